"""neffcache show."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from neffcache.cli.completing import offer
from neffcache.cli.options import Output, open_store, output_options, size, store_option
from neffcache.cli.table import table
from neffcache.flows.request import setting_text, words

if TYPE_CHECKING:
    from neffcache.store.local import LocalStore
    from neffcache.store.records import GraphRecord, Manifest, Ref

_PLACE = ("target", "lnc", "world_size", "toolchain")


@click.command("show", epilog="Example:  neffcache show a26f69aa --text")
@click.argument("name", shell_complete=offer("thing"))
@click.option("--text", is_flag=True, help="The canonical text of a graph.")
@store_option
@output_options
def command(name: str, text: bool, directory: str | None, output: Output) -> int:
    """One manifest or graph record: a warmed CONFIG, or the beginning of a manifest id, job key or compile key."""
    from neffcache.errors import Usage
    from neffcache.flows.listing import find

    store = open_store(directory, writable=False)
    found = find(store, name)
    document = found.to_json(store)
    if text:
        if found.graph is None:
            raise Usage(f"--text prints a graph, and {name} is none", hint="a compile key: neffcache ls --graphs")
        written = store.read_blob(found.graph.text).decode()
        output.emit({**document, "text": written}, written.splitlines())
    elif found.graph is not None:
        output.emit(document, _graph(found.graph))
    elif found.manifest is not None:
        output.emit(document, [*_manifest(store, found.manifest), *_ways(found.refs)])
    else:
        lines = [f"{name} was warmed as {len(found.refs)} requests; show one by its manifest:"]
        output.emit(document, [*lines, *_refs(found.refs)])
    return 0


def _graph(record: GraphRecord) -> list[str]:
    peak = "" if record.peak_bytes is None else f", peak {size(record.peak_bytes)}"
    return [
        f"graph {record.compile_key}",
        f"  {record.kind} {record.name}: {record.nodes} nodes, {record.inputs} inputs",
        f"  compiled in {record.seconds:.1f} s{peak}",
        *(f"  {name} {value or '(does not reach this compiler)'}" for name, value in sorted(record.components.items())),
        *("  " + line for line in table(
            ("file", "size", "sha256"),
            [(f"{item.store}/{item.path}", size(item.size), item.sha256[:16]) for item in record.artifacts],
            right=("size",),
        )),
    ]  # fmt: skip


def _manifest(store: LocalStore, manifest: Manifest) -> list[str]:
    from neffcache.store.native import graphs_of

    request = manifest.request
    graphs = []
    for key in manifest.compile_keys():
        record = store.get_graph(key)
        graphs.append(
            (key[:12], "", "", "no record") if record is None else (key[:12], record.kind, record.nodes, record.name)
        )
    settings = request.get("set") or {}
    lacking = store.missing(manifest)
    return [
        f"manifest {manifest.id}",
        f"  config {request.get('config')}, {'complete' if manifest.complete else 'INCOMPLETE'}, {manifest.created}",
        f"  job key {manifest.cache_key}",
        *(f"    {name} {str(part['sha256'])[:16]}" for name, part in manifest.components.items()),
        "  request " + ", ".join(f"{name} {request[name]}" for name in _PLACE if name in request),
        *(f"    --set {name}={setting_text(value)}" for name, value in settings.items()),
        *(f"    --option={value}" for value in request.get("options") or ()),
        *(f"  ranks {item.ranks}: {_phases(graphs_of(item))}" for item in manifest.rank_classes),
        *("    " + line for line in table(("graph", "kind", "nodes", "name"), graphs, right=("nodes",))),
        *(f"  native {item.store}/{item.path} {size(item.size)}" for item in manifest.artifacts),
        *(f"  environment {name}={value}" for name, value in manifest.environment.items()),
        *(f"  {name} {value}" for name, value in manifest.versions.items()),
        *(f"  MISSING {item.kind} {item.what}" for item in lacking),
        *([] if lacking else ["  everything that it names is in the store"]),
    ]  # fmt: skip


def _ways(refs: Sequence[tuple[str, str, Ref]]) -> list[str]:
    return [f"  without TorchTitan: neffcache init {shlex.join(words(ref.request))}" for _, _, ref in refs]


def _phases(graphs: Mapping[str, Sequence[str]]) -> str:
    return ", ".join(f"{phase} {len(keys)} graphs" for phase, keys in graphs.items())


def _refs(refs: tuple[tuple[str, str, Ref], ...]) -> list[str]:
    rows = [
        (
            channel,
            request_digest[:12],
            ref.manifest[:12],
            ref.request.get("target", ""),
            ref.request.get("lnc", ""),
            ref.request.get("world_size", ""),
            " ".join(f"{name}={setting_text(value)}" for name, value in (ref.request.get("set") or {}).items()),
        )
        for channel, request_digest, ref in refs
    ]
    return table(("channel", "request", "manifest", "target", "lnc", "ranks", "set"), rows, right=("lnc", "ranks"))
