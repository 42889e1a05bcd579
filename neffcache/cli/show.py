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

FILES = 20
"""Files of a collection that are shown; it may have very many."""
_PLACE = ("target", "lnc", "world_size", "toolchain")


@click.command("show", epilog="Example:  neffcache show a26f69aa --text")
@click.argument("name", shell_complete=offer("thing"))
@click.option("--text", is_flag=True, help="The canonical text of a graph.")
@store_option
@output_options
def command(name: str, text: bool, directory: str | None, output: Output) -> int:
    """One manifest or graph record: a warmed CONFIG, a collection, or the beginning of an id or key of one."""
    from neffcache.errors import Usage
    from neffcache.flows.listing import find
    from neffcache.store.records import is_collection

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
    elif all(is_collection(ref) for _, _, ref in found.refs):
        lines = [f"{name} is a collection of {len(found.refs)} manifests; show one by its manifest:"]
        rows = [(ref.manifest[:12], ref.request.get("layout"), ref.request.get("compiler") or "unknown")
                for _, _, ref in found.refs]  # fmt: skip
        output.emit(document, [*lines, *table(("manifest", "layout", "compiler"), rows)])
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
    from neffcache.store.records import is_collection

    if is_collection(manifest):
        return _collection(store, manifest)
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


def _collection(store: LocalStore, manifest: Manifest) -> list[str]:
    from neffcache.flows.collections import summary

    said, lacking = summary(manifest), store.missing(manifest)
    files = [f"  file {item.store}/{item.path} {size(item.size)}" for item in manifest.artifacts[:FILES]]
    more = len(manifest.artifacts) - len(files)
    return [
        f"manifest {manifest.id}",
        f"  collection {manifest.request.get('config')}: files of a cache, of no job; {manifest.created}",
        f"  {said['entries']} entries of {said['layout']}, {said['files']} files, {size(said['bytes'])}",
        f"  compiler {said['compiler'] or 'unknown'}",
        *files,
        *([f"  and {more} more files; --json names all"] if more else []),
        *(f"  MISSING {item.kind} {item.what}" for item in lacking),
        *([] if lacking else ["  everything that it names is in the store"]),
    ]


def _ways(refs: Sequence[tuple[str, str, Ref]]) -> list[str]:
    from neffcache.store.records import is_collection

    return [
        f"  to use it: neffcache export {shlex.quote(ref.config)} --layout auto -o DIRECTORY"
        if is_collection(ref)
        else f"  without TorchTitan: neffcache init {shlex.join(words(ref.request))}"
        for _, _, ref in refs
    ]


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
