"""One rank under `neffcache run`: proof that it is the manifest's job, what it starts, its steps, its report.

A Trainer is seen when it is built, a callable when it is called.

How it gets what was compiled is the business of `doors` (graphs of ours) and `native` (a compiler's own cache).
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import wrapt
from torch.optim.optimizer import register_optimizer_step_post_hook

from neffcache import inference, variables
from neffcache.compile.toolchains import identity_in_rank
from neffcache.errors import Bug, Mismatch, NeffcacheError
from neffcache.inference import Workload
from neffcache.key.compare import Difference
from neffcache.key.workload import CALLABLE, TORCHTITAN
from neffcache.runtime.identity import place_differences, toolchain_differences, workload_differences
from neffcache.runtime.processes import watch
from neffcache.runtime.report import ReportFile
from neffcache.store.ranks import has_rank
from neffcache.store.records import Manifest
from neffcache.trace import titan
from neffcache.trace.document import inference_document, workload_document


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


class Rank:
    """One rank's view, report and policy."""

    def __init__(self, manifest: Manifest, view: Path, report: ReportFile, environ: Mapping[str, str]) -> None:
        self.manifest = manifest
        self.view = view
        self.file = report
        self.report = report.report
        self.environ = environ
        self.on_miss = environ.get(variables.ON_MISS, "fail")
        # Before any program code: what a program changes later is in each graph's own settings.
        self.identity = identity_in_rank(manifest.components["toolchain"]["value"], environ)
        self.report.kind = manifest.components["workload"]["value"].get("kind", TORCHTITAN)
        self._first_optimizer: int | None = None
        for number, ranks in enumerate(manifest.rank_classes):
            if has_rank(ranks.ranks, self.report.rank):
                self.report.rank_class = number
                self.expect(number)

    # --- what the two kinds do ------------------------------------------------------------------------------------

    def expect(self, number: int) -> None:
        """Enter into the report what rank class `number` of the manifest needs."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Be ready for the program to compile; this process is known to be of the manifest's place and toolchain."""
        raise NotImplementedError

    # --- opening --------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Everything that can be known before the program runs is proved here. Raises NeffcacheError."""
        watch(self.process_started)
        different = place_differences(self.manifest, self.environ) + toolchain_differences(self.manifest, self.identity)
        if different:
            raise self.other_job(different)
        if self.report.rank_class is None:
            raise Mismatch(f"the manifest names no graphs for rank {self.report.rank}")
        self.prepare()
        atexit.register(self.ended)
        if self.report.kind == CALLABLE:
            inference.observe(self)
            return
        register_optimizer_step_post_hook(self.step_done)
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

    def prove(self, document: Callable[[], Mapping[str, Any]]) -> None:
        """Prove, before any model is built, that this process is the job of the manifest; end it otherwise."""
        try:
            if different := workload_differences(self.manifest, document()):
                raise self.other_job(different)
        except Exception as fault:
            refuse(self.file, as_neffcache_error(fault))
        self.report.identity = "proved"

    # --- a callable -----------------------------------------------------------------------------------------------

    def before_call(self, workload: Workload, arguments: Mapping[str, Any]) -> None:
        self.prove(lambda: inference_document(workload, arguments, self.environ))
        self.file.save("identified")

    def after_call(self) -> None:
        self.report.built = self.file.now()
        self.file.save("built")

    def step(self) -> None:
        self.stepping()
        self.file.step()

    # --- the Trainer ----------------------------------------------------------------------------------------------

    def before_build(self, config: Any) -> None:
        self.prove(lambda: workload_document(config, self.environ))
        if self.environ.get(variables.HARNESS) == "1":
            titan.force_sum_reduction(config)
        self.file.save("identified")

    def after_build(self, trainer: Any) -> None:
        self.report.built = self.file.now()
        titan.watch_losses(trainer, self.file.loss)
        self.file.save("built")

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
            self.step()

    def stepping(self) -> None:
        """A step is about to be counted."""

    def ended(self) -> None:
        if os.getpid() == self.report.pid:
            self.file.save("ended")
