"""Where `init` takes things from: a remote, or the directory of another store on a shared file system."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from neffcache.errors import Miss, StoreFault
from neffcache.flows.trust import Approve
from neffcache.store.blobs import read_file
from neffcache.store.local import LocalStore
from neffcache.store.records import GraphRecord, Manifest, Ref, Signatures

if TYPE_CHECKING:
    from neffcache.remote.tier import RemoteStore
    from neffcache.remote.transfer import Progress

WAIT = 4 * 3600.0
"""Seconds to wait for another process that fetches into the same store; a killed one's lock is gone at once."""


class Source(Protocol):
    """What can be asked for refs and signatures, and can bring all that a ref's manifest needs into a store."""

    @property
    def where(self) -> str: ...

    @property
    def requests(self) -> int:
        """Requests over a network so far."""

    def ref(self, channel: str, config: str, request_digest: str) -> Ref | None:
        """Raises Damaged, StoreFault, RemoteFault."""

    def signatures(self, manifest_id: str, signer: str) -> Signatures | None:
        """Raises Damaged, StoreFault, RemoteFault."""

    def fetch(self, ref: Ref, store: LocalStore, approve: Approve) -> int:
        """Bytes that were fetched; of processes that fetch into one store at once, one does.

        Afterwards the store holds the manifest and all that it names. Raises Miss when the source lacks something or
        the manifest is not complete, Damaged, StoreFault, RemoteFault, and what `approve` raises.
        """


class Directory:
    """Another store, read only."""

    requests = 0

    def __init__(self, path: Path) -> None:
        self.store = LocalStore.open(path, writable=False, given=True)
        if not self.store.root.is_dir():
            raise StoreFault(f"there is no store {self.store.root} to fetch from", hint="check the mount, or --remote")

    @property
    def where(self) -> str:
        return str(self.store.root)

    def ref(self, channel: str, config: str, request_digest: str) -> Ref | None:
        return self.store.ref(channel, config, request_digest)

    def signatures(self, manifest_id: str, signer: str) -> Signatures | None:
        return self.store.signatures(manifest_id, signer)

    def fetch(self, ref: Ref, store: LocalStore, approve: Approve) -> int:
        with store.base.lock("fetch", timeout=WAIT):
            manifest = self.store.get_manifest(ref.manifest)
            if manifest is None or not manifest.complete:
                why = "is gone from" if manifest is None else "is not complete in"
                raise Miss(f"manifest {ref.manifest[:12]} of {ref.config} {why} {self.where}", hint="warm it there")
            approve(manifest, self.store.get_graph)
            return self._copy(manifest, store)

    def _copy(self, manifest: Manifest, store: LocalStore) -> int:
        records = [self._record(key, manifest) for key in manifest.compile_keys()]
        needed = {item.sha256 for record in records for item in record.artifacts}
        needed |= {item.sha256 for item in manifest.artifacts} | {record.text for record in records}
        sizes = {sha256: self.store.blob_size(sha256) for sha256 in sorted(needed) if not self._held(store, sha256)}
        if absent := [sha256 for sha256, size in sizes.items() if size is None]:
            raise Miss(
                f"{self.where} lacks blob {absent[0]} of manifest {manifest.id[:12]}", hint="warm it there again"
            )
        total = sum(size or 0 for size in sizes.values())
        store.require_space(total)
        with store.batch() as batch:
            for sha256 in sizes:
                batch.put_chunks(self._content(sha256), expect=sha256)
        for record in records:
            store.put_graph(record)
        store.put_manifest(manifest)
        return total

    def _record(self, key: str, manifest: Manifest) -> GraphRecord:
        record = self.store.get_graph(key)
        if record is None:
            raise Miss(f"{self.where} lacks graph {key} of manifest {manifest.id[:12]}", hint="warm it there again")
        return record

    def _held(self, store: LocalStore, sha256: str) -> bool:
        size = store.blob_size(sha256)
        return size is not None and size == self.store.blob_size(sha256)

    def _content(self, sha256: str) -> Iterable[bytes]:
        return read_file(self.store.blob_path(sha256))


class Remote:
    """A remote, through `flows/pull.py`. Nothing is written to it, and nothing is listed."""

    def __init__(self, remote: RemoteStore, progress: Progress | None = None) -> None:
        self.remote = remote
        self.progress = progress

    @property
    def where(self) -> str:
        return self.remote.where

    @property
    def requests(self) -> int:
        return self.remote.client.requests()["total"]

    def ref(self, channel: str, config: str, request_digest: str) -> Ref | None:
        return self.remote.ref(channel, config, request_digest)

    def signatures(self, manifest_id: str, signer: str) -> Signatures | None:
        return self.remote.signatures(manifest_id, signer)

    def fetch(self, ref: Ref, store: LocalStore, approve: Approve) -> int:
        from neffcache.flows.pull import Target, pull

        target = Target(ref.config, ref.manifest, ref.cache_key)
        done = pull(self.remote, store, [target], progress=self.progress, approve=approve)
        if (fault := done.fault()) is not None:
            raise fault
        if not done.complete:
            raise Miss(
                f"manifest {ref.manifest[:12]} of {ref.config} is not complete in {self.where}",
                hint=f"neffcache warm {ref.config} --push, where it can be compiled",
            )
        return done.tally.transferred_bytes
