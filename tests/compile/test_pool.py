"""The pool: what becomes of each graph when a stub compiler works, refuses, breaks or dies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from neffcache.compile import pool
from neffcache.compile.pool import Event
from neffcache.compile.toolchain import CompileRequest
from neffcache.errors import CompileFailed


def requests(place: Path, **wishes: str) -> list[CompileRequest]:
    made = []
    for key, wish in wishes.items():
        (place / f"{key}.payload").write_text(wish)
        made.append(CompileRequest(key, key, place / f"{key}.payload", {}, {}))
    return made


def outcome(
    place: Path, stub: str, jobs: int = 2, environment: dict[str, str] | None = None, **wishes: str
) -> dict[str, list[Event]]:
    found: dict[str, list[Event]] = {}
    for event in pool.run(
        requests(place, **wishes),
        jobs=jobs,
        directory=place / "work",
        environment=environment or {},
        compiler=f"tests.compile.stub_compilers.{stub}",
    ):
        found.setdefault(event.compile_key, []).append(event)
    return found


def happenings(events: list[Event]) -> list[str]:
    return [event.happening for event in events]


def test_every_graph_is_queued_started_and_done_once(tmp_path: Path) -> None:
    found = outcome(tmp_path, "echo", a="1", b="2", c="3")
    for key, text in {"a": "1", "b": "2", "c": "3"}.items():
        assert happenings(found[key]) == ["queued", "started", "done"]
        compiled = found[key][-1].compiled
        assert compiled is not None
        assert compiled.products[0].source.read_text() == text


def test_a_refusal_and_a_bug_stop_nobody_else(tmp_path: Path) -> None:
    found = outcome(tmp_path, "picky", a="refuse", b="good", c="break", d="good")
    assert happenings(found["b"])[-1] == happenings(found["d"])[-1] == "done"
    refused, broken = found["a"][-1].fault, found["c"][-1].fault
    assert isinstance(refused, CompileFailed)
    assert (refused.message, refused.hint, refused.details["code"]) == ("the stub refuses", "ask nicely", "STUB1")
    assert broken is not None
    assert "a bug in the stub" in broken.message


def test_a_worker_that_dies_costs_only_its_own_graph(tmp_path: Path) -> None:
    found = outcome(tmp_path, "picky", a="die", b="good", c="good")
    assert happenings(found["b"])[-1] == happenings(found["c"])[-1] == "done"
    fault = found["a"][-1].fault
    assert fault is not None
    assert fault.details["class"] == "killed"


def test_a_worker_that_dies_once_is_tried_again_alone(tmp_path: Path) -> None:
    found = outcome(tmp_path, "picky", a="die once", b="good")
    assert happenings(found["a"])[-1] == happenings(found["b"])[-1] == "done"


def test_the_identity_s_environment_reaches_the_workers(tmp_path: Path) -> None:
    found = outcome(tmp_path, "environment", environment={"OMP_NUM_THREADS": "3"}, a="")
    compiled = found["a"][-1].compiled
    assert compiled is not None
    assert compiled.products[0].source.read_text() == "3"


@pytest.mark.fast
def test_workers_fit_into_memory() -> None:
    assert pool.default_jobs(10_000, 1_000, wanted=7) == 7
    assert pool.default_jobs(1_500, 1_000) == 1
    assert pool.default_jobs(0, 1_000) == 1
    assert pool.memory_limit() > 0


def spans(found: dict[str, list[Event]]) -> dict[str, tuple[float, float]]:
    """When each compile began and ended, by its own clock."""
    times = {}
    for key, events in found.items():
        compiled = events[-1].compiled
        assert compiled is not None
        began, ended = compiled.products[0].source.read_text().split()
        times[key] = (float(began), float(ended))
    return times


def most_at_once(times: dict[str, tuple[float, float]]) -> int:
    return max(sum(began <= at < ended for began, ended in times.values()) for at, _ in times.values())


def run_timed(place: Path, jobs: int, budget: int | None, wishes: dict[str, tuple[str, int]]) -> dict[str, list[Event]]:
    made = [
        replace(
            request,
            peak_bytes=wishes[request.compile_key][1],
            time_limit=1.0 if wishes[request.compile_key][0] == "hang" else None,
        )
        for request in requests(place, **{key: wish for key, (wish, _) in wishes.items()})
    ]
    found: dict[str, list[Event]] = {}
    for event in pool.run(
        made, jobs=jobs, directory=place / "work", environment={}, compiler="tests.compile.stub_compilers.timed",
        budget=budget,
    ):  # fmt: skip
        found.setdefault(event.compile_key, []).append(event)
    return found


def test_no_more_run_at_once_than_fit_into_memory(tmp_path: Path) -> None:
    sizes = {"a": ("0.2", 60), "b": ("0.2", 60), "c": ("0.2", 30), "d": ("0.2", 30), "e": ("0.2", 200)}
    times = spans(run_timed(tmp_path, 3, 100, sizes))
    assert most_at_once(times) <= 2
    assert not (times["a"][0] < times["b"][1] and times["b"][0] < times["a"][1]), "60 + 60 is over 100"
    alone = {key: value for key, value in times.items() if key != "e"}
    assert not any(began < times["e"][1] and times["e"][0] < ended for began, ended in alone.values())


def test_a_worker_that_hangs_is_ended_and_costs_only_its_own_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "GRACE", 0.5)
    found = run_timed(tmp_path, 2, None, {"h": ("hang", 1), "a": ("0.1", 1), "b": ("0.1", 1), "c": ("0.1", 1)})
    assert [happenings(found[key])[-1] for key in "habc"] == ["failed", "done", "done", "done"]
    fault = found["h"][-1].fault
    assert fault is not None
    assert fault.details["class"] == "time-out"
    assert happenings(found["h"]).count("started") == 1, "a limit is no reason to wait for it once more"


def test_after_a_kill_half_as_many_run_at_once(tmp_path: Path) -> None:
    wishes = {"a": "die once"} | {f"b{number}": "good" for number in range(4)}
    events: list[Event] = []
    for event in pool.run(
        requests(tmp_path, **wishes), jobs=2, directory=tmp_path / "work", environment={},
        compiler="tests.compile.stub_compilers.picky",
    ):  # fmt: skip
        events.append(event)
    killed = next(index for index, event in enumerate(events) if event.happening == "retried")
    running = 0
    for event in events[killed + 1 :]:
        running += {"started": 1, "done": -1}.get(event.happening, 0)
        assert running <= 1
    assert events[-1].compile_key == "a", "and the killed one comes last, alone"
    assert sum(event.happening == "done" for event in events) == 5
