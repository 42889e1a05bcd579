"""neffcache check."""

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
    open_to_mend,
    output_options,
    ref_options,
    store_option,
    trust_options,
)
from neffcache.cli.remote import MayStandAlone, remote_options

if TYPE_CHECKING:
    from neffcache.flows.trust import Trust


@click.command("check", cls=MayStandAlone, epilog="Example:  neffcache check llama3_8b --lnc 2 --remote")
@click.argument("configs", nargs=-1, metavar="CONFIG...", shell_complete=offer("config"))
@click.option("--remote", metavar="[URL]", help="The remote instead of the local store [NEFFCACHE_REMOTE].")
@click.option("--all", "every", is_flag=True, help="With --remote: the current manifest of every job key.")
@click.option(
    "--channel",
    shell_complete=offer("channel"),
    help="With --remote: where refs are looked up; without a CONFIG everything it names.",
)
@click.option("--by-ref", is_flag=True, help="By the ref of the request, without TorchTitan; proves less.")
@click.option("--verify", is_flag=True, help="Hash every file too; damage is quarantined and exit code 7.")
@remote_options(more=False, stands_alone=True)
@job_options
@ref_options
@trust_options
@store_option
@output_options
def command(
    configs: tuple[str, ...],
    every: bool,
    by_ref: bool,
    verify: bool,
    versions: list[str],
    trust: Trust,
    directory: str | None,
    choose: Callable[..., Any],
    settings: Callable[[], Any],
    remote_asked: bool,
    channel_asked: str | None,
    output: Output,
) -> int:
    """HIT, PARTIAL, MISS or UNKNOWN for each CONFIG; exit code 0 only when all are HIT, else 3.

    By job key where TorchTitan is installed. Otherwise by ref: somebody warmed this very request, with these versions
    (--version-of), which is not yet a proof that the training will be that job.
    """
    from neffcache.cli.several import for_each
    from neffcache.flows.check import check
    from neffcache.flows.resolve import titan_installed
    from neffcache.store.native import graph_count

    if not remote_asked and (every or channel_asked or not configs):
        raise click.UsageError("give a CONFIG; --all and --channel go with --remote")
    if remote_asked:
        if trust:
            raise click.UsageError("--require-signature looks at the local store; pull --dry-run asks a remote")
        return _remote(settings(), configs, every, channel_asked, by_ref, verify, versions, directory, choose, output)
    store = open_to_mend(directory) if verify else open_store(directory, writable=False)
    if not by_ref and not titan_installed():
        output.note("TorchTitan is not installed: checking by ref, which proves only that somebody warmed this request")
        by_ref = True
    width = max(len(name) for name in configs)

    def one(name: str) -> tuple[dict[str, Any], list[str]]:
        request = choose(name, versions if by_ref else None)
        found = check(request, store, os.environ, by_ref=by_ref, verify=verify, trust=trust)
        what = found.reason or ("" if found.manifest is None else f"{graph_count(found.manifest)} graphs")
        named = "" if found.manifest is None else f"  manifest {found.manifest.id[:12]}"
        lines = [f"{name:{width}}  {found.state:7}  by {found.by}  local{named}  {what}".rstrip()]
        for item in found.missing:
            gone = "in quarantine" if item.quarantined else "absent"
            lines.append(f"  {item.kind} {item.what}" + ("" if item.kind == "damaged" else f"  {gone}"))
        return found.to_json(), lines

    done = for_each(configs, one)
    output.emit(done.documents, done.lines)
    if done.fault is not None:
        if done.fault.hint:
            output.note(f"hint: {done.fault.hint}")
        return done.fault.exit_code
    return 0 if all(document["state"] == "HIT" for document in done.documents) else 3


def _remote(
    settings: Any,
    configs: tuple[str, ...],
    every: bool,
    channel: str | None,
    by_ref: bool,
    verify: bool,
    versions: list[str],
    directory: str | None,
    choose: Callable[..., Any],
    output: Output,
) -> int:
    """The remote's rows: HIT when all that a complete manifest names is there. A fault of the remote is raised."""
    from neffcache.errors import StoreFault
    from neffcache.flows.fetching import Wanted, check_remote
    from neffcache.flows.resolve import titan_installed

    if not (configs or every or channel):
        raise click.UsageError("give a CONFIG, --channel or --all")
    if configs and not by_ref and not titan_installed():
        output.note("TorchTitan is not installed: checking by ref, which proves only that somebody warmed this request")
    wanted = Wanted(
        requests=tuple(choose(name, versions if by_ref or not titan_installed() else None) for name in configs),
        channel=None if configs else channel,
        every=every,
        by_ref=by_ref,
    )
    rows = check_remote(settings, open_store(directory, writable=False), os.environ, wanted, verify=verify)
    width = max((len(row.config) for row in rows), default=0)
    lines = []
    for row in rows:
        named = f"  manifest {row.manifest[:12]}" if row.manifest else ""
        lines.append(
            f"{row.config:{width}}  {row.state:7}  by {row.by}  remote{named}  local {row.local}  {row.reason}".rstrip()
        )
        lines += [f"  missing {name}" for name in row.missing]
    output.emit([row.to_json() for row in rows], lines)
    if any(row.damaged for row in rows):
        output.note("hint: push --repair from a store that has it")
        return StoreFault.exit_code
    return 0 if all(row.state == "HIT" for row in rows) else 3
