"""Plan: what a warm would trace and compile, how long, with how much memory, and how it knows. Compiles nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from neffcache.compile import pool
from neffcache.errors import Unsupported
from neffcache.flows.compiling import expected
from neffcache.flows.costs import WORKER_BYTES, Capacity, Costs, Estimate, capacity, costs_of
from neffcache.flows.request import Request
from neffcache.flows.resolve import Job, current_manifest, first_line, resolve
from neffcache.flows.tracing import TracedGraph, trace_job
from neffcache.flows.warm import usable
from neffcache.flows.workers import aside, scratch
from neffcache.store.local import LocalStore
from neffcache.store.native import graph_count, graphs_of
from neffcache.store.records import RankClass


@dataclass(frozen=True)
class PlannedGraph:
    """A graph that a warm would compile, and what that is expected to take."""

    compile_key: str
    kind: str
    name: str
    nodes: int
    estimate: Estimate

    def to_json(self) -> dict[str, Any]:
        return {
            "compile_key": self.compile_key,
            "kind": self.kind,
            "name": self.name,
            "nodes": self.nodes,
            "seconds": round(self.estimate.seconds, 1),
            "peak_bytes": self.estimate.peak_bytes,
            "basis": self.estimate.basis,
            "measured_nodes": self.estimate.nodes,
        }


@dataclass(frozen=True)
class Plan:
    """total = hit + compile + refused; `refused` are graphs that this toolchain cannot compile, with the reason.

    `not_compiled` (name -> reason) are beside them: graphs whose sizes depend on data, which ranks run by operator.
    `uncacheable` (name -> reason) have no key: a warm of this job cannot be complete.
    `trace_seconds` is what tracing took just now, None when the manifest answered. `memory_bytes` is the most that all
    workers need at once; `room` says how many workers and how much memory there are, and who says so.
    """

    job: Job
    known_by: Literal["manifest", "trace"]
    total: int
    hit: int
    compile: tuple[PlannedGraph, ...]
    refused: tuple[tuple[str, str, str], ...]
    phases: tuple[str, ...]
    rank_classes: tuple[RankClass, ...]
    workers: int
    compile_seconds: float
    memory_bytes: int
    trace_seconds: float | None
    room: Capacity
    not_compiled: Mapping[str, str] = field(default_factory=dict)
    uncacheable: Mapping[str, str] = field(default_factory=dict)

    def basis(self) -> dict[str, int]:
        """How many estimates are measured, taken from a similar graph, or a default."""
        found = [item.estimate.basis for item in self.compile]
        return {name: found.count(name) for name in ("measured", "similar", "default")}

    def to_json(self) -> dict[str, Any]:
        placement = self.job.request.placement
        return {
            "config": self.job.request.config,
            "cache_key": self.job.key.cache_key,
            "toolchain": self.job.request.toolchain,
            "toolchain_id": self.job.toolchain_id,
            "target": placement.target,
            "lnc": placement.lnc,
            "instance": placement.instance,
            "nodes": placement.nodes,
            "ranks": placement.world_size,
            "mesh": None if self.job.called else asdict(self.job.mesh),
            "known_by": self.known_by,
            "phases": list(self.phases),
            "rank_classes": [{"ranks": item.ranks, "graphs": class_size(item)} for item in self.rank_classes],
            "graphs": {
                "total": self.total,
                "hit": self.hit,
                "compile": len(self.compile),
                "refused": len(self.refused),
            },
            "compile": [item.to_json() for item in self.compile],
            "refused": [{"compile_key": key, "name": name, "reason": reason} for key, name, reason in self.refused],
            "not_compiled": dict(self.not_compiled),
            "uncacheable": dict(self.uncacheable),
            "workers": self.workers,
            "seconds": {
                "trace": None if self.trace_seconds is None else round(self.trace_seconds, 3),
                "compile": round(self.compile_seconds, 1),
            },
            "minutes": round(self.compile_seconds / 60, 1),
            "memory_bytes": self.memory_bytes,
            "room": self.room.to_json(),
            "basis": self.basis(),
            "warnings": list(self.job.warnings),
            "replaced": [dict(entry) for entry in self.job.replaced],
            "dropped_options": list(self.job.request.dropped),
        }


def class_size(item: RankClass) -> int:
    """Unique graphs of a rank class."""
    return len({key for keys in graphs_of(item).values() for key in keys})


def plan(
    request: Request,
    store: LocalStore,
    environ: Mapping[str, str],
    *,
    jobs: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Plan:
    """What a warm would do. A complete manifest answers at once; otherwise the job is traced.

    Raises Usage, Unsupported, StoreFault.
    """
    with scratch(aside(environ)) as place:
        progress(first_line(request))
        job = resolve(request, environ, place)
        known = current_manifest(store, job)
        if known is not None and known.complete and not store.missing(known):
            total = graph_count(known)
            ranks, room = known.rank_classes, capacity(jobs)
            beside = {entry["name"]: entry["reason"] for entry in known.extra.get("not_compiled", {}).values()}
            return Plan(
                job, "manifest", total, total, (), (), known.phases, ranks, 0, 0.0, 0, None, room, not_compiled=beside
            )
        if job.native_store is not None:
            raise Unsupported(
                f"what the compiler of {request.config} keeps only a warm shows: it runs the real job",
                hint=f"neffcache warm {request.config} --native; or plan without --native, which counts graphs",
            )
        return _traced(job, store, environ, place, jobs, progress)


def _traced(
    job: Job,
    store: LocalStore,
    environ: Mapping[str, str],
    place: Path,
    jobs: int | None,
    progress: Callable[[str], None],
) -> Plan:
    started = time.monotonic()
    tracers = pool.default_jobs(pool.memory_limit(), WORKER_BYTES, jobs)
    traced = trace_job(job, environ, place, jobs=tracers, progress=progress)
    seconds = time.monotonic() - started
    missing = [graph for key, graph in traced.graphs.items() if not usable(store, key)]
    with costs_of(store, remember=False) as costs:
        planned = tuple(_planned(missing, costs))
    room = capacity(jobs)
    forecast = expected([item.estimate for item in planned], room)
    return Plan(
        job=job,
        known_by="trace",
        total=len(traced.graphs),
        hit=len(traced.graphs) - len(missing),
        compile=planned,
        refused=tuple((item.compile_key, item.name, item.reason) for item in missing if item.payload is None),
        phases=traced.phases,
        rank_classes=traced.classes,
        workers=forecast.at_once,
        compile_seconds=forecast.seconds,
        memory_bytes=forecast.peak_bytes,
        trace_seconds=seconds,
        room=room,
        not_compiled={graph.name: graph.reason for graph in traced.not_compiled.values()},
        uncacheable=traced.uncacheable,
    )


def _planned(missing: Iterable[TracedGraph], costs: Costs) -> Iterable[PlannedGraph]:
    """Longest first, as a warm compiles them."""
    found = [(graph, costs.estimate(graph.compile_key, graph.nodes)) for graph in missing if graph.payload is not None]
    for graph, estimate in sorted(found, key=lambda item: (-item[1].seconds, -item[0].nodes, item[0].compile_key)):
        yield PlannedGraph(graph.compile_key, graph.kind, graph.name, graph.nodes, estimate)
