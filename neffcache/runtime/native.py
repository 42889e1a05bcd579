"""A rank whose compiler serves itself from its own cache: nothing is put in its way, everything it does is counted.

The compiler's counters are read each second and after each step, its own names of the graphs after each step. A
compiler process is seen before it starts. A strict run ends at the first sign that something is compiled; a recording
one (the first half of a warm) writes down what was used when.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path

from neffcache import variables
from neffcache.compile.toolchain import Counters, NativeStore
from neffcache.errors import Mismatch, Miss
from neffcache.runtime.rank import Rank, as_neffcache_error, refuse
from neffcache.runtime.report import ReportFile
from neffcache.store.native import EXTRA, graph_keys
from neffcache.store.records import Manifest

EVERY = 1.0
"""Seconds between two looks at the compiler's counters."""

_LATE = 8
"""Steps whose graphs are asked for by name; later ones only when the counters moved."""


class NativeRank(Rank):
    """A rank that is served by its compiler's own cache."""

    def __init__(
        self, store: NativeStore, manifest: Manifest, view: Path, report: ReportFile, environ: Mapping[str, str]
    ) -> None:
        self.store = store
        self.phases: dict[str, list[str]] = {}
        self._seen: set[str] = set()
        self._moved = 0
        self.allowed: int | None = None
        super().__init__(manifest, view, report, environ)

    def expect(self, number: int) -> None:
        entry = self.manifest.rank_classes[number]
        self.report.expected = sorted({key for keys in graph_keys(entry).values() for key in keys})
        said = entry.extra.get(EXTRA)
        if isinstance(said, Mapping) and "misses" in said:
            self.allowed = int(said["misses"])

    def prepare(self) -> None:
        self.store.check_environment(self.environ)
        for name, value in json.loads(self.environ.get(variables.EXPECTED, "{}")).items():
            if self.environ.get(name) != value:
                raise Mismatch(
                    f"{name} is {self.environ.get(name)} in this rank, and the run's own directory is {value}",
                    hint=f"the command sets {name}: take it out",
                    details={"variable": name, "warmed": value, "here": self.environ.get(name)},
                )
        threading.Thread(target=self._watch, name="neffcache-counters", daemon=True).start()

    # --- what is counted ------------------------------------------------------------------------------------------

    def process_started(self, command: list[str], compiles: bool) -> None:
        super().process_started(command, compiles)
        if compiles and self.on_miss == "fail" and os.getpid() == self.report.pid:
            self.compiled(f"it was about to start {Path(command[0]).name}")

    def stepping(self) -> None:
        # Before the step is counted: the report of step one has that step's own counts.
        self.look(f"step {self.report.step_count + 1}")

    def ended(self) -> None:
        if os.getpid() == self.report.pid:
            self.look("the end")
        super().ended()

    def look(self, when: str) -> None:
        """Read the counters and, while graphs may still be new, the compiler's names of them; refuse what is wrong."""
        try:
            counters = self.store.counters(names=False)
            moved = counters.compiles + counters.hits + counters.misses
            if self.report.step_count < _LATE or moved != self._moved:
                counters = self.store.counters()
                self._name(counters)
            self._moved = moved
            self._count(counters, when)
        except Exception as fault:
            refuse(self.file, as_neffcache_error(fault))

    def _name(self, counters: Counters) -> None:
        if counters.keys is None:
            self.report.native["named"] = False
            return
        steps = self.report.step_count
        phase = "first_step" if steps == 0 else "steady_step" if steps == 1 else f"steady_step_{steps}"
        new = sorted(counters.keys - self._seen)
        self._seen |= counters.keys
        if new or phase in ("first_step", "steady_step"):
            self.phases.setdefault(phase, []).extend(new)
        expected = set(self.report.expected)
        self.report.hits = sorted(self._seen & expected if expected else self._seen)
        unknown = sorted(self._seen - expected) if expected else []
        self.report.misses = [
            {"compile_key": key, "kind": "native", "name": "", "reason": "the manifest does not name it"}
            for key in unknown
        ]
        self.report.native.update(named=True, phases=self.phases, others=sorted(counters.others))
        self.report.native.setdefault("labels", {}).update(counters.labels)

    def _count(self, counters: Counters, when: str) -> None:
        # A program may clear the counters; what was counted stays counted.
        self.report.backend_compiles = max(self.report.backend_compiles, counters.compiles + counters.errors)
        looked = counters.hits + counters.misses + counters.compiles if counters.detail else None
        self.report.native.update(
            counters=dict(counters.detail), misses=counters.misses, allowed=self.allowed, looked=looked
        )
        if self.on_miss == "fail" and counters.compiles + counters.errors:
            self.compiled(f"its counters say so at {when}")

    def compiled(self, how: str) -> None:
        """End this rank: what it needs is not in the view."""
        known = len(self.report.expected)
        refuse(
            self.file,
            Miss(
                f"the compiler did not find what it needs in the cache of manifest {self.manifest.id[:12]}: {how}",
                hint="neffcache warm the configuration again, with --native",
                details={"counters": self.report.native.get("counters", {}), "graphs": known, "how": how},
            ),
        )

    def _watch(self) -> None:
        pause = threading.Event()
        while not pause.wait(EVERY):
            try:
                counters = self.store.counters(names=False)
            except Exception:
                continue  # the program is still importing its compiler; the next step reads them again
            if self.on_miss == "fail" and counters.compiles + counters.errors:
                self._count(counters, "a look each second")
