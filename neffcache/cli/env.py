"""neffcache env."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from neffcache.cli.completing import offer
from neffcache.cli.options import Output, job_options, open_to_run, output_options, store_option, trust_options

if TYPE_CHECKING:
    from neffcache.flows.trust import Trust


@click.command("env", epilog='Example:  eval "$(neffcache env llama3_debugmodel)"')
@click.argument("config", required=False, shell_complete=offer("config"))
@click.option("--collection", metavar="NAME", help="Of a named collection instead: what points its package to it.")
@click.option(
    "--layout",
    type=click.Choice(["torchneuron", "torchneuron-older", "libneuronxla", "vllm"]),
    help="Which of a collection's layouts [the installed package's, or the only one].",
)
@click.option(
    "--on-miss",
    type=click.Choice(["fail", "compile", "warn"]),
    default="fail",
    show_default=True,
    help="What a rank does with a graph that has no artifact, as in run.",
)
@job_options
@trust_options
@store_option
@output_options
def command(
    config: str | None,
    collection: str | None,
    layout: str | None,
    on_miss: str,
    trust: Trust,
    directory: str | None,
    choose: Callable[[str], Any],
    output: Output,
) -> int:
    """The exact environment that run would set for CONFIG, as lines for a shell, and the command that it would start.
    With --collection: the variable that points a Neuron package to the collection's files.

    Makes what a run needs: the view, and a directory of its own below the store's runs/ (reports, outputs).
    """
    from neffcache.cli.progress import Lines
    from neffcache.flows.env import env, env_of_collection

    if (config is None) == (collection is None):
        raise click.UsageError("give a CONFIG, or --collection NAME")
    store = open_to_run(directory)
    if collection is not None:
        view, variables, own = env_of_collection(store, collection, os.environ, layout=layout)
        output.note(f"made {own}; remove it when nobody uses it any more")
        output.note("a collection is of no job: nothing proves that a run finds what it needs there")
        said = {"environment": variables, "view": str(view.path), "manifest": view.manifest_id, "directory": str(own)}
        output.emit(said, [f"export {name}={shlex.quote(value)}" for name, value in variables.items()])
        return 0
    if layout is not None:
        raise click.UsageError("--layout is for --collection")
    assert config is not None
    ready, own = env(choose(config), store, os.environ, on_miss=on_miss, progress=Lines(output), trust=trust)
    output.note(f"made {own} for this run; remove it when the run is over")
    if ready.command:
        output.note(f"command: {shlex.join(ready.command)}")
    document = {
        "environment": dict(ready.environment),
        "unset": list(ready.job.cleared),
        "command": list(ready.command),
        "view": str(ready.view.path),
        "manifest": ready.manifest.id,
        "cache_key": ready.job.key.cache_key,
        "directory": str(own),
    }
    lines = [f"unset {name}" for name in ready.job.cleared]
    output.emit(document, lines + [f"export {name}={shlex.quote(value)}" for name, value in ready.environment.items()])
    return 0
