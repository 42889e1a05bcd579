"""Limits of workers: what takes too long or too much memory is ended and named, and the next one starts afresh."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from neffcache.errors import Unsupported
from neffcache.flows import probe
from neffcache.flows.workers import Series, Worker

WORKER = """
import os, sys, time
from neffcache.flows.workers import SERIES, answer, answer_series

def work(given):
    held = bytearray(given.get("bytes", 0))
    for place in range(0, len(held), 4096):
        held[place] = 1
    time.sleep(given.get("sleep", 0))
    return {"pid": os.getpid(), "parent": os.getppid(), "threads": os.environ.get("OMP_NUM_THREADS")}

def prepare(): ...

if __name__ == "__main__":
    sys.exit(answer_series(prepare, work) if SERIES in sys.argv[1:] else answer(work))
"""


@pytest.fixture
def environ(tmp_path: Path) -> Mapping[str, str]:
    (tmp_path / "sleeper.py").write_text(WORKER)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])}


LIMITS: list[Any] = [
    pytest.param({"sleep": 60}, {"seconds": 1.0}, "sleeper takes longer than 1 s and was ended", id="seconds"),
    pytest.param(
        {"bytes": 300_000_000, "sleep": 60},
        {"memory": 200_000_000},
        "sleeper needs more than 0.2 GB of memory and was ended",
        id="memory",
    ),
]


@pytest.mark.parametrize(("question", "limits", "told"), LIMITS)
def test_a_worker_beyond_its_limit_is_ended(
    environ: Mapping[str, str], tmp_path: Path, question: Any, limits: Any, told: str
) -> None:
    with Worker("sleeper", question, environ, tmp_path) as worker, pytest.raises(Unsupported, match=told) as caught:
        worker.result(**limits)
    assert caught.value.details["class"] == "limit"


@pytest.mark.parametrize(("question", "limits", "told"), LIMITS)
def test_a_series_beyond_its_limit_is_ended(
    environ: Mapping[str, str], tmp_path: Path, question: Any, limits: Any, told: str
) -> None:
    with Series("sleeper", environ, tmp_path) as series:
        first, second = (series.ask({}, seconds=60, memory=1 << 40) for _ in range(2))
        assert first["parent"] == second["parent"]
        assert first["pid"] != second["pid"]
        with pytest.raises(Unsupported, match=told) as caught:
            series.ask(question, **limits)
        assert caught.value.details["class"] == "limit"
        assert not series.alive


def test_a_prober_starts_afresh_after_a_limit_and_for_other_variables(
    environ: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "WORKER", "sleeper")
    monkeypatch.setattr(probe, "environment", lambda environ, world: {"OMP_NUM_THREADS": str(world)})
    limits: dict[str, Any] = {"seconds": 60, "memory": 1 << 40}
    with probe.Prober(environ, tmp_path) as prober:
        one, again, two = (prober.ask({"world_size": world}, **limits) for world in (1, 1, 2))
        assert one["parent"] == again["parent"] != two["parent"]
        assert (one["threads"], two["threads"]) == ("1", "2")
        with pytest.raises(Unsupported):
            prober.ask({"world_size": 2, "sleep": 60}, **{**limits, "seconds": 0.5})
        assert prober.ask({"world_size": 2}, **limits)["parent"] != two["parent"]
