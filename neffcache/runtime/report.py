"""What one rank saw, as a JSON file that is whole at any time: the launcher reads it while the job runs."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TEXTS = "texts"
"""Beside the reports: the manifest's graph texts, <compile key>.txt, to name the nearest record of a missed graph."""

MISSED = "missed"
"""Beside the reports: what ranks had to compile, one directory a compile key."""


@dataclass
class RankReport:
    """One rank's record of a run.

    hits and misses count distinct compile keys; `compiles` are compiles of the back end plus compiler processes.
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
    hits: list[str] = field(default_factory=list)
    misses: list[dict[str, Any]] = field(default_factory=list)
    backend_compiles: int = 0
    compiler_processes: list[str] = field(default_factory=list)
    other_processes: int = 0
    loads: float = 0.0
    texts: float = 0.0
    built: float | None = None
    steps: list[float] = field(default_factory=list)
    losses: dict[str, float] = field(default_factory=dict)
    at_step_one: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    replaced: list[str] = field(default_factory=list)

    @property
    def compiles(self) -> int:
        return self.backend_compiles + len(self.compiler_processes)

    def counts(self) -> dict[str, int]:
        return {"hits": len(self.hits), "misses": len(self.misses), "compiles": self.compiles}


class ReportFile:
    """Writes a rank's report to `directory`/rank-<n>.json by rename, after every event that matters."""

    def __init__(self, directory: Path, report: RankReport) -> None:
        self._path = directory / f"rank-{report.rank}.json"
        self.report = report
        self.started = time.monotonic()

    def now(self) -> float:
        return round(time.monotonic() - self.started, 4)

    def save(self, state: str | None = None) -> None:
        if state is not None:
            self.report.state = state
        temporary = self._path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps({"schema": 1, **asdict(self.report)}))
        os.replace(temporary, self._path)


def read_reports(directory: Path) -> dict[int, RankReport]:
    """The reports that stand in `directory` now, by rank."""
    found: dict[int, RankReport] = {}
    for path in sorted(directory.glob("rank-*.json")):
        document = json.loads(path.read_bytes())
        document.pop("schema")
        found[document["rank"]] = RankReport(**document)
    return found
