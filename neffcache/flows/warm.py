"""Warm: trace a job, compile what is missing, record it, and prove it by a replay in a fresh process."""

from __future__ import annotations

import datetime
import functools
import platform
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from neffcache.compile import pool
from neffcache.compile.toolchain import Compiled, CompileRequest
from neffcache.errors import Bug, CompileFailed, NeffcacheError, Unsupported
from neffcache.flows.compiling import How, Tally, Unit, check_executor, compile_units
from neffcache.flows.costs import WORKER_BYTES
from neffcache.flows.native import NativeWarm, warm_native
from neffcache.flows.request import CHANNEL, Request
from neffcache.flows.resolve import Job, current_manifest, first_line, resolve
from neffcache.flows.shards import Shard
from neffcache.flows.tracing import TracedGraph, TracedJob, trace_job
from neffcache.flows.workers import call, scratch
from neffcache.key.canonical import digest
from neffcache.store.local import LocalStore
from neffcache.store.native import graph_count
from neffcache.store.pointers import next_serial
from neffcache.store.records import Artifact, Damaged, GraphRecord, Manifest, Ref, manifest
from neffcache.store.view import discard, materialise

COMPILER = "neffcache.compile.host.build.compile_graph"


class Progress:
    """What a warm tells while it runs; the command line draws it. Every method may do nothing."""

    def note(self, text: str) -> None: ...

    def graphs(self, graphs: Iterable[TracedGraph], hits: Iterable[str]) -> None: ...

    def event(self, event: pool.Event) -> None: ...


@dataclass
class WarmResult:
    """The contract's document of `warm`; total = hit + compiled + failed + skipped.

    `manifest` is what the store has now and `ref` its name there, `candidate` what was traced, stored or not.
    """

    job: Job
    manifest: Manifest | None = None
    ref: Ref | None = None
    candidate: Manifest | None = None
    total: int = 0
    hit: int = 0
    compiled: int = 0
    failed: int = 0
    skipped: int = 0
    complete: bool = False
    trace_seconds: float = 0.0
    compile_seconds: float = 0.0
    total_seconds: float = 0.0
    peak_rss_bytes: int = 0
    failures: list[NeffcacheError] = field(default_factory=list)
    eager: Mapping[str, int] = field(default_factory=dict)
    native: NativeWarm | None = None
    shard: Shard | None = None
    tally: Tally = field(default_factory=Tally)
    graphs: Mapping[str, TracedGraph] = field(default_factory=dict)
    not_compiled: Mapping[str, str] = field(default_factory=dict)

    @property
    def fault(self) -> NeffcacheError | None:
        """The error that the command ends with, first error first; None when nothing that was to be done failed."""
        tally = replace(self.tally, failures=self.failures, failed=self.failed)
        return tally.fault(self.job.request.config, self.total)

    def to_json(self) -> dict[str, Any]:
        return {
            "config": self.job.request.config,
            "cache_key": self.job.key.cache_key,
            "toolchain": self.job.request.toolchain,
            "toolchain_id": self.job.toolchain_id,
            "ranks": self.job.world_size,
            "graphs": {
                "total": self.total,
                "hit": self.hit,
                "compiled": self.compiled,
                "failed": self.failed,
                "skipped": self.skipped,
            },
            "seconds": {
                "trace": round(self.trace_seconds, 3),
                "compile": round(self.compile_seconds, 3),
                "total": round(self.total_seconds, 3),
            },
            "peak_rss_bytes": self.peak_rss_bytes,
            "manifest": None if self.manifest is None else self.manifest.id,
            "complete": self.complete,
            "request": None if self.ref is None else dict(self.ref.request),
            "serial": None if self.ref is None else self.ref.serial,
            **({"not_compiled": dict(self.not_compiled)} if self.not_compiled else {}),
            "not_captured": {"operators": sum(self.eager.values()), "distinct": len(self.eager)},
            "replaced": list(self.job.replaced),
            "warnings": list(self.job.warnings),
            "workers": self.tally.workers,
            "retries": self.tally.retries,
            "remembered": self.tally.remembered,
            "adopted": self.tally.adopted,
            "shard": None if self.shard is None else str(self.shard),
            "stopped": None if self.tally.stopped is None else self.tally.stopped.to_json(),
            "failures": [fault.to_json() for fault in self.failures],
            **({} if self.native is None else {"native": self.native.to_json()}),
        }


def warm(
    request: Request,
    store: LocalStore,
    environ: Mapping[str, str],
    *,
    how: How | None = None,
    compile_missing: bool = True,
    progress: Progress | None = None,
    job: Job | None = None,
    shard: Shard | None = None,
) -> WarmResult:
    """Make a job's manifest complete. With `compile_missing` false nothing is compiled: what lacks is `skipped`.

    With a `shard` only its part is compiled; what the other parts lack is `skipped`, and the manifest is complete only
    if nothing lacks. Raises NeffcacheError for what stops all of it; a graph that fails is in the result.
    """
    progress = progress or Progress()
    how = how or How()
    check_executor(how.executor)
    started = time.monotonic()
    with scratch(store.root / "tmp") as place:
        if job is None:
            progress.note(first_line(request))
            job = resolve(request, environ, place)
            progress.note(job.describe())
        result = WarmResult(job, shard=shard)
        for warning in job.warnings:
            progress.note(f"warning: {warning}")
        known = current_manifest(store, job)
        if known is not None and known.complete and not store.missing(known):
            result.manifest, result.complete = known, True
            result.total = result.hit = graph_count(known)
            result.ref = _name(store, job, known)
            progress.note(f"nothing to do: {result.total} graphs are there")
        elif job.native_store is not None:
            if shard is not None:
                progress.note("a compiler's own cache is warmed by the whole job: no shard of it can be")
            found = warm_native(job, store, environ, place, seed=known, note=progress.note)
            result.ref = _name(store, job, found.manifest)
            result.native, result.manifest, result.candidate, result.complete = found, *[found.manifest] * 2, True
            result.total, result.hit, result.compiled = found.graphs, found.hit, found.graphs - found.hit
            result.compile_seconds = found.record_seconds
        else:
            _build(job, store, environ, place, how, compile_missing, progress, result)
    result.total_seconds = time.monotonic() - started
    return result


def _build(
    job: Job,
    store: LocalStore,
    environ: Mapping[str, str],
    place: Path,
    how: How,
    compile_missing: bool,
    progress: Progress,
    result: WarmResult,
) -> None:
    workers = pool.default_jobs(pool.memory_limit(), WORKER_BYTES, how.jobs)
    traced = trace_job(job, environ, place, jobs=workers, progress=progress.note)
    result.trace_seconds, result.peak_rss_bytes, result.eager = traced.seconds, traced.peak_bytes, traced.eager
    result.graphs, result.not_compiled = traced.graphs, {g.name: g.reason for g in traced.not_compiled.values()}
    for graph in traced.not_compiled.values():
        progress.note(f"not compiled: {graph.name}: {graph.reason}")
    have = {key for key in traced.graphs if usable(store, key)}
    progress.graphs(traced.graphs.values(), have)
    result.total, result.hit = len(traced.graphs) + len(traced.uncacheable), len(have)
    for name, why in traced.uncacheable.items():
        result.failed += 1
        result.failures.append(Unsupported(f"graph {name} has no key: {why}", details={"class": "uncacheable"}))
    missing = [graph for key, graph in traced.graphs.items() if key not in have]
    if compile_missing:
        if result.shard is not None:
            mine = result.shard.mine({key: graph.nodes for key, graph in traced.graphs.items()})
            result.skipped += sum(graph.compile_key not in mine for graph in missing)
            missing = [graph for graph in missing if graph.compile_key in mine]
            progress.note(f"shard {result.shard}: {len(missing)} to compile here, {result.skipped} in other shards")
        _compile(job, missing, store, place, how, progress, result)
    else:
        result.skipped = len(missing)
    candidate = _manifest(job, traced, complete=False)
    if result.hit + result.compiled == result.total:
        progress.note("replaying in a fresh process")
        replay(job, traced, candidate, store, environ, place)
        candidate = _manifest(job, traced, complete=True)
        result.complete = True
    result.candidate = candidate
    if result.complete or compile_missing:
        result.manifest = store.put_manifest(candidate)
        if result.complete or current_manifest(store, job) is None:
            store.set_pointer(job.key.cache_key, result.manifest.id)
            result.ref = _name(store, job, result.manifest)


def usable(store: LocalStore, key: str) -> bool:
    """Whether a graph has a record and all its artifacts are there and whole; what is damaged goes to quarantine."""
    try:
        record = store.get_graph(key)
        return record is not None and all(store.check_blob(artifact.sha256) for artifact in record.artifacts)
    except Damaged:
        return False


def _compile(
    job: Job,
    missing: list[TracedGraph],
    store: LocalStore,
    place: Path,
    how: How,
    progress: Progress,
    result: WarmResult,
) -> None:
    toolchain = job.key.components["toolchain"].value
    units: list[Unit] = []
    for graph in missing:
        if graph.payload is None:
            result.failed += 1
            result.failures.append(
                CompileFailed(
                    f"graph {graph.compile_key} ({graph.name}) cannot be compiled: {graph.reason}",
                    details={"compile_key": graph.compile_key, "name": graph.name, "class": "unsupported"},
                )
            )
        else:
            request = CompileRequest(graph.compile_key, graph.name, graph.payload, graph.settings, toolchain)
            units.append(Unit(request, graph.nodes, functools.partial(record, store, graph)))
    tally = result.tally = compile_units(
        units,
        store,
        how,
        family="host",
        toolchain_id=job.toolchain_id,
        environment=job.environment,
        compiler=COMPILER,
        place=place,
        event=progress.event,
    )
    result.compiled, result.compile_seconds = tally.compiled, tally.seconds
    result.hit += tally.adopted
    result.failed += tally.failed
    result.skipped += tally.skipped
    result.failures += tally.failures
    result.peak_rss_bytes = max(result.peak_rss_bytes, tally.peak_bytes)


def record(store: LocalStore, graph: TracedGraph, compiled: Compiled) -> GraphRecord:
    """Keep what a graph compiled to: its files and text first, flushed together, then the record that names them."""
    with store.batch() as batch:
        text = batch.put(graph.text_file.read_bytes())
        said = {} if compiled.log is None else {"log": batch.put_file(compiled.log)}
        artifacts = [
            Artifact(
                store=product.store,
                path=product.path,
                sha256=batch.put_file(product.source),
                size=product.source.stat().st_size,
                mode=product.mode,
            )
            for product in compiled.products
        ]
    return store.put_graph(
        GraphRecord(
            compile_key=graph.compile_key,
            components=graph.components.to_json(),
            kind=graph.kind,
            name=graph.name,
            nodes=graph.nodes,
            inputs=graph.inputs,
            text=text,
            artifacts=tuple(artifacts),
            seconds=compiled.seconds,
            peak_bytes=compiled.peak_bytes,
            extra=said,
        )
    )


def _manifest(job: Job, traced: TracedJob, *, complete: bool) -> Manifest:
    not_compiled = {
        key: {"name": graph.name, "kind": graph.kind, "nodes": graph.nodes, "reason": graph.reason}
        for key, graph in sorted(traced.not_compiled.items())
    }
    return manifest(
        cache_key=job.key.cache_key,
        components={name: {"sha256": part.sha256, "value": part.value} for name, part in job.key.components.items()},
        request=job.request.to_json(),
        complete=complete,
        phases=traced.phases,
        rank_classes=traced.classes,
        artifacts=(),
        environment=dict(job.environment),
        versions=dict(job.versions),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        host={"machine": platform.machine(), "system": platform.system()},
        # What no artifact covers: operators of rank 0 outside of compiled regions, with how often they ran, and graphs
        # whose sizes depend on data, which a rank runs operator by operator.
        extra={
            "not_captured": dict(sorted(traced.eager.items())),
            **({"not_compiled": not_compiled} if not_compiled else {}),
        },
    )


def _name(store: LocalStore, job: Job, made: Manifest) -> Ref:
    named, config = job.request.named(job.versions), job.request.config
    name = digest(named)
    try:
        known = store.ref(CHANNEL, config, name)
    except Damaged:
        known = None
    ref = Ref(named, job.key.cache_key, made.id, config, next_serial(known, made.id))
    return store.put_ref(CHANNEL, config, name, ref)


def replay(
    job: Job, traced: TracedJob, candidate: Manifest, store: LocalStore, environ: Mapping[str, str], place: Path
) -> None:
    """Run the phases of every rank class again in fresh processes, from a view; raises Bug unless all graphs hit.

    Of a callable it raises Unsupported: what it builds is its own business.

    The fresh process has another hash seed than the one that traced.
    """
    view = materialise(store, candidate)
    try:
        of_classes = zip(traced.representatives, traced.edges, traced.classes, strict=True)
        for number, (rank, edge, ranks) in enumerate(of_classes):
            expected = sorted({key for keys in ranks.graphs.values() for key in keys})
            outcome = call(
                "neffcache.flows.worker_trace",
                {
                    "kind": job.kind,
                    "arguments": list(job.arguments),
                    "rank": rank,
                    "world_size": job.world_size,
                    "cpu": True,
                    "edge": edge,
                    "view": str(view.path),
                    "toolchain": job.toolchain_id,
                    "expected": expected,
                    "not_compiled": sorted(traced.not_compiled),
                },
                {
                    **job.base(environ),
                    "PYTHONHASHSEED": str(1 + number),
                    "TORCHINDUCTOR_CACHE_DIR": str(place / "replay"),
                },
                place,
            )
            if sorted(outcome["hits"]) != expected or outcome["misses"] or outcome["compiles"]:
                raise (Unsupported if job.called else Bug)(
                    f"a fresh process did not find what was just compiled for rank {rank}: "
                    f"{len(outcome['hits'])} of {len(expected)} hits, {len(outcome['misses'])} misses, "
                    f"{len(outcome['compiles'])} compiler processes",
                    hint="the callable builds another module each time: it must depend on its arguments alone"
                    if job.called
                    else "",
                    details={name: outcome[name] for name in ("hits", "misses", "compiles")},
                )
    finally:
        discard(view)
