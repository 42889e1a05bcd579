"""The lint over made-up traces: it names the field, the graph, the line and the value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from neffcache.errors import Unsupported
from neffcache.flows.lint import LintReport, judge, lint

pytestmark = pytest.mark.fast

FIELDS = {f"neutral{n}": n + 1 for n in range(20)}
WATCHED = {"lr": 2.0, "eps": 3.0}
Holds = Callable[[Mapping[str, Any]], tuple[str, str]]


def linted(tmp_path: Path, holds: Holds, env: Callable[[Mapping[str, Any]], str] = lambda _: "e") -> LintReport:
    """`holds(values)` gives what a graph's second line and an eager operator say for these values of all fields."""
    report = LintReport("toy")
    plain = {**dict.fromkeys(FIELDS, 0), "lr": 1.0, "eps": 1.0}

    def traced(changes: Mapping[str, Any]) -> dict[str, Any]:
        report.traces += 1
        line, operator = holds({**plain, **changes})
        settings = env({**plain, **changes})
        file = tmp_path / f"{report.traces}.txt"
        file.write_text(f"first\n{line}\nlast\n")
        graph = {"phase": "first_step", "name": "Block.forward", "text": line, "env": settings, "text_file": str(file)}
        return {
            "graphs": [graph],
            "eager": {operator: 1},
            "uncacheable": {"odd": "why"},
            "neutral": FIELDS,
            "watched": WATCHED,
        }

    judge(report, traced, lambda _: None)
    return report


def test_a_callable_is_not_linted(tmp_path: Path) -> None:
    request: Any = SimpleNamespace(config="blocks_tp2")
    job: Any = SimpleNamespace(called=True)
    with pytest.raises(Unsupported, match="blocks_tp2 is a callable, and --lint is for"):
        lint(request, {"TMPDIR": str(tmp_path)}, lambda _: None, job=job)


def test_nothing_moves(tmp_path: Path) -> None:
    report = linted(tmp_path, lambda _: ("mul", "add"))
    assert report.clean
    assert not report.baked
    assert report.traces == 3
    assert report.varied == 22
    assert report.to_json()["uncacheable"] == {"odd": "why"}


@pytest.mark.parametrize("name", ["neutral0", "neutral7", "neutral19"])
def test_a_neutral_field_in_a_graph_is_named_with_line_and_value(tmp_path: Path, name: str) -> None:
    report = linted(tmp_path, lambda values: (f"mul {values[name]}", "add"))
    assert [(m.field, m.where, m.line, m.before, m.after) for m in report.moved] == [
        (name, "Block.forward", 2, "mul 0", f"mul {FIELDS[name]}")
    ]
    assert report.traces < 12, "fields are halved, not tried one by one"


def test_a_neutral_field_in_an_eager_operator_is_found_too(tmp_path: Path) -> None:
    report = linted(tmp_path, lambda values: ("mul", f"add {values['neutral3']}"))
    assert [(m.field, m.where, m.before, m.after) for m in report.moved] == [
        ("neutral3", "the eager operators", "add 0", "add 4")
    ]


def test_two_fields_are_both_found(tmp_path: Path) -> None:
    report = linted(tmp_path, lambda values: (f"mul {values['neutral3']} {values['neutral15']}", "add"))
    assert {m.field for m in report.moved} == {"neutral3", "neutral15"}


def test_a_learning_rate_in_a_graph_is_baked_in_and_in_an_eager_operator_expected(tmp_path: Path) -> None:
    report = linted(tmp_path, lambda values: (f"mul {values['lr']}", f"adamw {values['eps']}"))
    assert report.clean
    assert [(m.field, m.line, m.before, m.after) for m in report.baked] == [("lr", 2, "mul 1.0", "mul 2.0")]
    assert report.eager == 2


def test_fields_that_move_something_only_together_are_not_called_clean(tmp_path: Path) -> None:
    report = linted(tmp_path, lambda values: (f"mul {values['neutral3'] and values['neutral15']}", "add"))
    assert not report.clean
    assert report.moved[0].field.endswith("with other fields")
    assert (report.moved[0].before, report.moved[0].after) == ("mul 0", "mul 16")


def test_settings_that_move_with_a_field_are_no_clean_report(tmp_path: Path) -> None:
    report = linted(tmp_path, lambda values: ("mul", "add"), env=lambda values: f"env {values['neutral9']}")
    assert [(m.field, m.before, m.after) for m in report.moved] == [("neutral9", "env env 0", "env env 10")]
