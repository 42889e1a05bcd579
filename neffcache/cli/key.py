"""neffcache key."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from neffcache.cli.completing import offer
from neffcache.cli.options import Output, job_options, open_store, output_options, store_option


@click.command("key", epilog="Example:  neffcache key llama3_8b --lnc 1")
@click.argument("config", required=False, shell_complete=offer("config"))
@click.option(
    "--diff",
    nargs=2,
    metavar="A B",
    shell_complete=offer("config"),
    help="Compare two: configurations, keys, manifests or JSON files.",
)
@job_options
@store_option
@output_options
def command(
    config: str | None,
    diff: tuple[str, str] | None,
    directory: str | None,
    choose: Callable[[str], Any],
    output: Output,
) -> int:
    """The job key of CONFIG and its five components: workload, target, LNC, toolchain, options."""
    from neffcache.flows.keys import compare, key_of, load_key
    from neffcache.key.job import JobKey

    if (config is None) == (diff is None):
        raise click.UsageError("give a CONFIG, or --diff A B")

    if config is not None:
        key = key_of(choose(config), os.environ)
        lines = [key.cache_key, *(f"  {name:10} {part.sha256[:16]}" for name, part in key.components.items())]
        output.emit(key.to_json(), lines)
        return 0

    assert diff is not None

    def load(name: str) -> JobKey:
        if name.endswith(".json") and Path(name).exists():
            return JobKey.from_json(json.loads(Path(name).read_text()))
        found = load_key(open_store(directory, writable=False), name)
        return found if found is not None else key_of(choose(name), os.environ)

    left, right = (load(name) for name in diff)
    found = compare(left, right)
    document = {"left": left.cache_key, "right": right.cache_key, "differences": [d.to_json() for d in found]}
    output.emit(document, [str(entry) for entry in found] or ["the same key"])
    return 0 if not found else 3
