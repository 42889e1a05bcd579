"""What a push can be asked for: manifests of the local store, by job key, request, channel, collection, or all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from neffcache.flows import collections
from neffcache.flows.request import Request
from neffcache.store.local import LocalStore
from neffcache.store.records import Manifest, Ref


@dataclass(frozen=True)
class Source:
    """A manifest of the local store to push, the name to call it by, and its refs: (channel, request digest, ref)."""

    name: str
    manifest: Manifest
    refs: tuple[tuple[str, str, Ref], ...] = ()


def of_key(store: LocalStore, cache_key: str, name: str) -> Source | None:
    """The current manifest of a job key with its refs. Raises Damaged, StoreFault."""
    pointer = store.pointer(cache_key)
    found = None if pointer is None else store.get_manifest(pointer.manifest)
    return None if found is None else Source(name, found, _refs_of(store, found))


def of_request(store: LocalStore, channel: str, request: Request) -> list[Source]:
    """The manifests that a channel names for a request, of all versions unless some are said. Raises StoreFault."""
    return of_channel(store, channel, lambda ref: ref.config == request.config and request.means(ref.request))


def of_channel(store: LocalStore, channel: str, wanted: Callable[[Ref], bool] = lambda ref: True) -> list[Source]:
    """Every manifest that a channel names (in a wanted ref), with these refs."""
    named: dict[str, list[tuple[str, str, Ref]]] = {}
    for digest, ref in store.refs(channel):
        if wanted(ref):
            named.setdefault(ref.manifest, []).append((channel, digest, ref))
    found = ((store.get_manifest(item), refs) for item, refs in named.items())
    return [Source(refs[0][2].config, item, tuple(refs)) for item, refs in found if item is not None]


def of_collection(store: LocalStore, name: str) -> list[Source]:
    """The manifests of a named collection. Raises Miss when there is none, StoreFault."""
    return [
        Source(name, item.manifest, ((collections.CHANNEL, item.digest, item.ref),))
        for item in collections.require(store, name)
    ]


def of_all(store: LocalStore) -> list[Source]:
    """The current manifest of every job key, with its refs."""
    refs = _all_refs(store)
    found: list[Source] = []
    for pointer in store.pointers():
        item = store.get_manifest(pointer.manifest)
        if item is not None:
            found.append(Source(str(item.request.get("config", item.id[:12])), item, tuple(refs.get(item.id, ()))))
    return found


def _refs_of(store: LocalStore, found: Manifest) -> tuple[tuple[str, str, Ref], ...]:
    return tuple(_all_refs(store).get(found.id, ()))


def _all_refs(store: LocalStore) -> dict[str, list[tuple[str, str, Ref]]]:
    named: dict[str, list[tuple[str, str, Ref]]] = {}
    for channel in store.channels():
        for digest, ref in store.refs(channel):
            named.setdefault(ref.manifest, []).append((channel, digest, ref))
    return named
