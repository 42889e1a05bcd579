from __future__ import annotations

import errno
import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from neffcache.errors import Miss, StoreFault
from neffcache.key.canonical import sha256_hex
from neffcache.store import layout
from neffcache.store.local import LocalStore
from neffcache.store.records import Artifact, Damaged, Manifest
from neffcache.store.view import discard, materialise

pytestmark = pytest.mark.fast


@pytest.fixture
def manifest(store: LocalStore, made) -> Manifest:
    """Two graphs, and a native store with a program in a directory of its own."""
    made.job(store, "one", "two")
    data = made.content("native")
    store.put_blob(data)
    native = Artifact("neff", "deep/er/tool", sha256_hex(data), len(data), 0o755)
    return store.put_manifest(made.manifest("one", "two", native=(native,)))


def files(path: Path) -> dict[str, bytes]:
    return {str(item.relative_to(path)): item.read_bytes() for item in path.rglob("*") if item.is_file()}


def expected(made, manifest: Manifest) -> dict[str, bytes]:
    return {f"host/{made.key(word)}/code.bin": made.content(f"code {word}") for word in ("one", "two")} | {
        "neff/deep/er/tool": made.content("native")
    }


def test_a_view_holds_exactly_the_files_of_its_manifest(store: LocalStore, manifest: Manifest, made) -> None:
    view = materialise(store, manifest)
    assert (view.path, view.manifest_id, view.ready) == (store.root / "views" / manifest.id, manifest.id, True)
    found = files(view.path)
    ready = json.loads(found.pop("ready.json"))
    assert ready == {"schema": 1, "manifest": manifest.id, "files": 3, "bytes": 6_000}
    assert Manifest.from_json(json.loads(found.pop("manifest.json"))) == manifest
    assert found == expected(made, manifest)
    assert os.access(view.path / "neff/deep/er/tool", os.X_OK)
    linked = view.path / f"host/{made.key('one')}/code.bin"
    assert linked.samefile(store.blob_path(made.record("one").artifacts[0].sha256))
    assert list((store.root / "tmp").iterdir()) == []


def test_a_second_call_changes_nothing(store: LocalStore, manifest: Manifest, state_of) -> None:
    view = materialise(store, manifest)
    before = state_of(view.path)
    assert materialise(store, manifest) == view
    assert materialise(LocalStore.open(store.root, writable=True), manifest) == view
    assert state_of(view.path) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda path: (path / "ready.json").unlink(),
        lambda path: (path / "manifest.json").unlink(),
        lambda path: (path / "extra").write_bytes(b"x"),
        lambda path: (path / "neff" / "deep" / "er" / "tool").unlink(),
        lambda path: (path / "neff" / "deep" / "link").symlink_to("/etc/passwd"),
        lambda path: (path / "neff" / "deep" / "er" / "tool").chmod(0o644),
        lambda path: os.mkfifo(path / "pipe"),
    ],
    ids=["no ready", "no manifest", "extra", "absent", "link", "mode", "pipe"],
)
def test_a_view_that_is_not_exact_is_rebuilt(store: LocalStore, manifest: Manifest, made, change) -> None:
    change(materialise(store, manifest).path)
    view = materialise(store, manifest)
    found = files(view.path)
    assert {name: found[name] for name in found if "/" in name} == expected(made, manifest)
    assert set(found) == {*expected(made, manifest), "manifest.json", "ready.json"}
    assert not list(view.path.rglob("link")) + list(view.path.rglob("pipe"))
    assert list((store.root / "tmp").iterdir()) == []


def test_a_changed_copy_in_a_view_is_rebuilt(store: LocalStore, manifest: Manifest, made, flip) -> None:
    view = materialise(store, manifest)
    flip(view.path / "neff/deep/er/tool")
    link = view.path / f"host/{made.key('one')}/code.bin"
    link.unlink()
    link.write_bytes(bytes(2_000))  # the right size
    manifest_file = view.path / "manifest.json"
    manifest_file.unlink()
    manifest_file.write_text("{}")
    found = files(materialise(store, manifest).path)
    assert {name: found[name] for name in found if "/" in name} == expected(made, manifest)
    assert json.loads(found["manifest.json"])["id"] == manifest.id


def test_damage_through_a_link_is_found_and_healed(store: LocalStore, manifest: Manifest, made, flip) -> None:
    view = materialise(store, manifest)
    flip(view.path / f"host/{made.key('one')}/code.bin")  # as a compiler that runs as root could
    with pytest.raises(Damaged) as caught:
        materialise(store, manifest)
    assert caught.value.details["blob"] == made.record("one").artifacts[0].sha256
    store.put_blob(made.content("code one"))
    found = files(materialise(store, manifest).path)
    assert {name: found[name] for name in found if "/" in name} == expected(made, manifest)


def test_a_damaged_blob_never_reaches_a_view(store: LocalStore, manifest: Manifest, made, flip) -> None:
    sha256 = made.record("two").artifacts[0].sha256
    flip(store.blob_path(sha256))
    with pytest.raises(Damaged):
        materialise(store, manifest)
    assert list((store.root / "views").iterdir()) == list((store.root / "tmp").iterdir()) == []
    with pytest.raises(Miss) as caught:
        materialise(store, manifest)
    assert caught.value.details["missing"] == [{"kind": "artifact", "what": sha256}]


def test_a_cut_blob_is_damage_and_not_a_miss(store: LocalStore, manifest: Manifest, made) -> None:
    path = store.blob_path(made.record("two").artifacts[0].sha256)
    path.chmod(0o600)
    path.write_bytes(b"")
    with pytest.raises(Damaged):
        materialise(store, manifest)


def test_a_partial_view_is_not_ready(store: LocalStore, manifest: Manifest, made) -> None:
    (store.root / layout.graph_name(made.key("one"))).unlink()
    with pytest.raises(Miss):
        materialise(store, manifest)
    view = materialise(store, manifest, partial=True)
    assert view.ready is False
    assert set(files(view.path)) == {f"host/{made.key('two')}/code.bin", "neff/deep/er/tool", "manifest.json"}
    made.graph(store, "one")
    assert materialise(store, manifest).ready is True
    assert (view.path / "ready.json").exists()


def test_an_overlay_can_be_written_and_the_store_does_not_change(store: LocalStore, manifest: Manifest, made) -> None:
    one = materialise(store, manifest, writable_overlay=True)
    two = materialise(store, manifest, writable_overlay=True)
    assert one.path != two.path
    for path in one.path.rglob("*"):
        if path.is_file() and path.parent != one.path:
            assert stat.S_IMODE(path.stat().st_mode) & 0o200
            assert path.stat().st_nlink == 1
            path.write_bytes(b"the compiler was here")
    found = files(two.path)
    assert {name: found[name] for name in found if "/" in name} == expected(made, manifest)
    assert store.damaged(manifest) == []
    discard(one)
    assert not one.path.exists()


def test_a_read_only_store_gives_its_view_or_builds_one_elsewhere(
    store: LocalStore, manifest: Manifest, made, tmp_path: Path, state_of
) -> None:
    reader = LocalStore.open(store.root, writable=False)
    with pytest.raises(StoreFault, match="read-only store"):
        materialise(reader, manifest)
    before = state_of(store.root / "graphs")
    view = materialise(reader, manifest, where=tmp_path / "else" / "where")
    assert view.path == tmp_path / "else" / "where" / manifest.id
    assert set(files(view.path)) == {*expected(made, manifest), "manifest.json", "ready.json"}
    assert materialise(reader, manifest, where=tmp_path / "else" / "where") == view
    assert state_of(store.root / "graphs") == before
    assert list((store.root / "views").iterdir()) == list((store.root / "tmp").iterdir()) == []
    own = materialise(store, manifest)
    before = state_of(store.root)
    assert materialise(reader, manifest) == own
    assert state_of(store.root) == before


def test_a_mounted_volume_is_readable_by_another_user(store: LocalStore, manifest: Manifest, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    volume.chmod(0o777)
    before = os.umask(0o077)
    try:
        view = materialise(store, manifest, where=volume)
    finally:
        os.umask(before)
    for path in (view.path, *view.path.rglob("*")):
        wanted = 0o005 if path.is_dir() else 0o004
        assert path.stat().st_mode & wanted == wanted


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_files_are_copied_where_links_do_not_work(store, manifest, made, monkeypatch, code: int, tmp_path) -> None:
    def refused(*names: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refused)
    view = materialise(store, manifest, where=tmp_path / "views")
    found = files(view.path)
    assert {name: found[name] for name in found if "/" in name} == expected(made, manifest)


def test_a_failing_build_leaves_nothing(store: LocalStore, manifest: Manifest, monkeypatch, tmp_path: Path) -> None:
    def refused(*names: object) -> None:
        raise OSError(errno.EIO, "bad")

    monkeypatch.setattr(os, "link", refused)
    with pytest.raises(StoreFault):
        materialise(store, manifest)
    assert list((store.root / "views").iterdir()) == list((store.root / "tmp").iterdir()) == []


def test_what_a_killed_builder_left_is_removed_by_the_next(store: LocalStore, manifest: Manifest, tmp_path) -> None:
    volume = tmp_path / "volume"
    leftover = volume / f".{manifest.id}.building-{'a' * 16}"
    (leftover / "host").mkdir(parents=True)
    view = materialise(store, manifest, where=volume)
    assert not leftover.exists()
    assert {path.name for path in volume.iterdir()} == {view.path.name, f".{manifest.id}.lock"}


def test_two_files_of_one_name_are_refused(store: LocalStore, made) -> None:
    one = made.graph(store, "one")
    data = made.content("other")
    store.put_blob(data)
    name = one.artifacts[0].path
    for path, what in ((name, "different files"), (f"{name}/inner", "a file and a directory")):
        native = Artifact("host", path, sha256_hex(data), len(data), 0o644)
        with pytest.raises(StoreFault, match=what):
            materialise(store, made.manifest("one", native=(native,)))
    same = replace(one.artifacts[0])
    assert materialise(store, made.manifest("one", native=(same,))).ready


def test_a_manifest_id_cannot_lead_out_of_the_views(store: LocalStore, manifest: Manifest) -> None:
    with pytest.raises(Exception, match="is not a manifest id"):
        materialise(store, replace(manifest, id="../../../x"))


def test_a_view_directory_that_is_a_link_is_replaced_and_not_followed(
    store: LocalStore, manifest: Manifest, tmp_path: Path
) -> None:
    elsewhere = materialise(store, manifest, where=tmp_path / "views").path
    (store.root / "views" / manifest.id).symlink_to(elsewhere)
    view = materialise(store, manifest)
    assert view.path.is_dir()
    assert not view.path.is_symlink()
    assert elsewhere.is_dir()


@pytest.mark.parametrize("outside", [False, True])
def test_processes_that_build_one_view_at_once_all_get_it(
    store: LocalStore, manifest: Manifest, made, child, tmp_path: Path, outside: bool
) -> None:
    where = tmp_path / "views" if outside else None

    def build() -> None:
        mine = LocalStore.open(store.root, writable=True)
        for _ in range(5):
            view = materialise(mine, manifest, where=where)
            found = files(view.path)
            assert {name: found[name] for name in found if "/" in name} == expected(made, manifest)

    children = [child(build) for _ in range(6)]
    assert [item.wait() for item in children] == [0] * 6
    assert list((store.root / "tmp").iterdir()) == []
