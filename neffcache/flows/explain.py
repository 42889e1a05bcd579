"""Explain: why a job is not a HIT, what the nearest manifest of the store has otherwise, and what to change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neffcache.compile import pool
from neffcache.flows.changes import Change, Other, changes
from neffcache.flows.check import Checked, check_job
from neffcache.flows.costs import WORKER_BYTES
from neffcache.flows.keys import compare, manifest_key
from neffcache.flows.request import Request
from neffcache.flows.resolve import Job, first_line, resolve
from neffcache.flows.tracing import TracedGraph, trace_job
from neffcache.flows.warm import usable
from neffcache.flows.workers import aside, scratch
from neffcache.graph.difference import first_difference, nearest
from neffcache.key.compare import Difference
from neffcache.store.local import LocalStore
from neffcache.store.records import GraphRecord, Manifest, is_collection

CANDIDATES = 16
"""Records, nearest in number of nodes first, whose texts are compared with that of a graph without record."""

LINE = 300
"""Characters of a line of a graph text that are shown."""


@dataclass(frozen=True)
class Near:
    """The nearest manifest: the components that differ, their fields (left: this job, right: the manifest), changes."""

    manifest: Manifest
    components: tuple[str, ...]
    differences: tuple[Difference, ...]
    changes: tuple[Change, ...]

    @property
    def reachable(self) -> bool:
        """Whether doing all of the changes gives a HIT."""
        return self.manifest.complete and all(item.kind != "none" for item in self.changes)

    def to_json(self) -> dict[str, Any]:
        return {
            "manifest": self.manifest.id,
            "cache_key": self.manifest.cache_key,
            "reachable": self.reachable,
            "config": self.manifest.request.get("config"),
            "complete": self.manifest.complete,
            "components": list(self.components),
            "differences": [item.to_json() for item in self.differences],
            "changes": [item.to_json() for item in self.changes],
        }


@dataclass(frozen=True)
class Unmet:
    """A traced graph without a usable record, and the nearest record.

    `components` are those of the compile key that differ; `line` (from 1), `here` and `there` say where the texts do
    first, None when they are equal.
    """

    compile_key: str
    kind: str
    name: str
    nodes: int
    record: str | None = None
    components: tuple[str, ...] = ()
    line: int | None = None
    here: str | None = None
    there: str | None = None

    def to_json(self) -> dict[str, Any]:
        graph = {"compile_key": self.compile_key, "kind": self.kind, "name": self.name, "nodes": self.nodes}
        if self.record is None:
            return {**graph, "nearest": None}
        where = {"line": self.line, "here": self.here, "there": self.there}
        return {**graph, "nearest": {"compile_key": self.record, "components": list(self.components), **where}}


@dataclass(frozen=True)
class Retraced:
    """What tracing again found: total = hit + unmet + uncacheable (graphs without a key, by name, with the reason)."""

    total: int
    hit: int
    unmet: tuple[Unmet, ...]
    uncacheable: Mapping[str, str]

    @property
    def whole(self) -> bool:
        """Whether every graph has a record, so that `run` goes on without compiling."""
        return self.hit == self.total

    def to_json(self) -> dict[str, Any]:
        return {
            "total": self.total,
            "hit": self.hit,
            "unmet": [item.to_json() for item in self.unmet],
            "uncacheable": dict(self.uncacheable),
        }


@dataclass(frozen=True)
class Explanation:
    """`near` is None for a HIT or PARTIAL, and where the store has no manifest; `retraced` unless it was asked for."""

    checked: Checked
    near: Near | None
    retraced: Retraced | None

    @property
    def served(self) -> bool:
        """Whether everything that was asked for is there: a HIT, or records of all graphs that were traced."""
        if self.retraced is None:
            return self.checked.state == "HIT"
        return self.retraced.whole and not self.checked.missing

    def to_json(self) -> dict[str, Any]:
        return {
            **self.checked.to_json(),
            "nearest": None if self.near is None else self.near.to_json(),
            "trace": None if self.retraced is None else self.retraced.to_json(),
        }


def explain(
    request: Request,
    store: LocalStore,
    environ: Mapping[str, str],
    *,
    trace: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Explanation:
    """Why this request is not a HIT. `trace` also traces the job (unless it is a HIT) and looks for its graphs.

    Raises Usage, Unsupported, StoreFault.
    """
    with scratch(aside(environ)) as place:
        progress(first_line(request))
        job = resolve(request, environ, place)
        checked = check_job(job, store)
        if checked.state == "HIT":
            return Explanation(checked, None, None)
        if trace and job.native_store is not None:
            progress("a compiler's own cache has no graph records: nothing to trace for")
            trace = False
        near = nearest_manifest(job, store.manifests()) if checked.state == "MISS" else None
        return Explanation(checked, near, _retraced(job, store, environ, place, progress) if trace else None)


def nearest_manifest(job: Job, manifests: list[Manifest]) -> Near | None:
    """The manifest with the fewest differing components, then fields; of equals, one of the same configuration."""
    best: tuple[tuple[Any, ...], Near] | None = None
    for manifest in manifests:
        if is_collection(manifest):
            continue
        there = manifest_key(manifest)
        differing = [
            name
            for name, part in job.key.components.items()
            if name not in there.components or there.components[name].sha256 != part.sha256
        ]
        if best is not None and len(differing) > best[0][0]:
            continue
        found = compare(job.key, there)
        other = manifest.request.get("config") != job.request.config
        rank = (len(differing), len(found), other, not manifest.complete, manifest.id)
        if best is None or rank < best[0]:
            todo = changes(found, Other(there.components, manifest.versions, job.option_values))
            best = rank, Near(manifest, tuple(differing), tuple(found), tuple(todo))
    return None if best is None else best[1]


def _retraced(
    job: Job, store: LocalStore, environ: Mapping[str, str], place: Path, progress: Callable[[str], None]
) -> Retraced:
    workers = pool.default_jobs(pool.memory_limit(), WORKER_BYTES)
    traced = trace_job(job, environ, place, jobs=workers, progress=progress)
    missing = [graph for key, graph in traced.graphs.items() if not usable(store, key)]
    records = store.graphs() if missing else []
    unmet = tuple(unmet_graph(graph, records, store) for graph in missing)
    total = len(traced.graphs) + len(traced.uncacheable)
    return Retraced(total, len(traced.graphs) - len(missing), unmet, traced.uncacheable)


def unmet_graph(graph: TracedGraph, records: list[GraphRecord], store: LocalStore) -> Unmet:
    """The nearest record of a graph: one with the same text, else the one of its kind whose text shares most lines."""
    none = Unmet(graph.compile_key, graph.kind, graph.name, graph.nodes)
    by_key = {item.compile_key: item for item in records if store.has_blob(item.text)}
    here = graph.text_file.read_text()
    same = [key for key, item in by_key.items() if item.components.get("text") == graph.components.text]
    if same:
        found: str | None = same[0]
    else:
        alike = [item for item in by_key.values() if item.kind == graph.kind] or list(by_key.values())
        alike.sort(key=lambda item: (abs(item.nodes - graph.nodes), item.compile_key))
        texts = ((item.compile_key, store.read_blob(item.text).decode()) for item in alike[:CANDIDATES])
        found = nearest(here, texts)
    if found is None:
        return none
    record = by_key[found]
    mine = graph.components.to_json()
    differing = tuple(name for name in mine if mine[name] != record.components.get(name))
    first = first_difference(here, store.read_blob(record.text).decode())
    where = (None, None, None) if first is None else (first[0], first[1][:LINE], first[2][:LINE])
    return Unmet(graph.compile_key, graph.kind, graph.name, graph.nodes, found, differing, *where)
