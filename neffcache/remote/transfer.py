"""What one push or pull does, in numbers that add up, and what somebody who waits for it is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from neffcache.errors import NeffcacheError

T = TypeVar("T")
K = TypeVar("K")


@dataclass(frozen=True)
class Failure:
    """One thing that was planned and did not arrive."""

    name: str
    fault: NeffcacheError

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, **self.fault.to_json()}


@dataclass
class Tally:
    """Things of the layout (blobs, records, manifests, pointers), whatever they travel in.

    planned = transferred + present + failed.
    """

    planned: int = 0
    transferred: int = 0
    present: int = 0
    planned_bytes: int = 0
    transferred_bytes: int = 0
    present_bytes: int = 0
    failures: dict[str, NeffcacheError] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def failed(self) -> int:
        return len(self.failures)

    @property
    def adds_up(self) -> bool:
        return self.planned == self.transferred + self.present + self.failed

    def plan(self, size: int = 0) -> None:
        with self._lock:
            self.planned += 1
            self.planned_bytes += size

    def unplan(self) -> None:
        with self._lock:
            self.planned -= 1

    def sent(self, size: int = 0) -> None:
        with self._lock:
            self.transferred += 1
            self.transferred_bytes += size

    def there(self, size: int = 0) -> None:
        with self._lock:
            self.present += 1
            self.present_bytes += size

    def fail(self, name: str, fault: NeffcacheError) -> None:
        with self._lock:
            self.failures.setdefault(name, fault)

    def to_json(self) -> dict[str, Any]:
        return {
            "objects": {
                "planned": self.planned,
                "transferred": self.transferred,
                "present": self.present,
                "failed": self.failed,
            },
            "bytes": {
                "planned": self.planned_bytes,
                "transferred": self.transferred_bytes,
                "present": self.present_bytes,
            },
            "failures": [Failure(name, fault).to_json() for name, fault in self.failures.items()],
        }


class Progress:
    """What a transfer tells while it runs; every method may do nothing. Called from several threads."""

    def note(self, text: str) -> None: ...

    def begin(self, doing: str, count: int, size: int) -> None:
        """A phase with `count` things of `size` bytes begins."""

    def moved(self, size: int) -> None:
        """So many bytes more have passed."""

    def end(self) -> None: ...


@dataclass
class Meter:
    """Bytes, rate and time left of one phase. Rates are in bytes a second."""

    total: int
    done: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def rate(self) -> float:
        return self.done / max(time.monotonic() - self.started, 1e-6)

    @property
    def seconds_left(self) -> float | None:
        return None if not self.done else max(self.total - self.done, 0) / self.rate


class Waiting(Generic[K, T]):
    """Keys that wait for items. Safe to use from several threads."""

    def __init__(self, needs: Mapping[K, Iterable[T]]) -> None:
        self._lacking = {key: set(needed) for key, needed in needs.items()}
        self._users: dict[T, list[K]] = {}
        for key, needed in self._lacking.items():
            for item in needed:
                self._users.setdefault(item, []).append(key)
        self._lock = threading.Lock()
        self.free = [key for key, needed in self._lacking.items() if not needed]
        """Those that never had to wait."""

    def done(self, items: Iterable[T]) -> list[K]:
        """The keys for which the last item that they waited for is among these."""
        ready: list[K] = []
        with self._lock:
            for item in items:
                for key in self._users.pop(item, ()):
                    self._lacking[key].discard(item)
                    if not self._lacking[key]:
                        ready.append(key)
        return ready


def at_once_then(
    threads: int,
    work: Callable[[T], None],
    items: Sequence[T],
    then: Callable[[K], None],
    needs: Mapping[K, Iterable[T]],
) -> None:
    """`work` of every item in threads, and `then` of each key as soon as the items that it needs are done.

    Exceptions as `at_once`.
    """
    waiting = Waiting(needs)

    def step(item: T) -> None:
        work(item)
        for key in waiting.done([item]):
            then(key)

    at_once(threads, step, items)
    at_once(threads, then, waiting.free)


def at_once(threads: int, work: Callable[[T], object], items: Iterable[T]) -> None:
    """`work` of every item, in threads. The first exception that it lets out, or a signal, drops what has not begun."""
    with ThreadPoolExecutor(threads, thread_name_prefix="transfer") as pool:
        waiting = [pool.submit(work, item) for item in items]
        try:
            for future in waiting:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
