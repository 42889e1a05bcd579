"""The local store: blobs, graph records, manifests, pointers and refs under one directory.

Whoever reads takes no lock and writes nothing. Order of writing: blobs, then the records that name them, then
manifests, then pointers; each is refused before what it refers to is there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from neffcache.errors import Bug, Miss, StoreFault, Usage
from neffcache.key.canonical import sha256_hex
from neffcache.store import layout, needs
from neffcache.store.blobs import Batch, Blobs, Reader
from neffcache.store.documents import Documents
from neffcache.store.files import names, remove, storage
from neffcache.store.needs import Missing as Missing
from neffcache.store.pointers import Pointers
from neffcache.store.records import Artifact, Damaged, Extra, GraphRecord, KeyPointer, Manifest, Ref, Signatures
from neffcache.store.root import Root

SWEEP_AGE = 86_400.0  # seconds; no write of ours takes a day


class LocalStore:
    """One directory, checked and opened. See `open`."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._blobs = Blobs(root)
        self._graphs = Documents(root, GraphRecord, lambda item: layout.graph_name(item.compile_key))
        self._manifests = Documents(root, Manifest, lambda item: layout.manifest_name(item.id))
        self._pointers = Pointers(root)

    @classmethod
    def open(cls, root: str | Path, *, writable: bool, given: bool = False, mode: int = 0o700) -> LocalStore:
        """Open the store at `root`, creating it (with `mode`) only when `writable`.

        `given` says that the user named the directory (option, variable, settings file): it may then be shared, owned
        by somebody else, or a mounted volume. A default place that could be somebody else's is refused.
        A root that is absent and not `writable` is an empty store. Raises StoreFault.
        """
        return cls(Root.open(Path(root), writable=writable, given=given, mode=mode))

    @property
    def root(self) -> Path:
        """The absolute path of the store."""
        return self._root.path

    @property
    def writable(self) -> bool:
        return self._root.writable

    @property
    def base(self) -> Root:
        """The checked directory: modes, temporary names, locks. For the other modules of this room."""
        return self._root

    def require_space(self, needed: int) -> None:
        """Raises StoreFault, before the first byte, when fewer than `needed` bytes are free."""
        self._root.require_space(needed)

    # Blobs

    def put_blob(self, data: bytes) -> str:
        """Store bytes; their SHA-256. Raises StoreFault."""
        with self.batch() as batch:
            return batch.put(data)

    def put_blob_file(self, path: str | Path) -> str:
        """Store a copy of a file; its SHA-256. Raises Miss when it is absent, StoreFault."""
        with self.batch() as batch:
            return batch.put_file(Path(path))

    def batch(self, *, flush: bool = True) -> AbstractContextManager[Batch]:
        """Many blobs with one flush: they are on the disk and visible when the block ends, never before.

        Without `flush` only visible: for what a remote has too, and what is damaged by a power cut is fetched again.

        The batch has `put(bytes)`, `put_file(path)` and `put_chunks(iterable, expect=sha256)`, each giving the SHA-256,
        and may be used by several threads. Raises StoreFault.
        """
        return self._blobs.batch(flush=flush)

    def has_blob(self, sha256: str) -> bool:
        """Whether a file of that name is there; nothing is read. Raises StoreFault."""
        return self._blobs.size(sha256) is not None

    def blob_size(self, sha256: str) -> int | None:
        """Bytes of the file of that name, unread, or None when absent (-1: not a regular file). Raises StoreFault."""
        return self._blobs.size(sha256)

    def blob_path(self, sha256: str) -> Path:
        """The path of a blob, checked. Raises Miss when absent, Damaged (after quarantine), StoreFault."""
        path = self._blobs.check(sha256)
        if path is None:
            raise self._absent(sha256)
        return path

    def blob_reader(self, sha256: str, *, checked: bool = True) -> Reader:
        """The blob as an open file that is hashed while it is read: its last bytes come only when all are right.

        `checked=False` is for who gives it to somebody who will refuse what is damaged.
        Raises Miss when absent, StoreFault; its `read` Damaged (after quarantine), StoreFault.
        """
        reader = self._blobs.reader(sha256, checked=checked)
        if reader is None:
            raise self._absent(sha256)
        return reader

    def read_blob(self, sha256: str) -> bytes:
        """The checked bytes of a blob. Raises Miss when absent, Damaged (after quarantine), StoreFault."""
        data = self._blobs.read(sha256)
        if data is None:
            raise self._absent(sha256)
        return data

    def check_blob(self, sha256: str, *, fresh: bool = False) -> bool:
        """False when absent, True when the content has its digest (`fresh`: hashed now, whatever is remembered).

        Raises Damaged after moving a damaged file to quarantine/, StoreFault.
        """
        return self._blobs.check(sha256, fresh=fresh) is not None

    def blobs(self) -> Iterator[str]:
        """The SHA-256 of every blob, in order. Raises StoreFault."""
        return self._blobs.names()

    # Graph records

    def put_graph(self, record: GraphRecord) -> GraphRecord:
        """Store a graph record and return the one that counts: the first writer's, unless its blobs are gone.

        Raises StoreFault, also when a blob that the record names is not here yet.
        """
        self._need(self._graph_lacks(record), f"graph {record.compile_key}")
        name = layout.graph_name(record.compile_key)
        for _ in range(3):
            if self._graphs.publish(record):
                return record
            existing = self._graphs.read_or_heal(name)
            if existing is None:
                continue
            if needs.unusable(self._blobs, existing.artifacts):
                # Adopting it would make the loss of a blob eternal: a second compile need not give the same bytes.
                with self._root.lock(f"graph-{record.compile_key[:2]}"):
                    existing = self._graphs.read_or_heal(name)
                    if existing is None or needs.unusable(self._blobs, existing.artifacts):
                        self._graphs.replace(record)
                        existing = record
            return existing
        raise StoreFault(f"the record of graph {record.compile_key} cannot be written", hint="run `neffcache verify`")

    def put_graphs(self, records: Sequence[GraphRecord]) -> None:
        """Store many graph records with one flush; of those whose names are taken the one that counts stays.

        Raises StoreFault, also when a blob that a record names is not here yet.
        """
        for record in records:
            self._need(self._graph_lacks(record), f"graph {record.compile_key}")
        for record, written in zip(records, self._graphs.publish_all(records), strict=True):
            if not written:
                self.put_graph(record)

    def get_graph(self, compile_key: str) -> GraphRecord | None:
        """The record, or None when absent. Raises Damaged (after quarantine), StoreFault."""
        return self._graphs.read(layout.graph_name(compile_key))

    def graph_keys(self) -> list[str]:
        """Every compile key that has a record, in order, without reading one. Raises StoreFault."""
        return _stems(self._graphs.names(layout.GRAPHS))

    def graphs(self) -> list[GraphRecord]:
        """Every good record; damaged ones are logged and quarantined. Raises StoreFault."""
        return self._graphs.all(layout.GRAPHS)

    # Manifests

    def put_manifest(self, manifest: Manifest) -> Manifest:
        """Store a manifest (the first writer wins; time and host may differ) and return the stored one.

        Raises StoreFault, also when a complete manifest names a graph or an artifact that is not here.
        """
        if manifest.complete:
            self._need(self.missing(manifest), f"manifest {manifest.id}")
        for _ in range(3):
            if self._manifests.publish(manifest):
                return manifest
            if (existing := self._manifests.read_or_heal(layout.manifest_name(manifest.id))) is not None:
                return existing
        raise StoreFault(f"manifest {manifest.id} cannot be written", hint="run `neffcache verify`")

    def get_manifest(self, manifest_id: str) -> Manifest | None:
        """The manifest, or None when absent. Raises Damaged (after quarantine), StoreFault."""
        return self._manifests.read(layout.manifest_name(manifest_id))

    def manifest_ids(self) -> list[str]:
        """The id of every manifest, in order, without reading one. Raises StoreFault."""
        return _stems(self._manifests.names(layout.MANIFESTS))

    def manifests(self) -> list[Manifest]:
        """Every good manifest; damaged ones are logged and quarantined. Raises StoreFault."""
        return self._manifests.all(layout.MANIFESTS)

    # Pointers and refs

    def set_pointer(self, cache_key: str, manifest_id: str, *, extra: Extra | None = None) -> KeyPointer:
        """Make a manifest of this store the current one of a job key, whatever was before. Raises StoreFault."""
        return self._pointers.set(cache_key, manifest_id, extra)

    def swap_pointer(self, cache_key: str, expected: str | None, manifest_id: str) -> bool:
        """The same only if the current manifest id is `expected` (None: no pointer yet); whether it was.

        Raises Damaged when the present pointer is, StoreFault.
        """
        return self._pointers.swap(cache_key, expected, manifest_id)

    def pointer(self, cache_key: str) -> KeyPointer | None:
        """The pointer of a job key, or None when absent. Raises Damaged (after quarantine), StoreFault."""
        return self._pointers.keys.read(layout.pointer_name(cache_key))

    def pointers(self) -> list[KeyPointer]:
        """Every good pointer; damaged ones are logged and quarantined. Raises StoreFault."""
        return self._pointers.keys.all(layout.KEYS)

    def put_ref(self, channel: str, config: str, request_digest: str, ref: Ref) -> Ref:
        """Write a ref over one of the same request that is not newer; the one that counts now.

        Raises Bug for a ref of another config, StoreFault.
        """
        return self._pointers.put_ref(channel, config, request_digest, ref)

    def ref(self, channel: str, config: str, request_digest: str) -> Ref | None:
        """The ref, or None when absent. Raises Damaged (after quarantine), StoreFault."""
        name = layout.ref_name(channel, config, request_digest)
        return self._pointers.documents(channel, request_digest).read(name)

    def refs(self, channel: str) -> list[tuple[str, Ref]]:
        """(request digest, ref) of every good ref of a channel; others are logged. Raises StoreFault."""
        return self._pointers.refs(channel)

    def channels(self) -> list[str]:
        """The names of all channels. Raises StoreFault."""
        return self._pointers.channels()

    def put_signatures(self, made: Signatures) -> Signatures:
        """Add what a signer says about a manifest of this store to what it said before; all. Raises StoreFault."""
        return self._pointers.put_signatures(made)

    def signatures(self, manifest_id: str, signer: str) -> Signatures | None:
        """What a signer says about a manifest, or None. Raises Damaged (after quarantine), StoreFault."""
        return self._pointers.signatures.read(layout.signature_name(manifest_id, signer))

    # What a manifest needs

    def artifacts(self, manifest: Manifest) -> list[Artifact]:
        """Every artifact of a manifest's graphs and native stores. Raises Miss when a graph has no record, Damaged."""
        return needs.artifacts(self._graphs, manifest)

    def missing(self, manifest: Manifest) -> list[Missing]:
        """What the store lacks for a manifest, by existence and size only; nothing large is read. Raises StoreFault."""
        return needs.missing(self._blobs, self._graphs, manifest)

    def damaged(self, manifest: Manifest) -> list[Missing]:
        """What is there and wrong, by digest (each blob hashed once per process); it is quarantined.

        What is absent is not listed: see `missing`. Raises StoreFault.
        """
        return needs.damaged(self._blobs, self._graphs, manifest)

    def quarantined(self) -> list[str]:
        """The names of the files in quarantine. Raises StoreFault."""
        return names(self.root / layout.QUARANTINE)

    # A tier among others

    def get(self, key: str) -> bytes | None:
        """The checked bytes of a name in the layout, or None. Raises Damaged, StoreFault, Usage for a foreign name."""
        name = _parsed(key)
        if name.kind == "blob":
            return self._blobs.read(name.id)
        if name.kind == "graph":
            return self._graphs.read_bytes(key)
        if name.kind == "manifest":
            return self._manifests.read_bytes(key)
        if name.kind == "key":
            return self._pointers.keys.read_bytes(key)
        if name.kind == "signature":
            return self._pointers.signatures.read_bytes(key)
        channel, _, stem = name.id.partition("/")
        return self._pointers.documents(channel, stem.rpartition("-")[2]).read_bytes(key)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Store an immutable thing under its name: True when this call did, False when it was there.

        Raises Damaged when `data` does not belong under that name, StoreFault; Bug for a pointer, which can change.
        """
        name, before = _parsed(key), self.exists(key)
        if name.kind == "blob":
            if sha256_hex(data) != name.id:
                raise Damaged(f"{key} was given {sha256_hex(data)}", details={"blob": name.id})
            before = self._blobs.holds(name.id)
            self.put_blob(data)
            return not before
        if name.kind == "graph":
            record = self._graphs.check(key, data)
            return self.put_graph(record) is record and not before
        if name.kind == "manifest":
            manifest = self._manifests.check(key, data)
            return self.put_manifest(manifest) is manifest and not before
        raise Bug(f"{key} can change: use set_pointer, put_ref or put_signatures")

    def exists(self, key: str) -> bool:
        """Whether something has that name; the content is not read. Raises StoreFault, Usage for a foreign name."""
        _parsed(key)
        with storage("looking at", self.root / key):
            try:
                os.lstat(self.root / key)
            except FileNotFoundError:
                return False
        return True

    def names(self, kind: layout.Kind) -> list[str]:
        """The names in the layout of everything of one kind, in order; orphans are left out. Raises StoreFault."""
        if kind == "blob":
            return [layout.blob_name(sha256) for sha256 in self.blobs()]
        if kind == "signature":
            folders = [f"{layout.SIGNATURES}/{name}" for name in names(self.root / layout.SIGNATURES)]
        elif kind == "ref":
            folders = [layout.channel_name(channel) for channel in self.channels()]
        else:
            folders = [{"graph": layout.GRAPHS, "manifest": layout.MANIFESTS, "key": layout.KEYS}[kind]]
        found = [f"{folder}/{name}" for folder in folders for name in names(self.root / folder)]
        return [name for name in found if layout.parse(name)]

    def _graph_lacks(self, record: GraphRecord) -> list[Missing]:
        text = [] if self.has_blob(record.text) else [Missing("artifact", record.text, layout.blob_name(record.text))]
        return text + needs.unusable(self._blobs, record.artifacts)

    def _need(self, lacking: Sequence[Missing], what: str) -> None:
        if lacking:
            raise StoreFault(
                f"{what} cannot be recorded: {lacking[0].kind} {lacking[0].what} is not in {self.root}"
                + (f", and {len(lacking) - 1} more" if len(lacking) > 1 else ""),
                hint="put what a record names before the record",
                details={"missing": [{"kind": item.kind, "what": item.what} for item in lacking]},
            )

    def _absent(self, sha256: str) -> Miss:
        path = self._blobs.expected_path(sha256)
        return Miss(f"there is no blob {path}", hint="pull it or warm again", details={"blob": sha256})

    # Leftovers

    def sweep(self, *, older_than: float = SWEEP_AGE, now: float | None = None) -> list[str]:
        """Remove leftovers of killed writers in tmp/ that were last changed more than `older_than` seconds ago.

        The names that were removed. A live writer's file is younger. Raises StoreFault.
        """
        self._root.need_writable()
        limit, swept = (time.time() if now is None else now) - older_than, []
        for name in names(self.root / layout.TMP):
            path = self.root / layout.TMP / name
            with storage("sweeping", path):
                try:
                    old = os.lstat(path).st_mtime < limit
                except FileNotFoundError:
                    continue
            if old:
                remove(path)
                swept.append(name)
        return swept


def _stems(found: Sequence[str]) -> list[str]:
    return [name.rpartition("/")[2].removesuffix(".json") for name in found]


def _parsed(key: str) -> layout.Name:
    name = layout.parse(key)
    if name is None:
        raise Usage(f"{key!r} is not a name of a store")
    return name
