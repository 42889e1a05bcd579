"""A rank's report is written from several threads at once: Inductor starts compilers in threads of its own."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from neffcache.runtime.report import RankReport, ReportFile

pytestmark = pytest.mark.fast


@pytest.fixture
def file(tmp_path: Path) -> ReportFile:
    return ReportFile(tmp_path, RankReport(rank=3, local_rank=3, pid=1))


def test_threads_that_save_at_once_lose_nothing(file: ReportFile, tmp_path: Path) -> None:
    def start(number: int) -> None:
        for step in range(100):
            file.report.compiler_processes.append(f"g++ {number} {step}")
            file.report.losses[f"{number} {step}"] = 0.0
            file.save()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(start, range(8)))
    (path,) = tmp_path.iterdir()
    assert path.name == "rank-3.json"
    found = json.loads(path.read_bytes())
    assert len(found["compiler_processes"]) == len(found["losses"]) == 800


def test_a_signal_may_come_while_it_is_written(
    file: ReportFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_text

    def interrupted(path: Path, text: str, *rest: Any) -> int:
        monkeypatch.setattr(Path, "write_text", write)
        written = write(path, text, *rest)
        signal.raise_signal(signal.SIGUSR1)
        return written

    before = signal.signal(signal.SIGUSR1, lambda *_: file.save("ended"))
    monkeypatch.setattr(Path, "write_text", interrupted)
    try:
        file.save("built")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert json.loads((tmp_path / "rank-3.json").read_bytes())["state"] in ("built", "ended")
    assert len(list(tmp_path.iterdir())) == 1
