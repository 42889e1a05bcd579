"""What is in a store and what is wrong with it, as far as names and sizes tell: nothing large is read or written."""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from neffcache.errors import NeffcacheError
from neffcache.flows.findings import Finding, of_fault
from neffcache.flows.settings import Setting
from neffcache.store import layout
from neffcache.store.index import Index, Reading
from neffcache.store.local import SWEEP_AGE, LocalStore
from neffcache.store.records import Damaged, Manifest

LITTLE_SPACE, NO_SPACE = 10 * 10**9, 64 * 10**6
"""Bytes: less than the NEFFs of one large job and a copy of them; less than any compile writes."""

VOLATILE = frozenset({"tmpfs", "ramfs"})
LAYERED = frozenset({"overlay", "aufs"})
SHARED = frozenset({"nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "gpfs", "beegfs", "glusterfs", "9p", "afs"})
LOOKED_AT = 50
"""Refs whose manifests are compared with what is there; `verify` looks at everything."""

ELSEWHERE = "give a directory on a disk or a mounted volume with NEFFCACHE_DIR"


def examine(
    place: Setting, environ: Mapping[str, str], toolchain: str | None = None
) -> tuple[list[Finding], dict[str, Any]]:
    """Findings and a summary of the store at `place`; `toolchain` is the id of what is installed, where it is known."""
    path = Path(os.path.abspath(place.value))
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    mount, kind = file_system(existing)
    usage = shutil.disk_usage(existing)
    writable = os.access(existing, os.W_OK)
    summary: dict[str, Any] = {
        "path": str(path),
        "origin": place.origin,
        "exists": path.exists(),
        "file_system": {"mount": mount, "type": kind},
        "free_bytes": usage.free,
        "writable": writable,
    }
    findings = list(_place(f"{path} ({place.origin}), {kind or 'unknown file system'} on {mount}", kind, environ))
    findings += _space(usage.free)
    if path.exists():
        status = path.stat()
        summary |= {"mode": f"{stat.S_IMODE(status.st_mode):04o}", "mine": status.st_uid == os.geteuid()}
    elif not writable:
        said = f"{path} cannot be made: {existing} cannot be written"
        return [*findings, Finding("store", "error", said, ELSEWHERE, 7)], summary
    try:
        store = LocalStore.open(place.value, writable=False, given=place.given)
        findings += _content(store, summary, toolchain)
    except NeffcacheError as fault:
        findings.append(of_fault("store", fault))
    return findings, summary


def _place(where: str, kind: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    if kind in VOLATILE:
        yield Finding("store", "warning", f"{where}: it is memory, gone with the next reboot or pod", ELSEWHERE)
    elif kind in LAYERED and in_container(environ):
        yield Finding("store", "warning", f"{where}: it is the container's own layer, gone with the pod", ELSEWHERE)
    elif kind in SHARED or kind.startswith("fuse."):
        said = f"{where}: a network file system; its hosts exclude each other by names and digests, not by locks"
        yield Finding("store", "note", said)
    else:
        yield Finding("store", "ok", where)


def _space(free: int) -> Iterator[Finding]:
    said = f"{free / 1e9:.1f} GB free for the store"
    if free < NO_SPACE:
        yield Finding("space", "error", f"{said}: nothing more can be kept", f"free space, or {ELSEWHERE}", 7)
    elif free < LITTLE_SPACE:
        yield Finding("space", "warning", f"{said}: less than one large job takes", f"free space, or {ELSEWHERE}")
    else:
        yield Finding("space", "ok", said)


def _content(store: LocalStore, summary: dict[str, Any], toolchain: str | None) -> Iterator[Finding]:
    manifests, damaged = _manifests(store)
    refs = [(channel, digest, ref) for channel in store.channels() for digest, ref in store.refs(channel)]
    refs_there = len(store.names("ref"))
    leftovers = _old(store.root / layout.TMP)
    quarantined = store.quarantined()
    summary |= {
        "manifests": {
            "total": len(manifests) + len(damaged),
            "complete": sum(manifest.complete for manifest in manifests),
            "damaged": damaged,
        },
        "graphs": len(store.graph_keys()),
        "blobs": sum(1 for _ in store.blobs()),
        "pointers": len(store.names("key")),
        "channels": dict(Counter(channel for channel, _, _ in refs)),
        "toolchains": dict(Counter(_compiler(manifest) for manifest in manifests)),
        "quarantined": len(quarantined),
        "leftovers": len(leftovers),
    }
    writes = "" if summary["writable"] else "; it cannot be written, which a hit needs not, and warm and pull do"
    complete = summary["manifests"]["complete"]
    yield Finding("store", "ok" if not writes else "note", f"{len(manifests)} manifests, {complete} complete{writes}")
    if damaged or refs_there > len(refs):
        count = len(damaged) + refs_there - len(refs)
        first = f", such as manifest {damaged[0][:12]}" if damaged else ""
        hint = "neffcache verify names them all and moves them away; pull or warm brings them back"
        yield Finding("store", "error", f"{count} records are damaged{first}", hint, 7)
    yield from _whole(store, [ref.manifest for _, _, ref in refs], {item.id: item for item in manifests})
    if quarantined:
        said = f"{len(quarantined)} damaged files lie in quarantine/: this disk, or who copied the store, alters files"
        yield Finding("store", "warning", said, "what was healed may be deleted there; check the disk")
    if leftovers:
        said = f"{len(leftovers)} leftovers of killed writers in tmp/ are older than a day"
        yield Finding("store", "note", said, "they are in nobody's way and may be deleted")
    if toolchain is not None and (others := [item for item in manifests if _toolchain(item) != toolchain]):
        names = ", ".join(sorted({_compiler(item) for item in others}))
        said = f"{len(others)} of {len(manifests)} manifests are of other toolchains ({names}): no hits with this one"
        yield Finding("store", "note", said, "they stay as they are, and hit again where that toolchain is installed")
    yield from _index(Index.look(store), summary)


def _manifests(store: LocalStore) -> tuple[list[Manifest], list[str]]:
    """The good ones, and the ids of the damaged ones."""
    good, damaged = [], []
    for manifest_id in store.manifest_ids():
        try:
            found = store.get_manifest(manifest_id)
        except Damaged:
            damaged.append(manifest_id)
            continue
        if found is not None:
            good.append(found)
    return good, damaged


def _whole(store: LocalStore, named: list[str], manifests: Mapping[str, Manifest]) -> Iterator[Finding]:
    """Whether what the refs name is there, by existence and size."""
    for manifest_id in list(dict.fromkeys(named))[:LOOKED_AT]:
        manifest = manifests.get(manifest_id)
        if manifest is None or not manifest.complete:
            continue
        try:
            lacking = store.missing(manifest)
        except Damaged as fault:
            yield of_fault("store", fault, f"manifest {manifest_id[:12]}: ")
            continue
        if lacking:
            config = manifest.request.get("config", "?")
            yield Finding(
                "store",
                "error",
                f"manifest {manifest_id[:12]} of {config} lacks {len(lacking)} files, such as {lacking[0].path}: "
                "gone, or of another size",
                f"neffcache pull {config}, or neffcache warm {config}",
                7,
            )


def _index(found: Reading, summary: dict[str, Any]) -> Iterator[Finding]:
    summary["index"] = {"state": found.state, "rejected": found.rejected, "refused": len(found.failures)}
    if found.fault:
        said = f"the index cannot be used: {found.fault}"
        yield Finding("store", "warning", said, "the next command that writes makes it anew; costs are measured again")
    elif found.rejected:
        said = f"{found.rejected} rows of the index are not JSON and are never loaded: another program wrote them"
        yield Finding("store", "warning", said, "delete index/ in the store; it is made anew")
    if found.failures:
        codes = ", ".join(sorted({failure.code for failure in found.failures.values()}))
        said = f"{len(found.failures)} graphs are remembered as refused by their compiler ({codes})"
        yield Finding("store", "note", said, "neffcache warm --retry-failed tries them again")


def _toolchain(manifest: Manifest) -> str:
    return str(manifest.components.get("toolchain", {}).get("sha256", ""))


def _compiler(manifest: Manifest) -> str:
    return str(manifest.versions.get("compiler", "unknown"))


def _old(folder: Path) -> list[str]:
    limit = time.time() - SWEEP_AGE
    try:
        return [entry.name for entry in os.scandir(folder) if entry.stat(follow_symlinks=False).st_mtime < limit]
    except OSError:
        return []


def file_system(path: Path, mounts: list[tuple[str, str]] | None = None) -> tuple[str, str]:
    """(mount point, type) of the file system that holds `path`; ("?", "") when it cannot be told."""
    if mounts is None:
        mounts = [(part.mountpoint, part.fstype) for part in psutil.disk_partitions(all=True)]
    real = os.path.realpath(path)
    over = [(mount, kind) for mount, kind in mounts if os.path.commonpath([real, mount]) == mount]
    # Of several mounts on one point the last one is seen.
    return max(reversed(over), key=lambda found: len(found[0]), default=("?", ""))


def in_container(environ: Mapping[str, str]) -> bool:
    return "KUBERNETES_SERVICE_HOST" in environ or any(map(os.path.exists, ("/.dockerenv", "/run/.containerenv")))
