"""The objects of a remote that change: whoever writes has read what is there, and takes it in."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from neffcache.remote import errors
from neffcache.remote.tier import RemoteStore, Versioned
from neffcache.remote.union import united
from neffcache.store import layout
from neffcache.store.records import Damaged, KeyPointer, Manifest, Ref, Signatures, encode

RecordT = TypeVar("RecordT", KeyPointer, Ref, Signatures)
T = TypeVar("T")

ROUNDS = 50
"""Writers that may come first; each round one of them is through."""


def point(remote: RemoteStore, ours: Manifest) -> tuple[Manifest, bool]:
    """Make the job key's pointer name a manifest that has all graphs of `ours` and of what it named before.

    Gives that manifest, and whether the pointer was changed. Raises Mismatch, Fault.
    """
    name = layout.pointer_name(ours.cache_key)

    def renewed(found: KeyPointer | None) -> tuple[KeyPointer, Manifest]:
        theirs = None if found is None else _manifest(remote, found.manifest)
        both = ours if theirs is None else united(theirs, ours)
        if both.id not in (ours.id, None if theirs is None else theirs.id):
            remote.put_if_absent(layout.manifest_name(both.id), encode(both))
        extra = {} if found is None else found.extra
        return KeyPointer(ours.cache_key, both.id, extra), both

    return _renew(remote, KeyPointer, name, renewed)


def refer(
    remote: RemoteStore, channel: str, request_digest: str, make: Callable[[Ref | None], Ref], config: str
) -> tuple[Ref, bool]:
    """Make a ref be what `make` makes of the present one; gives it, and whether it was changed. Raises Fault."""
    name = layout.ref_name(channel, config, request_digest)

    def renewed(found: Ref | None) -> tuple[Ref, Ref]:
        made = make(found)
        return made, made

    return _renew(remote, Ref, name, renewed)


def attest(remote: RemoteStore, ours: Signatures) -> bool:
    """Add a signer's statements to those that are there; whether any was new. Raises Fault."""

    def renewed(found: Signatures | None) -> tuple[Signatures, None]:
        return (ours if found is None else found.united(ours)), None

    return _renew(remote, Signatures, layout.signature_name(ours.manifest, ours.signer), renewed)[1]


def _renew(
    remote: RemoteStore, kind: type[RecordT], name: str, renewed: Callable[[RecordT | None], tuple[RecordT, T]]
) -> tuple[T, bool]:
    """Write over exactly what was read; when somebody else came first, read again. Raises Precondition after many."""
    for turn in range(ROUNDS):
        found = remote.versioned(kind, name)
        current = found.record if isinstance(found, Versioned) else None
        record, result = renewed(current)
        if record == current:
            return result, False
        etag = found.etag if isinstance(found, Versioned) else found  # what is damaged is written over
        if remote.replace(name, record, etag):
            return result, True
        time.sleep(random.uniform(0, 0.01 * min(turn + 1, 20)))
    raise errors.Precondition(f"{name} of {remote.where} changes all the time", hint="run the command again")


def _manifest(remote: RemoteStore, manifest_id: str) -> Manifest | None:
    """None also for a damaged one: nothing can be taken over from it."""
    try:
        return remote.get_manifest(manifest_id)
    except Damaged:
        return None
