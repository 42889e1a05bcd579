"""What a manifest needs, and what of it a store lacks or holds damaged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from neffcache.errors import Miss
from neffcache.store import layout
from neffcache.store.blobs import Blobs
from neffcache.store.documents import Documents
from neffcache.store.files import names
from neffcache.store.records import Artifact, Damaged, GraphRecord, Manifest
from neffcache.store.root import Root


@dataclass(frozen=True, slots=True)
class Missing:
    """One thing that a manifest needs and the store cannot give.

    `what` is a compile key or a blob's SHA-256, `path` where it should be. "damaged" is there and wrong (a blob of
    another size, a record that is none); `quarantined` says that it was here once and was moved away as damaged.
    """

    kind: Literal["graph", "artifact", "damaged"]
    what: str
    path: str
    quarantined: bool = False


def artifacts(graphs: Documents[GraphRecord], manifest: Manifest) -> list[Artifact]:
    """Every artifact of a manifest's graphs and native stores. Raises Miss when a graph has no record, Damaged."""
    found: list[Artifact] = []
    for key in manifest.compile_keys():
        record = graphs.read(layout.graph_name(key))
        if record is None:
            raise Miss(
                f"graph {key} of manifest {manifest.id} has no record in {graphs.root.path}",
                hint="warm or pull it",
                details={"compile_key": key, "manifest": manifest.id},
            )
        found.extend(record.artifacts)
    return [*found, *manifest.artifacts]


def missing(blobs: Blobs, graphs: Documents[GraphRecord], manifest: Manifest) -> list[Missing]:
    """What is lacking, by existence and size only; nothing large is read. Raises StoreFault."""
    lacking, needed = _records(graphs, manifest)
    return lacking + unusable(blobs, needed)


def unusable(blobs: Blobs, needed: Iterable[Artifact]) -> list[Missing]:
    """The artifacts whose blob is absent or of another size. Raises StoreFault."""
    lacking: list[Missing] = []
    for sha256, size in dict.fromkeys((item.sha256, item.size) for item in needed):
        present = blobs.size(sha256)
        if present == size:
            continue
        path = str(blobs.expected_path(sha256))
        if present is None:
            lacking.append(Missing("artifact", sha256, path, _in_quarantine(blobs.root, sha256)))
        else:
            lacking.append(Missing("damaged", sha256, path))
    return lacking


def damaged(blobs: Blobs, graphs: Documents[GraphRecord], manifest: Manifest) -> list[Missing]:
    """What is there and wrong, by digest; it is quarantined. What is absent is not listed. Raises StoreFault."""
    lacking, needed = _records(graphs, manifest)
    wrong = [item for item in lacking if item.kind == "damaged"]
    for sha256 in dict.fromkeys(item.sha256 for item in needed):
        try:
            blobs.check(sha256)
        except Damaged as error:
            wrong.append(Missing("damaged", sha256, error.details["path"], error.details["quarantined"] is not None))
    return wrong


def _records(graphs: Documents[GraphRecord], manifest: Manifest) -> tuple[list[Missing], list[Artifact]]:
    lacking: list[Missing] = []
    needed: list[Artifact] = []
    for key in manifest.compile_keys():
        path = str(graphs.root.path / layout.graph_name(key))
        try:
            record = graphs.read(layout.graph_name(key))
        except Damaged as error:
            lacking.append(Missing("damaged", key, path, error.details["quarantined"] is not None))
            continue
        if record is None:
            lacking.append(Missing("graph", key, path, _in_quarantine(graphs.root, key)))
        else:
            needed.extend(record.artifacts)
    return lacking, [*needed, *manifest.artifacts]


def _in_quarantine(root: Root, stem: str) -> bool:
    return any(name.startswith(f"{stem}.") for name in names(root.path / layout.QUARANTINE))
