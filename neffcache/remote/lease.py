"""The right to compile a graph now, between machines that share nothing but a remote: `leases/<compile key>.json`.

Taken by a conditional write, kept by a heartbeat that rewrites it, given back by a last rewrite; never deleted, so that
no two writers ever race for a name that is free again. A waiter takes a lease over with `If-Match` when its ETag has
stood still for `STALE` heartbeats of the waiter's own monotonic clock: no clock of another machine counts.
A lease saves work and proves nothing: whoever lost his goes on, and the first record that is written wins.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from neffcache.key.canonical import sha256_hex
from neffcache.remote import errors
from neffcache.remote.tier import RemoteStore
from neffcache.store import layout

HEARTBEAT = 20.0
"""Seconds between two rewrites by a holder."""

STALE = 3
"""Heartbeats without a rewrite after which a holder is taken for dead."""


class Document(msgspec.Struct):
    """What a lease says. `holder` is a random word: who it is does not leave the machine.

    `nonce` makes every rewrite other bytes, hence another ETag.
    """

    schema: int
    compile_key: str
    holder: str
    state: str
    beat: int
    heartbeat: float
    nonce: str


@dataclass
class Held:
    """A lease that this process has."""

    compile_key: str
    etag: str
    beat: int = 0


@dataclass
class Watched:
    """A lease that somebody else has, as it was seen last; `since` on this machine's monotonic clock."""

    etag: str
    since: float
    heartbeat: float


@dataclass
class Leases:
    """All leases of one process in one remote. `clock` and `heartbeat` are for tests."""

    remote: RemoteStore
    heartbeat: float = HEARTBEAT
    clock: Callable[[], float] = time.monotonic
    holder: str = field(default_factory=lambda: secrets.token_hex(16))
    lost: set[str] = field(default_factory=set)
    """Keys whose lease somebody else has taken over."""
    taken_over: set[str] = field(default_factory=set)
    _held: dict[str, Held] = field(default_factory=dict)
    _watched: dict[str, Watched] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def acquire(self, compile_key: str) -> bool:
        """Whether this process has the lease now: it was free, given back, or its holder is dead. Raises Fault."""
        # One that somebody was seen to have is only read: a write that must fail costs as much as one that works.
        etag = None if compile_key in self._watched else self._write(compile_key, None, 0, "held")
        if etag is None:
            found = self._read(compile_key)
            if found is None:
                return False  # in the middle of being written; the next look tells
            document, seen = found
            if document is not None and document.holder == self.holder and document.state == "held":
                etag = seen  # ours: the answer to our own write was lost
            elif document is None or document.state == "released" or self._stale(compile_key, seen, document):
                over = document is not None and document.state != "released"
                etag = self._write(compile_key, seen, 0, "held")
                if etag is not None and over:
                    self.taken_over.add(compile_key)
        if etag is None:
            return False
        with self._lock:
            self._watched.pop(compile_key, None)
            self._held[compile_key] = Held(compile_key, etag)
        self._start()
        return True

    def release(self, compile_key: str) -> None:
        """Give a lease back, if it is still ours. Raises Fault."""
        with self._lock:
            held = self._held.pop(compile_key, None)
            if held is not None:
                self._write(compile_key, held.etag, held.beat + 1, "released")

    def close(self) -> None:
        """Give every lease back as far as the remote lets us, and stop the heartbeat."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        for compile_key in list(self._held):
            try:
                self.release(compile_key)
            except errors.Fault:
                continue  # it goes stale by itself

    def _stale(self, compile_key: str, etag: str, document: Document) -> bool:
        """Whether this ETag has stood still for long enough; a new one starts a new wait."""
        watched = self._watched.get(compile_key)
        if watched is None or watched.etag != etag:
            self._watched[compile_key] = Watched(etag, self.clock(), document.heartbeat)
            return False
        return self.clock() - watched.since > STALE * max(watched.heartbeat, self.heartbeat)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._beat, name="leases", daemon=True)
                self._thread.start()

    def _beat(self) -> None:
        while not self._stop.wait(self.heartbeat):
            for compile_key in list(self._held):
                self.beat(compile_key)

    def beat(self, compile_key: str) -> None:
        """Rewrite one lease. One that somebody else has written is lost; a fault is tried again at the next beat."""
        with self._lock:
            held = self._held.get(compile_key)
            if held is None:
                return
            try:
                etag = self._write(compile_key, held.etag, held.beat + 1, "held")
                if etag is None:
                    found = self._read(compile_key)
                    document = None if found is None else found[0]
                    if found is None or document is None or document.holder != self.holder:
                        del self._held[compile_key]
                        self.lost.add(compile_key)
                        return
                    etag = found[1]
                held.etag, held.beat = etag, held.beat + 1
            except errors.Fault:
                return

    def _write(self, compile_key: str, over: str | None, beat: int, state: str) -> str | None:
        document = Document(1, compile_key, self.holder, state, beat, self.heartbeat, secrets.token_hex(8))
        data = msgspec.json.encode(document)
        put = self.remote.client.put
        return put(
            layout.lease_name(compile_key),
            data,
            sha256_hex(data),
            size=len(data),
            if_absent=over is None,
            if_match=over,
        )

    def _read(self, compile_key: str) -> tuple[Document | None, str] | None:
        """The lease and its ETag; None for the lease when it is not one: whoever can take it may."""
        found = self.remote.client.read(layout.lease_name(compile_key))
        if found is None:
            return None
        try:
            document = msgspec.convert(json.loads(found[0]), Document)
        except (ValueError, msgspec.ValidationError):
            return None, found[1]
        return document, found[1]
