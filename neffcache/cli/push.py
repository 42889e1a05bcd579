"""neffcache push."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from neffcache.cli.completing import offer
from neffcache.cli.options import Output, job_options, open_store, output_options, ref_options, store_option
from neffcache.cli.remote import URL_HELP, remote_options, summary, transfer_of


@click.command("push", epilog="Example:  neffcache push llama3_8b --lnc 2 --remote s3://bucket/prefix")
@click.argument("configs", nargs=-1, metavar="CONFIG...", shell_complete=offer("config"))
@click.option("--remote", help=URL_HELP)
@click.option("--all", "every", is_flag=True, help="The current manifest of every job key.")
@click.option(
    "--channel",
    shell_complete=offer("channel"),
    help="Where refs are looked up; without a CONFIG everything that it names [current].",
)
@click.option("--collection", "collections", multiple=True, metavar="NAME", help="A named collection; repeatable.")
@click.option("--repair", is_flag=True, help="Read what is there, and rewrite what is damaged or gone.")
@click.option("--dry-run", is_flag=True, help="Only say what would be sent.")
@remote_options(writing=True)
@job_options
@ref_options
@store_option
@output_options
def command(
    configs: tuple[str, ...],
    collections: tuple[str, ...],
    every: bool,
    repair: bool,
    dry_run: bool,
    versions: list[str],
    directory: str | None,
    choose: Callable[..., Any],
    settings: Callable[[], Any],
    channel_asked: str | None,
    output: Output,
) -> int:
    """Send what CONFIG needs from the local store to the remote; what is there already is not sent again.

    CONFIG is found by its ref: the request must have been warmed into, or pulled into, this store. Signatures go along.
    Exit codes: 0 everything is there; 3 the store has nothing for CONFIG; 4 the remote failed; 7 something is damaged.
    """
    from neffcache.errors import Miss
    from neffcache.flows.push import push
    from neffcache.flows.pushable import of_all, of_channel, of_collection, of_request
    from neffcache.flows.remote import accounts

    chosen = settings()
    if not (configs or every or channel_asked or collections):
        raise click.UsageError("give a CONFIG, --collection, --channel or --all")
    remote = chosen.open()
    store = open_store(directory, writable=False)
    if every:
        sources = of_all(store)
    elif configs or collections:
        sources = [source for name in collections for source in of_collection(store, name)]
        for name in configs:
            request = choose(name, versions)
            found = of_request(store, chosen.channel, request)
            if not found:
                raise Miss(
                    f"{store.root} has nothing for this request of {name}",
                    hint=f"neffcache warm {name}, with the same options",
                    details={"config": name},
                )
            sources += found
    else:
        sources = of_channel(store, chosen.channel)
    with transfer_of(output) as progress:
        pushed = push(remote, store, sources, progress=progress, dry_run=dry_run, repair=repair)
    document = {**pushed.to_json(), **accounts(remote), "dry_run": dry_run}
    lines = [
        f"{row['config']}: {'pushed' if row['pushed'] else 'FAILED'}  manifest {row['manifest'][:12]}"
        for row in document["targets"]
        if not dry_run
    ]
    lines += [f"repaired {name}" for name in pushed.repaired]
    output.emit(document, [*lines, summary(document)])
    fault = pushed.fault()
    if fault is None:
        return 0
    click.echo(f"error: {fault.message}", err=True)
    if fault.hint:
        output.note(f"hint: {fault.hint}")
    return fault.exit_code
