"""How a warm shows what it does: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import click

from neffcache.cli.options import Output
from neffcache.compile.pool import Event
from neffcache.flows.compile_files import IrFile
from neffcache.flows.tracing import TracedGraph
from neffcache.flows.warm import Progress


class Lines(Progress):
    """One line an event, on stderr."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._names: dict[str, str] = {}
        self._done = 0
        self._total = 0

    def note(self, text: str) -> None:
        self._output.note(text)

    def graphs(self, graphs: Iterable[TracedGraph], hits: Iterable[str]) -> None:
        self._begin({graph.compile_key: graph.name for graph in graphs}, set(hits))

    def begin(self, files: Iterable[IrFile], hits: set[str]) -> None:
        """The same for IR files."""
        self._begin({item.key: item.name for item in files}, hits)

    def _begin(self, names: Mapping[str, str], hits: set[str]) -> None:
        self._names = dict(names)
        self._total = len(names) - len(hits)
        self._output.note(f"{len(names)} graphs: {len(hits)} in the store, {self._total} to compile")

    def event(self, event: Event) -> None:
        name = f"{event.compile_key[:12]} {self._names.get(event.compile_key, '')}"
        if event.happening == "started":
            self._output.note(f"  compiling {name}")
        elif event.happening == "done":
            self._done += 1
            self._output.note(f"  done      {name} {event.seconds:.1f} s ({self._done} of {self._total})")
        elif event.happening == "failed":
            self._output.note(f"  FAILED    {name}: {event.fault.message if event.fault else ''}")
        elif event.happening == "retried":
            self._output.note(f"  again     {name}: {event.fault.message if event.fault else ''}")
        elif event.happening == "skipped":
            self._output.note(f"  skipped   {name}")
        elif event.happening == "adopted":
            self._total -= 1
            self._output.note(f"  adopted   {name}: somebody else compiled it")


class Live(Lines):
    """A rich table that is drawn again four times a second."""

    def __init__(self, output: Output) -> None:
        super().__init__(output)
        self._state: dict[str, tuple[str, float]] = {}
        self._live: Any = None

    def _begin(self, names: Mapping[str, str], hits: set[str]) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive

        self._names = dict(names)
        self._state = {key: ("in the store" if key in hits else "queued", 0.0) for key in names}
        self._live = RichLive(
            get_renderable=self._table, console=Console(stderr=True), refresh_per_second=4, transient=False
        )
        self._live.start()

    def event(self, event: Event) -> None:
        words = {
            "queued": ("queued", 0.0),
            "started": ("compiling", time.monotonic()),
            "done": (f"done {event.seconds:.1f} s", 0.0),
            "failed": (f"FAILED {event.fault.message[:60] if event.fault else ''}", 0.0),
            "retried": ("queued again", 0.0),
            "skipped": ("skipped", 0.0),
            "adopted": ("compiled by somebody else", 0.0),
        }
        self._state[event.compile_key] = words[event.happening]

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _table(self) -> Any:
        from rich.table import Table

        table = Table("graph", "region", "state", box=None)
        for key, (state, since) in self._state.items():
            shown = f"compiling {time.monotonic() - since:.0f} s" if state == "compiling" else state
            table.add_row(key[:12], self._names.get(key, ""), shown)
        return table


@contextlib.contextmanager
def progress_of(output: Output) -> Iterator[Lines]:
    """The progress for this terminal."""
    live = sys.stderr.isatty() and not output.quiet and not output.json
    progress = Live(output) if live else Lines(output)
    try:
        yield progress
    finally:
        if isinstance(progress, Live):
            progress.close()
            click.echo("", err=True)
