"""What a store holds: rows for `ls`, and the one thing that a name means for `show`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from neffcache.errors import Miss, Usage
from neffcache.flows.check import missing_json
from neffcache.flows.collections import entry_count
from neffcache.store.local import LocalStore
from neffcache.store.native import graph_count
from neffcache.store.ranks import ranges
from neffcache.store.records import GraphRecord, Manifest, Ref, is_collection

SHORTEST = 6
"""Hex digits that the beginning of an id must have at least, so that a word is not taken for one."""

HEX = frozenset("0123456789abcdef")


def manifest_rows(store: LocalStore) -> list[dict[str, Any]]:
    """Every manifest, newest first; `bytes` are those of its distinct artifacts, `current`: its job key names it."""
    records = {record.compile_key: record for record in store.graphs()}
    current = {pointer.cache_key: pointer.manifest for pointer in store.pointers()}
    rows = [
        {
            "id": item.id,
            "config": str(item.request.get("config", "")),
            "cache_key": item.cache_key,
            "complete": item.complete,
            "collection": is_collection(item),
            "current": current.get(item.cache_key) == item.id,
            "ranks": rank_count(item),
            "graphs": entry_count(item) if is_collection(item) else graph_count(item),
            "bytes": sum(sizes(item, records).values()),
            "created": item.created,
        }
        for item in store.manifests()
    ]
    return sorted(rows, key=lambda row: str(row["created"]), reverse=True)


def graph_rows(store: LocalStore) -> list[dict[str, Any]]:
    """Every graph record, in the order of names and kinds."""
    rows = [
        {
            "compile_key": item.compile_key,
            "kind": item.kind,
            "name": item.name,
            "nodes": item.nodes,
            "seconds": item.seconds,
            "peak_bytes": item.peak_bytes,
            "artifacts": len(item.artifacts),
            "bytes": sum(artifact.size for artifact in item.artifacts),
        }
        for item in store.graphs()
    ]
    return sorted(rows, key=lambda row: (str(row["name"]), str(row["kind"]), str(row["compile_key"])))


def ref_rows(store: LocalStore) -> list[dict[str, Any]]:
    """Every ref of every channel."""
    return [
        {
            "channel": channel,
            "config": ref.config,
            "request_digest": request_digest,
            "cache_key": ref.cache_key,
            "manifest": ref.manifest,
            "request": dict(ref.request),
        }
        for channel in store.channels()
        for request_digest, ref in store.refs(channel)
    ]


def blob_rows(store: LocalStore) -> list[dict[str, Any]]:
    """Every blob and its bytes, unread."""
    found = ((sha256, store.blob_size(sha256)) for sha256 in store.blobs())
    return [{"sha256": sha256, "bytes": size} for sha256, size in found if size is not None]


def rank_count(manifest: Manifest) -> int:
    """Ranks of all classes."""
    return sum(high - low + 1 for item in manifest.rank_classes for low, high in ranges(item.ranks))


def sizes(manifest: Manifest, records: Mapping[str, GraphRecord]) -> dict[str, int]:
    """SHA-256 -> bytes of every artifact of a manifest, as far as its graphs have records."""
    known = [records[key] for key in manifest.compile_keys() if key in records]
    return {item.sha256: item.size for record in known for item in record.artifacts} | {
        item.sha256: item.size for item in manifest.artifacts
    }


@dataclass(frozen=True)
class Found:
    """What a name means: a manifest, a graph record, or the refs of a configuration."""

    kind: Literal["manifest", "graph", "refs"]
    manifest: Manifest | None = None
    graph: GraphRecord | None = None
    refs: tuple[tuple[str, str, Ref], ...] = ()

    def to_json(self, store: LocalStore) -> dict[str, Any]:
        if self.graph is not None:
            return {"kind": self.kind, "document": self.graph.to_json()}
        refs = [
            {"channel": channel, "request_digest": request_digest, "document": ref.to_json()}
            for channel, request_digest, ref in self.refs
        ]
        if self.manifest is None:
            return {"kind": self.kind, "refs": refs}
        return {
            "kind": self.kind,
            "document": self.manifest.to_json(),
            "missing": missing_json(tuple(store.missing(self.manifest))),
            "refs": refs,
        }


def find(store: LocalStore, name: str) -> Found:
    """What `name` means: a configuration with refs, or the beginning of a manifest id, job key or compile key.

    A configuration with one manifest is that manifest. Raises Miss when nothing has the name, Usage when several have.
    """
    refs = [
        (channel, request_digest, ref)
        for channel in store.channels()
        for request_digest, ref in store.refs(channel)
        if ref.config == name
    ]
    named = {ref.manifest for _, _, ref in refs}
    if len(named) > 1:
        return Found("refs", refs=tuple(refs))
    if named:
        return Found("manifest", manifest=_manifest(store, named.pop()), refs=tuple(refs))
    if len(name) < SHORTEST or set(name) - HEX:
        raise Miss(
            f"nothing in {store.root} is called {name!r}",
            hint=f"a configuration that was warmed, or at least {SHORTEST} digits of an id; see neffcache ls",
        )
    return _by_id(store, name)


def refs_of(store: LocalStore, name: str | None = None) -> list[tuple[str, str, Ref]]:
    """(channel, request digest, ref) of every ref, or of those that `name` means: a configuration, or the beginning of
    a manifest id or job key. Raises StoreFault."""
    found = [(channel, digest, ref) for channel in store.channels() for digest, ref in store.refs(channel)]
    if name is None:
        return found
    begins = len(name) >= SHORTEST and not set(name) - HEX
    return [
        item
        for item in found
        if item[2].config == name
        or (begins and (item[2].manifest.startswith(name) or item[2].cache_key.startswith(name)))
    ]


def _by_id(store: LocalStore, name: str) -> Found:
    manifests = _starting(store.manifest_ids(), name)
    graphs = _starting(store.graph_keys(), name)
    keys = {item.cache_key: item.manifest for item in store.pointers() if item.cache_key.startswith(name)}
    found = [
        *(f"manifest {item}" for item in manifests),
        *(f"job key {item}" for item in keys),
        *(f"graph {item}" for item in graphs),
    ]
    if len(found) > 1:
        raise Usage(f"{name} is the beginning of {len(found)} ids: {', '.join(found[:6])}", hint="give more digits")
    if graphs:
        record = store.get_graph(graphs[0])
        if record is not None:
            return Found("graph", graph=record)
    if manifests or keys:
        return Found("manifest", manifest=_manifest(store, [*manifests, *keys.values()][0]))
    older = [item for item in store.manifests() if item.cache_key.startswith(name)]
    if len(older) == 1:
        return Found("manifest", manifest=older[0])
    if older:
        raise Usage(
            f"{name} is the job key of {len(older)} manifests, none of them current",
            hint="show one of them: " + ", ".join(item.id[:12] for item in older[:6]),
        )
    raise Miss(f"nothing in {store.root} has an id that begins with {name}", hint="see neffcache ls")


def _starting(names: Iterable[str], beginning: str) -> list[str]:
    return [item for item in names if item.startswith(beginning)]


def _manifest(store: LocalStore, manifest_id: str) -> Manifest:
    found = store.get_manifest(manifest_id)
    if found is None:
        raise Miss(
            f"manifest {manifest_id} is named but not in {store.root}", hint="warm its configuration again, or pull it"
        )
    return found
