from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from neffcache.errors import StoreFault
from neffcache.store import layout
from neffcache.store import root as root_module
from neffcache.store.local import LocalStore

pytestmark = pytest.mark.fast


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_store_belongs_to_its_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = LocalStore.open(tmp_path / "a" / "b" / "store", writable=True)
    finally:
        os.umask(before)
    store.put_blob(b"x")
    assert {mode(path) for path in (store.root, *store.root.rglob("*")) if path.is_dir()} == {0o700}


def test_a_shared_store_keeps_its_modes_whatever_the_umask(tmp_path: Path, made) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o2775)
    before = os.umask(0o077)
    try:
        store = LocalStore.open(shared, writable=True)
        manifest = made.job(store, "one")
        store.set_pointer(manifest.cache_key, manifest.id)
    finally:
        os.umask(before)
    assert {mode(path) for path in (shared, *shared.rglob("*")) if path.is_dir()} == {0o2775}
    assert {mode(path) for path in shared.rglob("*.json")} == {0o444}
    assert {mode(path) & 0o060 for path in (shared / "locks").iterdir()} == {0o060}


def test_a_default_root_that_is_a_link_is_refused(tmp_path: Path) -> None:
    LocalStore.open(tmp_path / "real", writable=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for writable in (True, False):
        with pytest.raises(StoreFault, match="symbolic link") as caught:
            LocalStore.open(tmp_path / "link", writable=writable)
        assert caught.value.exit_code == 7
        assert "NEFFCACHE_DIR" in caught.value.hint
    LocalStore.open(tmp_path / "link", writable=True, given=True)


def test_a_default_root_that_everybody_can_write_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "open"
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(StoreFault, match="written by everybody"):
        LocalStore.open(root, writable=True)
    assert list(root.iterdir()) == []
    root.chmod(0o1777)
    LocalStore.open(root, writable=True)
    root.chmod(0o777)  # an emptyDir of Kubernetes
    LocalStore.open(root, writable=True, given=True).put_blob(b"x")


def test_a_default_root_of_somebody_else_is_refused(tmp_path: Path, monkeypatch) -> None:
    root = tmp_path / "theirs"
    root.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: root.stat().st_uid + 1)
    with pytest.raises(StoreFault, match="is owned by uid"):
        LocalStore.open(root, writable=True)
    LocalStore.open(root, writable=True, given=True)


def test_a_root_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name, writable in (("file", True), ("file", False), ("dangling", True)):
        with pytest.raises(StoreFault):
            LocalStore.open(tmp_path / name, writable=writable, given=True)


def test_a_reader_creates_nothing(tmp_path: Path, made) -> None:
    store = LocalStore.open(tmp_path / "absent", writable=False)
    assert store.get_graph("a" * 32) is None
    assert list(store.blobs()) == store.manifests() == []
    assert store.missing(made.manifest("one"))[0].kind == "graph"
    for write in (
        lambda: store.put_blob(b"x"),
        lambda: store.put_manifest(made.manifest("one", complete=False)),
        store.sweep,
    ):
        with pytest.raises(StoreFault, match="read only"):
            write()
    assert list(tmp_path.iterdir()) == []


def test_a_read_only_store_serves_hits_with_no_write(store: LocalStore, made, as_ordinary_user, state_of) -> None:
    manifest = made.job(store, "one", "two")
    store.set_pointer(manifest.cache_key, manifest.id)
    folders = [path for path in (store.root, *store.root.rglob("*")) if path.is_dir()]
    for path in folders:
        path.chmod(0o555)
    before = state_of(store.root)
    try:
        with as_ordinary_user():
            reader = LocalStore.open(store.root, writable=False)
            pointer = reader.pointer(manifest.cache_key)
            assert pointer is not None
            assert reader.get_manifest(pointer.manifest) == manifest
            assert reader.missing(manifest) == reader.damaged(manifest) == []
            assert reader.read_blob(made.record("one").text) == made.content("text one")
            with pytest.raises(StoreFault, match="permission is denied"):
                LocalStore.open(store.root, writable=True)
        assert state_of(store.root) == before
    finally:
        for path in folders:
            path.chmod(0o700)


def test_damage_in_a_read_only_store_is_said_and_left(store: LocalStore, made, flip, state_of) -> None:
    record = made.graph(store, "one")
    flip(store.blob_path(record.artifacts[0].sha256))
    before = state_of(store.root)
    reader = LocalStore.open(store.root, writable=False)
    with pytest.raises(StoreFault) as caught:
        reader.blob_path(record.artifacts[0].sha256)
    assert caught.value.details["quarantined"] is None
    assert state_of(store.root) == before


def test_a_store_that_may_not_be_read_is_a_fault_and_not_empty(store: LocalStore, made, as_ordinary_user) -> None:
    record = made.graph(store, "one")
    (store.root / "graphs").chmod(0o000)
    try:
        with as_ordinary_user():
            reader = LocalStore.open(store.root, writable=False)
            with pytest.raises(StoreFault, match="permission is denied"):
                reader.get_graph(record.compile_key)
            with pytest.raises(StoreFault, match="permission is denied"):
                reader.graph_keys()
    finally:
        (store.root / "graphs").chmod(0o700)


def test_a_lock_of_a_killed_holder_is_free_and_one_of_a_live_holder_is_not(store: LocalStore, child) -> None:
    ready, said = os.pipe()

    def hold() -> None:
        with store.base.lock("x"):
            os.write(said, b"1")
            os.read(os.pipe()[0], 1)  # for ever

    holder = child(hold)
    assert os.read(ready, 1) == b"1"
    with pytest.raises(StoreFault, match="another process has held"):
        with store.base.lock("x", timeout=0.0):
            pytest.fail("a live holder was robbed")
    holder.kill()
    assert holder.wait() < 0
    with store.base.lock("x", timeout=1.0):
        pass
    assert (store.root / "locks" / "x.lock").exists()  # it is the kernel that knows, not the file


def test_a_file_system_without_locks_still_takes_pointers(store: LocalStore, made, monkeypatch) -> None:
    class Unsupported(root_module.UnixFileLock):
        def acquire(self, *_args: object, **_named: object) -> None:  # type: ignore[override]
            raise OSError(errno.ENOLCK, "no locks available")

    manifest = made.job(store, "one")
    monkeypatch.setattr(root_module, "UnixFileLock", Unsupported)
    store.set_pointer(manifest.cache_key, manifest.id)
    assert store.pointer(manifest.cache_key) is not None


def test_quarantine_and_temporary_files_share_the_file_system_of_the_blobs(store: LocalStore) -> None:
    devices = {(store.root / name).stat().st_dev for name in layout.DIRECTORIES}
    assert len(devices) == 1
