"""The doors through which a training process gets its artifacts, and the gate at each of them.

Opened by `autoload` when torch has been imported and before anything else of the program ran:

- `torch.compile(backend="inductor")` and `backend="neffcache"` serve graphs from the view by compile key;
- `Trainer.__init__` proves that this process is the job that the manifest was made for;
- an audit hook counts compiler processes;
- the optimizer's step hook marks the steps.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import wrapt
from torch.optim.optimizer import register_optimizer_step_post_hook

from neffcache.compile.host.build import meta_path
from neffcache.compile.host.identity import identity_in_rank
from neffcache.compile.host.load import load_graph
from neffcache.errors import Mismatch, Miss, NeffcacheError
from neffcache.graph.settings import current_settings
from neffcache.graph.text import canonical_text
from neffcache.graph.uncacheable import Uncacheable
from neffcache.key.canonical import digest
from neffcache.key.compare import Difference, differences
from neffcache.key.job import CompileComponents, compile_key
from neffcache.key.workload import workload_component
from neffcache.runtime import fallback, variables
from neffcache.runtime.processes import watch
from neffcache.runtime.report import TEXTS, RankReport, ReportFile
from neffcache.store.ranks import has_rank
from neffcache.store.records import Manifest
from neffcache.trace import titan, torch_internals
from neffcache.trace.document import workload_document

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
        manifest = Manifest.from_json(json.loads(path.read_bytes()))
        _doors = Doors(manifest, path.parent, report, environ)
        _doors.open()
        report.save()
    except NeffcacheError as fault:
        refuse(report, fault)


def refuse(report: ReportFile, fault: NeffcacheError) -> None:
    """Write the fault into the report and end this rank: nobody waits in a collective for it."""
    report.report.error = fault.to_json()
    report.save("refused")
    print(f"neffcache: rank {report.report.rank}: {fault.message}", file=sys.stderr, flush=True)
    sys.stderr.flush()
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
        self.loaded: dict[str, Callable[[list[Any]], list[Any]]] = {}
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
        torch_internals.probe()
        watch(self.process_started)
        self.check_world()
        if different := self.toolchain_differences():
            raise self.other_job(different)
        torch_internals.static_shapes()
        torch_internals.replace_inductor(self.backend)
        register_optimizer_step_post_hook(self.step_done)
        if self.environ.get(variables.HARNESS) == "1":
            wrapt.register_post_import_hook(titan.use_cpu, "torchtitan.tools.utils")
        wrapt.register_post_import_hook(
            lambda module: titan.wrap_trainer(module, self.before_build, self.after_build), "torchtitan.trainer"
        )

    def check_world(self) -> None:
        """World size and rank are known before any model: refuse here what is another job."""
        wanted = self.manifest.components["lnc"]["value"]["world_size"]
        world = int(self.environ.get("WORLD_SIZE", "1"))
        if world != wanted:
            raise Mismatch(
                f"the manifest is for {wanted} ranks, this job has {world}",
                hint="warm the configuration for this world size",
                details={"differences": [{"path": "lnc.world_size", "left": wanted, "right": world}]},
            )
        if self.report.rank_class is None:
            raise Mismatch(f"the manifest names no graphs for rank {self.report.rank}")

    # --- identity -------------------------------------------------------------------------------------------------

    def before_build(self, config: Any) -> None:
        """Prove, before any model is built, that this process is the job of the manifest; end it otherwise."""
        try:
            different = self.identity_differences(config)
        except NeffcacheError as fault:
            refuse(self.file, fault)
            return
        if different:
            refuse(self.file, self.other_job(different))
        self.report.identity = "proved"
        if self.environ.get(variables.HARNESS) == "1":
            titan.force_sum_reduction(config)
        self.file.save("identified")

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

    def identity_differences(self, config: Any) -> list[Difference]:
        """What differs between the manifest's workload and that of this process, field by field."""
        found: list[Difference] = []
        recorded = self.manifest.components
        workload = workload_component(workload_document(config, self.environ))
        if digest(workload) != recorded["workload"]["sha256"]:
            found += differences(recorded["workload"]["value"], workload)
        return found

    def toolchain_differences(self) -> list[Difference]:
        if self.identity.id == self.toolchain:
            return []
        recorded = self.manifest.components["toolchain"]["value"]
        return differences(recorded, dict(self.identity.value), path="toolchain")

    def after_build(self, trainer: Any) -> None:
        self.report.built = self.file.now()
        titan.watch_losses(trainer, self.loss_seen)
        self.file.save("built")

    def loss_seen(self, step: int, loss: float) -> None:
        self.report.losses[str(step)] = loss
        self.file.save()

    # --- serving --------------------------------------------------------------------------------------------------

    def serve(
        self, kind: str, gm: torch.fx.GraphModule, inputs: Sequence[Any], settings: dict[str, Any]
    ) -> Callable[[list[Any]], list[Any]]:
        """The compiled form of a flat graph: from the view, else by the policy for a miss."""
        started = time.perf_counter()
        try:
            text = canonical_text(gm)
        except Uncacheable as fault:
            return self.missed("uncacheable", kind, fault, gm, None, settings)
        key = compile_key(CompileComponents(text=text.sha256, toolchain=self.toolchain, env=digest(settings)))
        self.report.texts = round(self.report.texts + time.perf_counter() - started, 4)
        if key in self.loaded:
            return self.loaded[key]
        if key not in self.report.expected:
            unknown = Miss(f"graph {key} ({kind}) is not in the manifest {self.manifest.id[:12]}")
            return self.missed(key, kind, unknown, gm, text, settings)
        if not (self.view / "host" / meta_path(key)).exists():
            absent = Miss(f"graph {key} ({kind}) has no artifact in the view")
            return self.missed(key, kind, absent, gm, text, settings)
        started = time.perf_counter()
        try:
            run = load_graph(self.view / "host", key, text)
        except NeffcacheError as damaged:
            refuse(self.file, damaged)
            raise
        self.report.loads = round(self.report.loads + time.perf_counter() - started, 4)
        self.loaded[key] = run
        self.report.hits.append(key)
        self.file.save()
        return run

    def missed(
        self, key: str, kind: str, fault: NeffcacheError, gm: Any, text: Any, settings: dict[str, Any]
    ) -> Callable[[list[Any]], list[Any]]:
        entry = {
            "compile_key": key,
            "kind": kind,
            "name": torch_internals.compile_name(gm, kind),
            "reason": fault.message,
            "nearest": self.nearest(text),
        }
        self.report.misses.append(entry)
        if self.on_miss == "fail":
            self.file.save()
            refuse(
                self.file,
                Miss(
                    fault.message,
                    hint="neffcache warm the configuration again, or run with --on-miss compile",
                    details=entry,
                ),
            )
        self.file.save()
        try:
            run = fallback.compile_here(
                key,
                text,
                gm,
                settings,
                self.manifest.components["toolchain"]["value"],
                reports=self.reports,
                compiling=self.compiling,
            )
        except NeffcacheError as broken:
            refuse(self.file, broken)
            raise
        self.loaded[key] = run
        self.file.save()
        return run

    def compiling(self) -> None:
        self.report.backend_compiles += 1
        self.file.save()

    def nearest(self, text: Any) -> dict[str, Any] | None:
        """The record of this rank's class with the most like text: its key and the first line that differs."""
        if text is None:
            return None
        return fallback.nearest_record(self.reports / TEXTS, self.report.expected, text.text)

    # --- what is counted ------------------------------------------------------------------------------------------

    def process_started(self, command: list[str], compiles: bool) -> None:
        if os.getpid() != self.report.pid:
            return
        if compiles:
            self.report.compiler_processes.append(" ".join(command)[:300])
        else:
            self.report.other_processes += 1

    def step_done(self, optimizer: Any, *_: Any) -> None:
        """A step ends when the first optimizer that ever stepped steps again: containers hold several."""
        if self._first_optimizer is None:
            self._first_optimizer = id(optimizer)
        if id(optimizer) != self._first_optimizer:
            return
        self.report.steps.append(self.file.now())
        if len(self.report.steps) == 1:
            self.report.at_step_one = self.report.counts()
            self.file.save("step_one")
        else:
            self.file.save("stepping")
