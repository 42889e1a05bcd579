"""Blobs: bytes by their SHA-256, checked before their first use in every process."""

from __future__ import annotations

import hashlib
import os
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from neffcache.errors import Miss, StoreFault
from neffcache.key.canonical import sha256_hex
from neffcache.store import layout
from neffcache.store.files import (
    Bytes,
    Identity,
    Written,
    flush_directory,
    flush_each,
    flush_file,
    hash_regular,
    names,
    open_regular,
    publish,
    read_chunks,
    read_regular,
    remove,
    retrying,
    storage,
    write_temporary,
)
from neffcache.store.records import Damaged
from neffcache.store.root import Root

MODE = 0o444

# A file that was modified this recently could change again without a visible change of its time.
SETTLED_NS = 1_000_000_000


class Blobs:
    """The blobs of one store, and which of them this process has verified already."""

    def __init__(self, root: Root) -> None:
        self.root = root
        self._top = os.fspath(root.path)
        self._verified: dict[str, Identity] = {}

    def expected_path(self, sha256: str) -> Path:
        """Where that blob is or would be; nothing is checked. Raises Usage unless `sha256` is one."""
        return self.root.path / layout.blob_name(sha256)

    def size(self, sha256: str) -> int | None:
        """Bytes of the file of that name, unread and unchecked, or None when there is none. Raises StoreFault."""
        try:
            # Of every file of a job, several times: a string is a tenth of a Path.
            status = os.lstat(f"{self._top}/{layout.blob_name(sha256)}")
        except FileNotFoundError:
            return None
        except OSError:
            path = self.expected_path(sha256)
            with storage("looking at", path):
                try:
                    status = retrying(lambda: os.lstat(path))
                except FileNotFoundError:
                    return None
        return status.st_size if stat.S_ISREG(status.st_mode) else -1

    def check(self, sha256: str, *, fresh: bool = False) -> Path | None:
        """The path of a blob whose content has its digest, or None when it is absent.

        Hashes once per process and state of the file; `fresh` hashes always. A damaged blob is quarantined and
        Damaged is raised with its digest in the details. Raises StoreFault for other errors.
        """
        path = self.expected_path(sha256)
        if not fresh and sha256 in self._verified and self._identity(path) == self._verified[sha256]:
            return path
        try:
            found = hash_regular(path)
        except Damaged as error:
            raise self._damaged(sha256, path, None, error.message) from error
        if found is None:
            return None
        self._judge(sha256, path, *found)
        return path

    def read(self, sha256: str) -> bytes | None:
        """The checked content, or None when it is absent; what is returned is what was checked. Errors as `check`."""
        path = self.expected_path(sha256)
        try:
            found = read_regular(path)
        except Damaged as error:
            raise self._damaged(sha256, path, None, error.message) from error
        if found is None:
            return None
        data, identity = found
        if self._verified.get(sha256) != identity:
            self._judge(sha256, path, sha256_hex(data), identity)
        return data

    def reader(self, sha256: str, *, checked: bool = True) -> Reader | None:
        """The blob as an open file, None when it is absent. Its last bytes come only when all are right, if `checked`.

        Raises Damaged for what is not a regular file, StoreFault.
        """
        path = self.expected_path(sha256)
        try:
            descriptor = open_regular(path)
        except Damaged as error:
            raise self._damaged(sha256, path, None, error.message) from error
        return None if descriptor is None else Reader(self, sha256, path, descriptor, checked=checked)

    def names(self) -> Iterator[str]:
        """The digests of all blobs, in order; files with other names are orphans and left alone. Raises StoreFault."""
        top = self.root.path / layout.BLOBS
        for folder in names(top):
            if len(folder) == 2 and (top / folder).is_dir():
                yield from (name for name in names(top / folder) if layout.parse(f"{layout.BLOBS}/{folder}/{name}"))

    @contextmanager
    def batch(self, *, flush: bool = True) -> Iterator[Batch]:
        """Write many blobs with one flush at the end: none is visible before all of them are safe on the disk.

        Without `flush` they are visible before: for bytes that can be had again. After a power cut such a file may be
        short or empty; whoever asks for it finds its size or its digest wrong, as with any damage.
        Raises StoreFault; an error inside the block drops what it has written.
        """
        self.root.need_writable()
        batch = Batch(self, flush=flush)
        try:
            yield batch
            batch.finish()
        finally:
            batch.discard()

    def adopt(self, written: Written) -> None:
        """Publish one temporary file under its digest; an existing blob is checked and kept, or replaced. The temporary
        name is gone afterwards.

        Raises StoreFault.
        """
        self.root.need_writable()
        name = layout.blob_name(written.sha256)
        final = f"{self._top}/{name}"
        if not os.path.isdir(final.rpartition("/")[0]):
            self.root.place(name)
        for _ in range(3):  # a name that is neither free nor good can come from a race, but not for ever
            if publish(written.path, final):
                self._verified[written.sha256] = written.identity
                return
            if self.holds(written.sha256):
                remove(written.path)
                return
        raise StoreFault(f"{final} is damaged and cannot be replaced", hint="remove it", details={"path": final})

    def holds(self, sha256: str) -> bool:
        """Whether the blob is here and good; a damaged one is quarantined and counts as absent. Raises StoreFault."""
        try:
            return self.check(sha256) is not None
        except Damaged:
            return False

    def _identity(self, path: Path) -> Identity | None:
        with storage("looking at", path):
            try:
                return Identity.of(retrying(lambda: os.lstat(path)))
            except FileNotFoundError:
                return None

    def _judge(self, sha256: str, path: Path, found: str, identity: Identity) -> None:
        if found != sha256:
            raise self._damaged(sha256, path, identity, f"blob {sha256} is damaged: {path} holds {found}")
        if time.time_ns() - identity.mtime_ns > SETTLED_NS:
            self._verified[sha256] = identity

    def _damaged(self, sha256: str, path: Path, identity: Identity | None, message: str) -> Damaged:
        self._verified.pop(sha256, None)
        moved = self.root.quarantine(path, identity)
        return Damaged(
            message,
            hint="pull it from the remote or warm again; the damaged file is kept in quarantine/ until you remove it",
            details={"blob": sha256, "path": str(path), "quarantined": str(moved) if moved else None},
        )


class Reader:
    """A blob that is hashed while it is read, for who sends it: read once, and its end is withheld when it is damaged.

    Not hashed when this process has verified it. `read` raises Damaged (after quarantine), StoreFault.
    """

    def __init__(self, blobs: Blobs, sha256: str, path: Path, descriptor: int, *, checked: bool) -> None:
        self._blobs, self._sha256, self._path = blobs, sha256, path
        self._file = os.fdopen(descriptor, "rb", buffering=0)
        self._identity = Identity.of(os.fstat(descriptor))
        self.size = self._identity.size
        self._known = not checked or blobs._verified.get(sha256) == self._identity
        self._sha: Any = hashlib.sha256()
        """Of what was read from the beginning; None after a jump."""

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes, b"" at the end."""
        with storage("reading", self._path):
            data: bytes = self._file.read(size) or b""
            at = self._file.tell()
        if not self._known and self._sha is not None:
            self._sha.update(data)
        ended = at >= self.size
        if (ended and not self._known) or not (ended or data):  # or an end where there should be more
            self._judge()
        return data

    def _judge(self) -> None:
        with storage("reading", self._path):
            now = Identity.of(os.fstat(self._file.fileno()))
        if self._sha is None or now != self._identity:  # it jumped, or somebody writes to the file
            self._blobs.check(self._sha256, fresh=True)
            if now != self._identity:
                raise Damaged(f"{self._path} changes while it is read", hint="find the program that writes to it")
        else:
            self._blobs._judge(self._sha256, self._path, self._sha.hexdigest(), now)
        self._known = True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """To the beginning, to read it again; elsewhere costs hashing all of it at the end."""
        at = self._file.seek(offset, whence)
        self._sha = hashlib.sha256() if at == 0 else None
        return at

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Batch:
    """Blobs on their way into a store. Safe to use from several threads."""

    def __init__(self, blobs: Blobs, *, flush: bool = True) -> None:
        self._blobs = blobs
        self._flush = flush
        self._lock = threading.Lock()
        self._written: dict[str, Written] = {}

    def put(self, data: bytes) -> str:
        """The SHA-256 of `data`, which the store will hold when the batch ends. Raises StoreFault."""
        sha256 = sha256_hex(data)
        return sha256 if self._blobs.holds(sha256) else self.put_chunks([data])

    def put_file(self, source: Path) -> str:
        """The same for a file, read once in pieces of a fixed size. Raises Miss when it is absent, StoreFault."""
        return self.put_chunks(read_file(source))

    def put_chunks(self, chunks: Iterable[Bytes], *, expect: str | None = None) -> str:
        """The same for a stream; errors of the stream pass through.

        Raises Damaged, and stores nothing, when the SHA-256 is not the `expect`ed one.
        """
        written = write_temporary(self._blobs.root.temporary_name(), chunks, MODE, flush=False)
        if expect is not None and written.sha256 != expect:
            remove(written.path)
            raise Damaged(
                f"blob {expect} arrived damaged: its content is {written.sha256}",
                hint="fetch it again; if it stays so, repair the place that it came from",
                details={"blob": expect, "found": written.sha256},
            )
        with self._lock:
            first = self._written.setdefault(written.sha256, written)
        if first is not written:
            remove(written.path)
        return written.sha256

    def finish(self) -> None:
        """Flush every file, publish all, flush the directories. Raises StoreFault; then nothing is half-written."""
        written = list(self._written.values())
        if self._flush:
            flush_each(flush_file, [item.path for item in written])
        for item in written:
            self._blobs.adopt(item)
        self._written.clear()  # nothing is left to discard
        if not self._flush:
            return
        folders = {self._blobs.expected_path(item.sha256).parent for item in written}
        flush_each(flush_directory, [*sorted(folders), *({self._blobs.root.path / layout.BLOBS} if folders else ())])

    def discard(self) -> None:
        """Remove what was not published."""
        for item in self._written.values():
            remove(item.path)


def read_file(source: Path) -> Iterator[bytes]:
    """A regular file in pieces of a fixed size. Raises Miss when it is absent, StoreFault."""
    descriptor = open_regular(source)
    if descriptor is None:
        raise Miss(f"there is no file {source} to store", details={"path": str(source)})
    try:
        chunks = read_chunks(descriptor)
        while True:
            with storage("reading", source):
                chunk = next(chunks, b"")
            if not chunk:
                return
            yield chunk
    finally:
        os.close(descriptor)
