"""Fake process groups against real ones: ranks that trace together, over gloo, find the graphs that each finds alone.

For parallelisms that this CPU stack can trace and not train: parameters are FakeTensors and no operator of the model
runs, but meshes, groups and what ranks tell each other outside of the model are real.
"""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from neffcache.flows.request import make_request
from neffcache.flows.resolve import Job, resolve
from neffcache.flows.tracing import trace_job
from neffcache.flows.workers import Worker
from neffcache.store.ranks import has_rank
from tests.integration.conftest import neffcache
from tests.integration.test_families import sets

pytestmark = pytest.mark.integration

CP2 = sets(context_parallel_degree=2, data_parallel_shard_degree=2, tensor_parallel_degree=1)
EP2 = sets(expert_parallel_degree=2)
EP4 = sets(expert_parallel_degree=4, tensor_parallel_degree=1)

JOBS = {
    "cp2-fsdp2": ("llama3_debugmodel", CP2),
    "ep2": ("qwen3_moe_debug", EP2),
    "ep4": ("deepseek_v3_debugmodel", EP4),
    "simple-fsdp-jit": ("graph_trainer_llama3_debugmodel_jit", []),
    "simple-fsdp-aot": ("graph_trainer_llama3_debugmodel", []),
}


def job_of(name: str, place: Path, *more: str, world_size: int = 4) -> Job:
    config, options = JOBS[name]
    words = [word for word in (*options, *more) if word != "--set"]
    request = make_request(config, sets=words, target="cpu", world_size=world_size, environ=os.environ)
    return resolve(request, dict(os.environ), place)


def document(job: Job, rank: int, place: Path, **more: Any) -> dict[str, Any]:
    return {
        "arguments": list(job.trace_arguments),
        "rank": rank,
        "world_size": job.world_size,
        "cpu": True,
        "into": str(place / f"{rank}"),
        **more,
    }


def alone(job: Job, place: Path) -> list[dict[str, Any]]:
    """Every rank in a fake group of its own, one after the other."""
    found = []
    for rank in range(job.world_size):
        with Worker(
            "neffcache.flows.worker_trace", document(job, rank, place / "alone"), job.base(os.environ), place
        ) as worker:
            found.append(worker.result())
    return found


def together(job: Job, place: Path) -> list[dict[str, Any]]:
    """All ranks in one real group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ExitStack() as stack:
        workers = [
            stack.enter_context(
                Worker(
                    "neffcache.flows.worker_trace",
                    document(job, rank, place / "together", meet=["127.0.0.1", port]),
                    job.base(os.environ),
                    place,
                )
            )
            for rank in range(job.world_size)
        ]
        return [worker.result() for worker in workers]


def graphs(trace: dict[str, Any]) -> list[tuple[str, ...]]:
    """Everything that a compile key is made of, in order of first use, and what has no key."""
    keys = [(graph["phase"], graph["kind"], graph["text"], graph["env"]) for graph in trace["graphs"]]
    return [*keys, *(("uncacheable", name) for name in sorted(trace["uncacheable"]))]


@pytest.mark.soak
@pytest.mark.parametrize("name", JOBS)
def test_real_ranks_trace_what_fake_ones_do(name: str, tmp_path: Path) -> None:
    job = job_of(name, tmp_path)
    fake, real = alone(job, tmp_path), together(job, tmp_path)
    for rank in range(job.world_size):
        assert graphs(real[rank]), f"rank {rank} found no graph"
        assert graphs(real[rank]) == graphs(fake[rank]), f"rank {rank} has other graphs in a real group"
    assert_classes(job, fake, tmp_path)


def assert_classes(job: Job, traces: list[dict[str, Any]], place: Path) -> None:
    """The classes that a warm makes of a few traces are those of all ranks traced."""
    (place / "job").mkdir()
    found = trace_job(job, dict(os.environ), place / "job", jobs=1, progress=lambda _: None)
    texts = {key: graph.components.text for key, graph in found.graphs.items()}
    for rank, trace in enumerate(traces):
        (mine,) = [entry for entry in found.classes if has_rank(entry.ranks, rank)]
        assert sorted(texts[key] for keys in mine.graphs.values() for key in keys) == sorted(
            graph["text"] for graph in trace["graphs"] if not graph["data_dependent"]
        ), f"rank {rank} is in a class of other graphs"
    named = {graph.components.text for graph in found.not_compiled.values()}
    assert named == {graph["text"] for trace in traces for graph in trace["graphs"] if graph["data_dependent"]}


@pytest.mark.soak
def test_what_is_static_beside_experts_is_compiled_and_the_rest_is_named(tmp_path: Path) -> None:
    """Blocks with experts stay operators; the dense block before them is compiled, and a replay compiles nothing."""
    config, options = JOBS["ep4"]
    warm = neffcache(tmp_path / "store", "warm", config, *options)
    assert warm.code == 0, warm.stderr[-3000:]
    graphs, beside = warm.document["graphs"], warm.document["not_compiled"]
    assert graphs["compiled"] == graphs["total"] > 0
    assert beside
    assert all("depend on data" in reason for reason in beside.values())
    plan = neffcache(tmp_path / "store", "plan", config, *options)
    assert plan.document["not_compiled"] == beside
    assert plan.document["graphs"] == {"total": graphs["total"], "hit": graphs["total"], "compile": 0, "refused": 0}
