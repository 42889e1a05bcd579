"""Which ranks are traced, which share a class, and what is refused; traces are made up here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from neffcache.errors import Unsupported
from neffcache.flows import tracing
from neffcache.flows.tracing import TracedJob, coordinate, representative_ranks, trace_job
from neffcache.key.canonical import sha256_hex
from neffcache.key.target import Mesh

pytestmark = pytest.mark.fast

EDGE = [{"shape": [1, 4], "stride": [4, 1], "dtype": "float32", "requires_grad": True}]


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[TracedJob, dict[int, Any]]]:
    """Trace a job whose rank r has the graphs `graphs(r)`; also which rank was traced with which edge."""

    def run(
        mesh: Mesh,
        world: int,
        graphs: Callable[[int], list[str]],
        edges: Callable[[int], Mapping[str, Mapping[str, Any]]] = lambda _: {"sent": {}, "received": {}},
    ) -> tuple[TracedJob, dict[int, Any]]:
        asked: dict[int, Any] = {}

        def trace_ranks(_: Any, wanted: Mapping[int, Any], *__: Any, **___: Any) -> dict[int, Any]:
            asked.update(wanted)
            return {rank: made(rank, edge) for rank, edge in wanted.items()}

        def made(rank: int, edge: Any) -> dict[str, Any]:
            entries = []
            for text in graphs(rank):
                path = tmp_path / f"{text}.txt"
                path.write_text(f"inputs 1\n%0 = input\n%1 = {text}\n")
                entry = {"kind": "forward", "name": "Block", "phase": "first_step", "nodes": 1, "inputs": 1}
                entry |= {"text": sha256_hex(text.encode()), "env": "e" * 64, "text_file": str(path)}
                entry["data_dependent"] = text.startswith("routed")
                entries.append({**entry, "settings": {}, "reason": ""})
            common = {"rank": rank, "phases": ["first_step"], "uncacheable": {}, "eager": {}, "edge": edge}
            return {**common, "graphs": entries, "seconds": 1.0, "peak_bytes": 1, **edges(rank)}

        monkeypatch.setattr(tracing, "_trace_ranks", trace_ranks)
        job: Any = SimpleNamespace(mesh=mesh, world_size=world, toolchain_id="a" * 64)
        return trace_job(job, {}, tmp_path, jobs=2, progress=lambda _: None), asked

    return run


def classes(job: TracedJob) -> list[tuple[str, int]]:
    return [(entry.ranks, len(entry.graphs["first_step"])) for entry in job.classes]


def test_an_spmd_job_of_any_size_is_told_by_its_two_corners(traced: Any) -> None:
    job, asked = traced(Mesh(dp_shard=64, tp=8), 512, lambda _: ["block"])
    assert classes(job) == [("0-511", 1)]
    assert sorted(asked) == [0, 511]


def test_a_tensor_parallel_coordinate_makes_a_class_each(traced: Any) -> None:
    """As a compiled loss does: its forward knows the bounds of its part of the vocabulary."""
    job, asked = traced(Mesh(dp_shard=2, tp=2), 4, lambda rank: ["block", f"loss{rank % 2}"])
    assert classes(job) == [("0,2", 2), ("1,3", 2)]
    assert sorted(asked) == [0, 1, 3]


def test_a_graph_that_depends_on_data_is_named_and_belongs_to_no_class(traced: Any) -> None:
    job, _ = traced(Mesh(dp_shard=4, ep=4), 4, lambda _: ["dense", "routed"])
    assert classes(job) == [("0-3", 1)]
    assert [graph.data_dependent for graph in job.graphs.values()] == [False]
    assert [graph.data_dependent for graph in job.not_compiled.values()] == [True]


def test_every_pipeline_stage_is_a_class_and_is_given_what_the_first_sends(traced: Any) -> None:
    def edges(rank: int) -> dict[str, Any]:
        stage = rank // 4
        sent = {f"forward {stage}>{stage + 1}": EDGE} if stage < 3 else {}
        return {"sent": sent, "received": {f"forward {stage - 1}>{stage}": EDGE} if stage else {}}

    job, asked = traced(Mesh(pp=4, dp_shard=4), 16, lambda rank: [f"stage{min(rank // 4, 1)}"], edges)
    assert classes(job) == [("0-3", 1), ("4-15", 1)]
    assert sorted(asked) == [0, 3, 4, 7, 8, 11, 12, 15]
    assert asked[0] is asked[3] is None
    assert asked[4] == asked[15] == EDGE
    assert job.edges == (None, EDGE)


def test_a_stage_that_sends_something_else_than_the_next_was_given_is_refused(traced: Any) -> None:
    other = [{**EDGE[0], "shape": [1, 5]}]

    def edges(rank: int) -> dict[str, Any]:
        if rank == 0:
            return {"sent": {"forward 0>1": EDGE}, "received": {"backward 1>0": EDGE}}
        return {"sent": {"backward 1>0": other}, "received": {"forward 0>1": EDGE}}

    with pytest.raises(Unsupported) as caught:
        traced(Mesh(pp=2, dp_shard=1), 2, lambda _: ["block"], edges)
    assert "edge backward 1>0" in caught.value.message


def test_data_parallel_ranks_with_other_graphs_are_refused_with_the_first_line(traced: Any) -> None:
    with pytest.raises(Unsupported) as caught:
        traced(Mesh(dp_shard=4), 4, lambda rank: [f"rank{rank}"])
    assert caught.value.message.endswith("Block, line 3: %1 = rank0 | %1 = rank3")


def test_ranks_that_build_other_modules_are_refused_with_the_first_part() -> None:
    same = {"structure": ["module (root): Net", "tensor weight: float32"]}
    other = {"structure": [*same["structure"], "tensor bias: float32"]}
    tracing._require_structure({0: same, 7: same})
    tracing._require_structure({0: {}, 7: {}})
    with pytest.raises(Unsupported) as caught:
        tracing._require_structure({7: other, 0: same, 3: same})
    assert caught.value.message == "rank 7 builds another module than rank 0: tensor bias: float32 | nothing"


def test_coordinates_follow_torchtitans_layout_of_ranks() -> None:
    mesh = Mesh(pp=2, dp_replicate=2, dp_shard=2, cp=1, tp=2)
    assert [coordinate(mesh, rank) for rank in (0, 1, 2, 7, 8, 15)] == [
        (0, 0, 0, 0),
        (0, 0, 0, 1),
        (0, 0, 0, 0),
        (0, 0, 0, 1),
        (1, 0, 0, 0),
        (1, 0, 0, 1),
    ]
    assert representative_ranks(mesh, 16) == {
        0: (0, 2, 4, 6),
        1: (1, 3, 5, 7),
        8: (8, 10, 12, 14),
        9: (9, 11, 13, 15),
    }
    assert coordinate(Mesh(dp_shard=4, ep=2), 3) == (0, 3, 0, 0)
