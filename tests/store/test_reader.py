"""A blob that is hashed while it is read: nobody gets all of a damaged one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from neffcache.errors import Miss
from neffcache.store import blobs as blobs_module
from neffcache.store.local import LocalStore
from neffcache.store.records import Damaged

pytestmark = pytest.mark.fast

DATA = bytes(range(256)) * 40
STEP = 1000


@pytest.fixture
def stored(store: LocalStore) -> tuple[LocalStore, str]:
    """A store that has not written (nor hashed) the blob itself, and the blob."""
    return LocalStore.open(store.root, writable=True, given=True), store.put_blob(DATA)


def drain(reader, step: int = STEP) -> bytes:
    return b"".join(iter(lambda: reader.read(step), b""))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)


def test_it_is_read_once_and_then_known(stored, monkeypatch: pytest.MonkeyPatch) -> None:
    store, sha256 = stored
    monkeypatch.setattr(blobs_module, "hash_regular", lambda path: pytest.fail("read a second time"))
    with store.blob_reader(sha256) as reader:
        assert reader.size == len(DATA)
        assert drain(reader) == DATA
    assert store.blob_path(sha256).read_bytes() == DATA


@pytest.mark.parametrize("step", [STEP, len(DATA), -1])
@pytest.mark.parametrize("at", [0, len(DATA) // 2, len(DATA) - 1])
def test_the_last_bytes_of_a_damaged_one_never_come(stored, at: int, step: int) -> None:
    store, sha256 = stored
    path = store.blob_path(sha256)
    flip(path, at)
    got: list[bytes] = []
    with store.blob_reader(sha256) as reader, pytest.raises(Damaged) as caught:
        got.extend(iter(lambda: reader.read(step), b""))
    assert sum(map(len, got)) < len(DATA)
    assert caught.value.details["blob"] == sha256
    assert not path.exists()
    with pytest.raises(Miss):
        store.blob_reader(sha256)


def test_from_the_beginning_again_it_is_hashed_again(stored) -> None:
    store, sha256 = stored
    with store.blob_reader(sha256) as reader:
        reader.read(STEP)
        assert reader.seek(0) == 0
        assert drain(reader) == DATA
        assert reader.tell() == len(DATA)
        reader.seek(0)
        assert drain(reader) == DATA


@pytest.mark.parametrize("good", [True, False])
def test_a_jump_costs_hashing_all_of_it(stored, good: bool) -> None:
    store, sha256 = stored
    if not good:
        flip(store.root / "blobs" / "sha256" / sha256[:2] / sha256, 3)
    with store.blob_reader(sha256) as reader:
        reader.seek(STEP)
        if good:
            assert drain(reader) == DATA[STEP:]
        else:
            with pytest.raises(Damaged):
                drain(reader)


@pytest.mark.parametrize("change", [lambda path: os.truncate(path, 10), lambda path: flip(path, 5000)])
def test_what_changes_meanwhile_is_not_given_whole(stored, change) -> None:
    store, sha256 = stored
    path = store.root / "blobs" / "sha256" / sha256[:2] / sha256
    with store.blob_reader(sha256) as reader:
        reader.read(STEP)
        path.chmod(0o600)
        change(path)
        with pytest.raises(Damaged):
            drain(reader)


def test_unchecked_it_is_given_as_it_is_and_not_when_it_ends_too_early(stored) -> None:
    store, sha256 = stored
    path = store.root / "blobs" / "sha256" / sha256[:2] / sha256
    flip(path, 3)
    with store.blob_reader(sha256, checked=False) as reader:
        assert len(drain(reader)) == len(DATA)
    with store.blob_reader(sha256, checked=False) as reader:
        reader.read(STEP)
        os.truncate(path, STEP)
        with pytest.raises(Damaged):
            drain(reader)


def test_what_is_no_file_is_damage_and_what_is_absent_a_miss(store: LocalStore) -> None:
    with pytest.raises(Miss):
        store.blob_reader("a" * 64)
    (store.root / "blobs" / "sha256" / "aa").mkdir(parents=True)
    (store.root / "blobs" / "sha256" / "aa" / ("a" * 64)).symlink_to("/etc/hostname")
    with pytest.raises(Damaged):
        store.blob_reader("a" * 64)


def test_an_empty_one(store: LocalStore) -> None:
    sha256 = store.put_blob(b"")
    store = LocalStore.open(store.root, writable=True, given=True)
    with store.blob_reader(sha256) as reader:
        assert drain(reader) == b""
