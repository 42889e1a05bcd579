"""What is nice to know and may be lost: measured costs, remembered failures, times of use.

DiskCache keeps it in SQLite. Its own disks unpickle what a row tells them to: who can write the file could run code.
`JsonDisk` reads nothing but JSON text out of a row, opens no file that a row names and removes none. Only writers open
the index. A fault of it is logged and costs what was remembered, never the command.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import diskcache
import msgspec

from neffcache.errors import StoreFault
from neffcache.store import layout
from neffcache.store.files import remove
from neffcache.store.local import LocalStore
from neffcache.store.records import Sha256
from neffcache.store.root import log

T = TypeVar("T")

RAW = 1  # diskcache.core.MODE_RAW: the value is in the row itself
TIMEOUT = 10.0  # seconds that SQLite waits for another writer

FAULTS = (sqlite3.Error, OSError, diskcache.Timeout)

SETTINGS: dict[str, Any] = {
    "cull_limit": 0,  # rows are few and small; nothing is evicted behind our back
    "eviction_policy": "none",
    "sqlite_journal_mode": "delete",  # a write-ahead log needs shared memory, which a network file system has not
    "sqlite_mmap_size": 0,
    "sqlite_synchronous": 0,  # what a power cut damages is made anew; opening would cost thirty flushes otherwise
}


class Rejected(ValueError):
    """A row that is not JSON text: planted, or written by another program."""


class JsonDisk(diskcache.Disk):  # type: ignore[misc]
    """Keys are text, values JSON text, both inside the row. Everything else is rejected unread."""

    def put(self, key: object) -> tuple[str, bool]:
        if type(key) is not str:
            raise TypeError(f"a key of the index is text, not {type(key).__name__}")
        return key, True

    def get(self, key: object, raw: object) -> str:
        if not raw or type(key) is not str:
            raise Rejected("a row of the index has a key that is not text")
        return key

    def store(self, value: object, read: bool, key: object = None) -> tuple[int, int, None, str]:
        if read:
            raise TypeError("the index takes no files")
        return 0, RAW, None, json.dumps(value, sort_keys=True, allow_nan=False)

    def fetch(self, mode: object, filename: object, value: object, read: object) -> Any:
        if mode != RAW or filename is not None or read or type(value) is not str:
            raise Rejected("a row of the index has a value that is not JSON text")
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:
            raise Rejected(f"a row of the index is not JSON: {error}") from error

    def filename(self, key: object = None, value: object = None) -> tuple[str, str]:
        raise Rejected("the index has no files")

    def remove(self, file_path: object) -> None:
        """A row may name any file: none is ever removed."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one compile took: wall clock in seconds, peak resident memory in bytes (None: not measured), graph nodes."""

    seconds: float
    peak_bytes: int | None
    nodes: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A deterministic refusal by a compiler.

    `toolchain` is its id, `log` the blob of its log or "", `at` is in seconds since 1970.
    """

    toolchain: str
    code: str
    message: str
    log: str
    at: float


@dataclass(frozen=True, slots=True)
class Reading:
    """What a look without writing shows: remembered refusals, rows that are not ours, why it cannot be used."""

    state: Literal["absent", "good", "unusable"]
    failures: dict[str, Failure] = field(default_factory=dict)
    rejected: int = 0
    fault: str = ""


class Index:
    """The index of one writable store. Use as a context manager, or call `close`."""

    def __init__(self, cache: Any, alone: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext) -> None:
        self._cache = cache
        self._alone = alone
        self.faults = 0
        self.rejected = 0

    @classmethod
    def open(cls, store: LocalStore) -> Index:
        """Open it; one that is damaged or not ours is made anew, and when that fails nothing is remembered.

        Raises StoreFault when the store was opened to read only.
        """
        store.base.need_writable()
        alone = functools.partial(store.base.lock, layout.INDEX, timeout=TIMEOUT)
        try:
            with alone():  # what somebody has half made, or is closing, looks damaged
                return cls(_opened(store), alone)
        except StoreFault as error:
            log.warning("the index is passed over: %s", error.message)
            return cls(None)

    @classmethod
    def look(cls, store: LocalStore) -> Reading:
        """Read the refusals of a store that need not be writable; nothing is made or mended."""
        database = store.root / layout.INDEX / diskcache.core.DBNAME
        try:
            if not database.exists():
                return Reading("absent")
            _check_settings(database)
            with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True, timeout=TIMEOUT)) as sql:
                rows = sql.execute("SELECT key, mode, typeof(key), value, filename FROM Cache WHERE raw = 1").fetchall()
                odd: int = sql.execute("SELECT count(*) FROM Cache WHERE raw != 1").fetchone()[0]
        except (sqlite3.Error, OSError, ValueError) as error:
            return Reading("unusable", fault=str(error))
        failures: dict[str, Failure] = {}
        for key, mode, kind, value, name in rows:
            try:
                if kind != "text" or mode != RAW or name is not None or type(value) is not str:
                    raise ValueError(key)
                document = json.loads(value)
                if key.startswith("failure/"):
                    failures[key.removeprefix("failure/")] = msgspec.convert(document, Failure)
            except (ValueError, RecursionError):
                odd += 1
        return Reading("good", failures, odd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the database; the index may be deleted afterwards."""
        if self._cache is not None:
            with contextlib.ExitStack() as stack:
                with contextlib.suppress(StoreFault):  # then it is closed without
                    stack.enter_context(self._alone())
                self._try(self._cache.close, None)

    # Costs

    def put_cost(self, compile_key: str, cost: Cost, family: str = "host") -> None:
        """Remember what a compile took, under its key and as the newest one of its node count and family.

        A family is a kind of compiler: what one takes says nothing about another.
        """
        self._set(f"cost/{compile_key}", asdict(cost))
        self._set(f"nodes/{family}/{cost.nodes:012d}", asdict(cost))

    def cost(self, compile_key: str) -> Cost | None:
        """What that compile took last time."""
        return self._get(f"cost/{compile_key}", Cost)

    def cost_of_nodes(self, nodes: int, family: str = "host") -> Cost | None:
        """What the measured compile with the nearest number of nodes took; of two as near, the larger."""
        prefix = f"nodes/{family}/"
        known = (int(key.removeprefix(prefix)) for key in self._keys(prefix))
        nearest = min(known, key=lambda count: (abs(count - nodes), -count), default=None)
        return None if nearest is None else self._get(f"{prefix}{nearest:012d}", Cost)

    # Failures

    def put_failure(self, compile_key: str, failure: Failure) -> None:
        """Remember that a compiler refuses this graph. Never for one that was killed or ran out of time."""
        self._set(f"failure/{compile_key}", asdict(failure))

    def failure(self, compile_key: str, toolchain: str) -> Failure | None:
        """The remembered refusal by that very toolchain."""
        found = self._get(f"failure/{compile_key}", Failure)
        return found if found is not None and found.toolchain == toolchain else None

    def forget_failure(self, compile_key: str) -> None:
        """Let it be tried again."""
        self._delete(f"failure/{compile_key}")

    def failures(self) -> dict[str, Failure]:
        """Every remembered refusal by compile key."""
        found = {key.removeprefix("failure/"): self._get(key, Failure) for key in list(self._keys("failure/"))}
        return {key: failure for key, failure in found.items() if failure is not None}

    # Times of use

    def touch(self, manifest_id: str, at: float | None = None) -> None:
        """Remember that a manifest was used, now or `at` (seconds since 1970)."""
        self._set(f"used/{manifest_id}", time.time() if at is None else at)

    def last_used(self, manifest_id: str) -> float | None:
        """When a manifest was used last, in seconds since 1970."""
        return self._get(f"used/{manifest_id}", float)

    # What objects of a bucket held

    def put_seen(self, seen: Mapping[str, str]) -> None:
        """Remember SHA-256 by the digest of an object's address, ETag and size: it need not be fetched to be known."""
        if self._cache is not None and seen:

            def put() -> None:
                with self._cache.transact():
                    for key, sha256 in seen.items():
                        self._cache.set(f"seen/{key}", sha256, retry=False)

            self._try(put, None)

    def seen(self, key: str) -> str | None:
        """The SHA-256 of the content that an object had."""
        return self._get(f"seen/{key}", Sha256)

    def _set(self, key: str, value: object) -> None:
        if self._cache is not None:
            self._try(lambda: self._cache.set(key, value, retry=False), None)

    def _get(self, key: str, kind: type[T]) -> T | None:
        if self._cache is None:
            return None
        try:
            value = self._try(lambda: self._cache.get(key), None)
            return None if value is None else msgspec.convert(value, kind)
        except (Rejected, msgspec.ValidationError) as error:
            self.rejected += 1
            log.warning("row %r of the index is rejected: %s", key, error)
            self._delete(key)
            return None

    def _delete(self, key: str) -> None:
        if self._cache is not None:
            self._try(lambda: self._cache.delete(key), None)

    def _keys(self, prefix: str) -> Iterator[str]:
        """The keys with that prefix, read by SQL: iterating the cache would stop at the first rejected row."""
        if self._cache is None:
            return iter(())
        sql = "SELECT key FROM Cache WHERE raw = 1 AND typeof(key) = 'text' AND substr(key, 1, ?) = ?"
        rows: list[tuple[str]] = self._try(lambda: self._cache._sql(sql, (len(prefix), prefix)).fetchall(), [])
        return (key for (key,) in rows if key.removeprefix(prefix).isalnum())

    def _try(self, call: Callable[[], T], otherwise: T) -> T:
        try:
            return call()
        except FAULTS as error:
            self.faults += 1
            log.warning("the index has a fault and is passed over: %s", error)
            return otherwise


def _opened(store: LocalStore) -> Any:
    """The database, made anew where it cannot be used; None when that fails too. Raises StoreFault."""
    folder = store.base.directory(layout.INDEX)
    for _ in range(2):
        try:
            _check_settings(folder / diskcache.core.DBNAME)
            return diskcache.Cache(str(folder), timeout=TIMEOUT, disk=JsonDisk, **SETTINGS)
        except (*FAULTS, ValueError, TypeError, KeyError, AttributeError) as error:
            log.warning("the index %s cannot be used and is made anew: %s", folder, error)
            remove(folder)
            folder = store.base.directory(layout.INDEX)
    return None


def _check_settings(database: Path) -> None:
    """Raises ValueError when the database's own settings are not ours: DiskCache would take them for its attributes."""
    if not database.exists():
        return
    ours = {**diskcache.core.DEFAULT_SETTINGS, **SETTINGS}
    connection = sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True, timeout=TIMEOUT)
    try:
        names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not names <= {"Cache", "Settings", "sqlite_sequence"}:
            raise ValueError(f"it has foreign tables: {sorted(names)}")
        rows = connection.execute("SELECT key, value FROM Settings").fetchall() if "Settings" in names else []
    finally:
        connection.close()
    for key, value in rows:
        known = type(value) is int if key in diskcache.core.METADATA else key in ours and value == ours[key]
        if not known:
            raise ValueError(f"it has the foreign setting {key!r}")
