"""neffcache run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from neffcache.cli.completing import offer
from neffcache.cli.options import Output, job_options, open_to_run, output_options, store_option, trust_options
from neffcache.cli.remote import POLICY, URL_HELP, remote_options

if TYPE_CHECKING:
    from neffcache.flows.trust import Trust


@click.command(
    "run",
    context_settings={"ignore_unknown_options": False},
    epilog="Example:  neffcache run llama3_debugmodel --steps 3",
)
@click.argument("config", shell_complete=offer("config"))
@click.argument("command_line", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
@click.option(
    "--on-miss",
    type=click.Choice(["fail", "compile", "warn"]),
    default="fail",
    show_default=True,
    help="A graph without an artifact ends the job, or is compiled and kept, or is compiled and counted.",
)
@click.option("--steps", type=click.IntRange(1), help="Steps: of training, or of every phase once (without a COMMAND).")
@click.option("--dump-folder", type=click.Path(path_type=Path), help="TorchTitan's output [default: a temporary one].")
@click.option("--pull", is_flag=True, help="Bring what lacks from the remote first.")
@click.option("--remote", help=URL_HELP)
@POLICY
@remote_options(more=False)
@job_options
@trust_options
@store_option
@output_options
def command(
    config: str,
    command_line: tuple[str, ...],
    on_miss: str,
    steps: int | None,
    dump_folder: Path | None,
    pull: bool,
    trust: Trust,
    directory: str | None,
    choose: Callable[[str], Any],
    settings: Callable[[], Any],
    output: Output,
) -> int:
    """Run CONFIG from the warm cache: TorchTitan or a callable's phases under torchrun, or COMMAND unchanged.

    Every rank proves that it is the job that was warmed, before it builds a model, and that it compiled nothing.
    """
    from neffcache.cli.progress import Lines
    from neffcache.flows.run import run

    document = run(
        choose(config),
        open_to_run(directory),
        os.environ,
        command=command_line,
        on_miss=on_miss,
        steps=steps,
        dump_folder=dump_folder,
        remote=settings() if pull else None,
        progress=Lines(output),
        trust=trust,
        # The job's own words never mix with the document on stdout.
        output=(lambda: sys.stderr) if output.json else None,
    )
    one = document["step_one"]
    lines = [
        f"identity {document['identity']}; step one {one['seconds']} s, "
        f"{one['hits']} hits, {one['misses']} misses, {one['compiles']} compiles",
        *(
            f"rank {rank['rank']}: class {rank['class']}, {rank['graphs']} graphs, {rank['hits']} hits, "
            f"{rank['misses']} misses, {rank['compiles']} compiles"
            for rank in document["ranks"]
        ),
        *(
            f"{phase}: first call {did['first_seconds']} s, then {did['steady_seconds']} s; "
            f"outputs {did['outputs'][:16]}"
            for phase, did in document.get("calls", {}).items()
        ),
        *(["losses " + " ".join(f"{loss:.5f}" for loss in document["losses"])] if "calls" not in document else []),
    ]
    output.emit(document, lines)
    error = document.get("error")
    if error:
        click.echo(f"error: {error['message']}", err=True)
        if error.get("hint"):
            click.echo(f"hint: {error['hint']}", err=True)
    code: int = document["exit_code"]
    return code
