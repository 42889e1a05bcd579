"""neffcache doctor."""

from __future__ import annotations

import os
from pathlib import Path

import click

from neffcache.cli.options import Output, output_options, store_option
from neffcache.cli.table import table


@click.command("doctor", epilog="Example:  neffcache doctor --json")
@click.option(
    "--probe", is_flag=True, help="Ask the installed TorchNeuron again what it does (compiles a few operators)."
)
@click.option(
    "--bundle",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.tar.gz",
    help="Write all of it, with versions, logs and reports, into an archive for a support thread, redacted.",
)
@click.option(
    "--include",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    multiple=True,
    metavar="LOG",
    help="With --bundle: this text too, redacted; repeatable.",
)
@store_option
@output_options
def command(probe: bool, bundle: Path | None, include: tuple[Path, ...], directory: str | None, output: Output) -> int:
    """What is here (toolchain, device, LNC, stores, remote, clock, space, memory), where each setting comes from, and
    what will go wrong. Changes nothing but a probe in the remote.

    Exit code 0 unless something is an error; then that of the first one.
    """
    from neffcache.errors import Usage
    from neffcache.flows.doctor import doctor

    if include and bundle is None:
        raise Usage("--include is for --bundle", hint="neffcache doctor --bundle FILE.tar.gz --include LOG")
    report = doctor(directory, os.environ, ask=probe, note=output.note)
    lines = [*table(("", "", ""), [(f.state, f.area, f.said) for f in report.findings])[1:]]
    lines += [f"  hint: {finding.hint}" for finding in report.findings if finding.hint and finding.state != "ok"]
    lines += ["", *table(("setting", "value", "origin"), [(s.name, s.value, s.origin) for s in report.settings])]
    if report.probes:
        rows = [(entry["probe"], entry["outcome"], entry["means"]) for entry in report.probes]
        lines += ["", *table(("probe", "outcome", "means"), rows)]
    document = report.to_json()
    if bundle is not None:
        from neffcache.flows.support import write_bundle

        document["bundle"] = write_bundle(bundle, report, os.environ, include=include)
        output.note(f"bundle: {bundle}; look through it before you send it")
    output.emit(document, lines)
    return report.exit_code
