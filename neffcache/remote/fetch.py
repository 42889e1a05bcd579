"""Blobs from a remote into a local store: in parallel, streaming, checked while the bytes pass.

They are not flushed: the remote has them. What a power cut spoils is found by its size or digest, and fetched again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

from neffcache.remote import errors
from neffcache.remote.packs import Place, Span, spans
from neffcache.remote.tier import RemoteStore
from neffcache.remote.transfer import Progress, Tally
from neffcache.store import layout
from neffcache.store.blobs import Batch
from neffcache.store.files import Bytes
from neffcache.store.local import LocalStore
from neffcache.store.records import Damaged

BATCH = 64 << 20
"""Bytes that become visible together."""
ARRIVING, PUBLISHING = 4, 2
"""Batches that are on their way at once, and that wait to become visible: what a killed pull may lose. Fewer, and those
who fetch would wait for the slowest of a batch, or for who publishes thousands of small files."""


@dataclass(frozen=True, slots=True)
class Want:
    """A blob to fetch: its size in bytes, and its place when the remote keeps it in a pack."""

    sha256: str
    size: int
    place: Place | None = None


def fetch(
    remote: RemoteStore,
    store: LocalStore,
    wanted: Sequence[Want],
    tally: Tally,
    progress: Progress,
    arrived: Callable[[list[str]], None] = lambda _: None,
) -> None:
    """Fetch blobs that the store lacks; they are visible when this ends.

    `arrived` is told of blobs as soon as they are visible, some at a time and one call at a time. What cannot be had is
    a failure of the tally. Raises StoreFault, what `arrived` raises, and Fault when the remote as a whole is gone.
    """
    transfers = remote.client.access.transfers
    arriving: deque[_Part] = deque()
    with (
        ThreadPoolExecutor(1, thread_name_prefix="publish") as publisher,
        ThreadPoolExecutor(transfers, thread_name_prefix="transfer") as pool,
    ):
        publishing: deque[Future[None]] = deque()
        try:
            for part in (*_batches(wanted), None):
                if part is not None:
                    arriving.append(_Part(remote, store, part, tally, progress, pool))
                while len(arriving) >= (1 if part is None else ARRIVING):
                    arriving[0].wait()
                    while len(publishing) >= PUBLISHING:
                        publishing.popleft().result()
                    publishing.append(publisher.submit(arriving.popleft().finish, arrived))
            for future in publishing:
                future.result()
        except BaseException as fault:
            pool.shutdown(cancel_futures=True)
            for each in arriving:
                each.drop(fault)
            raise


class _Part:
    """Blobs that become visible together, on their way as soon as this is made."""

    def __init__(
        self,
        remote: RemoteStore,
        store: LocalStore,
        wanted: Sequence[Want],
        tally: Tally,
        progress: Progress,
        pool: ThreadPoolExecutor,
    ) -> None:
        self.remote, self.tally, self.progress = remote, tally, progress
        self.by_name = {layout.blob_name(want.sha256): want for want in wanted}
        self.done: list[Want] = []
        self._open = ExitStack()
        self.batch = self._open.enter_context(store.batch(flush=False))
        packed = spans({name: want.place for name, want in self.by_name.items() if want.place is not None})
        units: list[Span | Want] = [*packed, *(want for want in wanted if want.place is None)]
        units.sort(key=lambda unit: unit.start - unit.end if isinstance(unit, Span) else -unit.size)
        self._waiting = [pool.submit(self._one, unit) for unit in units]

    def wait(self) -> None:
        for future in self._waiting:
            future.result()

    def finish(self, arrived: Callable[[list[str]], None]) -> None:
        self._open.close()  # publishes the batch
        for want in self.done:
            self.tally.sent(want.size)
        arrived([want.sha256 for want in self.done])

    def drop(self, fault: BaseException) -> None:
        self._open.__exit__(type(fault), fault, fault.__traceback__)

    def _one(self, unit: Span | Want) -> None:
        alone = [unit] if isinstance(unit, Want) else []
        if isinstance(unit, Span):
            got = _span(self.remote, self.batch, unit, self.progress)
            self.done.extend(self.by_name[name] for name in got)
            alone = [self.by_name[name] for name, _ in unit.members if name not in got]
        for want in alone:
            try:
                _blob(self.remote, self.batch, want, self.progress)
                self.done.append(want)
            except errors.Fault as fault:
                self.remote.client.patience.check()
                self.tally.fail(layout.blob_name(want.sha256), fault)


def _batches(wanted: Sequence[Want]) -> Iterator[list[Want]]:
    """In an order that keeps the members of a pack together."""
    part: list[Want] = []
    total = 0
    for want in sorted(wanted, key=lambda item: (item.place is None, item.place or (), -item.size)):
        if part and total + want.size > BATCH:
            yield part
            part, total = [], 0
        part.append(want)
        total += want.size
    if part:
        yield part


def _span(remote: RemoteStore, batch: Batch, span: Span, progress: Progress) -> set[str]:
    """The members that came whole and right; the others have to be fetched under their own names."""
    got: set[str] = set()
    stream = _Stream(remote.client.chunks(layout.pack_name(span.pack), span.start, span.end - span.start), span.start)
    try:
        for name, place in span.members:
            try:
                batch.put_chunks(_told(stream.take(place), progress), expect=name.rpartition("/")[2])
                got.add(name)
            except Damaged:
                remote.client.count("corrupt")
    except errors.Fault:
        remote.client.patience.check()
    finally:
        stream.close()
    return got


def _blob(remote: RemoteStore, batch: Batch, want: Want, progress: Progress) -> None:
    """A blob under its own name, or from its pack once more. Raises Corrupt, Incomplete, Fault."""
    name = layout.blob_name(want.sha256)
    absent: errors.Fault | None = None
    for _ in range(2):  # bytes that changed on the way are right the second time
        try:
            batch.put_chunks(_told(remote.client.chunks(name), progress), expect=want.sha256)
            return
        except errors.Incomplete as fault:
            absent = fault
            break
        except Damaged:
            remote.client.count("corrupt")
    if want.place is not None:
        pack, offset, size = want.place
        try:
            batch.put_chunks(remote.client.chunks(layout.pack_name(pack), offset, size), expect=want.sha256)
            return
        except errors.Incomplete as fault:
            absent = absent and fault
        except Damaged:
            absent = None
    raise absent or errors.corrupt(remote.where, name)


def _told(chunks: Iterable[Bytes], progress: Progress) -> Iterator[Bytes]:
    for chunk in chunks:
        progress.moved(len(chunk))
        yield chunk


class _Stream:
    """A stream of bytes from which members are taken in order."""

    def __init__(self, chunks: Iterator[bytes], start: int) -> None:
        self._chunks = chunks
        self._at = start
        self._rest = memoryview(b"")

    def take(self, place: Place) -> Iterator[memoryview]:
        """The bytes of one member; those before it are skipped."""
        for _ in self._pieces(place.offset - self._at):
            pass
        yield from self._pieces(place.size)

    def _pieces(self, count: int) -> Iterator[memoryview]:
        while count > 0:
            if not self._rest:
                self._rest = memoryview(next(self._chunks))
            piece, self._rest = self._rest[:count], self._rest[count:]
            count -= len(piece)
            self._at += len(piece)
            yield piece

    def close(self) -> None:
        close = getattr(self._chunks, "close", None)
        if close is not None:
            close()
