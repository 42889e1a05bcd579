"""File operations that survive a kill -9, a full disk and a network file system, and errors that say so.

A file is written under a unique temporary name, flushed, and only then linked or renamed to its own. Nobody needs a
lock to read, and a half-written file is never visible.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

from neffcache.errors import StoreFault
from neffcache.store.records import Damaged

T = TypeVar("T")
Bytes = bytes | memoryview
Named = str | Path
"""The name of a file; where thousands of files are written it is a string, which costs a tenth of a Path."""

CHUNK = 1 << 20
FLUSHERS = 8  # fsync waits for the journal, not for a core: several at once share one commit
BACKDATED_NS = 2_000_000_000

# Network file systems answer ESTALE after somebody else's rename and EBUSY after somebody else's unlink.
PASSING = frozenset({errno.ESTALE, errno.EBUSY})
RETRY_DELAYS = (0.01, 0.05, 0.2, 0.5)  # seconds

# Of renameat2, which `os` does not have.
AT_FDCWD = -100
RENAME_NOREPLACE = 1

# File systems without hard links (some FUSE and SMB mounts) answer one of these.
NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})

_NO_SPACE = "free space, or choose another place with NEFFCACHE_DIR"
_NOT_ALLOWED = "check owner and mode of the store, or choose another place with NEFFCACHE_DIR"
_FAULTS: dict[int, tuple[str, str]] = {
    errno.ENOSPC: ("no space is left", _NO_SPACE),
    errno.EDQUOT: ("the disk quota is used up", _NO_SPACE),
    errno.EFBIG: ("the file would be larger than the limit of this process or file system", _NO_SPACE),
    errno.EACCES: ("permission is denied", _NOT_ALLOWED),
    errno.EPERM: ("the operation is not permitted", _NOT_ALLOWED),
    errno.EROFS: ("the file system is read-only", "a read-only store serves hits; to write, choose another one"),
    errno.EIO: ("the device reports an input/output error", "check the disk or the network mount, then run `verify`"),
    errno.EMFILE: ("this process has too many open files", "raise `ulimit -n`"),
    errno.ENFILE: ("the system has too many open files", "close programs, or raise fs.file-max"),
}


class Identity(NamedTuple):
    """What tells one state of a file from another without reading it; times in nanoseconds."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Identity:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def retrying(call: Callable[[], T]) -> T:
    """`call()`, again after ESTALE or EBUSY; the last error is raised as it is."""
    for delay in RETRY_DELAYS:
        try:
            return call()
        except OSError as error:
            if error.errno not in PASSING:
                raise
        time.sleep(delay)
    return call()


class storage:  # read as what it is: `with storage("opening", path):`
    """Turn every OSError inside into a StoreFault that says what was being done. Absence must be handled inside."""

    # A class and no generator: each file of a transfer passes through several.
    __slots__ = ("_doing", "_path")

    def __init__(self, doing: str, path: Named) -> None:
        self._doing, self._path = doing, path

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, OSError):
            raise storage_fault(error, self._doing, self._path) from error


def storage_fault(error: OSError, doing: str, path: Named) -> StoreFault:
    """A sentence and a hint for an error of the file system, with the error's name in the details."""
    code = error.errno or 0
    why, hint = _FAULTS.get(code, (error.strerror or str(error), "check the file system that holds the store"))
    details = {"errno": errno.errorcode.get(code, str(code)), "path": str(path)}
    return StoreFault(f"{doing} {path} failed: {why}", hint=hint, details=details)


def open_regular(path: Path) -> int | None:
    """A descriptor to read a regular file, or None when nothing is there.

    Raises Damaged for a symbolic link, directory, pipe or socket, StoreFault for any other error.
    """
    try:
        # O_NONBLOCK: a pipe planted at this name must not hang a reader.
        descriptor = retrying(lambda: os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise Damaged(f"{path} is not a regular file", hint="remove it", details={"path": str(path)}) from error
        raise storage_fault(error, "opening", path) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Damaged(f"{path} is not a regular file", hint="remove it", details={"path": str(path)})
    return descriptor


def read_regular(path: Path) -> tuple[bytes, Identity] | None:
    """The whole content of a small regular file, or None when nothing is there. Errors as `open_regular`."""
    descriptor = open_regular(path)
    if descriptor is None:
        return None
    with storage("reading", path), os.fdopen(descriptor, "rb") as file:
        return file.read(), Identity.of(os.fstat(file.fileno()))


def read_chunks(descriptor: int) -> Iterator[bytes]:
    """The rest of an open file in pieces of `CHUNK` bytes."""
    while chunk := os.read(descriptor, CHUNK):
        yield chunk


def hash_regular(path: Path) -> tuple[str, Identity] | None:
    """(SHA-256, identity) of a regular file that held still while it was read, or None when nothing is there.

    Raises Damaged when it keeps changing. Other errors as `open_regular`.
    """
    for _ in range(3):
        descriptor = open_regular(path)
        if descriptor is None:
            return None
        with storage("reading", path):
            try:
                before, sha = Identity.of(os.fstat(descriptor)), hashlib.sha256()
                for chunk in read_chunks(descriptor):
                    sha.update(chunk)
                if Identity.of(os.fstat(descriptor)) == before:
                    return sha.hexdigest(), before
            finally:
                os.close(descriptor)
    hint = "find the program that writes to it"
    raise Damaged(f"{path} changes while it is read", hint=hint, details={"path": str(path)})


def hash_range(path: Path, start: int, size: int) -> str:
    """SHA-256 of `size` bytes of a file. Raises StoreFault, also when it is shorter."""
    sha, left = hashlib.sha256(), size
    with storage("reading", path), path.open("rb") as file:
        file.seek(start)
        while left and (chunk := file.read(min(CHUNK, left))):
            sha.update(chunk)
            left -= len(chunk)
    if left:
        raise StoreFault(f"{path} became shorter while it was read", hint="find the program that writes to it")
    return sha.hexdigest()


class Written(NamedTuple):
    """A complete file under a temporary name."""

    path: Named
    sha256: str
    identity: Identity


def write_temporary(path: Named, chunks: Iterable[Bytes], mode: int, *, flush: bool = True) -> Written:
    """Write a new file of exactly `chunks`; it is removed again when anything fails. Raises StoreFault.

    `flush=False` leaves the fsync to the caller, who must do it before anything names the file.
    """
    sha = hashlib.sha256()
    with storage("writing", path):
        descriptor = retrying(lambda: os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        try:
            for chunk in chunks:  # outside the `try`: an error of the source is not an error of this store
                sha.update(chunk)
                try:
                    _write_all(descriptor, chunk)
                except OSError as error:
                    raise storage_fault(error, "writing", path) from error
            with storage("writing", path):
                os.fchmod(descriptor, mode)
                # Back-dated, so that a later write in the same clock tick still changes the file's identity.
                stamp = time.time_ns() - BACKDATED_NS
                os.utime(descriptor, ns=(stamp, stamp))
                if flush:
                    os.fsync(descriptor)
                identity = Identity.of(os.fstat(descriptor))
        finally:
            with storage("closing", path):
                os.close(descriptor)  # where some network file systems report that the disk is full
    except BaseException:
        remove(path)
        raise
    return Written(path, sha.hexdigest(), identity)


def _write_all(descriptor: int, chunk: Bytes) -> None:
    written = os.write(descriptor, chunk)
    while written < len(chunk):
        written += os.write(descriptor, memoryview(chunk)[written:])


@functools.cache
def _renameat2() -> Callable[..., int] | None:
    import ctypes

    return getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)


def rename_new(directory: Path, name: Path) -> None:
    """Give a directory a name that nothing has. Raises FileExistsError when something has it, OSError.

    A plain rename would put it in the place of an empty directory, under the feet of whoever has just made that one.
    Where the C library or the file system knows no other, it still may: `_named` then tries again.
    """
    import ctypes

    rename = _renameat2()
    if rename is not None:
        if rename(AT_FDCWD, os.fsencode(directory), AT_FDCWD, os.fsencode(name), RENAME_NOREPLACE) == 0:
            return
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise OSError(code, os.strerror(code), os.fspath(name))
    os.rename(directory, name)


def _named(give: Callable[[Named, Named], None], temporary: Named, final: Named) -> None:
    """`give(temporary, final)`, again where the directory of `final` is replaced at that moment (see `rename_new`).

    A name that is just being given in a directory which is gone is answered with ENOENT.
    """
    for delay in RETRY_DELAYS:
        try:
            return retrying(lambda: give(temporary, final))
        except FileNotFoundError:
            if not os.path.lexists(temporary):
                raise
        time.sleep(delay)
    return retrying(lambda: give(temporary, final))


def publish(temporary: Named, final: Named) -> bool:
    """Give a complete file its own name unless it is taken.

    True when this call did, then the temporary name is gone; else the temporary file is still the caller's.
    Raises StoreFault.
    """
    with storage("writing", final):
        try:
            _named(os.link, temporary, final)
        except FileExistsError:
            # A lost NFS reply is repeated by the client: the name may be taken by ourselves.
            if not os.path.samestat(os.lstat(temporary), os.lstat(final)):
                return False
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            # Without links two writers may both get here; the later rename wins, and both files are whole.
            if os.path.lexists(final):
                return False
            _named(os.rename, temporary, final)
    remove(temporary)
    return True


def replace(temporary: Named, final: Named) -> None:
    """Give a complete file a name that others may have; readers see the old or the new one. Raises StoreFault."""
    try:
        with storage("writing", final):
            _named(os.replace, temporary, final)
    except BaseException:
        remove(temporary)
        raise


def remove(path: Named) -> None:
    """Remove a file or a tree of ours if it can be; a leftover is harmless and swept later."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except IsADirectoryError:
        shutil.rmtree(path, ignore_errors=True)
    except OSError:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)


def flush_file(path: Named) -> None:
    """fsync one file by its name. Raises StoreFault."""
    _flush(path, os.O_RDONLY)


def flush_each(flush: Callable[[Named], None], paths: Sequence[Named]) -> None:
    """Flush many at once. Raises StoreFault."""
    if len(paths) < FLUSHERS:
        for path in paths:
            flush(path)
        return
    with ThreadPoolExecutor(FLUSHERS) as pool:
        list(pool.map(flush, paths))


def flush_directory(path: Named) -> None:
    """fsync a directory, so that new names in it survive a power cut. Raises StoreFault."""
    _flush(path, os.O_RDONLY | os.O_DIRECTORY)


def _flush(path: Named, flags: int) -> None:
    with storage("flushing", path):
        descriptor = retrying(lambda: os.open(path, flags | os.O_CLOEXEC))
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some FUSE mounts cannot flush directories; a file that cannot be flushed is an error everywhere.
            if not (flags & os.O_DIRECTORY and error.errno in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)):
                raise
        finally:
            os.close(descriptor)


def names(directory: Path) -> list[str]:
    """The sorted names in a directory; none when it is absent. Raises StoreFault."""
    with storage("listing", directory):
        try:
            return sorted(retrying(lambda: os.listdir(directory)))
        except FileNotFoundError:
            return []
