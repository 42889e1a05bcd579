"""Named collections: the entries of a cache that others filled, of which nobody can say what job they are of.

A collection is one manifest for each layout and compiler version, so that what one compiler made is never served to
another. Its request says that it is a collection, its components are that and the toolchain, and its refs lie in the
channel `collections`: it travels, is verified, signed and exported like any manifest, and is never a job's HIT.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from neffcache.compile.neuron.layouts import STORES, Layout, key_of, of_artifact
from neffcache.errors import Miss, Usage
from neffcache.key.canonical import canonical_json, digest, xxh3_128_hex
from neffcache.key.job import Component
from neffcache.store import layout
from neffcache.store.local import LocalStore
from neffcache.store.pointers import next_serial
from neffcache.store.records import Artifact, Damaged, Manifest, Ref, is_collection, manifest

CHANNEL = layout.COLLECTIONS
LONGEST = 100


@dataclass(frozen=True, slots=True)
class Part:
    """What one manifest of a collection holds: entries of one layout by one compiler (None: nobody says which)."""

    layout: Layout
    compiler: str | None

    def request(self, name: str) -> dict[str, Any]:
        """The request of its ref: it names no job."""
        return {"config": name, "collection": True, "layout": self.layout, "compiler": self.compiler}

    def components(self, name: str) -> dict[str, dict[str, Any]]:
        """A job's other components are not known; without a workload no job is this one."""
        toolchain = {"name": "neuron", "layout": self.layout, "compiler": self.compiler}
        parts = (Component.of("collection", {"name": name}), Component.of("toolchain", toolchain))
        return {part.name: {"sha256": part.sha256, "value": part.value} for part in parts}

    def __str__(self) -> str:
        return f"{self.layout}, compiler {self.compiler or 'unknown'}"


@dataclass(frozen=True, slots=True)
class Named:
    """One part of a collection of a store: its ref and its manifest."""

    part: Part
    digest: str
    ref: Ref
    manifest: Manifest


def check_name(name: str) -> str:
    """`name` itself when a collection can have it. Raises Usage."""
    plain = name.isascii() and all(letter.isalnum() or letter in "._-" for letter in name)
    if not plain or not name[:1].isalnum() or len(name) > LONGEST:
        raise Usage(
            f"{name[:120]!r} cannot be the name of a collection",
            hint=f"--as NAME: 1 to {LONGEST} letters, digits, dots, dashes and underscores",
        )
    return name


def default_name(source: str) -> str:
    """The name that a source gives: its last folder that has letters or digits. Raises Usage when there is none."""
    for part in reversed(PurePosixPath(source).parts):
        kept = "".join(letter if (letter.isascii() and letter.isalnum()) or letter in "._-" else "-" for letter in part)
        if kept := kept.lstrip("._-")[:LONGEST]:
            return kept
    raise Usage(f"{source!r} gives no name", hint="--as NAME")


def find(store: LocalStore, name: str) -> list[Named]:
    """The parts of a collection, [] when the store has none of that name. Raises StoreFault."""
    found = []
    for request_digest, ref in store.refs(CHANNEL):
        said = next((item for item in STORES if item == ref.request.get("layout")), None)
        if ref.config != name or said is None or (made := _manifest(store, ref.manifest)) is None:
            continue
        if is_collection(made):
            found.append(Named(Part(said, ref.request.get("compiler")), request_digest, ref, made))
    return sorted(found, key=lambda item: (item.part.layout, item.part.compiler or ""))


def require(store: LocalStore, name: str) -> list[Named]:
    """The same. Raises Miss when there is none."""
    if found := find(store, name):
        return found
    raise Miss(
        f"{store.root} has no collection called {name!r}", hint="see neffcache ls; neffcache import SOURCE --as NAME"
    )


def current_id(store: LocalStore, name: str, part: Part) -> str | None:
    """The manifest id that the ref of one part has, None when there is none or it is damaged."""
    try:
        ref = store.ref(CHANNEL, name, digest(part.request(name)))
    except Damaged:
        return None
    return None if ref is None else ref.manifest


def current(store: LocalStore, name: str, part: Part) -> Manifest | None:
    """The manifest of one part, None when there is none or it is damaged."""
    found = current_id(store, name, part)
    return None if found is None else _manifest(store, found)


def put(store: LocalStore, name: str, part: Part, artifacts: Iterable[Artifact]) -> Manifest:
    """Make a collection's part hold these artifacts, whose blobs are here: manifest, pointer and ref.

    Raises StoreFault.
    """
    components = part.components(name)
    made = store.put_manifest(
        manifest(
            cache_key=xxh3_128_hex(canonical_json({each: said["sha256"] for each, said in components.items()})),
            components=components,
            request=part.request(name),
            complete=True,  # it has no phases: all that it names is here, and nothing else is said
            phases=(),
            rank_classes=(),
            artifacts=artifacts,
            environment={},
            versions={} if part.compiler is None else {"compiler": f"neuronx-cc {part.compiler}"},
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            host={},
        )
    )
    request = part.request(name)
    request_digest = digest(request)
    try:
        known = store.ref(CHANNEL, name, request_digest)
    except Damaged:
        known = None
    store.set_pointer(made.cache_key, made.id)
    ref = Ref(request, made.cache_key, made.id, name, next_serial(known, made.id))
    store.put_ref(CHANNEL, name, request_digest, ref)
    return made


def by_entry(artifacts: Iterable[Artifact]) -> dict[tuple[Layout, str], list[Artifact]]:
    """(layout, entry) -> its artifacts; those of no layout are left out."""
    found: dict[tuple[Layout, str], list[Artifact]] = {}
    for item in artifacts:
        if (place := of_artifact(item)) is not None:
            found.setdefault(place, []).append(item)
    return found


def entry_count(made: Manifest) -> int:
    """Compiled graphs of a collection's manifest."""
    return len({item.extra.get("graph") or key_of(item.path) for item in made.artifacts})


def summary(made: Manifest) -> Mapping[str, Any]:
    """What a collection's manifest is, for `show`."""
    return {
        "layout": made.request["layout"],
        "compiler": made.request["compiler"],
        "entries": entry_count(made),
        "files": len(made.artifacts),
        "bytes": sum({item.sha256: item.size for item in made.artifacts}.values()),
    }


def _manifest(store: LocalStore, manifest_id: str) -> Manifest | None:
    try:
        return store.get_manifest(manifest_id)
    except Damaged:
        return None
