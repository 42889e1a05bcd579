"""Blobs from a local store to a remote: small ones in packs, large ones in parts, each sent only where it is absent."""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from neffcache.key.canonical import sha256_hex
from neffcache.remote import errors
from neffcache.remote.packs import Place
from neffcache.remote.tier import RemoteStore
from neffcache.store import layout
from neffcache.store.blobs import Reader
from neffcache.store.files import hash_range
from neffcache.store.local import LocalStore

PART = 32 << 20
"""Bytes of a part of a multipart upload (S3: 5 MiB to 5 GiB, at most 10,000)."""
MULTIPART = 64 << 20
"""Bytes from which an object is sent in parts."""
MOST_PARTS = 10_000


def send_blob(remote: RemoteStore, store: LocalStore, sha256: str, size: int, *, over: str | None = None) -> bool:
    """Send one blob under its own name: whether it was absent there, or (with `over`) still had that ETag.

    S3 is given the digest. A store that is known to check it (`verifies`) is left to do so; else, or when it refuses,
    the blob is hashed while it is sent (once per process; what goes in parts: before), and a damaged one is not
    completed. So the remote never has it. Raises Miss, Damaged, StoreFault, Fault.
    """
    name = layout.blob_name(sha256)
    if size < MULTIPART:
        attempts = itertools.count()

        def opened() -> Reader:
            # One of another size would keep the server waiting for what never comes.
            trusted = remote.verifies and next(attempts) == 0 and store.blob_size(sha256) == size
            return store.blob_reader(sha256, checked=not trusted)

        etag = remote.client.put(name, opened, sha256, size=size, if_absent=over is None, if_match=over)
        return etag is not None
    path = store.blob_path(sha256)
    part = max(PART, -(-size // MOST_PARTS))
    cuts = [(start, min(part, size - start)) for start in range(0, size, part)]
    with ThreadPoolExecutor(max(1, min(remote.client.access.transfers, len(cuts)))) as pool:

        def each(calls: list[Callable[[], Any]]) -> list[Any]:
            waiting = [pool.submit(call) for call in calls]
            try:
                return [future.result() for future in waiting]
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

        digests = each([functools.partial(hash_range, path, start, count) for start, count in cuts])
        parts = [
            (_opener(path, start, count), digest, count) for (start, count), digest in zip(cuts, digests, strict=True)
        ]
        return remote.client.multipart(name, parts, each, if_match=over)


def send_pack(remote: RemoteStore, members: Sequence[tuple[str, Callable[[], bytes]]]) -> tuple[dict[str, Place], bool]:
    """Send members (name, how to get its checked bytes) as one pack: where each lies, and whether it was absent.

    Raises what getting one raises, and Fault.
    """
    placed: dict[str, tuple[int, int]] = {}
    data = bytearray()
    for name, read in members:
        content = read()
        placed[name] = (len(data), len(content))
        data += content
    pack = sha256_hex(data)
    name = layout.pack_name(pack)
    head = remote.client.head(name)
    new = False
    if head is None:
        new = remote.client.put(name, data, pack, size=len(data), if_absent=True) is not None
    elif head.size != len(data):
        new = remote.client.put(name, data, pack, size=len(data), if_match=head.etag) is not None
    return {name: Place(pack, *place) for name, place in placed.items()}, new


def rewrite(remote: RemoteStore, store: LocalStore, sha256: str, size: int) -> None:
    """Put a good copy of a blob under its own name, whatever is there. Raises Miss, Damaged, StoreFault, Fault."""
    for _ in range(5):
        head = remote.client.head(layout.blob_name(sha256))
        if send_blob(remote, store, sha256, size, over=None if head is None else head.etag):
            return
    raise errors.Precondition(
        f"{layout.blob_name(sha256)} of {remote.where} changes all the time", hint="find who else writes it"
    )


class Part(io.RawIOBase):
    """A piece of a file, as a file of its own."""

    def __init__(self, path: Path, start: int, size: int) -> None:
        self._file = path.open("rb")
        self._start, self._size, self._at = start, size, 0
        self._file.seek(start)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: self._size - self._at]
        count = self._file.readinto(view) if len(view) else 0
        self._at += count
        return count

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence] + offset)
        self._file.seek(self._start + self._at)
        return self._at

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        self._file.close()
        super().close()


def _opener(path: Path, start: int, size: int) -> Callable[[], IO[bytes]]:
    return lambda: Part(path, start, size)  # type: ignore[return-value]  # read, seek and tell are all that is used
