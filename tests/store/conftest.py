"""Parts for the tests of the store: records with real blobs, and processes made by fork."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

from neffcache.key.canonical import sha256_hex, xxh3_128_hex
from neffcache.store.local import LocalStore
from neffcache.store.records import Artifact, GraphRecord, Manifest, RankClass, manifest

REAL_FSYNC = os.fsync


class Made:
    """Makes records whose content follows from a few words, so that two processes make the same ones."""

    @staticmethod
    def key(word: str) -> str:
        return xxh3_128_hex(word.encode())

    @staticmethod
    def content(word: str, size: int = 2_000) -> bytes:
        return (sha256_hex(word.encode()).encode() * (size // 64 + 1))[:size]

    def record(self, word: str, *, by: str = "", seconds: float = 1.5) -> GraphRecord:
        """`by` changes the artifact but not the key: a compiler that is not deterministic."""
        text, code = self.content(f"text {word}"), self.content(f"code {word}{by}")
        artifact = Artifact("host", f"{self.key(word)}/code.bin", sha256_hex(code), len(code), 0o644)
        components = {"text": sha256_hex(text), "toolchain": "a" * 64, "lnc": None}
        return GraphRecord(
            self.key(word), components, "forward", word, 12, 3, sha256_hex(text), (artifact,), seconds, None
        )

    def graph(self, store: LocalStore, word: str, *, by: str = "", seconds: float = 1.5) -> GraphRecord:
        with store.batch() as batch:
            batch.put(self.content(f"text {word}"))
            batch.put(self.content(f"code {word}{by}"))
        return store.put_graph(self.record(word, by=by, seconds=seconds))

    def manifest(
        self,
        *words: str,
        complete: bool = True,
        created: str = "2025-01-01T00:00:00Z",
        native: tuple[Artifact, ...] = (),
    ) -> Manifest:
        return manifest(
            cache_key=self.key("job"),
            components={"lnc": {"sha256": "b" * 64, "value": {"lnc": 2}}},
            request={"config": "llama3_8b", "lnc": 2},
            complete=complete,
            phases=["first"],
            rank_classes=[RankClass("0-3", {"first": tuple(self.key(word) for word in words)})],
            artifacts=native,
            environment={"OMP_NUM_THREADS": "1"},
            versions={"torch": "2.14.1"},
            created=created,
            host={"kind": "host"},
        )

    def job(self, store: LocalStore, *words: str) -> Manifest:
        for word in words:
            self.graph(store, word)
        return store.put_manifest(self.manifest(*words))


@pytest.fixture(autouse=True)
def no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process loses nothing that is in the page cache, and the disk is slow: only some tests really flush."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def real_flush(no_flush: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", REAL_FSYNC)


@pytest.fixture
def made() -> Made:
    return Made()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> LocalStore:
    return LocalStore.open(root, writable=True)


def damage(path: Path, *, at: int = 100) -> None:
    """Flip one bit in place, as a bad disk would, whatever the mode of the file is."""
    mode = path.stat().st_mode
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    with path.open("r+b") as file:
        file.write(data)
    path.chmod(mode)


@pytest.fixture
def flip() -> Callable[..., None]:
    return damage


class Child:
    """A forked process that runs one function; what it raises ends up in its status and on stderr."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.ended = False
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._run(work)

    @staticmethod
    def _run(work: Callable[[], object]) -> NoReturn:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """The exit status, negative for the signal that ended it."""
        self.ended = True
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def child() -> Iterator[Callable[[Callable[[], object]], Child]]:
    """Starts a `Child`; one that a failing test did not wait for is killed."""
    started: list[Child] = []

    def start(work: Callable[[], object]) -> Child:
        started.append(Child(work))
        return started[-1]

    yield start
    for item in started:
        if not item.ended:
            item.kill()
            item.wait()


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Modes count inside, also for root: this thread lays down the capabilities that override them (Linux)."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this thread
    held = (ctypes.c_uint32 * 6)()
    if libc.capget(header, held) != 0:
        pytest.skip("capabilities cannot be read")
    less = (ctypes.c_uint32 * 6)(*held)
    less[0] &= ~0b1110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER, effective only
    if libc.capset(header, less) != 0:
        pytest.skip("capabilities cannot be laid down")
    try:
        yield
    finally:
        assert libc.capset(header, held) == 0


@pytest.fixture
def as_ordinary_user() -> Callable[[], AbstractContextManager[None]]:
    return ordinary_user


def snapshot(path: Path) -> dict[str, tuple[int, int, int, int]]:
    """Every name below a directory with inode, mode, size and time of change: equal means that nothing was written."""
    found = {}
    for name in [path, *sorted(path.rglob("*"))]:
        status = name.lstat()
        found[str(name)] = (status.st_ino, status.st_mode, status.st_size, status.st_ctime_ns)
    return found


@pytest.fixture
def state_of() -> Callable[[Path], dict[str, tuple[int, int, int, int]]]:
    return snapshot
