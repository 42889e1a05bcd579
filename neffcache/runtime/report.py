"""What one rank saw, as a JSON file that is whole at any time: the launcher reads it while the job runs."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from neffcache.key.workload import TORCHTITAN

TEXTS = "texts"
"""Beside the reports: the manifest's graph texts, <compile key>.txt, to name the nearest record of a missed graph."""

MISSED = "missed"
"""Beside the reports: what ranks had to compile, one directory a compile key."""


REFUSED = "refused-"
"""Beside the reports: `refused-<rank>` stands when a rank ended itself; the launcher looks for it."""

KEPT = 100
"""Losses and step times that a report keeps from the beginning; of later ones it keeps the last."""

QUIET = 1.0
"""Seconds between two writes of a report once training goes on."""


@dataclass
class RankReport:
    """One rank's record of a run.

    hits and misses count distinct compile keys; `compiles` are compiles of the back end plus compiler processes.
    `native` is what a compiler with its own cache said: counters, and the keys of the graphs used by phase.
    `not_compiled` are the keys of graphs that were run operator by operator, because their sizes depend on data.
    `optional` graphs belong only to phases that a run may end before.
    `calls` is what a callable did by phase: {"first_seconds", "steady_seconds", "outputs": SHA-256 of their bytes}.
    Times are seconds; `built` and each entry of `steps` are monotonic times since the doors opened.
    """

    rank: int
    local_rank: int
    pid: int
    state: str = "started"
    identity: str = "unproved"
    differences: list[dict[str, Any]] = field(default_factory=list)
    rank_class: int | None = None
    expected: list[str] = field(default_factory=list)
    optional: list[str] = field(default_factory=list)
    hits: list[str] = field(default_factory=list)
    misses: list[dict[str, Any]] = field(default_factory=list)
    backend_compiles: int = 0
    compiler_processes: list[str] = field(default_factory=list)
    other_processes: int = 0
    loads: float = 0.0
    texts: float = 0.0
    built: float | None = None
    step_count: int = 0
    steps: list[float] = field(default_factory=list)
    losses: dict[str, float] = field(default_factory=dict)
    at_step_one: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    native: dict[str, Any] = field(default_factory=dict)
    kind: str = TORCHTITAN
    calls: dict[str, dict[str, Any]] = field(default_factory=dict)
    not_compiled: list[str] = field(default_factory=list)

    @property
    def compiles(self) -> int:
        return self.backend_compiles + len(self.compiler_processes)

    def counts(self) -> dict[str, int]:
        return {"hits": len(self.hits), "misses": len(self.misses), "compiles": self.compiles}


class ReportFile:
    """Writes a rank's report to `directory`/rank-<n>.json by rename, after every event that matters.

    From any thread: Inductor starts compilers in threads of its own, and each start is an event.
    """

    def __init__(self, directory: Path, report: RankReport) -> None:
        self._path = directory / f"rank-{report.rank}.json"
        self.report = report
        self.started = time.monotonic()
        self._saved = 0.0
        self._saving = threading.RLock()
        self._numbers = itertools.count()

    def now(self) -> float:
        return round(time.monotonic() - self.started, 4)

    def save(self, state: str | None = None) -> None:
        if state is not None:
            self.report.state = state
        with self._saving:  # entered again by a signal's handler, hence a name for each
            self._saved = time.monotonic()
            temporary = self._path.with_suffix(f".{os.getpid()}.{next(self._numbers)}.tmp")
            temporary.write_text(self._text())
            os.replace(temporary, self._path)

    def _text(self) -> str:
        for _ in range(100):
            with contextlib.suppress(RuntimeError):  # another thread has entered something meanwhile
                return json.dumps({"schema": 1, **asdict(self.report)})
        return json.dumps({"schema": 1, **asdict(self.report)})

    def refused(self) -> None:
        """Save, and leave the mark that the launcher looks for."""
        self.save("refused")
        (self._path.parent / f"{REFUSED}{self.report.rank}").touch()

    def step(self) -> None:
        """One more step is done. The first is written at once, later ones now and then."""
        report = self.report
        report.step_count += 1
        if len(report.steps) >= KEPT:
            report.steps.pop()
        report.steps.append(self.now())
        if report.step_count == 1:
            report.at_step_one = report.counts()
            self.save("step_one")
        elif time.monotonic() - self._saved > QUIET:
            self.save("stepping")

    def loss(self, step: int, loss: float) -> None:
        """The loss of a step, as the trainer logged it."""
        losses = self.report.losses
        if len(losses) >= KEPT:
            losses.popitem()
        losses[str(step)] = loss
        if time.monotonic() - self._saved > QUIET:
            self.save()


def read_reports(directory: Path) -> dict[int, RankReport]:
    """The reports that stand in `directory` now, by rank."""
    found: dict[int, RankReport] = {}
    for path in sorted(directory.glob("rank-*.json")):
        document = json.loads(path.read_bytes())
        document.pop("schema")
        found[document["rank"]] = RankReport(**document)
    return found


def any_refused(directory: Path) -> bool:
    """Whether a rank has ended itself."""
    return next(directory.glob(f"{REFUSED}*"), None) is not None
