"""Push: what jobs need, from the local store into the remote; each thing once, and only where it is absent.

Blobs and packs go first, then the records that name them, then manifests, then pointers and refs: at no moment does
the remote name what it does not have. Run again, it sends what is missing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from neffcache.errors import Miss, NeffcacheError
from neffcache.flows.pushable import Source
from neffcache.key.canonical import sha256_hex
from neffcache.remote import errors
from neffcache.remote.packs import SMALL, Place, places, plain, spread, with_places
from neffcache.remote.pointers import attest, point, refer
from neffcache.remote.presence import Presence
from neffcache.remote.private import refuse_private
from neffcache.remote.send import rewrite, send_blob, send_pack
from neffcache.remote.tier import RemoteStore, Versioned
from neffcache.remote.transfer import Progress, Tally, at_once, at_once_then
from neffcache.store import layout
from neffcache.store.local import LocalStore
from neffcache.store.records import Artifact, Damaged, GraphRecord, Manifest, Ref, Signatures, encode

NOT_CONDITIONAL = (
    "this store ignores If-None-Match: of two pushes at the same moment one may lose its pointer; push from one machine"
)


@dataclass
class Pushed:
    """What a push did. `conditional`: whether the store honours conditional writes (None: nothing was written)."""

    sources: Sequence[Source]
    tally: Tally = field(default_factory=Tally)
    current: dict[str, str] = field(default_factory=dict)
    repaired: list[str] = field(default_factory=list)
    conditional: bool | None = None
    seconds: float = 0.0

    def fault(self) -> NeffcacheError | None:
        """Why not everything that was planned is there; None when it is."""
        if not self.tally.failed:
            return None
        first = next(iter(self.tally.failures.values()))
        if self.tally.failed == 1:
            return first
        kind = type(first) if isinstance(first, errors.Fault) else errors.Incomplete
        return kind(
            f"{self.tally.failed} of {self.tally.planned} things could not be pushed; the first: {first.message}",
            hint=first.hint or "push again: only what is missing is sent",
            details={"failed": list(self.tally.failures)},
        )

    def to_json(self) -> dict[str, Any]:
        failed = self.tally.failures
        return {
            "targets": [
                {
                    "config": source.name,
                    "manifest": source.manifest.id,
                    "current": self.current.get(source.manifest.cache_key),
                    "cache_key": source.manifest.cache_key,
                    "complete": source.manifest.complete,
                    "pushed": layout.manifest_name(source.manifest.id) not in failed,
                }
                for source in self.sources
            ],
            **self.tally.to_json(),
            "repaired": self.repaired,
            "conditional_writes": self.conditional,
            "seconds": round(self.seconds, 3),
        }


def push(
    remote: RemoteStore,
    store: LocalStore,
    sources: Sequence[Source],
    *,
    progress: Progress | None = None,
    dry_run: bool = False,
    repair: bool = False,
) -> Pushed:
    """Send every source. With `dry_run` only ask what is there; `repair` reads what is there and rewrites damage.

    What could not be sent is in the result (`fault()`); raises Fault when the remote as a whole is gone or denies
    writing, Usage for what must not leave the machine, StoreFault for the local store.
    """
    progress = progress or Progress()
    started = time.monotonic()
    result = Pushed(sources)
    for source in sources:
        what = f"manifest {source.manifest.id[:12]} of {source.name}"
        refuse_private(what, source.manifest.to_json(), str(store.root), os.environ)
    _Push(remote, store, result, progress, repair=repair, dry_run=dry_run).run()
    result.seconds = time.monotonic() - started
    return result


class _Push:
    def __init__(
        self, remote: RemoteStore, store: LocalStore, result: Pushed, progress: Progress, *, repair: bool, dry_run: bool
    ) -> None:
        self.remote, self.store, self.result, self.progress, self.repair = remote, store, result, progress, repair
        self.dry_run = dry_run
        self.tally = result.tally
        self.presence = Presence(remote)
        self.manifests = {source.manifest.id: source.manifest for source in result.sources}
        self.signed = signatures_of(store, self.manifests)
        self.theirs: dict[str, Versioned[Manifest] | str | None] = {}
        self.records: dict[str, Versioned[GraphRecord] | str | None] = {}
        self.place: dict[str, Place] = {}
        self.sizes: dict[str, int] = {}
        """SHA-256 -> bytes of every blob that has to be there."""
        self.groups: list[list[str]] = []
        """Blobs that are to be sent, those of one record together."""
        self.mended: set[str] = set()
        self.ours: dict[str, GraphRecord] = {}
        """Records that the remote shall have from here."""

    def run(self) -> None:
        self._ask()
        self._plan()
        small, single = self._units()
        total = sum(self.sizes[sha256] for unit in small for sha256, _ in unit) + sum(
            self.sizes[item] for item in single
        )
        if self.dry_run:
            return
        writes = bool(small or single or self.ours or self._manifests_to_write())
        if writes:
            self.result.conditional = self.remote.conditional()  # one attempt: who may not write learns it here
            if not self.result.conditional:
                self.progress.note(f"warning: {NOT_CONDITIONAL}")
        self.progress.begin("pushing", sum(len(unit) for unit in small) + len(single), total)
        try:
            self._send(small, single)
        finally:
            self.progress.end()
        at_once(self.threads, self._put_manifest, list(self.manifests))
        at_once(self.threads, self._point, list({item.cache_key: item for item in self.manifests.values()}.values()))
        at_once(self.threads, self._attest, [item for found in self.signed.values() for item in found])
        at_once(self.threads, self._refer, [(s, ref) for s in self.result.sources for ref in s.refs])

    @property
    def threads(self) -> int:
        return self.remote.client.access.transfers

    # What is there

    def _ask(self) -> None:
        keys = list(dict.fromkeys(key for item in self.manifests.values() for key in item.compile_keys()))

        def manifest(name: str) -> None:
            self.theirs[name] = self.remote.versioned(Manifest, layout.manifest_name(name))

        def record(key: str) -> None:
            self.records[key] = self.remote.versioned(GraphRecord, layout.graph_name(key))

        at_once(self.threads, manifest, list(self.manifests))
        at_once(self.threads, record, keys)
        named: dict[str, Place | None] = {}
        for found in (*self.theirs.values(), *self.records.values()):
            if isinstance(found, Versioned):
                placed = _placed(found.record)
                self.place |= placed
                if isinstance(found.record, GraphRecord):
                    named |= {name: placed.get(name) for name in _blob_names(found.record)}
        for item in self.manifests.values():
            named |= {layout.blob_name(a.sha256): self.place.get(layout.blob_name(a.sha256)) for a in item.artifacts}
        # Else each is looked for right before it is sent: that is no time during which nothing is sent.
        for key in keys if self.dry_run or self.repair else ():
            if not isinstance(self.records[key], Versioned) and (local := self._local(key)) is not None:
                named |= {name: None for name in _blob_names(local) if self._size(name.rpartition("/")[2]) >= SMALL}
        self.presence.look(named)
        if self.repair:
            self.progress.begin("checking", len(named), 0)
            self.presence.hash(named, self.progress)
            self.progress.end()
            for pack in sorted(self.presence.bad_packs) if not self.dry_run else ():
                self._mend(pack)

    def _mend(self, pack: str) -> None:
        """Write a damaged pack anew when all of its members are here; else they go under their own names."""
        members = sorted((place.offset, name) for name, place in self.place.items() if place.pack == pack)
        try:
            whole = b"".join(self.store.read_blob(name.rpartition("/")[2]) for _, name in members)
        except (Miss, Damaged):
            return
        name = layout.pack_name(pack)
        head = self.presence.heads.get(name)
        if sha256_hex(whole) != pack or head is None:
            return
        if self.remote.client.put(name, whole, pack, size=len(whole), if_match=head.etag) is not None:
            self.result.repaired.append(name)
            self.mended |= {member for _, member in members}
            self.presence.damaged -= self.mended

    def _local(self, key: str) -> GraphRecord | None:
        try:
            return self.store.get_graph(key)
        except Damaged:
            return None

    def _size(self, sha256: str) -> int:
        return self.store.blob_size(sha256) or 0

    # What has to be sent

    def _plan(self) -> None:
        for key, found in self.records.items():
            self.tally.plan()
            local = self._local(key)
            name = layout.graph_name(key)
            if isinstance(found, Versioned):
                record = found.record
                gone = [blob for blob in _blob_names(record) if not self._there(blob, record)]
                heal = all(self.store.has_blob(blob.rpartition("/")[2]) for blob in gone)
                if heal or local is None or _blob_names(local) == _blob_names(record):
                    self._need(record)
                    self.tally.there()
                else:
                    self._send_record(local)  # another compile's files are gone, and ours differ
            elif local is not None:
                self._send_record(local)
            elif any(item.complete for item in self.manifests.values() if key in item.compile_keys()):
                self.tally.fail(name, self._gone(f"graph {key}"))
            else:
                self.tally.unplan()  # nobody has compiled it yet, and the manifest says so
        for item in self.manifests.values():
            self.tally.plan()
            self.groups.append([self._need_blob(artifact.sha256, artifact.size) for artifact in item.artifacts])
        for sha256 in self.sizes:
            self.tally.plan(self.sizes[sha256])
        for _ in {item.cache_key for item in self.manifests.values()}:
            self.tally.plan()
        for source in self.result.sources:
            for _ in source.refs:
                self.tally.plan()
        for signatures in self.signed.values():
            for _ in signatures:
                self.tally.plan()

    def _need(self, record: GraphRecord) -> None:
        sizes = {item.sha256: item.size for item in record.artifacts}
        text = self.place.get(layout.blob_name(record.text))
        sizes.setdefault(record.text, text.size if text else self._text_size(record.text))
        self.groups.append([self._need_blob(sha256, size) for sha256, size in sizes.items()])

    def _text_size(self, sha256: str) -> int:
        head = self.presence.heads.get(layout.blob_name(sha256))
        return head.size if head else self._size(sha256)

    def _send_record(self, local: GraphRecord) -> None:
        self.ours[local.compile_key] = plain(local)
        self._need(local)

    def _need_blob(self, sha256: str, size: int) -> str:
        self.sizes.setdefault(sha256, size)
        return sha256

    def _there(self, name: str, record: GraphRecord | None = None) -> bool:
        sha256 = name.rpartition("/")[2]
        size = next((a.size for a in record.artifacts if a.sha256 == sha256), None) if record else self.sizes[sha256]
        return self.presence.there(name, self.place.get(name), size)

    def _units(self) -> tuple[list[list[tuple[str, int]]], list[str]]:
        """Packs to send and blobs to send alone; what is there already is counted."""
        assigned: set[str] = set()
        grouped: list[list[tuple[str, int]]] = []
        single: list[str] = []
        for group in self.groups:
            small: list[tuple[str, int]] = []
            for sha256 in dict.fromkeys(group):
                if sha256 in assigned:
                    continue
                assigned.add(sha256)
                size, name = self.sizes[sha256], layout.blob_name(sha256)
                if name in self.mended:
                    self.tally.sent(size)
                elif self._there(name):
                    self.tally.there(size)
                elif size < SMALL and name not in self.place and self.presence.heads.get(name) is None:
                    small.append((sha256, size))
                else:
                    # A pack that lacks or damages it stays as it is: who reads looks under the blob's own name next.
                    single.append(sha256)
            grouped.append(small)
        packs = spread(grouped)
        single += [unit[0][0] for unit in packs if len(unit) == 1]
        return [unit for unit in packs if len(unit) > 1], single

    # Sending

    def _send(self, packs: Sequence[Sequence[tuple[str, int]]], single: Sequence[str]) -> None:
        """Send blobs, and each record as soon as all that it names is there (or failed, which fails it too)."""

        def pack(unit: Sequence[tuple[str, int]]) -> None:
            names = [layout.blob_name(sha256) for sha256, _ in unit]
            try:
                readers = [(n, _reader(self.store, sha256)) for n, (sha256, _) in zip(names, unit, strict=True)]
                placed, new = send_pack(self.remote, readers)
            except (errors.Fault, Miss, Damaged) as fault:
                self._failed(names, fault)
                return
            self.place |= placed
            for _, size in unit:
                self.tally.sent(size) if new else self.tally.there(size)
            self.progress.moved(sum(size for _, size in unit))

        def blob(sha256: str) -> None:
            name, size = layout.blob_name(sha256), self.sizes[sha256]
            try:
                head = self.presence.head(name) if size >= SMALL else self.presence.heads.get(name)
                if head is not None and self.presence.there(name, None, size):
                    self.tally.there(size)
                elif head is not None and self.repair:
                    rewrite(self.remote, self.store, sha256, size)
                    self.result.repaired.append(name)
                    self.tally.sent(size)
                elif head is not None:
                    raise errors.corrupt(self.remote.where, name)
                elif send_blob(self.remote, self.store, sha256, size):
                    self.tally.sent(size)
                    if name in self.place:
                        self.result.repaired.append(name)
                else:
                    self.tally.there(size)
            except (errors.Fault, Miss, Damaged) as fault:
                self._failed([name], fault)
            self.progress.moved(size)

        units: list[Sequence[tuple[str, int]] | str] = [*sorted(single, key=lambda item: -self.sizes[item]), *packs]
        holds = {layout.blob_name(sha256): n for n, item in enumerate(units) for sha256 in _members(item)}
        needs = {
            key: [holds[name] for name in _blob_names(record) if name in holds] for key, record in self.ours.items()
        }

        def unit(number: int) -> None:
            item = units[number]
            blob(item) if isinstance(item, str) else pack(item)

        at_once_then(self.threads, unit, range(len(units)), self._put_record, needs)

    def _put_record(self, key: str) -> None:
        record, name = self.ours[key], layout.graph_name(key)
        blobs = _blob_names(record)
        bad = next((blob for blob in blobs if blob in self.tally.failures), None)
        if bad is not None:
            self._failed([name], self.tally.failures[bad])
            return
        record = with_places(record, {blob: self.place[blob] for blob in blobs if blob in self.place})
        found = self.records[key]
        etag = found.etag if isinstance(found, Versioned) else found
        try:
            if self.remote.replace(name, record, etag):
                self.records[key] = Versioned(record, "")
                self.tally.sent()
                if etag is not None:
                    self.result.repaired.append(name)
                return
            winner = self.remote.versioned(GraphRecord, name)
            if not isinstance(winner, Versioned):
                raise errors.corrupt(self.remote.where, name)
            self.records[key] = winner  # somebody else was first; readers get one record, not two
            self.place |= _placed(winner.record)
            self.tally.there()
        except errors.Fault as fault:
            self._failed([name], fault)

    def _manifests_to_write(self) -> bool:
        return any(not isinstance(found, Versioned) for found in self.theirs.values())

    def _put_manifest(self, manifest_id: str) -> None:
        made, name = self.manifests[manifest_id], layout.manifest_name(manifest_id)
        known = {layout.graph_name(key): self.records.get(key) for key in made.compile_keys()}
        graphs = {item: record.record for item, record in known.items() if isinstance(record, Versioned)}
        named = [*(layout.blob_name(item.sha256) for item in made.artifacts), *graphs]
        named += [layout.graph_name(key) for key in made.compile_keys()]
        named += [blob for record in graphs.values() for blob in _blob_names(record)]
        bad = next((item for item in named if item in self.tally.failures), None)
        if bad is not None and made.complete:
            self._failed([name], self.tally.failures[bad])
            return
        found = self.theirs[manifest_id]
        try:
            if isinstance(found, Versioned) and self._packs_are_there(found.record):
                self.tally.there()
                return
            placed = {name: self.place[name] for name in named if name in self.place and name.startswith("blobs/")}
            native = {layout.blob_name(item.sha256) for item in made.artifacts}
            placed = {name: place for name, place in placed.items() if name in native}
            data = {item: encode(record) for item, record in graphs.items()}
            for unit in spread([[(item, len(content))] for item, content in data.items()]):
                if len(unit) > 1:
                    placed |= send_pack(self.remote, [(item, _reader_of(data[item])) for item, _ in unit])[0]
            etag = found.etag if isinstance(found, Versioned) else found
            new = self.remote.replace(name, with_places(made, placed), etag)
            self.tally.sent() if new else self.tally.there()
            if new and etag is not None:
                self.result.repaired.append(name)
        except errors.Fault as fault:
            self._failed([name], fault)

    def _packs_are_there(self, theirs: Manifest) -> bool:
        placed = {name: place for name, place in _placed(theirs).items() if name.startswith("graphs/")}
        self.presence.look(placed)
        if self.repair:
            return self._records_are_good(placed)
        return all(self.presence.there(name, place, place.size) for name, place in placed.items())

    def _records_are_good(self, placed: Mapping[str, Place]) -> bool:
        for pack in {place.pack for place in placed.values()}:
            found = self.remote.client.read(layout.pack_name(pack))
            if found is None or sha256_hex(found[0]) != pack:
                return False
        return True

    def _point(self, made: Manifest) -> None:
        name = layout.pointer_name(made.cache_key)
        manifests = [item for item in self.manifests.values() if item.cache_key == made.cache_key]
        for item in manifests:
            bad = self.tally.failures.get(layout.manifest_name(item.id))
            if bad is not None:
                self._failed([name], bad)
                return
        try:
            changed = False
            for item in manifests:
                current, moved = point(self.remote, item)
                self.result.current[made.cache_key] = current.id
                changed |= moved
            self.tally.sent() if changed else self.tally.there()
        except NeffcacheError as fault:
            self._failed([name], fault)

    def _attest(self, ours: Signatures) -> None:
        name = layout.signature_name(ours.manifest, ours.signer)
        bad = self.tally.failures.get(layout.manifest_name(ours.manifest))
        try:
            if bad is not None:
                self._failed([name], bad)
            elif attest(self.remote, ours):
                self.tally.sent()
            else:
                self.tally.there()
        except errors.Fault as fault:
            self._failed([name], fault)

    def _refer(self, item: tuple[Source, tuple[str, str, Ref]]) -> None:
        source, (channel, digest, ref) = item
        name = layout.ref_name(channel, ref.config, digest)
        pointer = layout.pointer_name(ref.cache_key)
        if pointer in self.tally.failures:
            self._failed([name], self.tally.failures[pointer])
            return
        current = self.result.current.get(ref.cache_key, source.manifest.id)
        if self.signed.get(ref.manifest):
            current = ref.manifest  # nobody has signed a union

        def make(found: Ref | None) -> Ref:
            known = 0 if found is None else found.serial
            if found is not None and known > ref.serial and ref.manifest == source.manifest.id:
                return found  # somebody has warmed this request since
            extra = {**(found.extra if found else {}), **ref.extra}
            serial = ref.serial if current == ref.manifest else max(known, ref.serial) + 1
            return Ref(ref.request, ref.cache_key, current, ref.config, serial, extra)

        try:
            _, changed = refer(self.remote, channel, digest, make, ref.config)
            self.tally.sent() if changed else self.tally.there()
        except errors.Fault as fault:
            self._failed([name], fault)

    def _failed(self, names: Iterable[str], fault: NeffcacheError) -> None:
        self.remote.client.patience.check()
        if isinstance(fault, errors.Denied) and fault.details.get("put"):
            raise fault
        for name in names:
            self.tally.fail(name, fault)

    def _gone(self, what: str) -> Miss:
        return Miss(f"{what} is neither in {self.store.root} nor in {self.remote.where}", hint="warm it again")


def signatures_of(store: LocalStore, manifests: Iterable[str]) -> dict[str, list[Signatures]]:
    """What signers say about manifests, by manifest id. Raises Damaged, StoreFault."""
    wanted, signed = set(manifests), dict[str, list[Signatures]]()
    for name in store.names("signature"):
        _, manifest_id, signer = name.split("/")
        if manifest_id in wanted and (found := store.signatures(manifest_id, signer)) is not None:
            signed.setdefault(manifest_id, []).append(found)
    return signed


def _placed(record: GraphRecord | Manifest) -> dict[str, Place]:
    try:
        return places(record)
    except Damaged:
        return {}  # then everything is looked for under its own name


def _blob_names(record: GraphRecord) -> list[str]:
    """Everything that a record names, each once."""
    artifacts: Sequence[Artifact] = record.artifacts
    return [layout.blob_name(sha256) for sha256 in dict.fromkeys((record.text, *(a.sha256 for a in artifacts)))]


def _members(unit: Sequence[tuple[str, int]] | str) -> list[str]:
    return [unit] if isinstance(unit, str) else [sha256 for sha256, _ in unit]


def _reader_of(data: bytes) -> Callable[[], bytes]:
    return lambda: data


def _reader(store: LocalStore, sha256: str) -> Callable[[], bytes]:
    return lambda: store.read_blob(sha256)
