"""Where caches made by others are imported from: a directory, or a prefix of a bucket. Neither is ever written to."""

from __future__ import annotations

import hashlib
import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from neffcache.compile.neuron.layouts import Check, Wrong
from neffcache.errors import Usage
from neffcache.key.canonical import digest
from neffcache.store import layout
from neffcache.store.blobs import Batch
from neffcache.store.bundle import MAX_MEMBER
from neffcache.store.files import Identity, read_chunks
from neffcache.store.index import Index
from neffcache.store.local import LocalStore
from neffcache.store.records import Damaged

if TYPE_CHECKING:
    from neffcache.remote.client import Client


@dataclass(frozen=True, slots=True)
class File:
    """One file of a source: its relative `path`, its `size` in bytes, and a `tag` that equal content may share ("" says
    nothing). `reason`: why it is not to be read, of `layouts.REASONS`.
    """

    path: str
    size: int
    tag: str = ""
    reason: str = ""


class Origin(Protocol):
    """A source. Reading raises Wrong for what is left out, and the origin's own fault when all of it is gone."""

    where: str
    name: str
    """The last folder of its path: it may say what lies below."""
    at_once: int
    """Entries that are read at the same time."""

    def files(self) -> Iterator[File]:
        """Every file, so that those below one folder follow each other; nothing is held in memory."""
        ...

    def totals(self) -> tuple[int, int]:
        """How many files of how many bytes there are; (0, 0) when that is not known before."""
        ...

    def sha256(self, file: File, check: Check | None, *, needed: bool) -> str | None:
        """SHA-256 of a file whose bytes pass the check. None when that takes a download and is not `needed`."""
        ...

    def copy(self, file: File, batch: Batch, check: Check | None, expect: str | None) -> str:
        """The SHA-256 of a file that is copied into a store; `expect` is what `sha256` said."""
        ...

    def copied(self) -> None:
        """What was copied so far is safe in the store."""
        ...

    def close(self) -> None: ...


class Directory:
    """A directory of this machine, for import into `store`. No link is followed, whoever puts one there meanwhile."""

    at_once = 1

    def __init__(self, path: Path, store: LocalStore) -> None:
        self.path, self.store = Path(os.path.abspath(path)), store
        self.where, self.name = str(path), self.path.name
        self._links: Counter[tuple[int, int]] = Counter()
        try:
            self._root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as fault:
            raise Usage(f"{path} cannot be read: {os.strerror(fault.errno or 0)}") from None

    def totals(self) -> tuple[int, int]:
        count = size = 0
        for _, status in self._walk():
            count += 1
            if status is not None and stat.S_ISREG(status.st_mode):
                size += status.st_size
                if status.st_nlink > 1:
                    self._links[status.st_dev, status.st_ino] += 1
        return count, size

    def files(self) -> Iterator[File]:
        for path, status in self._walk():
            yield File(path, 0 if status is None else status.st_size, reason=self._reason(path, status))

    def _reason(self, path: str, status: os.stat_result | None) -> str:
        if status is None:
            return "unreadable"
        if stat.S_ISLNK(status.st_mode):
            return "link"
        if not stat.S_ISREG(status.st_mode):
            return "special"
        if status.st_size > MAX_MEMBER:
            return "huge"
        # Copies that share their content inside of the source are copies; another name elsewhere is somebody's file.
        outside = status.st_nlink > max(1, self._links[status.st_dev, status.st_ino])
        return "hard-link" if outside and not self._is_ours(path, status) else ""

    def _is_ours(self, path: str, status: os.stat_result) -> bool:
        """Whether a file is a link to a blob of the store, as those of a view are."""
        try:
            sha256 = self.sha256(File(path, status.st_size), None, needed=True)
            blob = os.lstat(self.store.root / layout.blob_name(sha256))
        except (Wrong, OSError):
            return False
        return os.path.samestat(blob, status)

    def _walk(self) -> Iterator[tuple[str, os.stat_result | None]]:
        """(path, status) of everything that is no directory, in order; None for what cannot be looked at."""
        stack: list[Iterator[tuple[str, bool, os.stat_result | None]]] = [self._list("")]
        while stack:
            for path, is_folder, status in stack[-1]:
                if is_folder:
                    stack.append(self._list(f"{path}/"))
                    break
                yield path, status
            else:
                stack.pop()

    def _list(self, folder: str) -> Iterator[tuple[str, bool, os.stat_result | None]]:
        found: list[tuple[str, bool, os.stat_result | None]] = []
        try:
            descriptor = self._open(folder.rstrip("/"), os.O_DIRECTORY)
        except OSError:
            return iter([(folder, False, None)])
        try:
            with os.scandir(descriptor) as entries:
                for entry in entries:
                    path = f"{folder}{entry.name}"
                    if entry.is_dir(follow_symlinks=False):
                        found.append((path, True, None))
                        continue
                    with suppress(FileNotFoundError):
                        found.append((path, False, entry.stat(follow_symlinks=False)))
        except OSError:
            found.append((folder, False, None))
        finally:
            os.close(descriptor)
        return iter(sorted(found, key=lambda item: item[0]))

    def _open(self, path: str, flags: int = 0) -> int:
        """A descriptor of something below the root, reached through real directories only. Raises OSError."""
        flags |= os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        current = os.dup(self._root)
        parts = path.split("/") if path else ["."]
        try:
            for number, part in enumerate(parts, 1):
                last = number == len(parts)
                following = os.open(part, flags if last else flags | os.O_DIRECTORY, dir_fd=current)
                os.close(current)
                current = following
        except BaseException:
            os.close(current)
            raise
        return current

    def sha256(self, file: File, check: Check | None, *, needed: bool) -> str:
        sha = hashlib.sha256()
        for chunk in _passing(self._chunks(file), check):
            sha.update(chunk)
        return sha.hexdigest()

    def copy(self, file: File, batch: Batch, check: Check | None, expect: str | None) -> str:
        try:
            return batch.put_chunks(self._chunks(file), expect=expect)
        except Damaged:
            raise Wrong("moving") from None

    def copied(self) -> None: ...

    def close(self) -> None:
        os.close(self._root)

    def _chunks(self, file: File) -> Iterator[bytes]:
        """Its bytes, as many as were announced, of a file that held still meanwhile."""
        try:
            descriptor = self._open(file.path)
        except FileNotFoundError:
            raise Wrong("moving") from None
        except OSError:
            raise Wrong("unreadable") from None
        try:
            before = os.fstat(descriptor)
            if not stat.S_ISREG(before.st_mode) or before.st_size != file.size:
                raise Wrong("moving")
            left = file.size
            for chunk in read_chunks(descriptor):
                left -= len(chunk)
                yield chunk
            if left or Identity.of(os.fstat(descriptor)) != Identity.of(before):
                raise Wrong("moving")
        except OSError:
            raise Wrong("unreadable") from None
        finally:
            os.close(descriptor)


class Bucket:
    """What lies below a prefix of a bucket. What an object held is remembered in the store's index by its ETag, so that
    an import that goes on fetches it no second time."""

    def __init__(self, client: Client, store: LocalStore) -> None:
        self.client = client
        self.where = client.where
        self.name = client.url.prefix.rpartition("/")[2]
        self.at_once = client.access.transfers
        self._index = Index.open(store)
        self._seen: dict[str, str] = {}

    def totals(self) -> tuple[int, int]:
        return 0, 0

    def files(self) -> Iterator[File]:
        from neffcache.remote.errors import Denied

        try:
            for item in self.client.names(""):
                if item.name and not (item.name.endswith("/") and not item.size):  # a folder's mark
                    yield File(item.name, item.size, item.etag, "huge" if item.size > MAX_MEMBER else "")
        except Denied as fault:
            raise Denied(
                f"listing {self.where} is denied: an import has to find out what is there",
                hint="ask for s3:ListBucket below the prefix, besides s3:GetObject",
                details=fault.details,
            ) from fault

    def sha256(self, file: File, check: Check | None, *, needed: bool) -> str | None:
        if not file.size:
            return _EMPTY
        if (known := self._index.seen(self._address(file))) is not None or not needed:
            return known
        sha = hashlib.sha256()
        for chunk in _passing(self._chunks(file), check):
            sha.update(chunk)
        return sha.hexdigest()

    def copy(self, file: File, batch: Batch, check: Check | None, expect: str | None) -> str:
        if not file.size:
            return batch.put(b"")
        try:
            found = batch.put_chunks(_passing(self._chunks(file), check), expect=expect)
        except Damaged:
            raise Wrong("moving") from None
        if file.tag:
            self._seen[self._address(file)] = found
        return found

    def copied(self) -> None:
        self._index.put_seen(self._seen)
        self._seen = {}

    def close(self) -> None:
        self._index.close()

    def _address(self, file: File) -> str:
        endpoint = self.client.access.endpoint_url or os.environ.get("AWS_ENDPOINT_URL", "")
        return digest([endpoint, self.where, file.path, file.tag, file.size])

    def _chunks(self, file: File) -> Iterator[bytes]:
        from neffcache.remote.errors import Incomplete, Precondition

        left = file.size
        try:
            for chunk in self.client.chunks(file.path, etag=file.tag):
                left -= len(chunk)
                yield chunk
        except (Incomplete, Precondition):
            raise Wrong("moving") from None
        if left:
            raise Wrong("moving")


_EMPTY = hashlib.sha256().hexdigest()


def _passing(chunks: Iterator[bytes], check: Check | None) -> Iterator[bytes]:
    for chunk in chunks:
        if check is not None:
            check.feed(chunk)
        yield chunk
    if check is not None:
        check.end()
