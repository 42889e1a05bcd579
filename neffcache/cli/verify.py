"""neffcache verify."""

from __future__ import annotations

import click

from neffcache.cli.options import Output, open_to_mend, output_options, size, store_option
from neffcache.cli.table import table


@click.command("verify", epilog="Example:  neffcache verify --json")
@store_option
@output_options
def command(directory: str | None, output: Output) -> int:
    """Hash everything in the store again. What is damaged goes to quarantine, where the store can be written.

    Exit code 7 when something is damaged or cannot be read, 3 when something that is named is absent.
    """
    from neffcache.errors import StoreFault
    from neffcache.store.verify import verify

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
