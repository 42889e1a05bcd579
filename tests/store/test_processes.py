"""Many processes on one store, some of them killed: a reader sees a whole entry or none, never half of one."""

from __future__ import annotations

import os
import random
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from neffcache.errors import Miss
from neffcache.key.canonical import sha256_hex
from neffcache.store.local import LocalStore
from neffcache.store.records import Damaged, Manifest
from neffcache.store.verify import verify
from neffcache.store.view import materialise

pytestmark = pytest.mark.integration


def all_is_whole(root: Path) -> None:
    """What any reader relies on, looked at by one that remembers nothing."""
    reader = LocalStore.open(root, writable=False)
    report = verify(reader)
    assert report.good, report.to_json()["findings"]
    for pointer in reader.pointers():
        manifest = reader.get_manifest(pointer.manifest)
        assert manifest is not None
        assert manifest.complete
        assert reader.missing(manifest) == []
    for path in (root / "views").glob("*"):
        assert (path / "ready.json").exists()


def write_everything(root: Path, made, word: str) -> Manifest:
    store = LocalStore.open(root, writable=True)
    manifest = made.job(store, word)
    store.set_pointer(manifest.cache_key, manifest.id)
    materialise(store, manifest)
    return manifest


class Trigger:
    """Counts this process's file operations, and kills it just before one of them, or half-way through a write."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0
        self.write, self.fsync = os.write, os.fsync
        os.write, os.fsync = self._write, self._fsync
        sys.addaudithook(self._hook)

    def _step(self) -> bool:
        self.count += 1
        return self.count == self.at

    def _die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _hook(self, event: str, _args: tuple[object, ...]) -> None:
        if (event == "open" or event.startswith(("os.", "shutil.", "fcntl."))) and event != "os.kill" and self._step():
            self._die()

    def _write(self, descriptor: int, data: bytes) -> int:
        if self._step():
            self.write(descriptor, bytes(data[: len(data) // 2]))
            self._die()
        return self.write(descriptor, data)

    def _fsync(self, descriptor: int) -> None:
        if self._step():
            self._die()
        self.fsync(descriptor)


def test_a_writer_killed_at_any_of_its_file_operations_leaves_a_whole_store(tmp_path: Path, made, child) -> None:
    at = leftovers = 0
    while True:
        at += 1
        root = tmp_path / str(at)

        def killed(at: int = at, root: Path = root) -> None:
            Trigger(at)
            write_everything(root, made, "one")

        if (status := child(killed).wait()) == 0:
            break  # it has fewer operations than that
        assert status == -signal.SIGKILL, f"operation {at}"
        if not root.exists():
            continue
        all_is_whole(root)
        if at % 3 == 0:
            write_everything(root, made, "one")  # a rerun does the rest
            all_is_whole(root)
        store = LocalStore.open(root, writable=True)
        leftovers += len(store.sweep(older_than=-60.0))
        assert list((root / "tmp").iterdir()) == store.quarantined() == []
    assert at > 100  # creation, blobs, record, manifest, pointer and view were all in it
    assert leftovers > 20  # and it was killed in the middle of things


@pytest.mark.usefixtures("real_flush")
def test_writers_killed_at_random_never_show_a_wrong_byte(root: Path, made, child) -> None:
    chance = random.Random(7)
    LocalStore.open(root, writable=True)

    def write_for_ever(number: int) -> None:
        turn = 0
        while True:
            write_everything(root, made, f"random {(number + turn) % 12}")
            turn += 1

    for number in range(25):
        writers = [child(lambda number=number: write_for_ever(number)) for _ in range(2)]
        for writer in writers:
            select.select([], [], [], chance.uniform(0.0, 0.05))  # where it is killed does not matter
            writer.kill()
        assert [writer.wait() for writer in writers] == [-signal.SIGKILL] * 2
        all_is_whole(root)


def test_16_writers_and_16_readers_on_one_key(root: Path, made, child) -> None:
    LocalStore.open(root, writable=True)
    key, done = made.key("one"), root.parent / "done"

    def write(number: int) -> None:
        for turn in range(3):
            store = LocalStore.open(root, writable=True)
            adopted = made.graph(store, "one", by=f"writer {number} {turn}", seconds=float(number))
            assert adopted == store.get_graph(key)
            manifest = store.put_manifest(made.manifest("one"))
            store.set_pointer(manifest.cache_key, manifest.id)

    def read() -> None:
        wrong: list[object] = []
        while True:
            last = done.exists()
            store = LocalStore.open(root, writable=False)
            if (pointer := store.pointer(made.key("job"))) is not None:
                manifest = store.get_manifest(pointer.manifest)
                wrong += [pointer] if manifest is None or store.missing(manifest) else []
            if (record := store.get_graph(key)) is not None:
                for sha256 in (record.text, record.artifacts[0].sha256):
                    wrong += [sha256] if sha256_hex(store.read_blob(sha256)) != sha256 else []
            assert wrong == []
            if last:
                assert pointer is not None
                assert record is not None
                return

    readers = [child(read) for _ in range(16)]
    writers = [child(lambda number=number: write(number)) for number in range(16)]
    assert [writer.wait() for writer in writers] == [0] * 16
    done.touch()
    assert [reader.wait() for reader in readers] == [0] * 16
    assert LocalStore.open(root, writable=False).quarantined() == []
    assert list((root / "tmp").iterdir()) == []
    all_is_whole(root)


def race(child, work: Callable[[int], bytes], racers: int) -> list[bytes]:
    """Start all at once, and give what each of them says."""
    (gate, open_gate), (reading, writing) = os.pipe(), os.pipe()

    def run(number: int) -> None:
        os.read(gate, 1)
        os.write(writing, work(number).ljust(64))

    children = [child(lambda number=number: run(number)) for number in range(racers)]
    os.write(open_gate, b"x" * racers)
    assert [item.wait() for item in children] == [0] * racers
    answers = [os.read(reading, 64).strip() for _ in range(racers)]
    for descriptor in (gate, open_gate, reading, writing):
        os.close(descriptor)
    return answers


def test_of_12_writers_of_one_graph_one_wins_and_all_adopt_it(root: Path, made, child) -> None:
    LocalStore.open(root, writable=True)
    for turn in range(5):

        def write(number: int, turn: int = turn) -> bytes:
            store = LocalStore.open(root, writable=True)
            return made.graph(store, f"turn {turn}", by=str(number)).artifacts[0].sha256.encode()

        answers = race(child, write, 12)
        record = LocalStore.open(root, writable=False).get_graph(made.key(f"turn {turn}"))
        assert record is not None
        assert set(answers) == {record.artifacts[0].sha256.encode()}


def test_of_12_swaps_of_one_pointer_one_wins(root: Path, made, child) -> None:
    store = LocalStore.open(root, writable=True)
    ids = [made.job(store, f"word {number}").id for number in range(12)]
    expected: str | None = None
    for _ in range(5):

        def swap(number: int, expected: str | None = expected) -> bytes:
            mine = LocalStore.open(root, writable=True)
            target = ids[(number + 1) % 12] if ids[number] == expected else ids[number]
            return target.encode() if mine.swap_pointer(made.key("job"), expected, target) else b"lost"

        answers = race(child, swap, 12)
        assert answers.count(b"lost") == 11
        pointer = store.pointer(made.key("job"))
        assert pointer is not None
        assert pointer.manifest.encode() in answers
        expected = pointer.manifest


def test_readers_of_a_blob_that_is_damaged_and_healed_again_and_again(root: Path, made, child, flip) -> None:
    store = LocalStore.open(root, writable=True)
    data = made.content("contested", 300_000)
    sha256, done = store.put_blob(data), root.parent / "done"

    def read() -> None:
        whole = 0
        while not done.exists() or not whole:
            try:
                assert LocalStore.open(root, writable=True).read_blob(sha256) == data
                whole += 1
            except (Miss, Damaged):
                continue

    readers = [child(read) for _ in range(4)]
    path, damaged = store.blob_path(sha256), 0
    while damaged < 40:
        try:
            flip(path, at=damaged * 7_000)
            damaged += 1
        except FileNotFoundError:  # a late reader has the good one in its hands and is putting it back
            pass
        store.put_blob(data)
    store.put_blob(data)
    done.touch()
    assert [reader.wait() for reader in readers] == [0] * 4
    assert store.read_blob(sha256) == data
