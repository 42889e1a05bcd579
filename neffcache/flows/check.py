"""Check: whether the store can serve a job, by its key where TorchTitan can be asked, by a ref otherwise.

A key proves that the manifest is this job's. A ref proves only that somebody warmed this request: what the request
means today (another TorchTitan, another compiler) is not asked. A fault of the store is raised, never called a miss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from neffcache.errors import StoreFault
from neffcache.flows.request import Request
from neffcache.flows.resolve import Job, resolve
from neffcache.flows.warm import CHANNEL, current_manifest
from neffcache.flows.workers import aside, scratch
from neffcache.key.canonical import canonical_json
from neffcache.store import layout
from neffcache.store.local import LocalStore, Missing
from neffcache.store.records import Manifest

State = Literal["HIT", "PARTIAL", "MISS", "UNKNOWN"]


@dataclass(frozen=True)
class Checked:
    """One row of `check`. `missing` lists what the manifest needs and the store cannot give; `reason` says the rest."""

    config: str
    state: State
    by: Literal["key", "ref"]
    cache_key: str | None = None
    manifest: Manifest | None = None
    missing: tuple[Missing, ...] = ()
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "config": self.config,
            "state": self.state,
            "by": self.by,
            "tier": "local",
            "cache_key": self.cache_key,
            "manifest": None if self.manifest is None else self.manifest.id,
            "missing": missing_json(self.missing),
            "reason": self.reason,
        }


def missing_json(missing: tuple[Missing, ...]) -> list[dict[str, Any]]:
    """What lacks, as every command writes it: kind graph, artifact, damaged or manifest."""
    return [
        {"kind": item.kind, "what": item.what, "path": item.path, "quarantined": item.quarantined} for item in missing
    ]


def check(
    request: Request, store: LocalStore, environ: Mapping[str, str], *, by_ref: bool = False, verify: bool = False
) -> Checked:
    """The state of one request. `verify` hashes every file of the manifest too.

    Raises StoreFault for a store that cannot be read, and for damage that hashing finds; Usage, Unsupported when
    TorchTitan refuses the request.
    """
    if by_ref:
        return check_ref(request, store, verify=verify)
    with scratch(aside(environ)) as place:
        return check_job(resolve(request, environ, place), store, verify=verify)


def check_job(job: Job, store: LocalStore, *, verify: bool = False) -> Checked:
    """The state of a resolved job, by its key."""
    config, key = job.request.config, job.key.cache_key
    found = current_manifest(store, job)
    if found is not None:
        return _judged(store, Checked(config, "HIT", "key", key, found), verify=verify)
    pointer = store.pointer(key)
    if pointer is None:
        return Checked(config, "MISS", "key", key, reason="no manifest for this job key")
    if store.exists(layout.manifest_name(pointer.manifest)):
        return Checked(config, "MISS", "key", key, reason="the manifest of this name was made of other components")
    return _without_manifest(Checked(config, "MISS", "key", key), pointer.manifest)


def check_ref(request: Request, store: LocalStore, *, verify: bool = False) -> Checked:
    """The state of a request as it was typed: the ref of its digest, whose whole request document must be this one."""
    config = request.config
    ref = store.ref(CHANNEL, config, request.digest)
    if ref is None:
        return Checked(config, "UNKNOWN", "ref", reason="nobody warmed this request into this store")
    if canonical_json(ref.request) != canonical_json(request.to_json()):
        return Checked(config, "UNKNOWN", "ref", reason="the ref of this name is another request's")
    found = store.get_manifest(ref.manifest)
    if found is None:
        return _without_manifest(Checked(config, "MISS", "ref", ref.cache_key), ref.manifest)
    if found.cache_key != ref.cache_key:
        return Checked(config, "UNKNOWN", "ref", reason="the ref names a manifest of another job key")
    return _judged(store, Checked(config, "HIT", "ref", ref.cache_key, found), verify=verify)


def refuse_damage(store: LocalStore, manifest: Manifest) -> None:
    """Hash what a manifest names. Raises StoreFault (after quarantine, where the store can be written) for damage."""
    damaged = store.damaged(manifest)
    if not damaged:
        return
    moved = sum(item.quarantined for item in damaged)
    where = "and are now in quarantine" if moved == len(damaged) else f"({moved} of them are now in quarantine)"
    raise StoreFault(
        f"{len(damaged)} files of manifest {manifest.id[:12]} were damaged {where}",
        hint="warm again, or pull them from a remote",
        details={"manifest": manifest.id, "damaged": [item.path for item in damaged]},
    )


def _judged(store: LocalStore, hit: Checked, *, verify: bool) -> Checked:
    """`hit`, or PARTIAL with what keeps it from being one."""
    assert hit.manifest is not None
    if verify:
        refuse_damage(store, hit.manifest)
    missing = tuple(store.missing(hit.manifest))
    if missing or not hit.manifest.complete:
        reason = "" if hit.manifest.complete else "the manifest is not complete"
        return Checked(hit.config, "PARTIAL", hit.by, hit.cache_key, hit.manifest, missing, reason)
    return hit


def _without_manifest(miss: Checked, manifest_id: str) -> Checked:
    return Checked(miss.config, miss.state, miss.by, miss.cache_key, reason=f"manifest {manifest_id} is gone")
