"""A view: one directory with exactly one manifest's files, checked, as the training process will see it.

The files are hard links to blobs, or copies where links do not work, where an executable bit differs, or where the
compiler must write (`writable_overlay`). A view is built aside and renamed, so that nobody sees half of one, and
`ready.json` is its last file.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from neffcache.errors import Miss, StoreFault
from neffcache.store import layout
from neffcache.store.blobs import SETTLED_NS
from neffcache.store.files import (
    NO_LINKS,
    Identity,
    hash_regular,
    names,
    read_regular,
    remove,
    retrying,
    storage,
    write_temporary,
)
from neffcache.store.local import LocalStore
from neffcache.store.records import Artifact, Damaged, Manifest, decode, encode
from neffcache.store.root import kernel_lock

MANIFEST, READY = "manifest.json", "ready.json"
LOCK_TIMEOUT = 600.0  # seconds; a peer may be copying many gigabytes to another file system

# Files of views that are not links to blobs, hashed in this process.
_hashed: dict[Identity, str] = {}


@dataclass(frozen=True, slots=True)
class View:
    """A directory `path` that holds `<store name>/<relative path>` for every artifact of a manifest.

    `ready` is False only for a partial view, whose manifest names more than the store has.
    """

    path: Path
    manifest_id: str
    ready: bool


def materialise(
    store: LocalStore,
    manifest: Manifest,
    *,
    where: Path | None = None,
    writable_overlay: bool = False,
    partial: bool = False,
) -> View:
    """The view of a manifest, built unless it is there and exact; two processes may do it at once.

    `where` is the directory for views (default: the store's own); a read-only store whose own view is not there needs
    one. `writable_overlay` gives a new private copy that a compiler may write to: see `discard`. `partial` leaves out
    what the store lacks instead of refusing.
    Raises Miss when something is absent, Damaged (after quarantine) when a blob is not what it should be, StoreFault.
    """
    wanted, ready = _wanted(store, manifest, partial=partial)
    layout.manifest_name(manifest.id)  # it becomes part of a path
    own = where is None
    place = store.root / layout.VIEWS if where is None else Path(os.path.abspath(where))
    path = place / manifest.id
    if not writable_overlay and _is_exact(store, path, manifest, wanted, ready=ready):
        return View(path, manifest.id, ready)
    if own and not store.writable:
        raise StoreFault(
            f"the read-only store {store.root} has no exact view of manifest {manifest.id}",
            hint="give a writable directory for the view",
            details={"manifest": manifest.id},
        )
    with storage("creating", place):
        place.mkdir(parents=True, exist_ok=True)
        mode = store.base.directory_mode if own else stat.S_IMODE(os.stat(place).st_mode) | 0o700
    if writable_overlay:
        overlay = place / f"{manifest.id}.overlay-{secrets.token_hex(8)}"
        _build(store, overlay, manifest, wanted, mode, ready=ready, writable=True)
        return View(overlay, manifest.id, ready)
    with _lock(store, place, manifest.id, mode, own=own):
        if not _is_exact(store, path, manifest, wanted, ready=ready):
            building = store.base.temporary(".view") if own else _building(place, manifest.id)
            _build(store, building, manifest, wanted, mode, ready=ready, writable=False)
            _swap(building, path)
        return View(path, manifest.id, ready)


def has_view(store: LocalStore, manifest: Manifest) -> bool:
    """Whether the store's own view of a manifest is there, whole and exact. Raises Damaged, StoreFault."""
    wanted, ready = _wanted(store, manifest, partial=True)
    return ready and _is_exact(store, store.root / layout.VIEWS / manifest.id, manifest, wanted, ready=True)


def discard(view: View) -> None:
    """Remove a view or an overlay; what cannot be removed is left."""
    remove(view.path)


def _wanted(store: LocalStore, manifest: Manifest, *, partial: bool) -> tuple[dict[str, Artifact], bool]:
    """What the view holds, by path in it, and whether that is all. Raises Miss, Damaged, StoreFault."""
    lacking = store.missing(manifest)
    if lacking and not partial:
        for item in lacking:
            if item.kind == "damaged":
                # Raises Damaged and quarantines a blob; a damaged record was quarantined by missing() already.
                if len(item.what) == 64:
                    store.check_blob(item.what)
                raise Damaged(f"{item.path} is damaged", hint="pull it or warm again", details={"path": item.path})
        first = lacking[0]
        raise Miss(
            f"manifest {manifest.id} needs {first.kind} {first.what}, which is not in {store.root}"
            + (f", and {len(lacking) - 1} more" if len(lacking) > 1 else ""),
            hint="pull it or warm again",
            details={"missing": [{"kind": item.kind, "what": item.what} for item in lacking]},
        )
    absent = {item.what for item in lacking}
    artifacts = list(manifest.artifacts)
    for key in manifest.compile_keys():
        if key not in absent and (record := store.get_graph(key)) is not None:
            artifacts.extend(record.artifacts)
    return _by_path(item for item in artifacts if item.sha256 not in absent), not lacking


def _by_path(artifacts: Iterable[Artifact]) -> dict[str, Artifact]:
    wanted: dict[str, Artifact] = {}
    for item in artifacts:
        name = f"{item.store}/{item.path}"  # both were checked when the artifact was made
        other = wanted.setdefault(name, item)
        if (other.sha256, other.mode & 0o111) != (item.sha256, item.mode & 0o111):
            raise StoreFault(
                f"two graphs of one manifest want different files at {name}",
                hint="this is a fault of the toolchain that named them; warm again with one version of it",
                details={"path": name, "sha256": [other.sha256, item.sha256]},
            )
    for name in wanted:
        for parent in PurePosixPath(name).parents:
            if str(parent) in wanted:
                raise StoreFault(f"{parent} would be a file and a directory in one view", details={"path": name})
    return wanted


def _is_exact(store: LocalStore, path: Path, manifest: Manifest, wanted: dict[str, Artifact], *, ready: bool) -> bool:
    """Whether the directory holds exactly the wanted files with the wanted content. Raises Damaged for a bad blob."""
    found = _tree(path)
    if found is None or found.keys() != {*wanted, MANIFEST, *((READY,) if ready else ())}:
        return False
    for name, item in wanted.items():
        status = found[name]
        if not stat.S_ISREG(status.st_mode) or status.st_size != item.size:
            return False
        if stat.S_IMODE(status.st_mode) & 0o111 != item.mode & 0o111 & 0o555:
            return False
        if not _holds(store, path / name, status, item.sha256):
            return False
    return _is_manifest(path / MANIFEST, manifest)


def _tree(path: Path) -> dict[str, os.stat_result] | None:
    """Every file under a directory by its relative path, never through a link; None when there is no directory."""
    found: dict[str, os.stat_result] = {}
    folders = [""]
    with storage("reading", path):
        if not path.is_dir() or path.is_symlink():
            return None
        try:
            while folders:
                folder = folders.pop()
                with os.scandir(path / folder) as entries:
                    for entry in entries:
                        name = f"{folder}{entry.name}"
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(f"{name}/")
                        else:
                            found[name] = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return None  # somebody is replacing it
    return found


def _holds(store: LocalStore, path: Path, status: os.stat_result, sha256: str) -> bool:
    blob = store.blob_path(sha256)
    if os.path.samestat(os.lstat(blob), status):
        return True
    identity = Identity.of(status)
    if _hashed.get(identity) == sha256:
        return True
    try:
        found = hash_regular(path)
    except Damaged:
        return False
    if found is None or found[0] != sha256:
        return False
    if time.time_ns() - found[1].mtime_ns > SETTLED_NS:
        _hashed[found[1]] = sha256
    return True


def _is_manifest(path: Path, manifest: Manifest) -> bool:
    try:
        found = read_regular(path)
        return found is not None and decode(Manifest, found[0]).id == manifest.id
    except StoreFault as error:
        if "errno" in error.details:
            raise
        return False


def _lock(store: LocalStore, place: Path, manifest_id: str, mode: int, *, own: bool) -> AbstractContextManager[None]:
    if own:
        return store.base.lock(f"view-{manifest_id[:2]}", timeout=LOCK_TIMEOUT)
    return kernel_lock(place / f".{manifest_id}.lock", mode & 0o666, timeout=LOCK_TIMEOUT)


def _building(where: Path, manifest_id: str) -> Path:
    """A name to build under outside a store; what killed builders left is removed. Called under the view's lock."""
    prefix = f".{manifest_id}.building-"
    for name in names(where):
        if name.startswith(prefix):
            remove(where / name)
    return where / f"{prefix}{secrets.token_hex(8)}"


def _build(
    store: LocalStore,
    building: Path,
    manifest: Manifest,
    wanted: dict[str, Artifact],
    mode: int,
    *,
    ready: bool,
    writable: bool,
) -> None:
    try:
        _make_folder(building, mode)
        made = {building}
        for name, item in wanted.items():
            target = building / name
            for folder in reversed(target.parents):
                if folder not in made and folder.is_relative_to(building):
                    _make_folder(folder, mode)
                    made.add(folder)
            _place(store, item, target, writable=writable)
        write_temporary(building / MANIFEST, [encode(manifest)], 0o444, flush=False)
        if ready:
            total = sum(item.size for item in wanted.values())
            document = {"schema": 1, "manifest": manifest.id, "files": len(wanted), "bytes": total}
            write_temporary(building / READY, [json.dumps(document).encode() + b"\n"], 0o444, flush=False)
    except BaseException:
        remove(building)
        raise


def _make_folder(path: Path, mode: int) -> None:
    with storage("creating", path):
        os.mkdir(path, 0o700)
        os.chmod(path, mode)


def _place(store: LocalStore, item: Artifact, target: Path, *, writable: bool) -> None:
    blob = store.blob_path(item.sha256)
    # A link would share the blob's mode, and a compiler running as root would write through it into the store.
    if not writable and not item.mode & 0o111:
        with storage("linking", target):
            try:
                retrying(lambda: os.link(blob, target))
                return
            except OSError as error:
                if error.errno not in NO_LINKS and error.errno != errno.EXDEV:
                    raise
    mode = item.mode | 0o600 if writable else item.mode & 0o555 | 0o444
    with storage("reading", blob):
        file = open(blob, "rb")  # noqa: SIM115 closed below
    with file:
        written = write_temporary(target, iter(lambda: file.read(1 << 20), b""), mode, flush=False)
    if written.sha256 != item.sha256:
        details = {"blob": item.sha256, "path": str(blob)}
        raise Damaged(f"blob {item.sha256} changed while it was copied", hint="run `verify`", details=details)


def _swap(building: Path, path: Path) -> None:
    """Put a new view where an inexact one may be; done under the lock of the view."""
    old = building.with_name(f"{building.name}.old")
    with storage("replacing", path):
        try:
            os.rename(path, old)
        except FileNotFoundError:
            old = path  # nothing to remove
        retrying(lambda: os.rename(building, path))
    if old != path:
        remove(old)
