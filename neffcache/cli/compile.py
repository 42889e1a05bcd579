"""neffcache compile."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from neffcache.cli.options import Output, compile_options, open_store, output_options, size, store_option


@click.command("compile", epilog="Example:  neffcache compile --target trn2 --lnc 2 dump/stablehlo/*.mlir")
@click.argument("files", nargs=-1, metavar="FILE...", type=click.Path(path_type=Path, exists=True))
@click.option("--target", help="trn1, trn2 or trn3.")
@click.option("--lnc", type=click.IntRange(1, 2), help="Logical NeuronCore configuration.")
@click.option("--option", "options", multiple=True, metavar="OPTION", help="A compiler option (--option=-O1).")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Put a copy of every NEFF here.")
@compile_options
@store_option
@output_options
def command(
    files: tuple[Path, ...],
    target: str | None,
    lnc: int | None,
    options: tuple[str, ...],
    out: Path | None,
    how: Any,
    shard: str | None,
    report: Path | None,
    directory: str | None,
    output: Output,
) -> int:
    """Compile single IR files (StableHLO or HLO) with neuronx-cc, several at once, into the store.

    A folder stands for all files in it. What compiled is kept whatever fails; run again, only the rest is compiled.
    """
    from neffcache.cli.options import chosen_shard, written_report
    from neffcache.cli.progress import progress_of
    from neffcache.flows.compile_files import compile_files

    if not files:
        raise click.UsageError("give a FILE")
    store = open_store(directory, writable=True)
    part = chosen_shard(shard, output)
    with progress_of(output) as progress:
        result = compile_files(
            files,
            store,
            os.environ,
            target=target,
            lnc=lnc,
            options=options,
            how=how,
            shard=part,
            out=out,
            begin=progress.begin,
            event=progress.event,
        )
    document = result.to_json()
    counts = document["graphs"]
    lines = [
        f"{result.identity.versions['compiler']}, {result.placement.target} at LNC {result.placement.lnc}: "
        f"{counts['total']} graphs = {counts['hit']} hit + {counts['compiled']} compiled + {counts['failed']} failed + "
        f"{counts['skipped']} skipped; {result.total_seconds:.1f} s"
    ]
    for entry in document["files"]:
        told = "" if entry["neff"] is None else f"  {size(entry['neff']['bytes']):>9}  {entry['seconds']:7.1f} s"
        lines.append(f"  {entry['compile_key'][:12]}  {entry['state']:8}  {Path(entry['file']).name}{told}")
    output.emit(document, lines)
    code = output.failed(result.tally.failures, result.fault)
    if report is not None:
        from neffcache.flows.report import of_files

        unwritten = written_report(report, [of_files(result)], output)
        code = code or unwritten
    return code
