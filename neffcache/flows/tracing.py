"""Trace a job: which ranks share all their graphs, and the compile key of each graph.

Ranks 0 and world-1 differ in every coordinate of the mesh. When they trace the same graphs, all ranks form one class;
otherwise one rank of every coordinate that can matter is traced, and ranks with equal graphs are put together.
What a rank really needs is proved again by its own gate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neffcache.errors import Unsupported
from neffcache.flows.resolve import Job
from neffcache.flows.workers import Worker
from neffcache.key.job import CompileComponents, compile_key
from neffcache.key.target import Mesh
from neffcache.store.ranks import fold_ranks
from neffcache.store.records import RankClass

MAX_CLASSES = 128
"""Representative ranks that are traced at most."""


@dataclass(frozen=True)
class TracedGraph:
    """One unique graph of a job. `payload` is None when this toolchain cannot compile it (see `reason`)."""

    compile_key: str
    components: CompileComponents
    kind: str
    name: str
    nodes: int
    inputs: int
    settings: Mapping[str, Any]
    text_file: Path
    payload: Path | None
    reason: str = ""


@dataclass(frozen=True)
class TracedJob:
    """All graphs of a job.

    `uncacheable` are graphs without a key, by name, with the reason; `eager` counts operators outside compiled regions,
    of rank 0. Seconds, bytes.
    """

    graphs: Mapping[str, TracedGraph]
    classes: tuple[RankClass, ...]
    representatives: tuple[int, ...]
    phases: tuple[str, ...]
    uncacheable: Mapping[str, str]
    eager: Mapping[str, int]
    seconds: float
    peak_bytes: int


def representative_ranks(mesh: Mesh, world_size: int) -> dict[int, tuple[int, ...]]:
    """One rank of each coordinate that graphs can depend on -> all ranks of that coordinate.

    TorchTitan lays ranks out as pp, dp_replicate, dp_shard, cp, tp, tp innermost (`ParallelDims`). Data-parallel
    coordinates do not matter, unless experts borrow them.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(world_size):
        rest, tp = divmod(rank, mesh.tp)
        rest, cp = divmod(rest, mesh.cp)
        rest, shard = divmod(rest, mesh.dp_shard)
        pp = rest // mesh.dp_replicate
        expert = shard if mesh.ep > 1 else 0
        groups.setdefault((pp, expert, cp, tp), []).append(rank)
    return {ranks[0]: tuple(ranks) for ranks in groups.values()}


def trace_job(
    job: Job, environ: Mapping[str, str], directory: Path, *, jobs: int, progress: Callable[[str], None]
) -> TracedJob:
    """Trace the ranks that are needed, `jobs` at a time. Raises Unsupported."""
    corners = sorted({0, job.world_size - 1})
    traces = _trace_ranks(job, corners, environ, directory, jobs=jobs, progress=progress)
    if len({_identity(trace) for trace in traces.values()}) == 1:
        members = {0: tuple(range(job.world_size))}
    else:
        members = representative_ranks(job.mesh, job.world_size)
        if len(members) > MAX_CLASSES:
            raise Unsupported(
                f"the graphs of this job differ by rank over {len(members)} coordinates, more than {MAX_CLASSES}"
            )
        progress(f"graphs differ by rank: tracing {len(members)} ranks")
        missing = [rank for rank in members if rank not in traces]
        traces.update(_trace_ranks(job, missing, environ, directory, jobs=jobs, progress=progress))
    return _assembled(job, traces, members)


def _identity(trace: Mapping[str, Any]) -> tuple[tuple[str, str, str], ...]:
    return tuple(sorted((graph["phase"], graph["text"], graph["env"]) for graph in trace["graphs"]))


def _trace_ranks(
    job: Job,
    ranks: list[int],
    environ: Mapping[str, str],
    directory: Path,
    *,
    jobs: int,
    progress: Callable[[str], None],
) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for start in range(0, len(ranks), max(1, jobs)):
        with ExitStack() as stack:
            workers = [
                (
                    rank,
                    stack.enter_context(
                        Worker(
                            "neffcache.flows.worker_trace",
                            {
                                "arguments": list(job.trace_arguments),
                                "rank": rank,
                                "world_size": job.world_size,
                                "cpu": True,
                                "into": str(directory / f"rank-{rank}"),
                            },
                            job.base(environ),
                            directory,
                        )
                    ),
                )
                for rank in ranks[start : start + max(1, jobs)]
            ]
            for rank, worker in workers:
                progress(f"tracing rank {rank} of {job.world_size}")
                found[rank] = worker.result()
    return found


def _assembled(job: Job, traces: Mapping[int, Mapping[str, Any]], members: Mapping[int, tuple[int, ...]]) -> TracedJob:
    graphs: dict[str, TracedGraph] = {}
    classes: dict[tuple[tuple[str, tuple[str, ...]], ...], list[int]] = {}
    for rank, trace in traces.items():
        for entry in trace["graphs"]:
            graph = _graph(job, entry)
            graphs.setdefault(graph.compile_key, graph)
        if rank in members:
            by_phase: dict[str, list[str]] = {phase: [] for phase in trace["phases"]}
            for entry in trace["graphs"]:
                by_phase[entry["phase"]].append(_key(job, entry)[0])
            shape = tuple((phase, tuple(sorted(keys))) for phase, keys in by_phase.items())
            classes.setdefault(shape, []).extend(members[rank])
    first = min(traces)
    used = {key for shape in classes for _, keys in shape for key in keys}
    return TracedJob(
        graphs={key: graph for key, graph in graphs.items() if key in used},
        classes=tuple(RankClass(fold_ranks(ranks), dict(shape)) for shape, ranks in classes.items()),
        representatives=tuple(min(ranks) for ranks in classes.values()),
        phases=tuple(traces[first]["phases"]),
        uncacheable={name: why for trace in traces.values() for name, why in trace["uncacheable"].items()},
        eager=traces[first]["eager"],
        seconds=max(trace["seconds"] for trace in traces.values()),
        peak_bytes=max(trace["peak_bytes"] for trace in traces.values()),
    )


def _key(job: Job, entry: Mapping[str, Any]) -> tuple[str, CompileComponents]:
    components = CompileComponents(text=entry["text"], toolchain=job.toolchain_id, env=entry["env"])
    return compile_key(components), components


def _graph(job: Job, entry: Mapping[str, Any]) -> TracedGraph:
    key, components = _key(job, entry)
    payload = entry.get("payload_file")
    return TracedGraph(
        compile_key=key,
        components=components,
        kind=entry["kind"],
        name=entry["name"],
        nodes=entry["nodes"],
        inputs=entry["inputs"],
        settings=entry["settings"],
        text_file=Path(entry["text_file"]),
        payload=None if payload is None else Path(payload),
        reason=entry["reason"],
    )
