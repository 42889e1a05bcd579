"""Compile many graphs at once, and say what happens to each.

Where compiles run is an executor: processes of this machine (`local.Local`) or a Dask cluster (`cluster.Cluster`). This
module decides what starts when (`schedule`), what a failure is worth (`failures`), and that everything ends.
A failed graph never stops the others, unless what failed is the machine.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from neffcache.compile import memory
from neffcache.compile.failures import Policy, failure, of_text, policy
from neffcache.compile.schedule import next_to_start
from neffcache.compile.toolchain import Compiled, CompileRequest
from neffcache.errors import NeffcacheError

Happening = Literal["queued", "started", "retried", "adopted", "done", "failed", "skipped"]
Outcome = Compiled | NeffcacheError

TICK = 0.5
"""Seconds between looks at the clock while nothing happens."""

GRACE = 15.0
"""Seconds beyond its time limit after which a compile that did not end itself is ended with its worker."""


@dataclass(frozen=True)
class Event:
    """What became of one graph.

    `seconds` since it was started, `at` since the run began, `worker` names where; `fault` says why it failed, is tried
    again, or was not started. One that somebody else compiled is `adopted`.
    """

    compile_key: str
    happening: Happening
    seconds: float = 0.0
    compiled: Compiled | None = None
    fault: NeffcacheError | None = None
    worker: str = ""
    attempt: int = 1
    at: float = 0.0


class Taken(NamedTuple):
    """What a feed gives: requests to start now, compile keys that need none any more, and those that would fail."""

    claimed: Sequence[CompileRequest]
    adopted: Sequence[str]
    refused: Sequence[tuple[str, NeffcacheError]] = ()


class Feed(Protocol):
    """Says when a request may be started at all, for a run that shares its work with others."""

    def start(self, wake: Callable[[], None]) -> None:
        """Begin; `wake` is to be called, from any thread, when `take` has something new."""
        ...

    def take(self) -> Taken | None:
        """What is new; None when nothing will come any more."""
        ...


class Executor(Protocol):
    """Where compiles run, in numbered slots."""

    slots: int
    lost: tuple[type[BaseException], ...]
    """What a future raises when its worker is gone."""
    shares_memory: bool
    """Whether all slots share this machine's memory, so that fewer at once helps after a kill."""

    def open(self, started: Callable[[str, str], None]) -> None:
        """Begin. `started(compile key, worker)` is to be called, from any thread, when a compile really starts."""
        ...

    def ready(self, slot: int) -> bool:
        """Whether `submit` for that slot starts no process; only then may any thread call it."""
        ...

    def submit(self, slot: int, request: CompileRequest, into: Path) -> Future[Outcome]: ...

    def kill(self, slot: int) -> None:
        """End what runs in a slot with its whole process tree; its future then raises one of `lost`."""
        ...

    def last_words(self, slot: int) -> str:
        """The end of what the worker of a slot wrote."""
        ...

    def close(self, *, idle: bool) -> None:
        """End everything; at once unless all slots are `idle`."""
        ...


def run(
    requests: Sequence[CompileRequest],
    *,
    jobs: int,
    directory: Path,
    environment: Mapping[str, str],
    compiler: str,
    budget: int | None = None,
    executor: Executor | None = None,
    feed: Feed | None = None,
) -> Iterator[Event]:
    """Compile every request, in this order as far as `jobs` slots and `budget` (bytes of memory) allow.

    With a `feed` only what it gives is started, when it gives it.
    `compiler` names a function (request, directory) -> Compiled that raises NeffcacheError. Without an `executor` its
    workers are processes of this machine. Leaving the iterator early ends all of them.
    """
    if not requests:
        return
    if executor is None:
        from neffcache.compile.local import Local

        executor = Local(min(jobs, len(requests)), environment, compiler, directory)
    yield from _Run(requests, executor, directory, budget, feed).events()


@dataclass
class _Running:
    request: CompileRequest
    began: float
    alone: bool
    expired: bool = False


@dataclass
class _Run:
    """One run of the pool. Everything but the iterator itself may be called from any thread, under the lock."""

    requests: Sequence[CompileRequest]
    executor: Executor
    directory: Path
    budget: int | None
    feed: Feed | None
    waiting: deque[CompileRequest] = field(init=False)
    alone: deque[CompileRequest] = field(default_factory=deque)
    running: dict[int, _Running] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)
    inbox: queue.SimpleQueue[Event | None] = field(default_factory=queue.SimpleQueue)
    stopped: NeffcacheError | None = None
    closed: bool = False
    known: set[str] = field(default_factory=set)
    """Keys of which the last word is said."""

    def __post_init__(self) -> None:
        self.waiting = deque(() if self.feed is not None else self.requests)
        self.width = self.executor.slots
        self.lock = threading.RLock()
        self.zero = time.monotonic()

    def events(self) -> Iterator[Event]:
        for request in self.requests:
            yield Event(request.compile_key, "queued")
        finished = False
        try:
            self.executor.open(self._started)
            if self.feed is not None:
                self.feed.start(lambda: self.inbox.put(None))
            while True:
                yield from self._taken()
                self._fill(spawn=True)
                with self.lock:
                    if not self.running and self.inbox.empty() and (self.feed is None or self.stopped is not None):
                        break
                try:
                    event = self.inbox.get(timeout=TICK)
                except queue.Empty:
                    self._expire()
                    continue
                if event is not None:
                    yield event
            yield from self._skipped()
            finished = True
        finally:
            with self.lock:
                self.closed = True
            self.executor.close(idle=finished)

    def _taken(self) -> Iterator[Event]:
        if self.feed is None:
            return
        taken = self.feed.take()
        if taken is None:
            self.feed = None
            return
        with self.lock:
            self.waiting += taken.claimed
        for key in taken.adopted:
            self.known.add(key)
            yield Event(key, "adopted", at=self._now())
        for key, fault in taken.refused:
            self.known.add(key)
            yield Event(key, "failed", fault=fault, at=self._now())

    def _skipped(self) -> Iterator[Event]:
        if self.stopped is not None:
            for request in self.requests:
                if request.compile_key not in self.known:
                    yield Event(request.compile_key, "skipped", fault=self.stopped, at=self._now())

    def _now(self) -> float:
        return round(time.monotonic() - self.zero, 3)

    def _fill(self, *, spawn: bool) -> None:
        """Start what may start. Only the iterator's own thread may `spawn`: a worker dies with the thread it is of."""
        with self.lock:
            while not self.closed and self.stopped is None and (self.waiting or self.alone):
                free = [slot for slot in range(self.executor.slots) if slot not in self.running]
                slot = next((each for each in free if self.executor.ready(each)), free[0] if spawn and free else None)
                if slot is None or len(self.running) >= self.width or any(each.alone for each in self.running.values()):
                    return
                alone = not self.waiting
                if (request := self._next()) is None:
                    return
                key = request.compile_key
                self.attempts[key] = self.attempts.get(key, 0) + 1
                self.running[slot] = _Running(request, time.monotonic(), alone)
                future = self.executor.submit(slot, request, self.directory / f"{key}-{self.attempts[key]}")
                future.add_done_callback(lambda done, slot=slot: self._finished(slot, done))  # type: ignore[misc]

    def _next(self) -> CompileRequest | None:
        if not self.waiting:
            return self.alone.popleft() if self.alone and not self.running else None
        needed = [request.peak_bytes for request in self.waiting]
        index = next_to_start(needed, [each.request.peak_bytes for each in self.running.values()], self.budget)
        if index is None:
            return None
        request = self.waiting[index]
        del self.waiting[index]
        return request

    def _started(self, key: str, worker: str) -> None:
        with self.lock:
            for each in self.running.values():
                if each.request.compile_key == key:
                    each.began = time.monotonic()
        self.inbox.put(Event(key, "started", worker=worker, attempt=self.attempts.get(key, 1), at=self._now()))

    def _finished(self, slot: int, future: Future[Outcome]) -> None:
        with self.lock:
            running = self.running[slot]
            if self.closed:
                return
            outcome, lost = self._judge(slot, running, future)
            del self.running[slot]
            request, seconds = running.request, round(time.monotonic() - running.began, 3)
            attempt = self.attempts[request.compile_key]
            event = Event(request.compile_key, "done", seconds, attempt=attempt, at=self._now())
            if isinstance(outcome, Compiled):
                self.known.add(request.compile_key)
                self.inbox.put(replace(event, compiled=outcome))
            else:
                self._failed(request, outcome, event)
            if not lost:
                self._fill(spawn=False)
        self.inbox.put(None)  # wakes the iterator: a new worker may be needed

    def _failed(self, request: CompileRequest, fault: NeffcacheError, event: Event) -> None:
        found: Policy = policy(fault)
        if fault.details.get("class") == "killed" and self.executor.shares_memory:
            self.width = max(1, self.width // 2)
        if found.stops:
            # What this machine cannot do now says nothing about the graph.
            self.stopped = self.stopped or fault
            self.known.add(request.compile_key)
            self.inbox.put(replace(event, happening="skipped", fault=fault))
        elif event.attempt < found.attempts and self.stopped is None:
            (self.alone if found.alone else self.waiting).append(request)
            self.inbox.put(replace(event, happening="retried", fault=fault))
        else:
            fault.details["attempts"] = event.attempt
            self.known.add(request.compile_key)
            self.inbox.put(replace(event, happening="failed", fault=fault))

    def _judge(self, slot: int, running: _Running, future: Future[Outcome]) -> tuple[Outcome, bool]:
        """What a future says, and whether its worker is gone."""
        key, name = running.request.compile_key, running.request.name
        about = {"compile_key": key, "name": name}
        try:
            outcome = future.result()
        except self.executor.lost:
            if running.expired:
                return expired(running.request), True
            return (
                failure(
                    "killed",
                    f"the worker that compiled {name} died; likely out of memory",
                    hint="try again with more memory or fewer workers (--jobs); its last words are in the log",
                    **about,
                    log=self.executor.last_words(slot),
                ),
                True,
            )
        except MemoryError:
            return failure("killed", f"the worker that compiled {name} ran out of memory", **about), False
        except Exception as fault:
            message = f"the compile of {name} broke: {type(fault).__name__}: {str(fault)[:300]}"
            told = of_text(key, name, str(fault)) if isinstance(fault, OSError) else None
            return told or failure("broken", message, **about), False
        if isinstance(outcome, NeffcacheError):
            for label, value in about.items():
                outcome.details.setdefault(label, value)
        return outcome, False

    def _expire(self) -> None:
        """End what is over its limit and has not ended itself."""
        with self.lock:
            for slot, each in self.running.items():
                limit = each.request.time_limit
                if limit is not None and not each.expired and time.monotonic() - each.began > limit + GRACE:
                    each.expired = True
                    self.executor.kill(slot)


def expired(request: CompileRequest, log: str = "") -> NeffcacheError:
    """The failure of a compile that was ended at its time limit."""
    return failure(
        "time-out",
        f"the compile of {request.name} was ended after its limit of {request.time_limit:.0f} s",
        hint="give it longer with --time-limit; nothing is remembered, the next run tries again",
        compile_key=request.compile_key,
        name=request.name,
        log=log,
    )


def default_jobs(free_bytes: int, per_worker_bytes: int, wanted: int | None = None) -> int:
    """Workers that fit into memory and CPUs; at least one. Both sizes in bytes."""
    if wanted is not None:
        return max(1, wanted)
    fitting = free_bytes // max(1, per_worker_bytes)
    return max(1, min(memory.cpus().value, fitting))


def memory_limit() -> int:
    """Bytes that this process tree may use: the control group's limit where there is one, else what is free."""
    return memory.available().value
