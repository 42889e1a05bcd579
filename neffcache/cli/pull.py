"""neffcache pull."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from neffcache.cli.completing import offer
from neffcache.cli.options import (
    Output,
    job_options,
    open_store,
    output_options,
    ref_options,
    store_option,
    trust_options,
)
from neffcache.cli.remote import POLICY, URL_HELP, remote_options, summary, transfer_of

if TYPE_CHECKING:
    from neffcache.flows.trust import Trust


@click.command("pull", epilog="Example:  neffcache pull llama3_8b --lnc 2 --remote s3://bucket/prefix")
@click.argument("configs", nargs=-1, metavar="CONFIG...", shell_complete=offer("config"))
@click.option("--remote", help=URL_HELP)
@click.option("--all", "every", is_flag=True, help="The current manifest of every job key.")
@click.option(
    "--channel",
    shell_complete=offer("channel"),
    help="Where refs are looked up; without a CONFIG everything that it names [current].",
)
@click.option(
    "--manifest",
    "manifests",
    multiple=True,
    metavar="ID",
    shell_complete=offer("manifest"),
    help="A manifest by its whole id; repeatable.",
)
@click.option("--collection", "collections", multiple=True, metavar="NAME", help="A named collection; repeatable.")
@click.option("--by-ref", is_flag=True, help="By the ref of the request, without TorchTitan; proves less.")
@click.option("--verify", is_flag=True, help="Hash what is here first, so that what is damaged is fetched again.")
@click.option("--dry-run", is_flag=True, help="Only say what would be fetched.")
@POLICY
@remote_options()
@job_options
@ref_options
@trust_options
@store_option
@output_options
def command(
    configs: tuple[str, ...],
    every: bool,
    manifests: tuple[str, ...],
    collections: tuple[str, ...],
    by_ref: bool,
    verify: bool,
    dry_run: bool,
    versions: list[str],
    trust: Trust,
    directory: str | None,
    choose: Callable[..., Any],
    settings: Callable[[], Any],
    channel_asked: str | None,
    output: Output,
) -> int:
    """Bring what CONFIG needs from the remote into the local store. Nothing is written to the remote.

    Run again, it fetches what is missing. Exit codes: 0 everything is here; 3 the remote has nothing for CONFIG, or an
    incomplete manifest; 4 the remote failed; 7 it is damaged.
    """
    from neffcache.flows.fetching import Wanted, pull_wanted

    chosen = settings()
    if not (configs or every or manifests or collections or channel_asked):
        raise click.UsageError("give a CONFIG, --collection, --manifest, --channel or --all")
    asked: list[str] | None = versions
    if configs and not by_ref:
        from neffcache.flows.resolve import titan_installed

        asked = None if titan_installed() else versions
    wanted = Wanted(
        requests=tuple(choose(name, asked) for name in configs),
        manifests=manifests,
        collections=collections,
        channel=channel_asked if not configs else None,
        every=every,
        by_ref=by_ref,
    )
    store = open_store(directory, writable=not dry_run)
    with transfer_of(output) as progress:
        done = pull_wanted(
            chosen, store, os.environ, wanted, progress=progress, dry_run=dry_run, verify=verify, trust=trust
        )
    document = done.document
    lines = [
        f"{row['config']}: {row['state']}  manifest {(row['manifest'] or '-')[:12]}  {row['reason']}".rstrip()
        for row in document["targets"]
    ]
    output.emit(document, [*lines, summary(document)])
    if done.fault is not None:
        click.echo(f"{'error' if done.exit_code else 'warning'}: {done.fault.message}", err=True)
        if done.fault.hint:
            output.note(f"hint: {done.fault.hint}")
    return done.exit_code
