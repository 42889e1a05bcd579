"""Rehash everything that a store holds, and say what is damaged and what is named but absent."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from neffcache.errors import StoreFault
from neffcache.store import layout
from neffcache.store.local import LocalStore
from neffcache.store.records import Damaged, GraphRecord, KeyPointer, Manifest, Ref, Signatures, decode

Kind = Literal["blobs", "graphs", "manifests", "keys", "refs", "signatures"]


@dataclass(slots=True)
class Tally:
    """Things of one kind. total = good + damaged + unreadable + gone (removed by somebody while we looked)."""

    total: int = 0
    good: int = 0
    damaged: int = 0
    unreadable: int = 0
    gone: int = 0


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    "damaged": `name` is not what was stored. "unreadable": the file system refuses it or it has a newer schema.
    "absent": `name` needs what `message` says, and it is not here.
    """

    state: Literal["damaged", "unreadable", "absent"]
    kind: Kind
    name: str
    message: str
    quarantined: bool = False


@dataclass(slots=True)
class Report:
    """What was looked at and what was found; `bytes` are those of good blobs."""

    tallies: dict[Kind, Tally] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    bytes: int = 0

    @property
    def good(self) -> bool:
        return not self.findings

    def to_json(self) -> dict[str, Any]:
        return {
            "good": self.good,
            "bytes": self.bytes,
            **{
                kind: {name: getattr(tally, name) for name in ("total", "good", "damaged", "unreadable", "gone")}
                for kind, tally in self.tallies.items()
            },
            "findings": [
                {name: getattr(item, name) for name in ("state", "kind", "name", "message", "quarantined")}
                for item in self.findings
            ],
        }


def verify(store: LocalStore) -> Report:
    """Hash every blob anew, read every record, and look for what they name.

    A writable store moves damaged things to quarantine/. Raises StoreFault only when a directory cannot be listed.
    """
    report = Report()

    def blob(sha256: str) -> bool:
        if not store.check_blob(sha256, fresh=True):
            return False
        report.bytes += store.blob_size(sha256) or 0
        return True

    def points(kind: Kind, record: type[KeyPointer] | type[Ref] | type[Signatures], name: str) -> bool:
        if (data := store.get(name)) is None:
            return False
        manifest = decode(record, data).manifest
        if not store.exists(layout.manifest_name(manifest)):
            report.findings.append(Finding("absent", kind, name, f"manifest {manifest}"))
        return True

    _each(report, "blobs", store.blobs(), blob)
    _each(report, "graphs", store.graph_keys(), lambda key: _graph(store, report, store.get_graph(key)))
    _each(report, "manifests", store.manifest_ids(), lambda name: _manifest(store, report, store.get_manifest(name)))
    _each(report, "keys", store.names("key"), lambda name: points("keys", KeyPointer, name))
    _each(report, "refs", store.names("ref"), lambda name: points("refs", Ref, name))
    _each(report, "signatures", store.names("signature"), lambda name: points("signatures", Signatures, name))
    return report


def _each(report: Report, kind: Kind, names: Iterable[str], look: Callable[[str], bool]) -> None:
    tally = report.tallies.setdefault(kind, Tally())
    for name in names:
        tally.total += 1
        try:
            if look(name):
                tally.good += 1
            else:
                tally.gone += 1
        except Damaged as error:
            tally.damaged += 1
            moved = error.details.get("quarantined") is not None
            report.findings.append(Finding("damaged", kind, name, error.message, moved))
        except StoreFault as error:
            tally.unreadable += 1
            report.findings.append(Finding("unreadable", kind, name, error.message))


def _graph(store: LocalStore, report: Report, record: GraphRecord | None) -> bool:
    if record is None:
        return False
    for sha256 in dict.fromkeys((record.text, *(item.sha256 for item in record.artifacts))):
        if not store.has_blob(sha256):
            report.findings.append(Finding("absent", "graphs", record.compile_key, f"blob {sha256}"))
    return True


def _manifest(store: LocalStore, report: Report, manifest: Manifest | None) -> bool:
    if manifest is None:
        return False
    if not manifest.complete:  # it says itself that it lacks something
        return True
    wanted = [f"graph {key}" for key in manifest.compile_keys() if not store.exists(layout.graph_name(key))]
    wanted += [f"blob {item.sha256}" for item in manifest.artifacts if not store.has_blob(item.sha256)]
    report.findings += [Finding("absent", "manifests", manifest.id, what) for what in wanted]
    return True
