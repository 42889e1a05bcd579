"""neffcache doctor."""

from __future__ import annotations

import os

import click

from neffcache.cli.options import Output, output_options, store_option
from neffcache.cli.table import table


@click.command("doctor", epilog="Example:  neffcache doctor --json")
@click.option(
    "--probe", is_flag=True, help="Ask the installed TorchNeuron again what it does (compiles a few operators)."
)
@store_option
@output_options
def command(probe: bool, directory: str | None, output: Output) -> int:
    """What is here (toolchain, device, LNC, stores, remote, clock, space, memory), where each setting comes from, and
    what will go wrong. Changes nothing.

    Exit code 0 unless something is an error; then that of the first one.
    """
    from neffcache.flows.doctor import doctor

    report = doctor(directory, os.environ, ask=probe, note=output.note)
    lines = [*table(("", "", ""), [(f.state, f.area, f.said) for f in report.findings])[1:]]
    lines += [f"  hint: {finding.hint}" for finding in report.findings if finding.hint and finding.state != "ok"]
    lines += ["", *table(("setting", "value", "origin"), [(s.name, s.value, s.origin) for s in report.settings])]
    if report.probes:
        rows = [(entry["probe"], entry["outcome"], entry["means"]) for entry in report.probes]
        lines += ["", *table(("probe", "outcome", "means"), rows)]
    output.emit(report.to_json(), lines)
    return report.exit_code
