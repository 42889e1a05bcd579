"""neffcache export."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from neffcache.cli.completing import offer
from neffcache.cli.options import Output, open_store, output_options, size, store_option

if TYPE_CHECKING:
    from neffcache.store.local import LocalStore


@click.command("export", epilog="Example:  neffcache export llama3_8b -o llama3_8b.tar")
@click.argument("names", nargs=-1, metavar="NAME...", shell_complete=offer("signable"))
@click.option("--all", "every", is_flag=True, help="Every ref of the store.")
@click.option("-o", "--out", required=True, help="The file to write, - for stdout; with --layout a directory.")
@click.option(
    "--layout",
    type=click.Choice(["auto", "torchneuron", "torchneuron-older", "libneuronxla", "vllm"]),
    help="Not a bundle but a directory that this package reads; auto: the installed one, else as it was.",
)
@store_option
@output_options
def command(
    names: tuple[str, ...], every: bool, out: str, layout: str | None, directory: str | None, output: Output
) -> int:
    """Write NAME (a warmed CONFIG, a collection, or the beginning of a manifest id or job key) and all that it needs
    into one file.

    A plain tar with its signatures. Equal content gives equal bytes. With --layout: the compiler's own files of NAME,
    as a directory that its package reads.
    """
    from neffcache.errors import StoreFault, Usage
    from neffcache.flows.bundles import export

    if not names and not every:
        raise click.UsageError("give a NAME, or --all")
    store = open_store(directory, writable=False)
    if layout is not None:
        return _directory(store, names, Path(out), layout, output)
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


def _directory(store: LocalStore, names: tuple[str, ...], where: Path, layout: str, output: Output) -> int:
    from neffcache.compile.neuron.installation import stack
    from neffcache.errors import Miss, Usage
    from neffcache.flows.bundles import named
    from neffcache.flows.exporting import export_directory

    if str(where) == "-" or (where.exists() and not where.is_dir()):
        raise Usage(f"{where} is no directory", hint="with --layout the export is a directory: -o DIR")
    done = export_directory(store, named(store, names)[1], where, layout=layout, stack=stack())
    lines = [
        f"{done.entries} entries of {', '.join(done.layouts)} = {done.written} written + {done.present} present + "
        f"{len(done.kept)} kept as they were; {size(done.bytes)} in {where}",
        *(f"not written: {count} entries of {other}" for other, count in sorted(done.others.items())),
        *(f"{name}={value}" for name, value in done.environment.items()),
    ]
    output.emit(done.to_json(), lines)
    if not done.kept:
        return 0
    fault = Miss(
        f"{len(done.kept)} entries are in {where} already with other files, the first is {done.kept[0]}",
        hint="export into an empty directory",
    )
    return output.failed([], fault)
