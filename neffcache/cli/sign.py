"""neffcache sign."""

from __future__ import annotations

from pathlib import Path

import click

from neffcache.cli.completing import offer
from neffcache.cli.options import Output, open_store, output_options, store_option


@click.command("sign", epilog="Example:  neffcache sign llama3_8b --key fleet.key")
@click.argument("names", nargs=-1, metavar="NAME...", shell_complete=offer("signable"))
@click.option("--all", "every", is_flag=True, help="Every ref of the store.")
@click.option("--key", required=True, type=click.Path(path_type=Path), help="The private key; see keygen.")
@store_option
@output_options
def command(names: tuple[str, ...], every: bool, key: Path, directory: str | None, output: Output) -> int:
    """Sign each ref of NAME, a warmed CONFIG or the beginning of a manifest id or job key, in the local store.

    `neffcache push` takes signatures along. TorchTitan is not needed, and the private key never leaves this machine.
    """
    from neffcache.errors import Miss
    from neffcache.flows.listing import refs_of
    from neffcache.flows.trust import sign
    from neffcache.store.signing import private_key

    if not names and not every:
        raise click.UsageError("give a NAME, or --all")
    private, store = private_key(key), open_store(directory, writable=True)
    documents, lines, seen = [], [], set()
    for name in names or (None,):
        found = refs_of(store, name)
        if not found:
            raise Miss(f"no ref of {store.root} is called {name!r}" if name else f"{store.root} has no refs", hint="ls")
        for channel, request_digest, ref in found:
            if (channel, request_digest, ref.config) in seen:
                continue
            seen.add((channel, request_digest, ref.config))
            sign(store, private, channel, ref)
            row = {"channel": channel, "config": ref.config, "manifest": ref.manifest, "serial": ref.serial}
            documents.append({**row, "request_digest": request_digest, "signer": private.public.signer})
            lines.append(f"{ref.config}  manifest {ref.manifest[:12]}  serial {ref.serial}  {channel}")
    output.emit(documents, [*lines, f"signed by {private.public}"])
    return 0
