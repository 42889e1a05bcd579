"""Compile together with machines that share nothing but a remote: who compiles what, and what the others made.

For each graph in turn: a record in the remote is adopted; else its lease is taken and it is compiled here, pushed, and
the lease given back; else somebody compiles it, and it is looked at again until a record appears or he is dead.
What the compiler refuses is told too (`remote.refusals`): whoever gets the lease next need not try it again.
Only as many leases are held as can be compiled soon, so that the others have something to do.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from neffcache.compile.pool import Taken
from neffcache.compile.toolchain import CompileRequest
from neffcache.errors import Bug, NeffcacheError
from neffcache.remote import refusals
from neffcache.remote.fetch import Want, fetch
from neffcache.remote.lease import HEARTBEAT, Leases
from neffcache.remote.packs import places, plain
from neffcache.remote.refusals import Refusal
from neffcache.remote.send import send_blob
from neffcache.remote.tier import RemoteStore
from neffcache.remote.transfer import Progress, Tally
from neffcache.store import layout
from neffcache.store.local import LocalStore
from neffcache.store.records import GraphRecord, encode

LOOK = 0.25
"""Seconds between two looks at what others compile, as a part of a heartbeat."""


@dataclass
class Together:
    """One run of compiles with others. Its thread talks to the remote; the pool's calls `take` and `settle`."""

    remote: RemoteStore
    store: LocalStore
    requests: Sequence[CompileRequest]
    ahead: int
    """How many leases to hold at most."""
    heartbeat: float = HEARTBEAT
    replay: Callable[[CompileRequest, Refusal], NeffcacheError | None] | None = None
    """Makes the failure of a graph that another machine's compiler refused; None tries what was refused again."""
    adopted: dict[str, GraphRecord] = field(default_factory=dict)
    fault: NeffcacheError | None = None
    leases: Leases = field(init=False)

    def __post_init__(self) -> None:
        self.leases = Leases(self.remote, self.heartbeat)
        self._left: deque[CompileRequest] = deque(self.requests)
        self._claimed: deque[CompileRequest] = deque()
        self._new: deque[str] = deque()
        self._refused: deque[tuple[str, NeffcacheError]] = deque()
        self._out = 0
        self._wake: Callable[[], None] = lambda: None
        self._settled: deque[tuple[str, GraphRecord | None, Refusal | None]] = deque()
        self._lock = threading.Lock()
        self._turn = threading.Event()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, name="sharing", daemon=True)

    def start(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._thread.start()

    def take(self) -> Taken | None:
        """What was claimed and adopted since the last call; None when nothing will ever come.

        After a fault of the remote the rest is compiled here, unshared.
        """
        with self._lock:
            if self.fault is not None:
                self._claimed += self._left
                self._left.clear()
            taken = Taken(list(self._claimed), list(self._new), list(self._refused))
            self._claimed.clear()
            self._new.clear()
            self._refused.clear()
            return taken if any(taken) or self._left else None

    def settle(self, key: str, record: GraphRecord | None, refusal: Refusal | None = None) -> None:
        """What came of a claimed compile: its record or its refusal, to be pushed, or neither; its lease goes back."""
        with self._lock:
            self._settled.append((key, record, refusal))
        self._turn.set()

    def close(self) -> NeffcacheError | None:
        """Push what is settled, give all leases back, end the thread; the fault of the remote, if it had one."""
        self._end.set()
        self._turn.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.leases.close()
        return self.fault

    def _work(self) -> None:
        try:
            while not (self._end.is_set() and not self._settled):
                progressed = self._settle() or (not self._end.is_set() and self._look())
                if progressed:
                    continue
                with self._lock:
                    idle = not self._left and self._out == 0 and not self._settled
                if idle:
                    break
                self._turn.wait(self.heartbeat * LOOK)
                self._turn.clear()
        except NeffcacheError as fault:
            self.fault = fault
        except Exception as fault:
            self.fault = Bug(f"sharing compiles broke: {type(fault).__name__}: {fault}")
        finally:
            self._wake()

    def _settle(self) -> bool:
        with self._lock:
            if not self._settled:
                return False
            key, record, refusal = self._settled.popleft()
        if record is not None:
            self._push(record)
        elif refusal is not None:
            refusals.put(self.remote, refusal)
        self.leases.release(key)
        with self._lock:
            self._out -= 1
        return True

    def _look(self) -> bool:
        """One round over what is left; whether anything moved."""
        moved = False
        for _ in range(len(self._left)):
            with self._lock:
                if self._end.is_set() or self._settled or not self._left:
                    return True
                request = self._left[0]
            key = request.compile_key
            if self._adopt(key):
                moved = True
                self._drop(key)
            elif self._out < self.ahead and self.leases.acquire(key):
                # It may have been compiled between the two looks.
                if self._adopt(key):
                    self.leases.release(key)
                    self._drop(key)
                elif (fault := self._told(request)) is not None:
                    self.leases.release(key)
                    self._drop(key, fault)
                else:
                    with self._lock:
                        self._left.popleft()
                        self._claimed.append(request)
                        self._out += 1
                moved = True
                self._wake()
            else:
                with self._lock:
                    self._left.rotate(-1)
        return moved

    def _drop(self, key: str, fault: NeffcacheError | None = None) -> None:
        with self._lock:
            self._left.popleft()
            if fault is None:
                self._new.append(key)
            else:
                self._refused.append((key, fault))
        self._wake()

    def _told(self, request: CompileRequest) -> NeffcacheError | None:
        """The failure of a graph that another machine's compiler has refused."""
        if self.replay is None:
            return None
        found = refusals.get(self.remote, request.compile_key)
        return None if found is None else self.replay(request, found)

    def _adopt(self, key: str) -> bool:
        """Bring another machine's record with all that it names into the store; whether there was one."""
        record = self.remote.get_graph(key)
        if record is None:
            return False
        placed = places(record)
        sizes = {item.sha256: item.size for item in record.artifacts}
        sizes.setdefault(record.text, 0)
        wanted = [
            Want(sha256, size, placed.get(layout.blob_name(sha256)))
            for sha256, size in sizes.items()
            if not self.store.has_blob(sha256)
        ]
        tally = Tally()
        fetch(self.remote, self.store, wanted, tally, Progress())
        if tally.failed:
            return False  # the record is there and its files are not: compiling heals it
        self.adopted[key] = self.store.put_graph(plain(record))
        return True

    def _push(self, record: GraphRecord) -> None:
        """Blobs first, then the record that names them; the first writer's stays."""
        for sha256 in dict.fromkeys((record.text, *(item.sha256 for item in record.artifacts))):
            size = self.store.blob_size(sha256)
            assert size is not None
            send_blob(self.remote, self.store, sha256, size)
        # What the compiler said may name places of this machine.
        shared = replace(record, extra={name: value for name, value in record.extra.items() if name != "log"})
        self.remote.put_if_absent(layout.graph_name(record.compile_key), encode(shared))
