"""A bundle: manifests and all that they need as one file, a plain tar (POSIX ustar) of names of the layout.

The first member, `neffcache-bundle.json`, says what follows: blobs, graph records, manifests, signatures, in this order
and sorted, with no time, owner or compression, so that equal content gives equal bytes and a bundle can be read from a
pipe. A reader takes regular members with names of the layout and nothing else; see `members`.
"""

from __future__ import annotations

import json
import os
import stat
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from neffcache.errors import StoreFault, Usage
from neffcache.key.canonical import canonical_json
from neffcache.store import layout
from neffcache.store.local import LocalStore
from neffcache.store.records import Damaged, GraphRecord, Manifest, Ref, Signatures, decode

INDEX = "neffcache-bundle.json"
FORMAT, SCHEMA = "neffcache-bundle", 1
ORDER = ("blob", "graph", "manifest", "signature")
BLOCK, CHUNK = 512, 1 << 20
MAX_DOCUMENT = 64 << 20
"""Bytes that a record may have; it is held in memory."""
MAX_MEMBER = (8 << 30) - 1
"""Bytes that a member of this kind of tar can have."""

_HINT = "get it again from where it was exported; import nothing that you do not trust without --require-signature"
_OTHER_KINDS = {
    tarfile.LNKTYPE: "a hard link",
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.DIRTYPE: "a directory",
    tarfile.FIFOTYPE: "a pipe",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
}


@dataclass(frozen=True, slots=True)
class Named:
    """A ref and its channel."""

    channel: str
    ref: Ref


@dataclass(frozen=True, slots=True)
class Written:
    """What a bundle holds; `bytes` are those of its members."""

    manifests: tuple[str, ...]
    refs: int
    members: int
    bytes: int


@dataclass(slots=True)
class Bundle:
    """What was read from a bundle and checked, before any record of it is in a store; its blobs are."""

    graphs: dict[str, GraphRecord] = field(default_factory=dict)
    manifests: dict[str, Manifest] = field(default_factory=dict)
    signatures: dict[tuple[str, str], Signatures] = field(default_factory=dict)
    refs: list[Named] = field(default_factory=list)
    members: int = 0
    bytes: int = 0


def write(store: LocalStore, manifests: Sequence[Manifest], refs: Iterable[Named], target: BinaryIO) -> Written:
    """Write complete manifests, their refs and signatures. Raises Miss, Damaged for what they lack, StoreFault."""
    blobs: dict[str, int] = {}
    graphs: set[str] = set()
    for manifest in manifests:
        for item in store.artifacts(manifest):
            blobs[item.sha256] = item.size
        for key in manifest.compile_keys():
            graphs.add(key)
            if (record := store.get_graph(key)) is not None and (size := store.blob_size(record.text)) is not None:
                blobs[record.text] = size
    ids = sorted({manifest.id for manifest in manifests})
    documents = [
        *(layout.graph_name(key) for key in sorted(graphs)),
        *(layout.manifest_name(manifest_id) for manifest_id in ids),
        *(name for name in store.names("signature") if name.split("/")[1] in ids),
    ]
    data = {name: store.get(name) or b"" for name in documents}
    ordered = sorted(refs, key=lambda item: (item.channel, item.ref.config, canonical_json(dict(item.ref.request))))
    total = sum(blobs.values()) + sum(map(len, data.values()))
    index = {
        "format": FORMAT,
        "schema": SCHEMA,
        "manifests": ids,
        "refs": [{"channel": item.channel, "document": item.ref.to_json()} for item in ordered],
        "members": len(blobs) + len(data),
        "bytes": total,
    }
    text = json.dumps(index, sort_keys=True, indent=1).encode() + b"\n"
    _member(target, INDEX, len(text), [text])
    for sha256, size in sorted(blobs.items()):
        _member(target, layout.blob_name(sha256), size, _content(store, sha256, size))
    for name, content in data.items():
        _member(target, name, len(content), [content])
    target.write(bytes(2 * BLOCK))
    return Written(tuple(ids), len(ordered), len(blobs) + len(data), total)


def read(source: BinaryIO, store: LocalStore) -> Bundle:
    """Read a bundle: its blobs go into the store, checked by digest; its records are given back, checked too.

    Raises Usage when it is no bundle, Damaged for one that is damaged or made to harm, StoreFault, also before the
    first blob when there is no space for what the bundle says it holds.
    """
    walk = members(source)
    bundle, index = Bundle(), _index(source, next(walk, None))
    bundle.refs = _refs(index)
    store.require_space(index["bytes"])
    rank = 0
    with store.batch() as batch:
        for name, size, chunks in walk:
            parsed = layout.parse(name)
            if parsed is None or parsed.kind not in ORDER:
                raise Damaged(f"the bundle has a member {name[:120]!r}, which is no name of a store", hint=_HINT)
            if ORDER.index(parsed.kind) < rank:
                raise Damaged(f"the bundle has {name} after what names it", hint=_HINT)
            rank = ORDER.index(parsed.kind)
            bundle.members, bundle.bytes = bundle.members + 1, bundle.bytes + size
            if bundle.members > index["members"] or bundle.bytes > index["bytes"]:
                raise Damaged("the bundle holds more than it says", hint=_HINT)
            if parsed.kind == "blob":
                batch.put_chunks(chunks, expect=parsed.id)
            else:
                _document(bundle, name, parsed.kind, _whole(name, size, chunks))
    if (bundle.members, bundle.bytes) != (index["members"], index["bytes"]):
        raise Damaged(
            f"the bundle holds {bundle.members} of {index['members']} members, {bundle.bytes:,} bytes", hint=_HINT
        )
    if sorted(bundle.manifests) != index["manifests"]:
        raise Damaged("the bundle holds other manifests than it says", hint=_HINT)
    return bundle


def members(source: BinaryIO) -> Iterator[tuple[str, int, Iterator[bytes]]]:
    """(name, bytes, content in chunks) of each member; whoever does not read the content lets it be skipped.

    Only headers of regular files are understood: no links, devices, directories, sparse files or extended headers, so
    that nothing a header says can be larger than the file. Raises Damaged, also for a name that comes twice.
    """
    seen: set[str] = set()
    while True:
        header = _exactly(source, BLOCK)
        if header == bytes(BLOCK):
            return
        try:
            info = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
        except (tarfile.HeaderError, ValueError) as error:
            raise Damaged(f"the bundle has a header that is none: {error}", hint=_HINT) from error
        name = info.name
        if info.type != tarfile.REGTYPE:
            kind = _OTHER_KINDS.get(info.type, "an extended header")
            raise Damaged(f"the bundle has a member {name[:120]!r} that is {kind}", hint=_HINT)
        if name in seen:
            raise Damaged(f"the bundle has {name[:120]!r} twice", hint=_HINT)
        if not 0 <= info.size <= MAX_MEMBER:
            raise Damaged(f"the bundle says that {name[:120]!r} has {info.size} bytes", hint=_HINT)
        seen.add(name)
        chunks = _chunks(source, info.size)
        yield name, info.size, chunks
        for _ in chunks:
            pass


def _chunks(source: BinaryIO, size: int) -> Iterator[bytes]:
    left = size
    while left:
        chunk = _exactly(source, min(left, CHUNK))
        left -= len(chunk)
        yield chunk
    _exactly(source, -size % BLOCK)


def _exactly(source: BinaryIO, count: int) -> bytes:
    try:
        data = source.read(count)
    except OSError as error:
        raise StoreFault(f"the bundle cannot be read: {os.strerror(error.errno or 0)}") from error
    if len(data) != count:
        raise Damaged("the bundle ends early", hint=_HINT)
    return data


def _index(source: BinaryIO, first: tuple[str, int, Iterator[bytes]] | None) -> Mapping[str, Any]:
    if first is None or first[0] != INDEX:
        raise Usage(f"this is no bundle: its first member is not {INDEX}", hint="neffcache export makes one")
    try:
        index = json.loads(_whole(*first))
    except (ValueError, RecursionError) as error:
        raise Damaged(f"the bundle's index is not JSON: {error}", hint=_HINT) from error
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise Usage(f"this is no bundle: its {INDEX} is something else", hint="neffcache export makes one")
    if index.get("schema") != SCHEMA:
        raise StoreFault(
            f"the bundle has schema {index.get('schema')!r}; this version of neffcache reads schema {SCHEMA}",
            hint="upgrade neffcache",
        )
    counts = [index.get(name) for name in ("members", "bytes")]
    if any(type(count) is not int or count < 0 for count in counts) or not isinstance(index.get("manifests"), list):
        raise Damaged("the bundle's index is malformed", hint=_HINT)
    if (size := _file_size(source)) is not None and index["bytes"] > size:
        raise Damaged(f"the bundle says {index['bytes']:,} bytes and the file has {size:,}", hint=_HINT)
    return index


def _refs(index: Mapping[str, Any]) -> list[Named]:
    found = []
    try:
        for item in index["refs"]:
            layout.channel_name(item["channel"])
            ref = Ref.from_json(item["document"])
            if ref.request.get("config") != ref.config or ref.manifest not in index["manifests"]:
                raise Damaged(f"a ref of the bundle to {ref.config!r} contradicts itself", hint=_HINT)
            found.append(Named(item["channel"], ref))
    except (KeyError, TypeError, Usage) as error:
        raise Damaged(f"a ref of the bundle is malformed: {error}", hint=_HINT) from error
    return found


def _document(bundle: Bundle, name: str, kind: str, data: bytes) -> None:
    if kind == "graph":
        record = decode(GraphRecord, data)
        bundle.graphs[record.compile_key] = record
        own = layout.graph_name(record.compile_key)
    elif kind == "manifest":
        manifest = decode(Manifest, data)
        bundle.manifests[manifest.id] = manifest
        own = layout.manifest_name(manifest.id)
    else:
        signatures = decode(Signatures, data)
        bundle.signatures[signatures.manifest, signatures.signer] = signatures
        own = layout.signature_name(signatures.manifest, signatures.signer)
    if own != name:
        raise Damaged(f"the bundle has under {name} what belongs to {own}", hint=_HINT)


def _whole(name: str, size: int, chunks: Iterator[bytes]) -> bytes:
    if size > MAX_DOCUMENT:
        raise Damaged(f"the bundle says that the record {name[:120]} has {size:,} bytes", hint=_HINT)
    return b"".join(chunks)


def _file_size(source: BinaryIO) -> int | None:
    try:
        status = os.fstat(source.fileno())
    except (OSError, AttributeError, ValueError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _member(target: BinaryIO, name: str, size: int, content: Iterable[bytes]) -> None:
    if size > MAX_MEMBER:
        raise StoreFault(f"{name} has {size:,} bytes, more than a member of a bundle can have")
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o444
    target.write(info.tobuf(tarfile.USTAR_FORMAT))
    for chunk in content:
        target.write(chunk)
    target.write(bytes(-size % BLOCK))


def _content(store: LocalStore, sha256: str, size: int) -> Iterator[bytes]:
    """The checked bytes of a blob, exactly `size` of them."""
    path = store.blob_path(sha256)
    left = size
    with open(path, "rb") as file:
        for chunk in iter(lambda: file.read(CHUNK), b""):
            left -= len(chunk)
            yield chunk
    if left:
        raise Damaged(f"blob {sha256} has not the size that its record says", hint="run `neffcache verify`")
