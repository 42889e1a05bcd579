"""Pull: what a job needs, from the remote into the local store. Nothing is ever written to the remote.

A pull with nothing to do costs one request a configuration and reads no blob. Processes of one node that pull into one
store at once fetch each blob once: the first one fetches, the others find it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from neffcache.errors import Miss, NeffcacheError
from neffcache.flows.trust import Approve
from neffcache.key.canonical import canonical_json
from neffcache.remote import errors
from neffcache.remote.contents import Contents
from neffcache.remote.fetch import Want, fetch
from neffcache.remote.packs import plain
from neffcache.remote.tier import RemoteStore
from neffcache.remote.transfer import Progress, Tally, Waiting, at_once
from neffcache.store import layout
from neffcache.store.local import LocalStore
from neffcache.store.records import Damaged, GraphRecord, Manifest, Ref, decode

HELD = 4 * 3600.0
"""Seconds to wait for another process that fetches into the same store; a killed one's lock is gone at once."""


@dataclass(frozen=True)
class Target:
    """A manifest to pull, a name to call it by, and the refs that name it: (channel, request digest, ref)."""

    name: str
    manifest: str
    cache_key: str
    refs: tuple[tuple[str, str, Ref], ...] = ()


@dataclass
class Pulled:
    """What a pull did. `manifests` are now in the store, in the order of the targets (None: it could not be had)."""

    targets: Sequence[Target]
    tally: Tally = field(default_factory=Tally)
    manifests: list[Manifest | None] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether every target is here, complete, with everything that it names."""
        return not self.tally.failed and all(item is not None and item.complete for item in self.manifests)

    def fault(self) -> NeffcacheError | None:
        """Why not everything that was planned is here; None when it is."""
        if not self.tally.failed:
            return None
        faults = list(self.tally.failures.values())
        worst = next((fault for fault in faults if isinstance(fault, errors.Corrupt)), faults[0])
        if self.tally.failed == 1:
            return worst
        kind = type(worst) if isinstance(worst, errors.Fault) else errors.Incomplete
        return kind(
            f"{self.tally.failed} of {self.tally.planned} things could not be pulled; the first: {worst.message}",
            hint=worst.hint,
            details={"failed": list(self.tally.failures)},
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "targets": [
                {
                    "config": target.name,
                    "manifest": target.manifest,
                    "cache_key": target.cache_key,
                    "state": "MISS" if found is None else "HIT" if found.complete else "PARTIAL",
                }
                for target, found in zip(self.targets, self.manifests, strict=True)
            ],
            **self.tally.to_json(),
            "seconds": round(self.seconds, 3),
        }


# What to pull


def by_key(remote: RemoteStore, cache_key: str, name: str) -> Target | None:
    """The remote's current manifest of a job key, None when it has none: one request. Raises Damaged, Fault."""
    found = remote.pointer(cache_key)
    return None if found is None else Target(name, found.manifest, cache_key)


def by_ref(remote: RemoteStore, channel: str, config: str, request: Mapping[str, Any], digest: str) -> Target | None:
    """What a channel names for this very request, None when it names nothing: one request. Raises Damaged, Fault."""
    found = remote.ref(channel, config, digest)
    if found is None or canonical_json(found.request) != canonical_json(dict(request)):
        return None
    return Target(config, found.manifest, found.cache_key, ((channel, digest, found),))


def in_channel(remote: RemoteStore, channel: str, config: str | None = None) -> list[Target]:
    """Every manifest that a channel names (for one configuration). Needs the right to list. Raises Damaged, Fault."""
    found = [item.name for item in remote.items("ref", channel)]
    if config is not None:
        found = [name for name in found if (layout.split_ref(name.rpartition("/")[2]) or ("", ""))[0] == config]
    return _by_manifest(_refs(remote, found))


def everything(remote: RemoteStore) -> list[Target]:
    """The current manifest of every job key, with the refs of all channels. Needs the right to list."""
    targets = _by_manifest(_refs(remote, list(remote.names("ref"))))
    named = {target.manifest for target in targets}
    names = list(remote.names("key"))
    found: dict[str, Target] = {}

    def read(name: str) -> None:
        pointer = remote.pointer(layout.parse(name).id)  # type: ignore[union-attr]  # `names` gives only such
        if pointer is not None and pointer.manifest not in named:
            found[name] = Target(pointer.cache_key, pointer.manifest, pointer.cache_key)

    at_once(remote.client.access.transfers, read, names)
    return targets + [found[name] for name in names if name in found]


def _refs(remote: RemoteStore, names: Sequence[str]) -> list[tuple[str, str, Ref]]:
    found: dict[str, tuple[str, str, Ref]] = {}

    def read(name: str) -> None:
        folder, _, last = name.rpartition("/")
        split = layout.split_ref(last)
        data = remote.get(name)
        if split is not None and data is not None:
            found[name] = (folder.rpartition("/")[2], split[1], decode(Ref, data))

    at_once(remote.client.access.transfers, read, names)
    return [found[name] for name in names if name in found]


def _by_manifest(refs: Iterable[tuple[str, str, Ref]]) -> list[Target]:
    named: dict[str, list[tuple[str, str, Ref]]] = {}
    for item in refs:
        named.setdefault(item[2].manifest, []).append(item)
    return [
        Target(items[0][2].config, manifest, items[0][2].cache_key, tuple(items)) for manifest, items in named.items()
    ]


# Pulling


def pull(
    remote: RemoteStore,
    store: LocalStore,
    targets: Sequence[Target],
    *,
    progress: Progress | None = None,
    dry_run: bool = False,
    verify: bool = False,
    approve: Approve | None = None,
) -> Pulled:
    """Bring every target into the store, blobs first, pointers and refs last. With `dry_run` only plan.

    `verify` hashes what is here first, so that what is damaged is fetched again. `approve` is called with every
    manifest before a blob of it is fetched or anything of it has a name here; what it raises ends the pull.
    What could not be had is in the result (`fault()`); raises Fault when the remote as a whole is gone, StoreFault for
    the local store (also, before the first byte, when it has no space).
    """
    progress = progress or Progress()
    started = time.monotonic()
    result = Pulled(targets)
    if verify:
        for found in (store.get_manifest(target.manifest) for target in targets):
            if found is not None:
                store.damaged(found)
    result.manifests = [_here(store, target.manifest) for target in targets]
    lacking = [target for target, found in zip(targets, result.manifests, strict=True) if found is None]
    if lacking and dry_run:
        _Pull(remote, store, result.tally, progress, approve).run(lacking, dry_run=True)
    elif lacking:
        with _alone(store, progress):
            # Somebody who fetched while we waited may have brought all of it.
            _Pull(remote, store, result.tally, progress, approve).run(
                [target for target in lacking if _here(store, target.manifest) is None]
            )
    if not dry_run:
        result.manifests = [_read(store, target.manifest) for target in targets]
        for target, found in zip(targets, result.manifests, strict=True):
            if found is not None:
                _name(store, target, found)
    result.seconds = time.monotonic() - started
    return result


def _here(store: LocalStore, manifest_id: str) -> Manifest | None:
    """A complete manifest whose files are all here, by existence and size."""
    found = _read(store, manifest_id)
    return found if found is not None and found.complete and not store.missing(found) else None


def _read(store: LocalStore, manifest_id: str) -> Manifest | None:
    try:
        return store.get_manifest(manifest_id)
    except Damaged:
        return None


def _alone(store: LocalStore, progress: Progress) -> AbstractContextManager[None]:
    return store.base.lock("fetch", timeout=HELD)


def _name(store: LocalStore, target: Target, found: Manifest) -> None:
    pointer = store.pointer(target.cache_key)
    current = None if pointer is None or pointer.manifest == found.id else _read(store, pointer.manifest)
    if (pointer is None or pointer.manifest != found.id) and (
        current is None or found.complete or not current.complete
    ):
        store.set_pointer(target.cache_key, found.id)
    for channel, digest, ref in target.refs:
        if store.ref(channel, ref.config, digest) != ref:
            store.put_ref(channel, ref.config, digest, ref)


class _Pull:
    """One pull: manifests, then the records that lack, then the blobs that those name, then everything is recorded."""

    def __init__(
        self, remote: RemoteStore, store: LocalStore, tally: Tally, progress: Progress, approve: Approve | None
    ) -> None:
        self.remote, self.store, self.tally, self.progress, self.approve = remote, store, tally, progress, approve
        self.contents = Contents(remote)
        self.usable: dict[str, bool] = {}
        """Compile key -> whether its record is here with everything that it names, as far as that is known."""

    def run(self, targets: Sequence[Target], *, dry_run: bool = False) -> None:
        contents = self.contents
        contents.load_manifests(target.manifest for target in targets)
        lacking = [key for key in contents.compile_keys() if not self._usable(key)]
        contents.load_records(lacking)
        for _ in (*contents.manifests, *contents.records, *contents.failures):
            self.tally.plan()
        for name, fault in contents.failures.items():
            self.tally.fail(name, fault)
        if self.approve is not None:
            if contents.failures:
                return  # what was not seen whole cannot be approved
            for item in contents.manifests.values():
                self.approve(item, lambda key: contents.records.get(key) or self.store.get_graph(key))
        wanted = self._wanted()
        for want in wanted.values():
            self.tally.plan(want.size)
        total = sum(want.size for want in wanted.values())
        if dry_run:
            return
        self.store.require_space(total)
        waiting = Waiting(
            {key: [blob for blob in _named(item) if blob in wanted] for key, item in self.contents.records.items()}
        )

        def arrived(blobs: list[str]) -> None:
            self._put(waiting.done(blobs))  # while other blobs are on their way

        self.progress.begin("pulling", len(wanted), total)
        try:
            fetch(self.remote, self.store, list(wanted.values()), self.tally, self.progress, arrived)
        finally:
            self.progress.end()
        self._record()

    def _usable(self, compile_key: str) -> bool:
        try:
            record = self.store.get_graph(compile_key)
        except Damaged:
            return False
        return record is not None and all(self.store.blob_size(item.sha256) == item.size for item in record.artifacts)

    def _wanted(self) -> dict[str, Want]:
        wanted: dict[str, Want] = {}
        for sha256, size in self.contents.blobs().items():
            present = self.store.blob_size(sha256)
            # Without a size only emptiness tells what a power cut left: no text of a graph is empty.
            if present is None or (present == 0 if size is None else present != size):
                place = self.contents.place.get(layout.blob_name(sha256))
                wanted[sha256] = Want(sha256, size or 0, place)
        return wanted

    def _put(self, keys: Sequence[str]) -> None:
        self.store.put_graphs([plain(self.contents.records[key]) for key in keys])
        for key in keys:
            self.usable[key] = True  # or else the store had refused it
            self.tally.sent()

    def _record(self) -> None:
        """The other records whose blobs are here, then manifests whose records are; a complete one only with all."""
        good: list[str] = []
        for key, record in self.contents.records.items():
            if key in self.usable:
                continue
            # What was here before was looked at, what was not is fetched or a failure of the tally.
            lacking = self._failed(_named(record))
            if lacking:
                fault = errors.incomplete(self.remote.where, f"graph {key}", lacking)
                self.tally.fail(layout.graph_name(key), self.tally.failures.get(lacking[0], fault))
            else:
                good.append(key)
        self._put(good)
        for found in self.contents.manifests.values():
            gone = self._failed([item.sha256 for item in found.artifacts])
            for key in found.compile_keys():
                if key not in self.usable:
                    self.usable[key] = self._usable(key)
            gone += [layout.graph_name(key) for key in found.compile_keys() if not self.usable[key]]
            if gone and found.complete:
                fault = errors.incomplete(self.remote.where, f"manifest {found.id[:12]}", gone)
                self.tally.fail(layout.manifest_name(found.id), self.tally.failures.get(gone[0], fault))
            else:
                self.store.put_manifest(plain(found))
                self.tally.sent()

    def _failed(self, blobs: Iterable[str]) -> list[str]:
        failures = self.tally.failures
        return [name for name in map(layout.blob_name, blobs) if name in failures]


def _named(record: GraphRecord) -> list[str]:
    """The blobs that a record names."""
    return [record.text, *(item.sha256 for item in record.artifacts)]


def miss(remote: RemoteStore, name: str) -> Miss:
    """Nothing there has that name."""
    return Miss(
        f"{remote.where} has nothing for {name}", hint=f"neffcache warm {name} --push, where it can be compiled"
    )
