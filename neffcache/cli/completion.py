"""neffcache completion."""

from __future__ import annotations

import click

from neffcache.cli.options import Output, output_options

SHELLS = ("bash", "zsh", "fish")


@click.command("completion", epilog='Example:  eval "$(neffcache completion bash)"')
@click.argument("shell", type=click.Choice(SHELLS))
@output_options
def command(shell: str, output: Output) -> int:
    """The script that lets SHELL complete verbs, options, configurations, refs, ids and versions.

    What it offers comes from files of this host: the warmers, the installed TorchTitan's registries and the local
    store. Bash needs 4.4 or newer.
    """
    from click.shell_completion import get_completion_class

    from neffcache.cli.main import neffcache
    from neffcache.errors import Bug

    kind = get_completion_class(shell)
    if kind is None:
        raise Bug(f"click has no completion for {shell}")
    made = kind(neffcache, {}, "neffcache", "_NEFFCACHE_COMPLETE")
    script = made.source_template % made.source_vars()  # source() would also start the shell to ask for its version
    output.emit({"shell": shell, "script": script}, script.strip().splitlines())
    return 0
