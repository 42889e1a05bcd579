"""The doors through which a training process gets its artifacts, and the gate at each of them.

Opened by `autoload` when torch has been imported and before anything else of the program ran:

- `torch.compile(backend="inductor")` and `backend="neffcache"` serve graphs from the view by compile key;
- `Trainer.__init__` proves that this process is the job that the manifest was made for;
- an audit hook counts compiler processes;
- the optimizer's step hook marks the steps.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import wrapt
from torch.optim.optimizer import register_optimizer_step_post_hook

from neffcache import variables
from neffcache.compile.host.build import meta_path
from neffcache.compile.host.identity import identity_in_rank
from neffcache.compile.host.load import bind_groups, load_graph
from neffcache.errors import Bug, Mismatch, Miss, NeffcacheError, StoreFault
from neffcache.graph.payload import Binding
from neffcache.graph.settings import current_settings
from neffcache.graph.text import GraphText, canonical_text
from neffcache.graph.uncacheable import Uncacheable
from neffcache.key.canonical import digest
from neffcache.key.compare import Difference
from neffcache.key.job import CompileComponents, compile_key
from neffcache.runtime import fallback
from neffcache.runtime.identity import place_differences, toolchain_differences, workload_differences
from neffcache.runtime.processes import watch
from neffcache.runtime.report import TEXTS, RankReport, ReportFile
from neffcache.store.ranks import has_rank
from neffcache.store.records import Manifest, decode
from neffcache.trace import titan, torch_internals

Runs = Callable[[list[Any]], list[Any]]

_doors: Doors | None = None


def current_backend() -> Callable[..., Any] | None:
    """The backend that serves the manifest of this process, or None outside `neffcache run`."""
    return None if _doors is None else _doors.backend


def open_doors() -> None:
    """Open all doors for this rank; called once, by the autoload entry point."""
    global _doors
    environ = dict(os.environ)
    path = Path(environ[variables.MANIFEST])
    rank, local = int(environ.get("RANK", environ["LOCAL_RANK"])), int(environ["LOCAL_RANK"])
    report = ReportFile(Path(environ[variables.REPORTS]), RankReport(rank, local, os.getpid()))
    try:
        _doors = Doors(decode(Manifest, path.read_bytes()), path.parent, report, environ)
        _doors.open()
        report.save()
    except OSError as fault:
        refuse(report, StoreFault(f"the view of this run cannot be read: {fault}"))
    except Exception as fault:
        refuse(report, as_neffcache_error(fault))


def as_neffcache_error(fault: Exception) -> NeffcacheError:
    if isinstance(fault, NeffcacheError):
        return fault
    return Bug(f"{type(fault).__name__} in a training process: {str(fault)[:300]}")


def refuse(report: ReportFile, fault: NeffcacheError) -> None:
    """Write the fault into the report and end this rank: nobody waits in a collective for it."""
    report.report.error = fault.to_json()
    report.refused()
    print(f"neffcache: rank {report.report.rank}: {fault.message}", file=sys.stderr, flush=True)
    os._exit(fault.exit_code)


class Doors:
    """One rank's view, report and policy."""

    def __init__(self, manifest: Manifest, view: Path, report: ReportFile, environ: Mapping[str, str]) -> None:
        self.manifest = manifest
        self.view = view
        self.file = report
        self.report = report.report
        self.environ = environ
        self.reports = Path(environ[variables.REPORTS])
        self.on_miss = environ.get(variables.ON_MISS, "fail")
        self.toolchain = str(manifest.components["toolchain"]["sha256"])
        self.loaded: dict[str, tuple[Runs, Binding]] = {}
        # Before any program code: what a program changes later is in each graph's own settings.
        self.identity = identity_in_rank(manifest.components["toolchain"]["value"])
        self.backend = torch_internals.aot_backend(self.serve, current_settings)
        self._first_optimizer: int | None = None
        for number, ranks in enumerate(manifest.rank_classes):
            if has_rank(ranks.ranks, self.report.rank):
                self.report.rank_class = number
                self.report.expected = sorted({key for keys in ranks.graphs.values() for key in keys})

    # --- opening --------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Everything that can be known before the program runs is proved here. Raises NeffcacheError."""
        torch_internals.probe()
        watch(self.process_started)
        different = place_differences(self.manifest, self.environ) + toolchain_differences(self.manifest, self.identity)
        if different:
            raise self.other_job(different)
        if self.report.rank_class is None:
            raise Mismatch(f"the manifest names no graphs for rank {self.report.rank}")
        torch_internals.static_shapes()
        torch_internals.no_unread_log_lines()
        torch_internals.replace_inductor(self.backend)
        register_optimizer_step_post_hook(self.step_done)
        atexit.register(self.ended)
        if self.environ.get(variables.HARNESS) == "1":
            wrapt.register_post_import_hook(titan.use_cpu, "torchtitan.tools.utils")
        wrapt.register_post_import_hook(
            lambda module: titan.wrap_trainer(module, self.before_build, self.after_build), "torchtitan.trainer"
        )

    def other_job(self, different: list[Difference]) -> Mismatch:
        self.report.identity = "refused"
        self.report.differences = [entry.to_json() for entry in different]
        first = different[0]
        more = f" (and {len(different) - 1} more differences)" if len(different) > 1 else ""
        return Mismatch(
            f"this job is not the one that was warmed: {first.path} is {first.right!r}, "
            f"the manifest has {first.left!r}{more}",
            hint="warm what is to be run, or run what was warmed",
            details={"differences": self.report.differences},
        )

    # --- the Trainer ----------------------------------------------------------------------------------------------

    def before_build(self, config: Any) -> None:
        """Prove, before any model is built, that this process is the job of the manifest; end it otherwise."""
        try:
            if different := workload_differences(self.manifest, config, self.environ):
                raise self.other_job(different)
        except Exception as fault:
            refuse(self.file, as_neffcache_error(fault))
        self.report.identity = "proved"
        if self.environ.get(variables.HARNESS) == "1":
            titan.force_sum_reduction(config)
        self.file.save("identified")

    def after_build(self, trainer: Any) -> None:
        self.report.built = self.file.now()
        titan.watch_losses(trainer, self.file.loss)
        self.file.save("built")

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

    # --- what is counted ------------------------------------------------------------------------------------------

    def process_started(self, command: list[str], compiles: bool) -> None:
        if os.getpid() != self.report.pid:
            return
        if compiles:
            self.report.compiler_processes.append(" ".join(command)[:300])
            self.file.save()
        else:
            self.report.other_processes += 1

    def step_done(self, optimizer: Any, *_: Any) -> None:
        """A step ends when the first optimizer that ever stepped steps again: containers hold several."""
        if self._first_optimizer is None:
            self._first_optimizer = id(optimizer)
        if id(optimizer) == self._first_optimizer:
            self.file.step()

    def ended(self) -> None:
        if os.getpid() == self.report.pid:
            self.file.save("ended")
