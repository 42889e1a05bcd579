"""neffcache configs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from neffcache.cli.completing import offer
from neffcache.cli.options import Output, output_options
from neffcache.cli.table import table

if TYPE_CHECKING:
    from neffcache.flows.verdicts import Verdict


@click.command("configs", epilog="Example:  neffcache configs --family qwen3")
@click.argument("configs", nargs=-1, metavar="[CONFIG]...", shell_complete=offer("config"))
@click.option(
    "--family", "families", multiple=True, shell_complete=offer("family"), help="Only of this family; repeatable."
)
@click.option(
    "--verdict",
    "states",
    multiple=True,
    type=click.Choice(["trains", "compiles", "traces", "unsupported", "unknown"]),
    help="Only with this verdict; repeatable.",
)
@click.option("--probe", is_flag=True, help="Trace them now, each in a process of its own, instead of asking the data.")
@click.option(
    "--titan",
    metavar="VERSION",
    shell_complete=offer("titan"),
    help="What is known of another TorchTitan than the installed one.",
)
@output_options
def command(
    configs: tuple[str, ...],
    families: tuple[str, ...],
    states: tuple[str, ...],
    probe: bool,
    titan: str | None,
    output: Output,
) -> int:
    """Every configuration of TorchTitan's registries with its verdict.

    traces, compiles, trains: what was done with it on this toolchain's CPUs. unsupported: why not. Beside it what in
    its graphs Trainium cannot take, by reading them; nothing here was run on a device.
    """
    from neffcache.errors import Usage
    from neffcache.flows.verdicts import counts, known

    found = known(titan)
    unknown = sorted(set(configs) - {entry.config for entry in found})
    if unknown:
        raise Usage(f"TorchTitan has no configuration {unknown[0]}", hint="neffcache configs lists all")
    wanted = [
        entry
        for entry in found
        if (not configs or entry.config in configs) and (not families or entry.family in families)
    ]
    if probe:
        wanted = _probed(wanted, output)
    wanted = [entry for entry in wanted if not states or entry.verdict in states]
    output.emit([entry.to_json() for entry in wanted], _lines(wanted))
    told = ", ".join(f"{count} {state}" for state, count in counts(wanted).items())
    output.note(f"{len(wanted)} configurations: {told or 'none'}")
    return 0


def _probed(wanted: list[Verdict], output: Output) -> list[Verdict]:
    from neffcache.flows.probe import Prober, probe
    from neffcache.flows.workers import aside, scratch
    from neffcache.trace.registries import registered

    entries = {(entry.module, entry.function): entry for entry in registered()}
    found: list[Verdict] = []
    with scratch(aside(os.environ)) as place, Prober(os.environ, place) as prober:
        for verdict in wanted:
            output.note(f"probing {verdict.config}")
            entry = entries.get((verdict.module, verdict.config))
            found.append(verdict if entry is None else probe(entry, prober))
    return found


def _lines(verdicts: list[Verdict]) -> list[str]:
    return table(
        ("family", "config", "verdict", "mode", "ranks", "graphs", "Trainium", "reason"),
        [
            (
                entry.family,
                entry.config,
                entry.verdict,
                entry.mode,
                "" if entry.ranks is None else entry.ranks,
                "" if entry.graphs is None else entry.graphs,
                ", ".join(item["rule"] for item in entry.neuron if item["effect"] == "stops"),
                entry.reason if len(entry.reason) <= 100 else entry.reason[:97] + "...",
            )
            for entry in verdicts
        ],
        right=("ranks", "graphs"),
    )
