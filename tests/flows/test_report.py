"""The HTML page of a warm: what it says, that it needs nothing else, and that a browser draws it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from neffcache.compile.memory import Amount
from neffcache.errors import CompileFailed
from neffcache.flows.compiling import Attempt, Tally
from neffcache.flows.costs import Capacity
from neffcache.flows.report import Graph, Section, advise, axis, lanes, render, write
from tests import browser

EVIL = "<script>alert(1)</script>&\"'"


def attempt(key: str, worker: int, began: float, ended: float, outcome: str = "done") -> Attempt:
    return Attempt(key, f"block {key}", f"worker {worker}", began, ended, outcome)


def tally() -> Tally:
    return Tally(
        compiled=3,
        failed=1,
        workers=2,
        seconds=20.0,
        peak_bytes=3_000_000_000,
        capacity=Capacity(2, 8_000_000_000, Amount(2, "the CPU affinity"), Amount(8_000_000_000, "a control group")),
        attempts=[
            attempt("a", 1, 0.0, 12.0),
            attempt("b", 2, 0.0, 3.0, "flaky"),
            attempt("b", 2, 3.0, 9.0),
            attempt("c", 2, 9.0, 15.0),
            attempt("d", 1, 12.0, 20.0, "refused"),
        ],
        costs={"a": (12.0, 3_000_000_000), "b": (6.0, 1), "c": (6.0, 1)},
    )


def section(**changes: object) -> Section:
    done = tally()
    fault = CompileFailed(
        f"the compiler refuses {EVIL}",
        hint=f"split {EVIL}",
        details={"class": "refused", "compile_key": "d", "log_tail": f"ERROR {EVIL}", "log": "f" * 64, "attempts": 2},
    )
    given: dict[str, object] = {
        "title": f"llama3 {EVIL}",
        "facts": [("job key", "0" * 32), ("toolchain", EVIL)],
        "counts": {"total": 5, "hit": 1, "compiled": 3, "failed": 1, "skipped": 0},
        "seconds": {"trace": 4.0, "compile": 20.0, "total": 24.5},
        "tally": done,
        "graphs": [Graph("a" * 32, f"block {EVIL}", "compiled", 900, 12.0, 3_000_000_000)]
        + [Graph(f"{number:032}", "small", "hit", 10, None, None) for number in range(3)],
        "failures": [fault],
        "complete": False,
        "advice": advise(done, {"trace": 4.0}),
    }
    return Section(**{**given, **changes})  # type: ignore[arg-type]


@pytest.mark.fast
def test_the_page_says_what_happened_and_everything_from_outside_is_escaped() -> None:
    page = render([section(), section(title="second", failures=[], complete=True)])
    assert "<script" not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 6
    assert page.count('<section class="job">') == 2
    for said in ("incomplete", "complete", "tried 2 times", "ERROR", "8.0 GB of memory (a control group)", "12.0"):
        assert said in page


@pytest.mark.fast
def test_the_page_needs_no_other_file_and_no_network() -> None:
    class Outside(HTMLParser):
        found: list[str] = []  # noqa: RUF012

        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            self.found += [f"{tag} {name}={value}" for name, value in attributes if name in ("src", "href", "srcset")]
            assert tag not in ("script", "iframe", "link", "img", "object", "embed", "base")

    page = render([section()])
    parser = Outside()
    parser.feed(page)
    assert parser.found == []
    assert not re.search(r"url\(|@import|https?://", page)


@pytest.mark.fast
def test_a_worker_s_bars_stand_in_its_rows_in_order() -> None:
    rows = lanes(tally().attempts)
    assert [worker for worker, _ in rows] == ["worker 1", "worker 2"]
    assert [(round(bar.left), round(bar.width), bar.attempt.outcome) for bar in rows[1][1]] == [
        (0, 15, "flaky"),
        (15, 30, "done"),
        (45, 30, "done"),
    ]
    both = [attempt("a", 1, 0, 5), attempt("b", 1, 1, 6), attempt("c", 1, 5, 7)]
    assert [[bar.attempt.compile_key for bar in bars] for _, bars in lanes(both)] == [["a", "c"], ["b"]]
    order = [attempt("a", number, 0, 1) for number in (10, 2, 1)]
    assert [worker for worker, _ in lanes(order)] == ["worker 1", "worker 2", "worker 10"]
    assert lanes([]) == []


@pytest.mark.fast
@pytest.mark.parametrize("seconds", [0.04, 1.0, 9.0, 61.0, 3600.0, 40_000.0])
def test_the_axis_has_some_marks_and_not_too_many(seconds: float) -> None:
    done = Tally(attempts=[attempt("a", 1, 0, seconds)])
    marks = axis(section(tally=done))
    assert 2 <= len(marks) <= 10
    assert marks[0][0] == 0.0
    assert marks[-1][0] <= 100.0


@pytest.mark.fast
def test_the_advice_follows_from_what_was_measured() -> None:
    assert "nothing to make faster" in advise(Tally(), {})[0]
    one_large = Tally(
        workers=4,
        attempts=[attempt("a", 1, 0, 100), attempt("b", 2, 0, 5)],
        costs={"a": (100.0, 1), "b": (5.0, 1)},
    )
    assert "more workers would not help" in advise(one_large, {})[0]
    many = Tally(
        workers=2,
        attempts=[
            attempt(str(number), number % 2, 10 * (number // 2), 10 * (number // 2) + 10) for number in range(20)
        ],
        costs={str(number): (10.0, 1) for number in range(20)},
    )
    assert advise(many, {}) == ["Twice as many workers (4) would take about 50 s instead of 100 s."]
    short = Capacity(4, 10, Amount(4, ""), Amount(10, ""))
    starved = Tally(
        workers=4,
        capacity=short,
        attempts=[attempt(str(number), 1, 10 * number, 10 * number + 10) for number in range(8)],
        costs={str(number): (10.0, 8) for number in range(8)},
    )
    assert any("Memory keeps compiles waiting" in text for text in advise(starved, {}))
    assert any("came to nothing (flaky, refused)" in text for text in advise(tally(), {}))


@pytest.mark.integration
def test_a_browser_draws_it_in_light_and_in_dark(tmp_path: Path) -> None:
    if browser.PROGRAM is None:
        pytest.skip(browser.ABSENT)
    page = tmp_path / "report.html"
    write(page, [section(), section(title="second")])
    pictures = {}
    for name, scheme in (("light", "1"), ("dark", "0")):
        picture = tmp_path / f"{name}.png"
        browser.browse(tmp_path / f"profile-{name}", f"--blink-settings=preferredColorScheme={scheme}",
               f"--screenshot={picture}", page.as_uri())  # fmt: skip
        pictures[name] = picture.read_bytes()
        assert pictures[name].startswith(b"\x89PNG")
        assert len(pictures[name]) > 20_000, "an empty page is smaller"
    assert pictures["light"] != pictures["dark"]
    drawn = browser.browse(tmp_path / "profile-dom", "--dump-dom", page.as_uri())
    assert drawn.count('class="bar ') == 10
    assert drawn.count("<title>block") == 10, "every bar says what it is"
    assert drawn.count("<tr>") == 2 * (1 + 4)
