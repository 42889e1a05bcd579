"""What `--all` means: every run of the warmers, and every configuration of the installed TorchTitan that has none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from neffcache.errors import NeffcacheError
from neffcache.flows.costs import Costs, costs_of
from neffcache.flows.probe import run_of
from neffcache.flows.request import CHANNEL, Request
from neffcache.flows.verdicts import Verdict, known, of_request
from neffcache.flows.warmers import known as known_runs
from neffcache.store.local import LocalStore
from neffcache.store.records import Manifest, Ref
from neffcache.trace.registries import installed_version, registered


@dataclass(frozen=True)
class Named:
    """One entry of `--all`: what to type, and what is known of it."""

    name: str
    verdict: Verdict | None

    @property
    def supported(self) -> bool:
        return self.verdict is None or self.verdict.verdict != "unsupported"


def everything(environ: Mapping[str, str]) -> list[Named]:
    """Every run, once: those of the warmers first, then the registry functions that none of them names."""
    runs = known_runs(environ)
    try:
        verdicts = known()
    except (NeffcacheError, ImportError):
        verdicts = []
    found = [Named(run.name, of_request(run.module, run.config, verdicts)) for run in runs.values()]
    named = {(run.module, run.config) for run in runs.values()}
    for entry in registered():
        if (entry.module, entry.function) not in named:
            found.append(Named(run_of(entry, runs), of_request(entry.module, entry.function, verdicts)))
    return found


@dataclass(frozen=True)
class Outline:
    """What a warm of one entry would do, told without tracing. total = hit + compile.

    `known_by`: `ref` (a complete manifest of this request and this TorchTitan), `verdict` (its graphs were counted when
    the verdict was made, at `traced_ranks`), `request` (it is refused as it stands), or `nothing`.
    """

    name: str
    state: str
    known_by: str
    reason: str = ""
    ranks: int | None = None
    traced_ranks: int | None = None
    total: int = 0
    hit: int = 0
    compile_seconds: float = 0.0
    trace_seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "config": self.name,
            "state": self.state,
            "known_by": self.known_by,
            "reason": self.reason,
            "ranks": self.ranks,
            "traced_ranks": self.traced_ranks,
            "graphs": {"total": self.total, "hit": self.hit, "compile": self.total - self.hit},
            "seconds": {"trace": round(self.trace_seconds, 1), "compile": round(self.compile_seconds, 1)},
        }


def outlines(
    names: list[Named], choose: Callable[[str], Request], store: LocalStore, *, workers: int
) -> tuple[list[Outline], float]:
    """One outline an entry, and the seconds of compiling that all of them need together on `workers`.

    Equal graphs of different entries are counted in each: only a trace tells that they are equal.
    """
    refs: dict[str, list[Ref]] = {}
    for _, ref in store.refs(CHANNEL):
        refs.setdefault(ref.config, []).append(ref)
    with costs_of(store, remember=False) as costs:
        found = [_outline(entry, choose, store, refs.get(entry.name, []), costs, workers) for entry in names]
    return found, sum(entry.compile_seconds for entry in found)


def _warmed(request: Request, store: LocalStore, refs: list[Ref]) -> Manifest | None:
    """The complete manifest that a ref of this request names; the compiler's own version is not compared."""
    installed = installed_version()
    for ref in refs:
        version = ref.request.get("versions", {}).get("torchtitan", installed)  # a callable's ref has none
        if request.means(ref.request) and (not installed or version == installed):
            found = store.get_manifest(ref.manifest)
            if found is not None and found.complete and not store.missing(found):
                return found
    return None


def _outline(
    entry: Named,
    choose: Callable[[str], Request],
    store: LocalStore,
    refs: list[Ref],
    costs: Costs,
    workers: int,
) -> Outline:
    verdict = entry.verdict
    if verdict is not None and verdict.verdict == "unsupported":
        return Outline(entry.name, "unsupported", "verdict", verdict.reason, verdict.ranks)
    try:
        request = choose(entry.name)
    except NeffcacheError as fault:
        return Outline(entry.name, "unsupported", "request", fault.message)
    ranks = request.placement.world_size
    manifest = _warmed(request, store, refs)
    if manifest is not None:
        total = len(manifest.compile_keys())
        return Outline(entry.name, "warm", "ref", ranks=ranks, total=total, hit=total)
    if verdict is None or not verdict.graphs:
        return Outline(entry.name, "cold", "nothing" if verdict is None else "verdict", ranks=ranks)
    each = costs.estimate("", (verdict.nodes or 0) // verdict.graphs)
    return Outline(
        entry.name,
        "cold",
        "verdict",
        ranks=ranks,
        traced_ranks=verdict.ranks,
        total=verdict.graphs,
        compile_seconds=each.seconds * math.ceil(verdict.graphs / workers),
        trace_seconds=verdict.seconds or 0.0,
    )
