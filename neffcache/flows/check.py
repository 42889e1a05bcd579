"""Check: whether the store can serve a job, by its key where TorchTitan can be asked, by a ref otherwise.

A key proves that the manifest is this job's. A ref proves only that somebody warmed this request, every word of it
with the versions of TorchTitan and the toolchain: whether the training will be that job, only the training process
proves. A fault of the store is raised, never called a miss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from neffcache.errors import StoreFault
from neffcache.flows.request import CHANNEL, Request
from neffcache.flows.resolve import Job, current_manifest, resolve
from neffcache.flows.trust import NOBODY, Trust, check_content, check_manifest, statement_of
from neffcache.flows.workers import aside, scratch
from neffcache.key.canonical import canonical_json
from neffcache.key.compare import differences
from neffcache.store import layout
from neffcache.store.local import LocalStore, Missing
from neffcache.store.records import Manifest, Ref, is_collection

State = Literal["HIT", "PARTIAL", "MISS", "UNKNOWN"]

UNPROVED = "not yet proved: by ref; the training process proves that it is this job"
"""What a HIT by ref says of itself."""


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
    request: Request,
    store: LocalStore,
    environ: Mapping[str, str],
    *,
    by_ref: bool = False,
    verify: bool = False,
    trust: Trust = NOBODY,
) -> Checked:
    """The state of one request. `verify` hashes every file of the manifest too.

    Raises StoreFault for a store that cannot be read, and for damage that hashing finds; Mismatch for a HIT that nobody
    in `trust` signed; Usage, Unsupported when TorchTitan refuses the request.
    """
    if by_ref:
        return check_ref(request, store, verify=verify, trust=trust)
    with scratch(aside(environ)) as place:
        found = check_job(resolve(request, environ, place), store, verify=verify)
    if found.state == "HIT" and found.manifest is not None:
        check_manifest(trust, found.manifest, store.signatures, store.get_graph)
    return found


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


def check_ref(request: Request, store: LocalStore, *, verify: bool = False, trust: Trust = NOBODY) -> Checked:
    """The state of a request as it was typed: the ref of its digest, whose whole request document must be this one.

    What is not said counts as unknown. Raises StoreFault, Mismatch for a ref that nobody in `trust` signed.
    """
    config = request.config
    ref = None if request.unsaid else store.ref(CHANNEL, config, request.digest)
    if ref is None or (foreign := another(request, ref)):
        reason = unknown(request, store) if ref is None else foreign
        return Checked(config, "UNKNOWN", "ref", reason=reason)
    statement = statement_of(trust, CHANNEL, ref, store.signatures)
    found = store.get_manifest(ref.manifest)
    if found is None:
        return _without_manifest(Checked(config, "MISS", "ref", ref.cache_key), ref.manifest)
    if is_collection(found):
        return Checked(config, "UNKNOWN", "ref", reason="the ref names a collection, which is of no job")
    if found.cache_key != ref.cache_key:
        return Checked(config, "UNKNOWN", "ref", reason="the ref names a manifest of another job key")
    judged = _judged(store, Checked(config, "HIT", "ref", ref.cache_key, found, reason=UNPROVED), verify=verify)
    if judged.state == "HIT":
        check_content(statement, found, store.get_graph)
    return judged


def another(request: Request, ref: Ref) -> str:
    """Why a ref is not this request's, "" when it is."""
    same = canonical_json(dict(ref.request)) == canonical_json(request.named())
    return "" if same else "the ref of this name is another request's"


def unknown(request: Request, store: LocalStore) -> str:
    """Why a request has no ref: what was not said, and where the nearest one of the store differs."""
    said = f"not said: {', '.join(request.unsaid)}" if request.unsaid else "nobody warmed this request into this store"
    others = [ref.request for _, ref in store.refs(CHANNEL) if ref.config == request.config]
    near = min((differences(request.named(), other) for other in others), key=len, default=[])
    return said + (f"; the nearest that was warmed: {', '.join(map(str, near[:6]))}" if near else "")


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
