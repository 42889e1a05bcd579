"""neffcache import."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from neffcache.cli.options import Output, open_store, output_options, size, store_option, trust_options
from neffcache.cli.remote import remote_options, transfer_of

if TYPE_CHECKING:
    from neffcache.flows.importing import Imported
    from neffcache.flows.origins import Origin
    from neffcache.flows.trust import Trust
    from neffcache.store.local import LocalStore


@click.command("import", epilog="Example:  neffcache import /var/tmp/neuron-compile-cache --as fleet")
@click.argument("source")
@click.option("--as", "name", metavar="NAME", help="Name of the collection [the directory's or prefix's].")
@click.option("--compiler", metavar="VERSION", help="The neuronx-cc that made it, where its layout does not say.")
@remote_options()
@trust_options
@store_option
@output_options
def command(
    source: str,
    name: str | None,
    compiler: str | None,
    trust: Trust,
    directory: str | None,
    settings: Callable[[], Any],
    output: Output,
) -> int:
    """Read a bundle that export wrote (- for stdin), or a compile cache that others filled, into the local store.

    SOURCE is a bundle, a directory, or an s3://bucket/prefix (which takes the right to list it). What is complete in a
    cache of TorchNeuron, libneuronxla or vLLM Neuron becomes a named collection; everything else is said by reason.
    Run again, it copies what is missing.

    Of a bundle every byte is checked by digest; what it names is visible only after all of it was. A bundle of somebody
    whom you do not trust with your training needs --require-signature: what it holds is code.

    Exit codes: 0; 2 no bundle; 3 a cache without a complete entry; 4 the bucket; 5 not signed as demanded; 7 damaged,
    made to harm, or not all of it could be read.
    """
    from neffcache.errors import Usage

    store = open_store(directory, writable=True)
    if source == "-" or not (source.startswith("s3://") or Path(source).is_dir()):
        if name or compiler:
            raise Usage("--as and --compiler are for caches, and this is no directory", hint="leave them out")
        return _bundle(source, store, trust, output)
    if trust:
        raise Usage("nobody signs a cache of files", hint="import it where it is trusted, and sign the collection")
    return _cache(source, store, name, compiler, settings, output)


def _bundle(file: str, store: LocalStore, trust: Trust, output: Output) -> int:
    from neffcache.errors import Usage
    from neffcache.flows.bundles import import_bundle

    if file == "-":
        done = import_bundle(sys.stdin.buffer, store, trust)
    else:
        try:
            source = Path(file).open("rb")  # noqa: SIM115 closed below
        except OSError as fault:
            raise Usage(f"{file} cannot be read: {os.strerror(fault.errno or 0)}") from None
        with source:
            done = import_bundle(source, store, trust)
    kept = f"; kept newer refs of {', '.join(done['kept_newer'])}" if done["kept_newer"] else ""
    line = f"{', '.join(done['configs'])}: {len(done['manifests'])} manifests, {done['graphs']} graphs, "
    output.emit({"file": file, **done}, [f"{line}{size(done['bytes'])}{kept}"])
    return 0


def _cache(
    source: str, store: LocalStore, name: str | None, compiler: str | None, settings: Callable[[], Any], output: Output
) -> int:
    from neffcache.flows.collections import default_name
    from neffcache.flows.importing import fault_of, import_cache
    from neffcache.flows.origins import Bucket, Directory
    from neffcache.flows.remote import accounts_of

    spent: dict[str, Any] = {}
    origin: Origin
    if source.startswith("s3://"):
        from neffcache.remote.client import Client
        from neffcache.remote.url import parse

        client = Client(parse(source).plain(), settings().access())
        origin = Bucket(client, store)
        called = name or default_name(f"{client.url.bucket}/{client.url.prefix}")
    else:
        origin = Directory(Path(source), store)
        called = name or default_name(os.path.abspath(source))
    try:
        with transfer_of(output) as progress:
            done = import_cache(origin, store, called, compiler=compiler, progress=progress)
    finally:
        origin.close()
    if isinstance(origin, Bucket):
        spent = accounts_of(origin.client)
    output.emit({**done.to_json(), **spent}, _lines(done))
    fault = fault_of(done)
    return output.failed([], fault)


def _lines(done: Imported) -> list[str]:
    from neffcache.cli.table import table

    document = done.to_json()
    rows = [
        (row["reason"], row["entries"], row["files"], row["means"], row["examples"][0]) for row in document["left_out"]
    ]
    return [
        *(f"{done.name}: {item.entries} entries ({item.new} new) of {item.part}; manifest {item.manifest[:12]}"
          for item in done.kept),
        *table(("left out", "entries", "files", "because", "such as"), rows, right=("entries", "files")),
        *(
            f"{what}: {row['found']} found = {row['imported']} imported + {row['present']} present + "
            f"{row['left_out']} left out"
            for what, row in (("entries", document["entries"]), ("files", document["files"]))
        ),
        f"copied {done.copied} blobs, {size(done.copied_bytes)}, in {done.seconds:.1f} s; "
        f"{done.folded} entries were copies of others",
    ]  # fmt: skip
