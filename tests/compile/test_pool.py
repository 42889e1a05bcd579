"""The pool: what becomes of each graph when a stub compiler works, refuses, breaks or dies."""

from __future__ import annotations

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
