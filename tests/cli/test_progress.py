"""What a warm shows while it works: lines for a log, a table for a terminal."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from rich.console import Console

from neffcache.cli.options import Output
from neffcache.cli.progress import Lines, Live
from neffcache.compile.pool import Event
from neffcache.errors import CompileFailed

pytestmark = pytest.mark.fast


@dataclass(frozen=True)
class Graph:
    compile_key: str
    name: str


GRAPHS = [Graph("a" * 32, "Block.forward"), Graph("b" * 32, "Block.backward"), Graph("c" * 32, "Other.forward")]
EVENTS = [
    Event("a" * 32, "queued"),
    Event("b" * 32, "queued"),
    Event("a" * 32, "started"),
    Event("b" * 32, "started"),
    Event("a" * 32, "done", 12.25),
    Event("b" * 32, "failed", 1.0, fault=CompileFailed("no such luck")),
]


def test_lines_say_what_happens_to_each_graph(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines(Output(json=False, quiet=False, verbose=False))
    lines.graphs(GRAPHS, ["c" * 32])  # type: ignore[arg-type]
    for event in EVENTS:
        lines.event(event)
    said = capsys.readouterr()
    assert said.out == "", "notes never mix with the answer"
    assert said.err.splitlines() == [
        "3 graphs: 1 in the store, 2 to compile",
        "  compiling aaaaaaaaaaaa Block.forward",
        "  compiling bbbbbbbbbbbb Block.backward",
        "  done      aaaaaaaaaaaa Block.forward 12.2 s (1 of 2)",
        "  FAILED    bbbbbbbbbbbb Block.backward: no such luck",
    ]


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines(Output(json=False, quiet=True, verbose=False))
    lines.graphs(GRAPHS, [])  # type: ignore[arg-type]
    for event in EVENTS:
        lines.event(event)
    assert capsys.readouterr() == ("", "")


def test_the_live_table_shows_each_graph_and_its_state() -> None:
    live = Live(Output(json=False, quiet=False, verbose=False))
    live.graphs(GRAPHS, ["c" * 32])  # type: ignore[arg-type]
    try:
        for event in EVENTS[:-2]:
            live.event(event)
        during = rendered(live)
        for event in EVENTS[-2:]:
            live.event(event)
        after = rendered(live)
    finally:
        live.close()
    assert "compiling 0 s" in during
    assert "in the store" in during
    assert "done 12.2 s" in after
    assert "FAILED no such luck" in after


def rendered(live: Live) -> str:
    console = Console(width=100, record=True, file=None, quiet=False)
    with console.capture() as shown:
        console.print(live._table())
    return shown.get()
