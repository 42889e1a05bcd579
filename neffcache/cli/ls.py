"""neffcache ls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from neffcache.cli.options import Output, open_store, output_options, size, store_option
from neffcache.cli.remote import MayStandAlone, remote_options
from neffcache.cli.table import table


@click.command("ls", cls=MayStandAlone, epilog="Example:  neffcache ls --graphs")
@click.option("--remote", metavar="[URL]", help="What the remote has, beside the local store [NEFFCACHE_REMOTE].")
@click.option("--manifests", is_flag=True, help="One line a manifest.")
@click.option("--graphs", is_flag=True, help="One line a graph record.")
@click.option("--refs", is_flag=True, help="One line a ref.")
@click.option("--blobs", is_flag=True, help="One line a blob.")
@remote_options(stands_alone=True)
@store_option
@output_options
def command(
    directory: str | None, settings: Callable[[], Any], remote_asked: bool, output: Output, **asked: bool
) -> int:
    """What the store holds: its manifests and totals, or the kinds that are asked for.

    With --remote: every manifest and ref of the remote, and which of them are in the local store too.
    """
    if remote_asked:
        return _remote(settings(), directory, output)
    from neffcache.flows import listing

    store = open_store(directory, writable=False)
    if not store.root.exists():
        output.note(f"there is no store {store.root} yet")
    read = {
        "manifests": listing.manifest_rows,
        "graphs": listing.graph_rows,
        "refs": listing.ref_rows,
        "blobs": listing.blob_rows,
    }
    kinds = [kind for kind in read if asked[kind]]
    rows = {kind: read[kind](store) for kind in kinds or ["manifests"]}
    document: dict[str, Any] = {"store": str(store.root), **rows}
    lines = [line for kind, found in rows.items() for line in _SHOWN[kind](found)]
    if not kinds:
        blobs = listing.blob_rows(store)
        counts = {
            "manifests": len(rows["manifests"]),
            "graphs": len(store.graph_keys()),
            "refs": len(store.names("ref")),
            "blobs": len(blobs),
            "quarantined": len(store.quarantined()),
        }
        total = sum(row["bytes"] for row in blobs)
        document["totals"] = {**counts, "bytes": total}
        lines.append(f"{', '.join(f'{count} {kind}' for kind, count in counts.items())}; {size(total)} in {store.root}")
    output.emit(document, lines)
    return 0


def _remote(settings: Any, directory: str | None, output: Output) -> int:
    from neffcache.flows.remote import accounts
    from neffcache.flows.remote_check import listing

    remote = settings.open()
    found = listing(remote, open_store(directory, writable=False))
    totals, compared = found["totals"], found["compared"]
    rows = [(row["id"], " ".join(row["tiers"])) for row in found["manifests"]]
    refs = [(row["channel"], row["config"], row["request_digest"][:12]) for row in found["refs"]]
    lines = [
        *table(("manifest", "in"), rows),
        *table(("channel", "config", "request"), refs),
        f"{compared['both']} manifests in both, {compared['remote_only']} only in {remote.where}, "
        f"{compared['local_only']} only in {found['store']}",
        ", ".join(f"{totals[kind]} {kind}" for kind in totals if kind != "bytes") + f"; {size(totals['bytes'])}",
    ]
    output.emit({**found, **accounts(remote)}, lines)
    return 0


def _manifests(rows: list[dict[str, Any]]) -> list[str]:
    state = {True: "complete", False: "INCOMPLETE"}
    return table(
        ("manifest", "config", "state", "current", "ranks", "graphs", "size", "job key", "created"),
        [
            (
                row["id"][:12],
                row["config"],
                "collection" if row["collection"] else state[row["complete"]],
                "yes" if row["current"] else "no",
                row["ranks"],
                row["graphs"],
                size(row["bytes"]),
                row["cache_key"][:12],
                row["created"],
            )
            for row in rows
        ],
        right=("ranks", "graphs", "size"),
    )


def _graphs(rows: list[dict[str, Any]]) -> list[str]:
    return table(
        ("graph", "kind", "nodes", "compile", "files", "size", "name"),
        [
            (
                row["compile_key"][:12],
                row["kind"],
                row["nodes"],
                f"{row['seconds']:.1f} s",
                row["artifacts"],
                size(row["bytes"]),
                row["name"],
            )
            for row in rows
        ],
        right=("nodes", "compile", "files", "size"),
    )


def _refs(rows: list[dict[str, Any]]) -> list[str]:
    return table(
        ("channel", "config", "request", "manifest", "job key"),
        [
            (row["channel"], row["config"], row["request_digest"][:12], row["manifest"][:12], row["cache_key"][:12])
            for row in rows
        ],
    )


def _blobs(rows: list[dict[str, Any]]) -> list[str]:
    return table(("blob", "size"), [(row["sha256"], size(row["bytes"])) for row in rows], right=("size",))


_SHOWN = {"manifests": _manifests, "graphs": _graphs, "refs": _refs, "blobs": _blobs}
