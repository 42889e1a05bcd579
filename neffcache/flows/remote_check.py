"""What a remote holds and whether it is whole, for `check`, `verify` and `ls` with `--remote`. Nothing is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from neffcache.errors import NeffcacheError
from neffcache.flows.pull import Target
from neffcache.remote import errors
from neffcache.remote.contents import Contents
from neffcache.remote.packs import Place
from neffcache.remote.presence import Presence
from neffcache.remote.tier import RemoteStore
from neffcache.remote.transfer import Progress
from neffcache.store import layout
from neffcache.store.local import LocalStore
from neffcache.store.records import Damaged, is_collection


@dataclass(frozen=True)
class RemoteRow:
    """One row of `check --remote`. `missing`: names in the layout that the manifest needs and the remote cannot give.

    `local` is the state of the same manifest in the local store.
    """

    config: str
    state: str
    by: str
    cache_key: str | None = None
    manifest: str | None = None
    missing: tuple[str, ...] = ()
    reason: str = ""
    local: str = "MISS"
    damaged: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "config": self.config,
            "state": self.state,
            "by": self.by,
            "tier": "remote",
            "cache_key": self.cache_key,
            "manifest": self.manifest,
            "missing": [
                {"kind": _kind(name), "what": name.rpartition("/")[2].removesuffix(".json"), "path": name}
                for name in self.missing
            ],
            "reason": self.reason,
            "local": self.local,
        }


def check_targets(
    remote: RemoteStore, store: LocalStore, targets: Sequence[Target], *, by: str, verify: bool = False
) -> list[RemoteRow]:
    """A row for each target, by existence and size; `verify` reads and hashes everything too.

    Raises Fault when the remote as a whole is gone.
    """
    contents, presence = _looked(remote, targets, Progress(), verify=verify)
    return [_row(contents, presence, store, target, by) for target in targets]


def _looked(
    remote: RemoteStore, targets: Sequence[Target], progress: Progress, *, verify: bool
) -> tuple[Contents, Presence]:
    contents = Contents(remote)
    contents.load_manifests(target.manifest for target in targets)
    contents.load_records(contents.compile_keys())
    presence = Presence(remote)
    named: dict[str, Place | None] = {
        layout.blob_name(sha256): contents.place.get(layout.blob_name(sha256)) for sha256 in contents.blobs()
    }
    presence.look(named)
    if verify:
        progress.begin("verifying", len(named), sum(size or 0 for size in contents.blobs().values()))
        presence.hash(named, progress)
        progress.end()
    return contents, presence


def _row(contents: Contents, presence: Presence, store: LocalStore, target: Target, by: str) -> RemoteRow:
    found = contents.manifests.get(target.manifest)
    if found is None:
        name = layout.manifest_name(target.manifest)
        fault = contents.failures[name]
        if not isinstance(fault, (errors.Incomplete, errors.Corrupt)):
            raise fault  # a fault is never a miss
        return RemoteRow(
            *(target.name, "MISS", by, target.cache_key, target.manifest, (name,), fault.message),
            local=_local(store, target.manifest),
            damaged=isinstance(fault, errors.Corrupt),
        )
    sizes = contents.blobs()
    missing: list[str] = []
    reasons: list[str] = []
    blobs = [item.sha256 for item in found.artifacts]
    for key in found.compile_keys():
        record = contents.records.get(key)
        if record is None:
            missing.append(layout.graph_name(key))
        else:
            blobs += [record.text, *(item.sha256 for item in record.artifacts)]
    names = [(layout.blob_name(sha256), sizes[sha256]) for sha256 in dict.fromkeys(blobs)]
    missing += [name for name, size in names if not presence.there(name, contents.place.get(name), size)]
    damaged = [name for name in missing if name in presence.damaged]
    if damaged:
        reasons.append(f"{len(damaged)} things are damaged")
    if not found.complete:
        reasons.append("the manifest is not complete")
    state = "PARTIAL" if missing or not found.complete else "HIT"
    if state == "HIT" and is_collection(found):
        state = "UNKNOWN"
        reasons.append("a collection, which is of no job; everything that it names is there")
    return RemoteRow(
        *(target.name, state, by, target.cache_key, found.id, tuple(missing), "; ".join(reasons)),
        local=_local(store, found.id),
        damaged=bool(damaged) or any(isinstance(contents.failures.get(n), errors.Corrupt) for n in missing),
    )


def _local(store: LocalStore, manifest_id: str) -> str:
    try:
        found = store.get_manifest(manifest_id)
    except Damaged:
        return "PARTIAL"
    if found is None:
        return "MISS"
    return "PARTIAL" if not found.complete or store.missing(found) else "HIT"


@dataclass
class RemoteReport:
    """What `verify --remote` found: total = good + damaged + absent for each kind."""

    total: Counter[str] = field(default_factory=Counter)
    bad: dict[str, NeffcacheError] = field(default_factory=dict)
    bytes: int = 0

    @property
    def damaged(self) -> list[str]:
        return [name for name, fault in self.bad.items() if isinstance(fault, errors.Corrupt)]

    def to_json(self) -> dict[str, Any]:
        kinds = {"manifest": "manifests", "graph": "graphs", "blob": "blobs"}
        state = {name: "damaged" if isinstance(fault, errors.Corrupt) else "absent" for name, fault in self.bad.items()}
        tallies = {}
        for kind, plural in kinds.items():
            wrong = Counter(state[name] for name in self.bad if _kind(name) == kind)
            tallies[plural] = {
                "total": self.total[kind],
                "good": self.total[kind] - wrong.total(),
                "damaged": wrong["damaged"],
                "absent": wrong["absent"],
            }
        return {
            "good": not self.bad,
            "bytes": self.bytes,
            **tallies,
            "findings": [
                {"state": state[name], "kind": _kind(name), "name": name, "message": fault.message}
                for name, fault in self.bad.items()
            ],
        }


def verify_targets(remote: RemoteStore, targets: Sequence[Target], progress: Progress) -> RemoteReport:
    """Read and hash everything that the targets name. Raises Fault when the remote as a whole is gone."""
    contents, presence = _looked(remote, targets, progress, verify=True)
    report = RemoteReport(bad=dict(contents.failures))
    report.total["manifest"] = len({target.manifest for target in targets})
    keys = {layout.graph_name(key) for key in contents.records}
    report.total["graph"] = len(keys | {name for name in contents.failures if _kind(name) == "graph"})
    for sha256, size in contents.blobs().items():
        name = layout.blob_name(sha256)
        report.total["blob"] += 1
        if name in presence.damaged:
            report.bad[name] = errors.corrupt(remote.where, name)
        elif not presence.there(name, contents.place.get(name), size):
            report.bad[name] = errors.incomplete(remote.where, "a record or manifest", [name])
        else:
            report.bytes += size or 0
    return report


def listing(remote: RemoteStore, store: LocalStore) -> dict[str, Any]:
    """Every manifest of the remote beside those of the local store, every ref, and totals; by names only.

    An id is the digest of its manifest: equal names are equal contents. A page that fails ends it: Fault.
    """
    counts: Counter[str] = Counter()
    total = 0
    manifests: list[str] = []
    refs: list[dict[str, str]] = []
    for item in remote.client.names(""):
        kind = "pack" if item.name.startswith(f"{layout.PACKS}/") else _kind(item.name)
        counts[kind] += 1
        total += item.size
        if kind == "manifest":
            manifests.append(item.name.rpartition("/")[2].removesuffix(".json"))
        elif kind == "ref":
            folder, _, last = item.name.rpartition("/")
            config, digest = layout.split_ref(last) or ("", "")
            refs.append({"channel": folder.rpartition("/")[2], "config": config, "request_digest": digest})
    here = set(store.manifest_ids())
    rows = [{"id": item, "tiers": ["local", "remote"] if item in here else ["remote"]} for item in manifests]
    rows += [{"id": item, "tiers": ["local"]} for item in sorted(here - set(manifests))]
    kinds = ("manifest", "graph", "key", "ref", "blob", "pack", "other")
    return {
        "remote": remote.where,
        "store": str(store.root),
        "manifests": rows,
        "refs": refs,
        "totals": {**{f"{kind}s": counts[kind] for kind in kinds}, "bytes": total},
        "compared": {
            "both": sum(len(row["tiers"]) == 2 for row in rows),
            "remote_only": sum(row["tiers"] == ["remote"] for row in rows),
            "local_only": sum(row["tiers"] == ["local"] for row in rows),
        },
    }


def _kind(name: str) -> str:
    parsed = layout.parse(name)
    return parsed.kind if parsed else "other"
