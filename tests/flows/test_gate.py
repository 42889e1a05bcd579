"""The gate over made-up reports: what it lets through and what it does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from neffcache.errors import CommandFailed, Mismatch, Miss
from neffcache.flows.gate import fault_of
from neffcache.flows.native import refusal
from neffcache.runtime.report import RankReport

pytestmark = pytest.mark.fast

GOOD = RankReport(
    rank=0, local_rank=0, pid=1, state="ended", identity="proved", expected=["a", "b"], hits=["a", "b"], step_count=1
)


def ranks(**of_rank_one: Any) -> dict[int, RankReport]:
    return {0: GOOD, 1: replace(GOOD, rank=1, local_rank=1, **of_rank_one)}


def test_all_ranks_hit_everything_and_compile_nothing() -> None:
    assert fault_of(ranks(), 0, 2, "fail") is None


def test_a_rank_without_a_report_is_a_failure() -> None:
    fault = fault_of({0: GOOD}, 0, 2, "fail")
    assert isinstance(fault, Mismatch)
    assert "1 of 2 ranks" in fault.message


def test_a_rank_s_own_word_comes_first() -> None:
    error = Miss("graph x is not there", hint="warm").to_json()
    fault = fault_of(ranks(error=error, state="refused"), 1, 2, "fail")
    assert isinstance(fault, Miss)
    assert fault.message == "rank 1: graph x is not there"


@pytest.mark.parametrize("status", [1, -9])
def test_the_command_s_failure_is_its_own(status: int) -> None:
    fault = fault_of(ranks(), status, 2, "fail")
    assert isinstance(fault, CommandFailed)
    assert str(abs(status)) in fault.message


@pytest.mark.parametrize(
    "wrong",
    [
        {"identity": "unproved"},
        {"step_count": 0},
        {"hits": ["a"]},
        {"backend_compiles": 1},
        {"compiler_processes": ["g++ -c a.cpp"]},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
@pytest.mark.parametrize("policy", ["fail", "compile", "warn"])
def test_one_rank_that_is_not_right_fails_all(wrong: dict[str, Any], policy: str) -> None:
    fault = fault_of(ranks(**wrong), 0, 2, policy)
    if wrong == {"backend_compiles": 1} and policy != "fail":
        assert fault is None, "the policy lets it compile"
    else:
        assert isinstance(fault, (Mismatch, Miss))
        assert "rank 1" in fault.message


def test_what_was_missed_and_compiled_by_policy_is_let_through_and_nothing_else() -> None:
    missed = {"hits": ["a"], "misses": [{"compile_key": "b"}], "backend_compiles": 1}
    assert fault_of(ranks(**missed), 0, 2, "compile") is None
    assert isinstance(fault_of(ranks(**missed, compiler_processes=["ninja"]), 0, 2, "compile"), Miss)
    assert isinstance(fault_of(ranks(**{**missed, "expected": ["a", "b", "c"]}), 0, 2, "compile"), Miss)


def test_a_compiler_that_counted_nothing_proves_nothing() -> None:
    counted = {"looked": 4, "counters": {"total_compilations": 0}, "misses": 2, "allowed": None}
    assert fault_of(ranks(native=counted), 0, 2, "fail") is None, "a rank may wait for a sibling: it misses, then hits"
    fault = fault_of(ranks(native={**counted, "looked": 0}), 0, 2, "fail")
    assert isinstance(fault, Mismatch)
    assert "counted not one look-up" in fault.message


def test_a_refused_compile_is_a_miss_that_names_what_was_asked() -> None:
    assert refusal([]) is None
    fault = refusal(["compile graph.mlir --target trn2", "compile other.mlir"])
    assert fault is not None
    assert fault.exit_code == 3
    assert "2 compiles" in fault.message
    assert "compile graph.mlir" in fault.message


CALLED = {"kind": "callable"}


def test_a_callable_is_proved_by_its_graphs_and_need_not_say_its_steps() -> None:
    assert fault_of(ranks(**CALLED, step_count=0), 0, 2, "fail") is None
    assert isinstance(fault_of(ranks(**CALLED, step_count=0, hits=["a"]), 0, 2, "fail"), Miss)
    assert isinstance(fault_of(ranks(**CALLED, step_count=0, expected=[], hits=[]), 0, 2, "fail"), Mismatch)
    assert isinstance(fault_of(ranks(**CALLED, backend_compiles=1), 0, 2, "fail"), Miss)


def test_a_rank_that_did_not_call_the_workload_is_told_so() -> None:
    fault = fault_of(ranks(**CALLED, identity="unproved"), 0, 2, "fail")
    assert isinstance(fault, Mismatch)
    assert "rank 1 did not call the workload" in fault.message
