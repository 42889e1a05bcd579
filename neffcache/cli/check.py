"""neffcache check."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import click

from neffcache.cli.options import Output, job_options, open_store, open_to_mend, output_options, store_option


@click.command("check", epilog="Example:  neffcache check llama3_8b --lnc 2")
@click.argument("configs", nargs=-1, required=True, metavar="CONFIG...")
@click.option("--by-ref", is_flag=True, help="By the ref of the request, without TorchTitan; proves less.")
@click.option("--verify", is_flag=True, help="Hash every file too; damage is quarantined and exit code 7.")
@job_options
@store_option
@output_options
def command(
    configs: tuple[str, ...],
    by_ref: bool,
    verify: bool,
    directory: str | None,
    choose: Callable[[str], Any],
    output: Output,
) -> int:
    """HIT, PARTIAL, MISS or UNKNOWN for each CONFIG; exit code 0 only when all are HIT, else 3.

    By job key where TorchTitan is installed. Otherwise by ref: somebody warmed this very request into this store,
    which is no proof that it means the same job today.
    """
    from neffcache.cli.several import for_each
    from neffcache.flows.check import check
    from neffcache.flows.resolve import titan_installed
    from neffcache.store.native import graph_count

    store = open_to_mend(directory) if verify else open_store(directory, writable=False)
    if not by_ref and not titan_installed():
        output.note("TorchTitan is not installed: checking by ref, which proves only that somebody warmed this request")
        by_ref = True
    width = max(len(name) for name in configs)

    def one(name: str) -> tuple[dict[str, Any], list[str]]:
        found = check(choose(name), store, os.environ, by_ref=by_ref, verify=verify)
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
