"""The doors through which a training process gets its graphs, and the gate at each of them.

Opened by `autoload` when torch has been imported and before anything else of the program ran:

- `torch.compile(backend="inductor")` and `backend="neffcache"` serve graphs from the view by compile key;
- `Trainer.__init__`, or the call of a workload, proves that this process is the job that the manifest was made for;
- an audit hook counts compiler processes;
- the optimizer's step hook marks the steps.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from neffcache import variables
from neffcache.compile.host.build import meta_path
from neffcache.compile.host.load import bind_groups, load_graph
from neffcache.compile.stores import native_store
from neffcache.errors import Miss, NeffcacheError, StoreFault
from neffcache.graph.payload import Binding
from neffcache.graph.settings import current_settings
from neffcache.graph.text import GraphText, canonical_text
from neffcache.graph.uncacheable import Uncacheable
from neffcache.key.canonical import digest
from neffcache.key.job import CompileComponents, compile_key
from neffcache.runtime import fallback
from neffcache.runtime.rank import Rank, as_neffcache_error, refuse
from neffcache.runtime.report import TEXTS, RankReport, ReportFile
from neffcache.store.records import Manifest, decode
from neffcache.trace import titan, torch_internals

Runs = Callable[[list[Any]], list[Any]]

_rank: Rank | None = None


def current_backend() -> Callable[..., Any] | None:
    """The backend that serves the manifest of this process, or None outside `neffcache run`."""
    return _rank.backend if isinstance(_rank, Doors) else None


def current_rank() -> Rank | None:
    """This rank, or None outside `neffcache run`."""
    return _rank


def open_doors() -> None:
    """Open all doors for this rank; called once, by the autoload entry point."""
    global _rank
    environ = dict(os.environ)
    path = Path(environ[variables.MANIFEST])
    rank, local = int(environ.get("RANK", environ["LOCAL_RANK"])), int(environ["LOCAL_RANK"])
    report = ReportFile(Path(environ[variables.REPORTS]), RankReport(rank, local, os.getpid()))
    try:
        _rank = rank_of(decode(Manifest, path.read_bytes()), path.parent, report, environ)
        _rank.open()
        report.save()
    except OSError as fault:
        refuse(report, StoreFault(f"the view of this run cannot be read: {fault}"))
    except Exception as fault:
        refuse(report, as_neffcache_error(fault))


def rank_of(manifest: Manifest, view: Path, report: ReportFile, environ: Mapping[str, str]) -> Rank:
    """This rank, of the kind that the manifest's toolchain asks for."""
    store = native_store(manifest.components["toolchain"]["value"])
    if store is None:
        return Doors(manifest, view, report, environ)
    from neffcache.runtime.native import NativeRank

    return NativeRank(store, manifest, view, report, environ)


def operator_by_operator(gm: torch.fx.GraphModule) -> Runs:
    """A boxed callable that runs a flat graph as it is written, and compiles nothing."""

    def run(given: list[Any]) -> list[Any]:
        values = list(given)
        given.clear()
        return list(gm(*values))

    return run


class Doors(Rank):
    """A rank that is served graphs which we compiled."""

    def __init__(self, manifest: Manifest, view: Path, report: ReportFile, environ: Mapping[str, str]) -> None:
        super().__init__(manifest, view, report, environ)
        self.reports = Path(environ[variables.REPORTS])
        self.toolchain = str(manifest.components["toolchain"]["sha256"])
        self.loaded: dict[str, tuple[Runs, Binding]] = {}
        self.not_compiled = frozenset(manifest.extra.get("not_compiled", ()))
        self.backend = torch_internals.aot_backend(self.serve, current_settings)

    def expect(self, number: int) -> None:
        graphs = self.manifest.rank_classes[number].graphs
        self.report.expected = sorted({key for keys in graphs.values() for key in keys})
        always = {key for phase, keys in graphs.items() if phase != titan.SHORT for key in keys}
        self.report.optional = [key for key in self.report.expected if key not in always]

    def prepare(self) -> None:
        torch_internals.probe()
        torch_internals.static_shapes()
        torch_internals.no_unread_log_lines()
        torch_internals.replace_inductor(self.backend)

    # --- serving --------------------------------------------------------------------------------------------------

    def serve(
        self, kind: str, gm: torch.fx.GraphModule, inputs: Sequence[Any], settings: Callable[[], dict[str, Any]]
    ) -> Runs:
        """The compiled form of a flat graph: from the view, else by the policy for a miss."""
        started = time.perf_counter()
        try:
            text, using = canonical_text(gm), settings()
        except Uncacheable as fault:
            return self.missed("uncacheable", kind, fault, gm, None, {})
        key = compile_key(CompileComponents(text=text.sha256, toolchain=self.toolchain, env=digest(using)))
        self.report.texts = round(self.report.texts + time.perf_counter() - started, 4)
        if text.data_dependent and key in self.not_compiled:
            if key not in self.report.not_compiled:
                self.report.not_compiled.append(key)
            return operator_by_operator(gm)
        try:
            if key not in self.loaded:
                why = self.lacks(key, kind)
                if why is not None:
                    return self.missed(key, kind, why, gm, text, using)
                self.load(key, text)
            run, binding = self.loaded[key]
            # Equal graphs may stand on different groups: one artifact is bound to one of them.
            bind_groups(binding, text)
        except Exception as fault:
            refuse(self.file, as_neffcache_error(fault))
            raise
        return run

    def lacks(self, key: str, kind: str) -> Miss | None:
        """Why this graph cannot be served, or None."""
        if key not in self.report.expected:
            return Miss(f"graph {key} ({kind}) is not in the manifest {self.manifest.id[:12]}")
        if not (self.view / "host" / meta_path(key)).exists():
            return Miss(f"graph {key} ({kind}) has no artifact in the view")
        return None

    def load(self, key: str, text: GraphText) -> None:
        started = time.perf_counter()
        self.loaded[key] = load_graph(self.view / "host", key, text)
        self.report.loads = round(self.report.loads + time.perf_counter() - started, 4)
        self.report.hits.append(key)
        self.file.save()

    def missed(
        self,
        key: str,
        kind: str,
        fault: NeffcacheError,
        gm: torch.fx.GraphModule,
        text: GraphText | None,
        settings: dict[str, Any],
    ) -> Runs:
        """Refuse, or compile: apart and shared where the graph can be written down, else in this process."""
        entry = {
            "compile_key": key,
            "kind": kind,
            "name": torch_internals.compile_name(gm, kind),
            "reason": fault.message,
            "nearest": None
            if text is None
            else fallback.nearest_record(self.reports / TEXTS, self.report.expected, text.text),
        }
        self.report.misses.append(entry)
        self.file.save()
        if self.on_miss == "fail":
            hint = "neffcache warm the configuration again, or run with --on-miss compile"
            refuse(self.file, Miss(fault.message, hint=hint, details=entry))
        if text is None or text.symbolic:
            self.compiling()
            return torch_internals.compile_in_place(gm)
        self.loaded[key] = fallback.compile_here(
            key,
            text,
            gm,
            settings,
            self.manifest.components["toolchain"]["value"],
            reports=self.reports,
            compiling=self.compiling,
        )
        return self.loaded[key][0]

    def compiling(self) -> None:
        self.report.backend_compiles += 1
        self.file.save()
