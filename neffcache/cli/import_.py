"""neffcache import."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from neffcache.cli.options import Output, open_store, output_options, size, store_option, trust_options

if TYPE_CHECKING:
    from neffcache.flows.trust import Trust


@click.command("import", epilog="Example:  neffcache import llama3_8b.tar --require-signature fleet.key.pub")
@click.argument("file")
@trust_options
@store_option
@output_options
def command(file: str, trust: Trust, directory: str | None, output: Output) -> int:
    """Read a bundle that export wrote (- for stdin) into the local store.

    Every byte is checked by digest; what the bundle names is visible only after all of it was. A bundle of somebody
    whom you do not trust with your training needs --require-signature: what it holds is code.
    """
    from neffcache.errors import Usage
    from neffcache.flows.bundles import import_bundle

    store = open_store(directory, writable=True)
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
