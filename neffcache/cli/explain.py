"""neffcache explain."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from neffcache.cli.completing import offer
from neffcache.cli.options import Output, job_options, open_store, output_options, store_option

if TYPE_CHECKING:
    from neffcache.flows.explain import Explanation, Near, Unmet
    from neffcache.key.compare import Difference

SHOWN = 20
"""Differences that are printed; --json and -v have all."""


@click.command("explain", epilog="Example:  neffcache explain llama3_8b --lnc 1 --trace")
@click.argument("config", shell_complete=offer("config"))
@click.option("--trace", is_flag=True, help="Trace again: which graphs have records, and where the others differ.")
@job_options
@store_option
@output_options
def command(
    config: str,
    trace: bool,
    directory: str | None,
    choose: Callable[[str], Any],
    output: Output,
) -> int:
    """Why CONFIG is not a HIT: the nearest manifest of the store, what differs, and what to change.

    Exit code 0 for a HIT, and with --trace when every graph has a record; else 3.
    """
    from neffcache.flows.explain import explain

    store = open_store(directory, writable=False)
    found = explain(choose(config), store, os.environ, trace=trace, progress=output.note)
    output.emit(found.to_json(), describe(found, limit=None if output.verbose else SHOWN))
    return 0 if found.served else 3


def describe(found: Explanation, *, limit: int | None) -> list[str]:
    """An explanation for people."""
    checked = found.checked
    lines = [f"{checked.config}: {checked.state}, job key {checked.cache_key}"]
    if checked.state == "HIT":
        assert checked.manifest is not None
        return [*lines, f"  manifest {checked.manifest.id[:12]} is complete and everything it names is there"]
    if checked.reason:
        lines.append(f"  {checked.reason}")
    for item in checked.missing:
        gone = " (in quarantine)" if item.quarantined else ""
        lines.append(f"  {'damaged' if item.kind == 'damaged' else 'missing ' + item.kind} {item.what}{gone}")
    if found.near is not None:
        lines += _near(found.near, limit)
    elif checked.state == "MISS":
        lines.append("  the store has no manifest to compare with")
    if found.retraced is not None:
        traced = found.retraced
        lines.append(f"  traced again: {traced.total} graphs, {traced.hit} with a record")
        lines += [line for graph in traced.unmet for line in _graph(graph)]
        lines += [f"  no key: {name}, {why}" for name, why in traced.uncacheable.items()]
        if traced.whole:
            lines.append("  neffcache run goes on from here without compiling: it writes a manifest of its own")
    if found.retraced is None or not found.retraced.whole:
        lines.append(f"  to warm it: neffcache warm {checked.config} with the same options")
    return lines


def _near(near: Near, limit: int | None) -> list[str]:
    state = "complete" if near.manifest.complete else "INCOMPLETE"
    shown = near.differences[:limit]
    to = "to hit it" if near.reachable else "nearer by"
    return [
        f"  nearest: manifest {near.manifest.id[:12]} of {near.manifest.request.get('config')}, {state}; "
        f"differing fields: {len(near.differences)} in {', '.join(near.components) or 'no component'}",
        *(f"    {_difference(item)}" for item in shown),
        *([f"    and {len(near.differences) - len(shown)} more (-v)"] if len(shown) < len(near.differences) else []),
        *(f"  {to}: {item.what}" for item in near.changes if item.kind != "none"),
        *(f"  in the way: {item.what}" for item in near.changes if item.kind == "none"),
    ]


def _difference(item: Difference) -> str:
    return f"{item.path}: here {_value(item.left)}, there {_value(item.right)}"


def _value(value: Any) -> str:
    text = str(value) if type(value).__name__ == "Missing" else repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


def _graph(graph: Unmet) -> list[str]:
    head = f"    {graph.compile_key[:12]} {graph.name} ({graph.kind}, {graph.nodes} nodes): no record"
    if graph.record is None:
        return [f"{head}, and none to compare with"]
    lines = [f"{head}; nearest {graph.record[:12]}, other {', '.join(graph.components) or 'nothing: files are gone'}"]
    if graph.line is not None:
        lines += [f"      line {graph.line} here:  {graph.here}", f"      line {graph.line} there: {graph.there}"]
    return lines
