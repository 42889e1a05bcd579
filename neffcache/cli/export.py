"""neffcache export."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

import click

from neffcache.cli.completing import offer
from neffcache.cli.options import Output, open_store, output_options, size, store_option


@click.command("export", epilog="Example:  neffcache export llama3_8b -o llama3_8b.tar")
@click.argument("names", nargs=-1, metavar="NAME...", shell_complete=offer("signable"))
@click.option("--all", "every", is_flag=True, help="Every ref of the store.")
@click.option("-o", "--out", required=True, help="The file to write; - for stdout.")
@store_option
@output_options
def command(names: tuple[str, ...], every: bool, out: str, directory: str | None, output: Output) -> int:
    """Write NAME (a warmed CONFIG, or the beginning of a manifest id or job key) and all that it needs into one file.

    A plain tar with its signatures. Equal content gives equal bytes.
    """
    from neffcache.errors import StoreFault, Usage
    from neffcache.flows.bundles import export

    if not names and not every:
        raise click.UsageError("give a NAME, or --all")
    store = open_store(directory, writable=False)
    if out == "-":
        if output.json:
            raise Usage("stdout cannot be the bundle and a JSON document", hint="leave out --json, or give -o FILE")
        made = export(store, names, sys.stdout.buffer)
    else:
        path = Path(out)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            with temporary.open("xb") as file:
                made = export(store, names, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as fault:
            raise StoreFault(f"{path} cannot be written: {os.strerror(fault.errno or 0)}") from fault
        finally:
            temporary.unlink(missing_ok=True)
    document = {"file": out, "manifests": list(made.manifests), "refs": made.refs, "members": made.members}
    line = f"{len(made.manifests)} manifests, {made.refs} refs, {made.members} members, {size(made.bytes)}"
    if out == "-":
        output.note(line)
    else:
        output.emit({**document, "bytes": made.bytes}, [line])
    return 0
