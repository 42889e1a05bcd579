"""Keep what ranks had to compile in a run with `--on-miss compile`, so that the next run is warm."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path

from neffcache.compile.toolchain import Compiled, Product
from neffcache.flows.resolve import Job
from neffcache.flows.tracing import TracedGraph
from neffcache.flows.warm import Progress, record, warm
from neffcache.key.job import CompileComponents
from neffcache.runtime.report import RankReport
from neffcache.store.local import LocalStore
from neffcache.store.ranks import expand_ranks, fold_ranks
from neffcache.store.records import Manifest, RankClass, manifest

OBSERVED = "observed"
"""The phase of graphs that a run needed and a trace does not show."""


def keep_missed(
    store: LocalStore,
    job: Job,
    reports: Mapping[int, RankReport],
    environ: Mapping[str, str],
    missed: Path,
    progress: Progress,
) -> Manifest | None:
    """Make records of what lies in `missed`, then a local manifest that a fresh process replayed; None without one.

    Graphs that tracing does not show get a phase of their own, per rank as reported. No replay runs that phase; each of
    its artifacts was loaded by ranks that had not compiled it.
    """
    for place in sorted(missed.glob("*")):
        if (place / "result.json").exists():
            _record(store, job, place, reports)
    again = warm(job.request, store, environ, compile_missing=False, progress=progress, job=job)
    if not again.complete or again.manifest is None:
        return None
    extra: dict[tuple[str, ...], list[int]] = {}
    for rank, report in reports.items():
        known = again.manifest.rank_class(rank)
        traced = {key for keys in known.graphs.values() for key in keys} if known else set()
        beyond = sorted({entry["compile_key"] for entry in report.misses} - traced)
        extra.setdefault(tuple(beyond), []).append(rank)
    if set(extra) <= {()} or any(store.get_graph(key) is None for keys in extra for key in keys):
        return again.manifest
    made = store.put_manifest(_extended(again.manifest, extra))
    store.set_pointer(job.key.cache_key, made.id)
    return made


def _record(store: LocalStore, job: Job, place: Path, reports: Mapping[int, RankReport]) -> None:
    key = place.name
    result = json.loads((place / "result.json").read_text())
    graph = json.loads((place / "graph.json").read_text())
    miss = next((m for r in reports.values() for m in r.misses if m["compile_key"] == key), {})
    traced = TracedGraph(
        compile_key=key,
        components=CompileComponents(graph["text"], job.toolchain_id, graph["env"]),
        kind=miss.get("kind", ""),
        name=miss.get("name", ""),
        nodes=graph["nodes"],
        inputs=graph["inputs"],
        settings={},
        text_file=place / "text",
        payload=None,
    )
    products = [Product(name, path, place / name / path, mode) for name, path, mode in result["products"]]
    record(store, traced, Compiled(key, products, result["seconds"], result["peak_bytes"]))


def _extended(found: Manifest, extra: Mapping[tuple[str, ...], list[int]]) -> Manifest:
    """`found` with an observed phase; classes split where ranks observed different graphs."""
    beyond = {rank: keys for keys, ranks in extra.items() for rank in ranks}
    classes: dict[tuple[int, tuple[str, ...]], list[int]] = {}
    for number, entry in enumerate(found.rank_classes):
        for rank in expand_ranks(entry.ranks):
            classes.setdefault((number, beyond.get(rank, ())), []).append(rank)
    return manifest(
        cache_key=found.cache_key,
        components=found.components,
        request=found.request,
        complete=True,
        phases=(*found.phases, OBSERVED),
        rank_classes=[
            RankClass(fold_ranks(ranks), {**found.rank_classes[number].graphs, OBSERVED: keys})
            for (number, keys), ranks in classes.items()
        ],
        artifacts=found.artifacts,
        environment=found.environment,
        versions=found.versions,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        host=found.host,
        extra=found.extra,
    )
