"""Trace a job: which ranks share all their graphs, and the compile key of each graph.

The first and the last rank of a pipeline coordinate differ in every other coordinate of the mesh. When they trace the
same graphs, all ranks of that coordinate form one class; otherwise one rank of every coordinate that can matter
(tensor, context and expert parallel) is traced, and ranks with equal graphs are put together. Data-parallel ranks must
agree: where they do not, the job is refused with the first line that differs. What a rank really needs is proved again
by its own gate.

A pipeline stage is traced without its neighbours. What it receives is taken from rank 0's first stage, and what every
stage says that it sends is compared with what the next one was given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from neffcache.compile import pool
from neffcache.errors import Unsupported
from neffcache.flows.resolve import Job
from neffcache.flows.workers import Worker
from neffcache.graph.difference import first_difference
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
    data_dependent: bool = False


@dataclass(frozen=True)
class TracedJob:
    """All graphs of a job.

    `not_compiled` are those whose sizes depend on data: they have a key, which no data is in, but no artifact; a rank
    runs them operator by operator. They are not among `graphs`.
    `uncacheable` are graphs without a key, by name, with the reason; `eager` counts operators outside compiled regions,
    of rank 0; `edges` is what the first pipeline stage of each representative receives. Seconds, bytes.
    """

    graphs: Mapping[str, TracedGraph]
    classes: tuple[RankClass, ...]
    representatives: tuple[int, ...]
    edges: tuple[Any, ...]
    phases: tuple[str, ...]
    uncacheable: Mapping[str, str]
    eager: Mapping[str, int]
    seconds: float
    peak_bytes: int
    not_compiled: Mapping[str, TracedGraph] = field(default_factory=dict)


def coordinate(mesh: Mesh, rank: int) -> tuple[int, int, int, int]:
    """(pp, expert, cp, tp) of a rank: what graphs can depend on.

    TorchTitan lays ranks out as pp, dp_replicate, dp_shard, cp, tp, tp innermost (`ParallelDims`). Data-parallel
    coordinates do not matter, unless experts borrow them.
    """
    rest, tp = divmod(rank, mesh.tp)
    rest, cp = divmod(rest, mesh.cp)
    rest, shard = divmod(rest, mesh.dp_shard)
    pp = rest // mesh.dp_replicate
    return pp, shard if mesh.ep > 1 else 0, cp, tp


def representative_ranks(mesh: Mesh, world_size: int) -> dict[int, tuple[int, ...]]:
    """One rank of each coordinate that graphs can depend on -> all ranks of that coordinate."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(world_size):
        groups.setdefault(coordinate(mesh, rank), []).append(rank)
    return {ranks[0]: tuple(ranks) for ranks in groups.values()}


def trace_job(
    job: Job, environ: Mapping[str, str], directory: Path, *, jobs: int, progress: Callable[[str], None]
) -> TracedJob:
    """Trace the ranks that are needed, `jobs` at a time. Raises Unsupported."""
    traces: dict[int, dict[str, Any]] = {}
    edge: list[dict[str, Any]] | None = None

    def trace_ranks(ranks: list[int]) -> None:
        missing = [rank for rank in ranks if rank not in traces]
        edges = {rank: edge if coordinate(job.mesh, rank)[0] else None for rank in missing}
        traces.update(_trace_ranks(job, edges, environ, directory, jobs=jobs, progress=progress))

    # Pipeline is the outermost degree: each of its coordinates is one run of ranks.
    length = job.world_size // job.mesh.pp
    stages = [range(first, first + length) for first in range(0, job.world_size, length)]
    if len(stages) > 1:
        trace_ranks(sorted({stages[0][0], stages[0][-1]}))
        edge = next(iter(tensors for name, tensors in traces[0]["sent"].items() if name.startswith("forward")), None)
    trace_ranks(sorted({corner for stage in stages for corner in (stage[0], stage[-1])}))
    members: dict[int, tuple[int, ...]] = {}
    all_of_them = representative_ranks(job.mesh, job.world_size)
    for stage in stages:
        if _identity(traces[stage[0]]) == _identity(traces[stage[-1]]):
            members[stage[0]] = tuple(stage)
        else:
            members |= {rank: ranks for rank, ranks in all_of_them.items() if rank in stage}
    if len(members) > MAX_CLASSES:
        raise Unsupported(
            f"the graphs of this job differ by rank over {len(members)} coordinates, more than {MAX_CLASSES}"
        )
    if not members.keys() <= traces.keys():
        progress(f"graphs differ by rank: tracing {len(members)} ranks")
    trace_ranks(sorted(members))
    _require_agreement(traces, members)
    _require_structure(traces)
    _require_edges(traces)
    return _assembled(job, traces, members)


def _require_agreement(traces: Mapping[int, Mapping[str, Any]], members: Mapping[int, tuple[int, ...]]) -> None:
    """Raise Unsupported when two traced ranks of one class have other graphs: this job is no single program."""
    for first, ranks in members.items():
        for rank in ranks:
            if rank in traces and _identity(traces[rank]) != _identity(traces[first]):
                where = first_other_line(traces[first], traces[rank])
                raise Unsupported(
                    f"ranks {first} and {rank} differ only in their data, but not in their graphs: {where}",
                    hint="something in the model depends on the rank; every rank would need artifacts of its own",
                    details={"ranks": [first, rank]},
                )


def _require_structure(traces: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise Unsupported when a callable builds another module on one rank: their collectives would not meet."""
    built = {rank: trace.get("structure", []) for rank, trace in sorted(traces.items())}
    first = min(built)
    for rank, lines in built.items():
        for here, there in zip_longest(built[first], lines, fillvalue="nothing"):
            if here != there:
                raise Unsupported(
                    f"rank {rank} builds another module than rank {first}: {there} | {here}",
                    hint="build the same module on every rank; what a rank has of its own are its shards",
                    details={"ranks": [first, rank]},
                )


def first_other_line(left: Mapping[str, Any], right: Mapping[str, Any]) -> str:
    """Where the graphs of two traces part: the graph, the line, and what stands there in each."""
    for here, there in zip_longest(left["graphs"], right["graphs"]):
        if here is None or there is None:
            only = here or there
            return f"only one has {only['name']} ({only['phase']})"
        if here["text"] != there["text"]:
            found = first_difference(Path(here["text_file"]).read_text(), Path(there["text_file"]).read_text())
            if found is not None:
                line, before, after = found
                return f"{here['name']}, line {line}: {before.strip()} | {after.strip()}"
        if here["env"] != there["env"]:
            return f"{here['name']} is compiled with other settings"
        if here["phase"] != there["phase"]:
            return f"{here['name']} belongs to {here['phase']} | {there['phase']}"
    return "they use the same graphs in another order"


def _require_edges(traces: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise Unsupported when a stage was given other tensors than the stage before it sends."""
    sent: dict[str, Any] = {}
    for trace in traces.values():
        sent.update(trace["sent"])
    for rank, trace in traces.items():
        for name, tensors in trace["received"].items():
            if sent.get(name, tensors) != tensors:
                raise Unsupported(
                    f"the pipeline stages of rank {rank} were traced with {tensors} at edge {name}, "
                    f"but the stage before sends {sent[name]}: the stages of this model are not alike",
                    details={"edge": name, "rank": rank},
                )


def _identity(trace: Mapping[str, Any]) -> tuple[tuple[str, str, str], ...]:
    return tuple(sorted((graph["phase"], graph["text"], graph["env"]) for graph in trace["graphs"]))


def _trace_ranks(
    job: Job,
    edges: Mapping[int, Any],
    environ: Mapping[str, str],
    directory: Path,
    *,
    jobs: int,
    progress: Callable[[str], None],
) -> dict[int, dict[str, Any]]:
    """`edges` are the ranks to trace, and what the first pipeline stage of each receives."""
    found: dict[int, dict[str, Any]] = {}
    ranks = list(edges)
    limit = pool.memory_limit()
    for start in range(0, len(ranks), max(1, jobs)):
        with ExitStack() as stack:
            workers = [
                (
                    rank,
                    stack.enter_context(
                        Worker(
                            "neffcache.flows.worker_trace",
                            {
                                "kind": job.kind,
                                "arguments": list(job.trace_arguments),
                                "rank": rank,
                                "world_size": job.world_size,
                                "cpu": True,
                                "edge": edges[rank],
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
                found[rank] = {**worker.result(memory=limit), "edge": edges[rank]}
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
                if not entry.get("data_dependent", False):
                    by_phase[entry["phase"]].append(_key(job, entry)[0])
            shape = tuple((phase, tuple(sorted(keys))) for phase, keys in by_phase.items())
            classes.setdefault(shape, []).extend(members[rank])
    first = min(traces)
    representatives = tuple(min(ranks) for ranks in classes.values())
    used = {key for shape in classes for _, keys in shape for key in keys}
    return TracedJob(
        graphs={key: graph for key, graph in graphs.items() if key in used},
        classes=tuple(RankClass(fold_ranks(ranks), dict(shape)) for shape, ranks in classes.items()),
        representatives=representatives,
        edges=tuple(traces[rank]["edge"] for rank in representatives),
        phases=tuple(traces[first]["phases"]),
        uncacheable={name: why for trace in traces.values() for name, why in trace["uncacheable"].items()},
        eager=traces[first]["eager"],
        seconds=max(trace["seconds"] for trace in traces.values()),
        peak_bytes=max(trace["peak_bytes"] for trace in traces.values()),
        not_compiled={key: graph for key, graph in graphs.items() if graph.data_dependent},
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
        data_dependent=entry.get("data_dependent", False),
    )
