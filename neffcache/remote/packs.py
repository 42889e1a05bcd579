"""Packs: many small things in one object, so that each costs neither a request nor a thread.

A pack is the plain concatenation of its members and named by its own SHA-256. A record or a manifest of a remote says
in its field `packs` where what it names lies: {SHA-256 of the pack: [[name in the layout, offset, size], ...]}. The
field exists only in a remote; it does not count in a manifest's id. What a pack does not give lies under its own name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import msgspec

from neffcache.store import layout
from neffcache.store.records import Damaged, GraphRecord, Key128, Manifest

RecordT = TypeVar("RecordT", GraphRecord, Manifest)

FIELD = "packs"
SMALL = 1 << 20
"""Bytes; what is smaller travels in a pack."""
FULL = 16 << 20
"""Bytes; a pack is closed when the next member would make it larger."""

__all__ = ["FIELD", "FULL", "SMALL", "Key128", "Place", "Span", "places", "plain", "spans", "spread", "with_places"]


class Place(NamedTuple):
    """Where a thing lies: the pack's SHA-256, offset and size in bytes."""

    pack: str
    offset: int
    size: int


class Span(NamedTuple):
    """A run of members of one pack: what is asked for with one request."""

    pack: str
    start: int
    end: int
    members: tuple[tuple[str, Place], ...]


def places(record: GraphRecord | Manifest) -> dict[str, Place]:
    """Name in the layout -> place, of everything that the record says is packed. Raises Damaged."""
    try:
        found = msgspec.convert(record.extra.get(FIELD, {}), dict[str, list[tuple[str, int, int]]])
        placed = {name: Place(pack, offset, size) for pack, members in found.items() for name, offset, size in members}
        if any(place.offset < 0 or place.size < 0 for place in placed.values()):
            raise ValueError("a negative place")
        for name, place in placed.items():
            layout.pack_name(place.pack)
            if layout.parse(name) is None:
                raise ValueError(f"{name!r} is no name of a store")
    except Exception as error:
        raise Damaged(f"the field {FIELD!r} of a {type(record).__name__} is malformed: {error}") from error
    return placed


def with_places(record: RecordT, placed: Mapping[str, Place]) -> RecordT:
    """The record as a remote keeps it; the field is left out when there is nothing to say."""
    field: dict[str, list[list[object]]] = {}
    for name, place in sorted(placed.items(), key=lambda item: (item[1].pack, item[1].offset, item[0])):
        field.setdefault(place.pack, []).append([name, place.offset, place.size])
    extra = {name: value for name, value in record.extra.items() if name != FIELD}
    return replace(record, extra={**extra, **({FIELD: field} if field else {})})


def plain(record: RecordT) -> RecordT:
    """The record as every store but this remote keeps it."""
    return with_places(record, {})


def spread(sizes: Iterable[Sequence[tuple[str, int]]]) -> list[list[tuple[str, int]]]:
    """Groups of (name, size) as packs: a group stays together where it fits, and the order is kept.

    So the packs that one push could not write are the packs that the next one makes.
    """
    packs: list[list[tuple[str, int]]] = []
    filled = FULL
    for group in sizes:
        total = sum(size for _, size in group)
        if not group:
            continue
        if filled + total > FULL:
            packs.append([])
            filled = 0
        for member in group:
            if packs[-1] and filled + member[1] > FULL:
                packs.append([])
                filled = 0
            packs[-1].append(member)
            filled += member[1]
    return packs


def spans(wanted: Mapping[str, Place], *, gap: int = 1 << 16, longest: int = FULL) -> list[Span]:
    """The requests that bring these members: neighbours together, up to `longest` bytes, over `gap` unwanted ones."""
    found: list[Span] = []
    for name, place in sorted(wanted.items(), key=lambda item: (item[1].pack, item[1].offset)):
        end = place.offset + place.size
        last = found[-1] if found else None
        near = last is not None and last.pack == place.pack and last.end <= place.offset <= last.end + gap
        if last is not None and near and end - last.start <= longest:
            found[-1] = Span(last.pack, last.start, end, (*last.members, (name, place)))
        else:
            found.append(Span(place.pack, place.offset, end, ((name, place),)))
    return found
