"""Compile keys do not depend on who traces: rank, hash seed, working directory."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from neffcache.flows.request import make_request
from neffcache.flows.resolve import Job, resolve
from neffcache.flows.workers import call

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    request = make_request("llama3_8b", lnc=2, environ=os.environ)
    return resolve(request, dict(os.environ), tmp_path_factory.mktemp("resolve"))


def traced(job: Job, rank: int, seed: str, place: Path, world_size: int | None = None) -> dict[str, Any]:
    return call(
        "neffcache.flows.worker_trace",
        {
            "arguments": list(job.arguments),
            "rank": rank,
            "world_size": world_size or job.world_size,
            "cpu": True,
            "into": str(place / f"{rank}-{seed}"),
        },
        {**os.environ, **job.environment, "PYTHONHASHSEED": seed},
        place,
    )


def keys(trace: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    return [(graph["phase"], graph["kind"], graph["text"], graph["env"]) for graph in trace["graphs"]]


def handed_over(trace: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What a compiler gets of each graph: the lean graph, how it is called, its groups."""
    from neffcache.graph.payload import unpack
    from neffcache.graph.text import canonical_text

    found = []
    for graph in trace["graphs"]:
        payload = unpack(Path(graph["payload_file"]).read_bytes())
        text = canonical_text(payload.module, resolve_group=payload.groups.__getitem__)
        found.append((text.text, payload.module.code, payload.binding, payload.groups))
    return found


ASKED = [(0, "0"), (1, "1"), (5, "1"), (63, "0")]
"""Ranks and hash seeds."""


@pytest.fixture(scope="module")
def traces(job: Job, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    place = tmp_path_factory.mktemp("traces")
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda entry: traced(job, *entry, place), ASKED))


def test_ranks_and_hash_seeds_give_the_same_graphs(job: Job, traces: list[dict[str, Any]]) -> None:
    assert job.world_size == 64
    first = keys(traces[0])
    assert sorted(kind for _, kind, _, _ in first) == ["backward", "forward"], "all layers share them, the first too"
    for (rank, seed), trace in zip(ASKED, traces, strict=True):
        assert keys(trace) == first, f"rank {rank} with hash seed {seed} has other graphs than rank 0"
        assert handed_over(trace) == handed_over(traces[0]), "equal texts, and what is compiled differs"
        assert trace["peak_bytes"] < 3e9
        assert trace["phases"] == ["first_step", "steady_step"]
    assert {graph["phase"] for graph in traces[0]["graphs"]} == {"first_step"}


def test_operators_outside_of_graphs_are_recorded(traces: list[dict[str, Any]]) -> None:
    eager = traces[0]["eager"]
    names = {text.partition("(")[0] for text in eager}
    assert "aten.embedding.default" in names
    assert any("adamw" in name for name in names), "the optimizer's operators belong to the record"
    assert not any(name.startswith("prim.") for name in names)
