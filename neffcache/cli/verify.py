"""neffcache verify."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from neffcache.cli.completing import offer
from neffcache.cli.options import Output, open_to_mend, output_options, size, store_option
from neffcache.cli.remote import MayStandAlone, remote_options, transfer_of
from neffcache.cli.table import table


@click.command("verify", cls=MayStandAlone, epilog="Example:  neffcache verify --json")
@click.option("--remote", metavar="[URL]", help="The remote instead of the local store [NEFFCACHE_REMOTE].")
@click.option("--channel", shell_complete=offer("channel"), help="With --remote: only what this channel names.")
@remote_options(stands_alone=True)
@store_option
@output_options
def command(
    directory: str | None,
    settings: Callable[[], Any],
    remote_asked: bool,
    channel_asked: str | None,
    output: Output,
) -> int:
    """Hash everything in the store again. What is damaged goes to quarantine, where the store can be written.

    Exit code 7 when something is damaged or cannot be read, 3 when something that is named is absent.
    """
    from neffcache.errors import StoreFault
    from neffcache.store.verify import verify

    if remote_asked:
        return _remote(settings(), channel_asked, output)
    store = open_to_mend(directory)
    if not store.root.exists():
        raise StoreFault(f"there is no store {store.root}", hint="give one with --dir or NEFFCACHE_DIR")
    report = verify(store)
    names = ("total", "good", "damaged", "unreadable", "gone")
    rows = [(kind, *(getattr(tally, name) for name in names)) for kind, tally in report.tallies.items()]
    moved = sum(item.quarantined for item in report.findings)
    lines = [
        *table(("kind", *names), rows, right=names),
        *(
            f"{item.state}: {item.kind} {item.name}: {item.message}"
            + (" (moved to quarantine)" if item.quarantined else "")
            for item in report.findings
        ),
        f"{size(report.bytes)} of blobs are good; {len(report.findings)} findings, {moved} moved to quarantine",
    ]
    output.emit({"store": str(store.root), **report.to_json(), "quarantined": moved}, lines)
    states = {item.state for item in report.findings}
    if states & {"damaged", "unreadable"}:
        output.note("hint: warm again, or pull what is damaged from a remote; quarantine/ may be emptied")
        return StoreFault.exit_code
    if states:
        output.note("hint: warm or pull what is absent")
        return 3
    return 0


def _remote(settings: Any, channel: str | None, output: Output) -> int:
    """Read and hash everything that the remote's refs and keys name. Damage is exit code 7, absence 4."""
    from neffcache.errors import RemoteFault, StoreFault
    from neffcache.flows.pull import everything, in_channel
    from neffcache.flows.remote import accounts
    from neffcache.flows.remote_check import verify_targets

    remote = settings.open()
    targets = in_channel(remote, channel) if channel else everything(remote)
    with transfer_of(output) as progress:
        report = verify_targets(remote, targets, progress)
    document = {**report.to_json(), **accounts(remote)}
    names = ("total", "good", "damaged", "absent")
    rows = [(kind, *(document[kind][name] for name in names)) for kind in ("manifests", "graphs", "blobs")]
    lines = [
        *table(("kind", *names), rows, right=names),
        *(f"{item['state']}: {item['name']}: {item['message']}" for item in document["findings"]),
        f"{size(report.bytes)} of blobs are good in {remote.where}; {len(report.bad)} findings",
    ]
    output.emit(document, lines)
    if report.bad:
        output.note("hint: push --repair from a store that has it, or warm it again")
    return StoreFault.exit_code if report.damaged else RemoteFault.exit_code if report.bad else 0
