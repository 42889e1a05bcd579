"""neffcache keygen."""

from __future__ import annotations

from pathlib import Path

import click

from neffcache.cli.options import Output, output_options


@click.command("keygen", epilog="Example:  neffcache keygen fleet.key")
@click.argument("file", type=click.Path(path_type=Path))
@output_options
def command(file: Path, output: Output) -> int:
    """Make an Ed25519 key pair: FILE (private, mode 0600) for who warms, FILE.pub for who reads.

    A file that exists is never replaced.
    """
    from neffcache.store.signing import make_key

    made = make_key(file)
    output.note(f"private {file}: keep it where jobs are warmed; public {file}.pub: give it to --require-signature")
    output.emit({"private": str(file), "public": f"{file}.pub", "key": str(made), "signer": made.signer}, [str(made)])
    return 0
