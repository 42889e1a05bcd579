"""Cache directories that compilers own: only complete files are kept, exactly they are put back.

The compiler here is made up: results are `<key>/<name>.neff`, `<key>/done` is an empty marker, `<key>/<name>.part` is
half of something, `locks/<key>` is held while a key is written, and a whole result ends with a full stop.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neffcache.errors import Miss
from neffcache.store.local import LocalStore
from neffcache.store.native import (
    EXTRA,
    Verdict,
    added,
    all_graph_keys,
    collect,
    graph_keys,
    is_held,
    look,
    overlay,
)
from neffcache.store.records import Artifact, Manifest, RankClass
from neffcache.store.view import discard, materialise

pytestmark = pytest.mark.fast


class MadeUp:
    """Rules of the made-up compiler; `meanwhile` is called between the two looks at a file."""

    name = "neff"
    compiled = True

    def __init__(self, meanwhile: dict[str, bytes | None] | None = None) -> None:
        self.meanwhile = meanwhile or {}

    def verdict(self, path: str, names: Collection[str]) -> Verdict:
        if path.endswith(".neff"):
            return "artifact"
        if path.endswith("/done"):
            return "marker"
        if path.endswith(".part"):
            return "incomplete"
        return "transient" if path.startswith("locks/") else "foreign"

    def locks(self, path: str) -> list[str]:
        return [f"locks/{path.partition('/')[0]}"]

    def whole(self, path: str, file: Path) -> bool:
        data = file.read_bytes()
        whole = not data or data.endswith(b".")  # a marker is empty
        if path in self.meanwhile:
            change(file, self.meanwhile[path])
        return whole

    def graph(self, path: str) -> str | None:
        return path.partition("/")[0] if "/" in path else None


def change(file: Path, data: bytes | None) -> None:
    """Another content, longer or of the same length, or (None) gone."""
    if data is None:
        file.unlink()
    else:
        file.write_bytes(data)


def put(stores: Path, files: dict[str, bytes]) -> Path:
    for path, data in files.items():
        target = stores / "neff" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return stores


def kept(collected) -> dict[str, str]:
    return {item.path: item.sha256 for item in collected.artifacts}


@contextmanager
def held(lock: Path) -> Iterator[None]:
    lock.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


def manifest_of(made, collected, **changes) -> Manifest:
    return made.manifest(native=collected.artifacts, **changes)


def test_complete_files_are_kept_by_content_and_everything_else_is_named_with_its_reason(
    store: LocalStore, tmp_path: Path
) -> None:
    stores = put(
        tmp_path / "stores",
        {
            "a/one.neff": b"program.",
            "a/done": b"",
            "a/empty.neff": b"",
            "a/half.neff": b"progr",
            "a/two.part": b"program.",
            "locks/a": b"",
            "README": b"hello.",
        },
    )
    (stores / "neff/a/link.neff").symlink_to(stores / "neff/a/one.neff")
    os.mkfifo(stores / "neff/a/pipe.neff")
    (stores / "neff/a/one.neff").chmod(0o755)
    collected = collect(store, stores, [MadeUp()])
    assert [(item.store, item.path, item.size, item.mode) for item in collected.artifacts] == [
        ("neff", "a/done", 0, 0o444),
        ("neff", "a/one.neff", 8, 0o555),
    ]
    assert collected.size == 8
    assert collected.artifacts[1].extra == {"graph": "a"}
    assert store.read_blob(kept(collected)["a/one.neff"]) == b"program."
    assert collected.left_out == {
        "neff": {
            "README": "foreign",
            "a/empty.neff": "empty",
            "a/half.neff": "broken",
            "a/link.neff": "irregular",
            "a/pipe.neff": "irregular",
            "a/two.part": "incomplete",
            "locks/a": "transient",
        }
    }


def test_nothing_is_kept_of_a_directory_that_is_not_there(store: LocalStore, tmp_path: Path) -> None:
    assert collect(store, tmp_path / "nowhere", [MadeUp()]).artifacts == ()


def test_what_a_live_writer_holds_is_left_until_it_lets_go(store: LocalStore, tmp_path: Path) -> None:
    stores = put(tmp_path, {"a/one.neff": b"program.", "b/one.neff": b"other."})
    with held(stores / "neff/locks/a"):
        collected = collect(store, stores, [MadeUp()])
        assert kept(collected).keys() == {"b/one.neff"}
        assert collected.left_out["neff"]["a/one.neff"] == "locked"
    assert not is_held(stores / "neff/locks/a"), "a lock file that nobody holds says nothing"
    assert kept(collect(store, stores, [MadeUp()])).keys() == {"a/one.neff", "b/one.neff"}


@pytest.mark.parametrize(
    "then", [b"program. and more.", b"prOgram.", b"", None], ids=["grows", "changes", "empty", "gone"]
)
def test_a_file_that_moves_between_two_looks_is_left(store: LocalStore, tmp_path: Path, then: bytes | None) -> None:
    stores = put(tmp_path, {"a/one.neff": b"program.", "a/two.neff": b"still."})
    collected = collect(store, stores, [MadeUp({"a/one.neff": then})])
    assert kept(collected).keys() == {"a/two.neff"}
    assert collected.left_out["neff"] == {"a/one.neff": "moving"}


def test_a_file_that_is_written_again_with_the_same_content_is_left_too(store: LocalStore, tmp_path: Path) -> None:
    """Who writes now may write something else a moment later."""
    stores = put(tmp_path, {"a/one.neff": b"program."})
    os.utime(stores / "neff/a/one.neff", ns=(1, 1))
    assert collect(store, stores, [MadeUp({"a/one.neff": b"program."})]).artifacts == ()


def test_only_the_graphs_that_the_compiler_says_this_job_used(store: LocalStore, tmp_path: Path) -> None:
    stores = put(tmp_path, {"a/one.neff": b"program.", "b/one.neff": b"other.", "shared.neff": b"for all."})
    collected = collect(store, stores, [MadeUp()], used={"a"})
    assert kept(collected).keys() == {"a/one.neff", "shared.neff"}
    assert collected.left_out["neff"] == {"b/one.neff": "unused"}


KINDS = {
    "one.neff": [b"", b"half", b"whole.", b"whole too."],
    "two.neff": [b"half", b"whole."],
    "done": [b""],
    "x.part": [b"whole."],
    "note": [b"whole."],
}


@settings(max_examples=60, deadline=None)
@given(
    tree=st.dictionaries(
        st.tuples(st.sampled_from("abc"), st.sampled_from(sorted(KINDS))), st.integers(0, 3), max_size=12
    ),
    writing=st.sets(st.sampled_from("abc"), max_size=2),
    used=st.none() | st.sets(st.sampled_from("abc")),
    moving=st.none() | st.tuples(st.sampled_from("abc"), st.sampled_from(["one.neff", "two.neff"])),
)
def test_no_other_than_complete_files_whatever_lies_there(
    tmp_path_factory: pytest.TempPathFactory, tree, writing: set[str], used: set[str] | None, moving
) -> None:
    place = tmp_path_factory.mktemp("tree")
    store = LocalStore.open(place / "store", writable=True)
    files = {f"{key}/{name}": KINDS[name][number % len(KINDS[name])] for (key, name), number in tree.items()}
    stores = put(place / "stores", files)
    moved = "/".join(moving) if moving else ""
    wanted = {
        path
        for path, data in files.items()
        if (path.endswith("/done") or (path.endswith(".neff") and data.endswith(b".")))
        and path[0] not in writing
        and (used is None or path[0] in used)
        and path != moved
    }
    locks = [held(stores / "neff/locks" / key) for key in sorted(writing)]
    for lock in locks:
        lock.__enter__()
    try:
        collected = collect(store, stores, [MadeUp({moved: b"another content."})], used=used)
    finally:
        for lock in locks:
            lock.__exit__(None, None, None)
    assert kept(collected).keys() == wanted
    assert set(files) - wanted <= set(collected.left_out["neff"])
    for item in collected.artifacts:
        assert store.read_blob(item.sha256) == files[item.path]


def test_a_name_that_no_manifest_may_hold_is_left(store: LocalStore, tmp_path: Path) -> None:
    stores = put(tmp_path, {"a/one\n.neff": b"program."})
    complete, left = look(stores / "neff", MadeUp())
    assert (complete, left) == ({}, {"a/one\n.neff": "irregular"})


def test_a_view_has_exactly_what_was_collected_and_a_second_configuration_does_not_leak(
    store: LocalStore, tmp_path: Path, made
) -> None:
    """Two jobs of one toolchain warmed into one store, each in its own directory."""
    first = put(tmp_path / "job one", {"a/one.neff": b"program.", "a/done": b""})
    second = put(tmp_path / "job two", {"a/one.neff": b"program.", "b/one.neff": b"other."})
    one = store.put_manifest(manifest_of(made, collect(store, first, [MadeUp()])))
    two = store.put_manifest(manifest_of(made, collect(store, second, [MadeUp()]), created="2026"))
    for found, names in ((one, {"a/one.neff", "a/done"}), (two, {"a/one.neff", "b/one.neff"})):
        view = materialise(store, found)
        there = {str(p.relative_to(view.path / "neff")) for p in (view.path / "neff").rglob("*") if p.is_file()}
        assert there == names
        discard(view)
    assert len(list(store.blobs())) == 3


def test_what_a_compiler_writes_into_an_overlay_stays_there(store: LocalStore, tmp_path: Path, made) -> None:
    stores = put(tmp_path / "stores", {"a/one.neff": b"program."})
    found = store.put_manifest(manifest_of(made, collect(store, stores, [MadeUp()])))
    view = overlay(store, found, tmp_path / "run")
    file = view.path / "neff/a/one.neff"
    assert added(view.path, [MadeUp()], found) == []
    file.write_bytes(b"scribble")
    (view.path / "neff/a/one.lock").touch()
    put(view.path, {"b/new.neff": b"compiled."})
    assert added(view.path, [MadeUp()], found) == ["neff/b/new.neff"]
    assert store.read_blob(found.artifacts[0].sha256) == b"program."
    again = overlay(store, found, tmp_path / "run")
    assert again.path != view.path
    assert (again.path / "neff/a/one.neff").read_bytes() == b"program."


def test_a_missing_file_is_refused_and_a_partial_overlay_leaves_it_out(store: LocalStore, tmp_path: Path, made) -> None:
    stores = put(tmp_path / "stores", {"a/one.neff": b"program.", "a/two.neff": b"other."})
    found = store.put_manifest(manifest_of(made, collect(store, stores, [MadeUp()])))
    store.blob_path(found.artifacts[0].sha256).unlink()
    with pytest.raises(Miss):
        overlay(store, found, tmp_path / "run")
    view = overlay(store, found, tmp_path / "run", partial=True)
    assert not (view.path / "neff/a/one.neff").exists()
    assert (view.path / "neff/a/two.neff").read_bytes() == b"other."


def test_a_damaged_file_is_quarantined_before_a_run_sees_it(store: LocalStore, tmp_path: Path, made, flip) -> None:
    stores = put(tmp_path / "stores", {"a/one.neff": b"program." * 100})
    found = store.put_manifest(manifest_of(made, collect(store, stores, [MadeUp()])))
    flip(store.blob_path(found.artifacts[0].sha256))
    assert [item.quarantined for item in LocalStore.open(store.root, writable=True).damaged(found)] == [True]
    with pytest.raises(Miss):
        overlay(store, found, tmp_path / "run")


def test_the_compiler_s_keys_of_a_rank_class(made) -> None:
    said = {EXTRA: {"phases": {"first_step": ["k1", "k2"], "steady_step": []}, "misses": 0}}
    entry = RankClass("0-3", {}, said)
    assert graph_keys(entry) == {"first_step": ("k1", "k2"), "steady_step": ()}
    assert graph_keys(RankClass("0-3", {"first_step": ()})) == {}
    found = replace(made.manifest(), rank_classes=(entry, RankClass("4", {}, {EXTRA: {"phases": {"x": ["k2", "k3"]}}})))
    assert all_graph_keys(found) == ("k1", "k2", "k3")


def test_an_artifact_keeps_the_graph_it_belongs_to_through_a_store(store: LocalStore, made, tmp_path: Path) -> None:
    stores = put(tmp_path / "stores", {"a/one.neff": b"program."})
    found = store.put_manifest(manifest_of(made, collect(store, stores, [MadeUp()])))
    again = LocalStore.open(store.root, writable=False).get_manifest(found.id)
    assert again is not None
    assert again.artifacts == (Artifact("neff", "a/one.neff", found.artifacts[0].sha256, 8, 0o444, {"graph": "a"}),)
