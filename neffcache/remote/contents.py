"""What manifests of a remote name: their records, and where everything lies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from neffcache.errors import NeffcacheError
from neffcache.remote import errors
from neffcache.remote.packs import Place, Span, places, spans
from neffcache.remote.tier import RemoteStore
from neffcache.remote.transfer import at_once
from neffcache.store import layout
from neffcache.store.records import Damaged, GraphRecord, Manifest, decode


class Contents:
    """Manifests and records that were read, what of them failed, and the places that they name."""

    def __init__(self, remote: RemoteStore) -> None:
        self.remote = remote
        self.manifests: dict[str, Manifest] = {}
        self.records: dict[str, GraphRecord] = {}
        self.place: dict[str, Place] = {}
        self.failures: dict[str, NeffcacheError] = {}
        """Name in the layout -> why it could not be had."""

    def load_manifests(self, ids: Iterable[str]) -> None:
        """Read manifests. Raises Fault when the remote as a whole is gone."""

        def load(manifest_id: str) -> None:
            name = layout.manifest_name(manifest_id)
            try:
                found = self.remote.get_manifest(manifest_id)
                if found is None:
                    raise errors.incomplete(self.remote.where, "a pointer or ref", [name])
                self.place |= places(found)
                self.manifests[manifest_id] = found
            except (errors.Fault, Damaged) as fault:
                self._failed(name, fault)

        at_once(self.remote.client.access.transfers, load, list(dict.fromkeys(ids)))

    def compile_keys(self) -> list[str]:
        """The compile keys of all manifests, each once."""
        return list(dict.fromkeys(key for item in self.manifests.values() for key in item.compile_keys()))

    def load_records(self, keys: Sequence[str]) -> None:
        """Read graph records, from packs where a manifest names one. A record that only manifests name which are not
        complete may be absent. Raises Fault when the remote as a whole is gone."""
        names = {layout.graph_name(key): key for key in keys}
        needed = {key for item in self.manifests.values() if item.complete for key in item.compile_keys()}
        packed = {name: self.place[name] for name in names if name in self.place}
        read: dict[str, bytes] = {}

        def unpack(span: Span) -> None:
            try:
                chunks = self.remote.client.chunks(layout.pack_name(span.pack), span.start, span.end - span.start)
                data = b"".join(chunks)
            except errors.Fault:
                self.remote.client.patience.check()
                return
            for name, place in span.members:
                read[name] = data[place.offset - span.start : place.offset - span.start + place.size]

        def load(name: str) -> None:
            try:
                data = self.remote.get(name)
                if data is not None:
                    self.records[names[name]] = self._decoded(name, data)
                elif names[name] in needed:
                    raise errors.incomplete(self.remote.where, "a complete manifest", [name])
            except (errors.Fault, Damaged) as fault:
                self._failed(name, fault)

        at_once(self.remote.client.access.transfers, unpack, spans(packed))
        for name, data in read.items():
            try:
                self.records[names[name]] = self._decoded(name, data)
            except Damaged:
                self.remote.client.count(errors.Corrupt.counter)
        # What is not packed, or damaged there, lies under its own name too.
        alone = [name for name, key in names.items() if key not in self.records]
        at_once(self.remote.client.access.transfers, load, alone)

    def blobs(self) -> dict[str, int | None]:
        """SHA-256 -> bytes of every blob that manifests and records name (None: only its record knows)."""
        sizes: dict[str, int | None] = {}
        for record in self.records.values():
            place = self.place.get(layout.blob_name(record.text))
            sizes.setdefault(record.text, place.size if place else None)
        artifacts = [artifact for record in self.records.values() for artifact in record.artifacts]
        artifacts += [artifact for found in self.manifests.values() for artifact in found.artifacts]
        sizes |= {artifact.sha256: artifact.size for artifact in artifacts}
        return sizes

    def _decoded(self, name: str, data: bytes) -> GraphRecord:
        record = decode(GraphRecord, data)
        if layout.graph_name(record.compile_key) != name:
            raise Damaged(f"{name} holds another graph's record")
        self.place |= places(record)
        return record

    def _failed(self, name: str, fault: NeffcacheError) -> None:
        self.remote.client.patience.check()
        self.failures[name] = fault if isinstance(fault, errors.Fault) else errors.corrupt(self.remote.where, name)
