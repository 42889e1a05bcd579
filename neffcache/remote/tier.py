"""The remote as a tier: the same names and records as a local store, every byte checked on its way in.

Order of writing: blobs and packs, then records, then manifests, then pointers and refs. Immutable things are written
only where their name is free; pointers only over what was read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from neffcache.errors import Bug, Usage
from neffcache.key.canonical import sha256_hex
from neffcache.remote.client import Access, Client, Item
from neffcache.remote.errors import Refused, corrupt
from neffcache.remote.url import Url, parse
from neffcache.store import layout
from neffcache.store.records import Damaged, GraphRecord, KeyPointer, Manifest, Record, Ref, Signatures, decode, encode

RecordT = TypeVar("RecordT", bound=Record)

PROBE = "probe"
"""An object of no meaning under `v1/`, written to see whether the store honours conditions."""


@dataclass(frozen=True)
class Versioned(Generic[RecordT]):
    """A record and the ETag under which it was read."""

    record: RecordT
    etag: str


class RemoteStore:
    """One remote. Safe to use from several threads."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.verifies = False
        """Whether this store is known to refuse what has not the SHA-256 it is sent with: `conditional` finds out."""
        self._conditional: bool | None = None

    @classmethod
    def open(cls, url: str | Url, access: Access | None = None) -> RemoteStore:
        """No request is made. Raises Usage, Fault for settings that botocore refuses."""
        return cls(Client(parse(url) if isinstance(url, str) else url, access or Access()))

    @property
    def where(self) -> str:
        return self.client.where

    # A tier among others

    def get(self, key: str) -> bytes | None:
        """The checked bytes of a name in the layout, or None. Raises Damaged, Fault, Usage for a foreign name."""
        found = self.client.read(key)
        if found is None:
            return None
        try:
            check(key, found[0])
        except Damaged:
            self.client.count("corrupt")
            found = self.client.read(key)  # bytes that changed on the way are right the second time
            if found is None:
                return None
            try:
                check(key, found[0])
            except Damaged as error:
                raise self.damaged(key) from error
        return found[0]

    def damaged(self, key: str) -> Damaged:
        """The fault of an object that is not what was put."""
        fault = corrupt(self.where, key)
        return Damaged(fault.message, hint=fault.hint, details=fault.details)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Store an immutable thing under its name: True when this call did, False when it was there.

        Raises Damaged when `data` does not belong under that name, Fault; Bug for a pointer, which can change.
        """
        check(key, data)
        if _kind(key) in ("key", "ref", "signature"):
            raise Bug(f"{key} can change: use `replace`")
        return self.client.put(key, data, sha256_hex(data), size=len(data), if_absent=True) is not None

    def exists(self, key: str) -> bool:
        """Whether something has that name; the content is not read. Raises Fault."""
        return self.client.head(key) is not None

    # Records

    def get_graph(self, compile_key: str) -> GraphRecord | None:
        """The record, or None when absent. Raises Damaged, Fault, StoreFault for an unknown schema."""
        return self._read(GraphRecord, layout.graph_name(compile_key))

    def get_manifest(self, manifest_id: str) -> Manifest | None:
        """The manifest, or None when absent. Errors as `get_graph`."""
        return self._read(Manifest, layout.manifest_name(manifest_id))

    def pointer(self, cache_key: str) -> KeyPointer | None:
        """The pointer of a job key, or None when absent. Errors as `get_graph`."""
        return self._read(KeyPointer, layout.pointer_name(cache_key))

    def ref(self, channel: str, config: str, request_digest: str) -> Ref | None:
        """The ref, or None when absent. Errors as `get_graph`."""
        return self._read(Ref, layout.ref_name(channel, config, request_digest))

    def signatures(self, manifest_id: str, signer: str) -> Signatures | None:
        """What a signer says about a manifest, or None when absent. Errors as `get_graph`."""
        return self._read(Signatures, layout.signature_name(manifest_id, signer))

    def versioned(self, kind: type[RecordT], name: str) -> Versioned[RecordT] | str | None:
        """A record with its ETag; of a damaged one only the ETag, None when absent. Raises Fault."""
        found = self.client.read(name)
        if found is None:
            return None
        try:
            check(name, found[0])
            return Versioned(decode(kind, found[0]), found[1])
        except Damaged:
            return found[1]

    def replace(self, name: str, record: Record, etag: str | None) -> bool:
        """Write a record over the state of that ETag (None: over nothing); whether it still was that. Raises Fault."""
        data = encode(record)
        check(name, data)
        return (
            self.client.put(name, data, sha256_hex(data), size=len(data), if_absent=etag is None, if_match=etag)
            is not None
        )

    def names(self, kind: layout.Kind) -> Iterator[str]:
        """The names of everything of one kind, page by page; foreign objects are left out. Raises Fault."""
        return (item.name for item in self.items(kind))

    def items(self, kind: layout.Kind, below: str = "") -> Iterator[Item]:
        """The same with sizes; `below` a folder of that kind."""
        folder = {"blob": layout.BLOBS, "graph": layout.GRAPHS, "manifest": layout.MANIFESTS, "key": layout.KEYS,
                  "ref": layout.REFS, "signature": layout.SIGNATURES}[kind]  # fmt: skip
        for item in self.client.names(f"{folder}/{below}" if below else folder):
            name = layout.parse(item.name)
            if name is not None and name.kind == kind:
                yield item

    def conditional(self) -> bool:
        """Whether this store honours `If-None-Match` and `If-Match`, found out by writing a probe. Raises Fault."""
        if self._conditional is None:
            self._conditional = self._probe()
            self.verifies = self.client.refuses_another_digest(PROBE)
        return self._conditional

    def _probe(self) -> bool:
        data = b"neffcache\n"
        digest = sha256_hex(data)
        put = self.client.put
        try:
            if put(PROBE, data, digest, size=len(data), if_absent=True) is not None and (
                put(PROBE, data, digest, size=len(data), if_absent=True) is not None
            ):
                return False
            return put(PROBE, data, digest, size=len(data), if_match='"0123456789abcdef0123456789abcdef"') is None
        except Refused as fault:
            if fault.details.get("status") == 501:
                return False
            raise

    def _read(self, kind: type[RecordT], name: str) -> RecordT | None:
        data = self.get(name)
        return None if data is None else decode(kind, data)


def check(key: str, data: bytes) -> None:
    """Raises Damaged unless `data` belongs under that name of the layout, StoreFault for an unknown schema."""
    name = _parsed(key)
    if name.kind == "blob":
        found, wanted = sha256_hex(data), name.id
    elif name.kind == "graph":
        found, wanted = decode(GraphRecord, data).compile_key, name.id
    elif name.kind == "manifest":
        found, wanted = decode(Manifest, data).id, name.id
    elif name.kind == "key":
        found, wanted = decode(KeyPointer, data).cache_key, name.id
    elif name.kind == "signature":
        signatures = decode(Signatures, data)
        wanted, found = key, layout.signature_name(signatures.manifest, signatures.signer)
    else:
        channel, _, stem = name.id.partition("/")
        wanted = key
        found = layout.ref_name(channel, decode(Ref, data).config, stem.rpartition("-")[2])
    if found != wanted:
        raise Damaged(f"{key} is damaged: it holds what belongs to {found}", details={"name": key})


def _kind(key: str) -> layout.Kind:
    return _parsed(key).kind


def _parsed(key: str) -> layout.Name:
    name = layout.parse(key)
    if name is None:
        raise Usage(f"{key!r} is not a name of a store")
    return name
