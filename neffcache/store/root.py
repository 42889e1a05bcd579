"""The directory that a store lives in: whether it may be trusted, modes, temporary names, locks, quarantine."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import Timeout, UnixFileLock

from neffcache.errors import StoreFault
from neffcache.store import layout
from neffcache.store.files import Identity, flush_directory, remove, rename_new, retrying, storage, storage_fault

log = logging.getLogger("neffcache.store")

NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP})
LOCK_TIMEOUT = 60.0  # seconds; an update under a lock takes milliseconds, and a killed holder's lock is gone at once


@dataclass(frozen=True, slots=True)
class Root:
    """A checked directory. Every directory inside it gets `directory_mode`, so that a shared store stays shared."""

    path: Path
    writable: bool
    directory_mode: int

    @classmethod
    def open(cls, path: Path, *, writable: bool, given: bool, mode: int = 0o700) -> Root:
        """Check a root and, when `writable`, create what is missing; otherwise nothing is ever created.

        `given=False` is the default place of a user: refused when it is a symbolic link, is owned by somebody else or
        is world-writable without the sticky bit. `given=True` is a directory that the user named (a group's, a mounted
        volume); it is taken as it is, its content is checked by digest. `mode` is that of a root that is made here.
        Raises StoreFault.
        """
        path = Path(os.path.abspath(path))
        if writable:
            with storage("creating", path):
                # The parents get the user's usual mode, the root its own.
                path.parent.mkdir(parents=True, exist_ok=True)
                with suppress(FileExistsError):
                    retrying(lambda: os.mkdir(path, mode))
                    os.chmod(path, mode)  # whatever the umask
        with storage("opening", path):
            try:
                status = retrying(lambda: os.stat(path) if given else os.lstat(path))
            except FileNotFoundError:
                if writable:  # a dangling link
                    raise
                return cls(path, False, 0o700)
        if not given:
            _refuse_unsafe(path, status)
        if not stat.S_ISDIR(status.st_mode):
            raise StoreFault(f"the store {path} is not a directory", hint="choose another NEFFCACHE_DIR")
        root = cls(path, writable, stat.S_IMODE(status.st_mode) | 0o700)
        if writable:
            for name in layout.DIRECTORIES:
                root.directory(name)
            if not os.access(path / layout.TMP, os.W_OK | os.X_OK, effective_ids=True):
                raise storage_fault(PermissionError(errno.EACCES, "denied"), "writing to", path / layout.TMP)
        return root

    def directory(self, name: str) -> Path:
        """The directory of that relative name, made with the root's mode if it is missing. Raises StoreFault."""
        path = self.path / name
        if os.path.isdir(path):
            return path
        if "/" in name:
            self.directory(name.rpartition("/")[0])
        with storage("creating", path):
            # Made aside and renamed: a kill in between must not leave it with the umask's mode in a shared store.
            new = path.with_name(f"{path.name}.{secrets.token_hex(8)}") if name == layout.TMP else self.temporary()
            retrying(lambda: os.mkdir(new, 0o700))
            try:
                os.chmod(new, self.directory_mode)
                retrying(lambda: rename_new(new, path))
            except OSError:
                with suppress(OSError):
                    os.rmdir(new)
                if not path.is_dir():  # not merely somebody else's, made meanwhile
                    raise
        return path

    def place(self, name: str) -> Path:
        """The path of a thing by its name in the layout, with its directory made. Raises StoreFault."""
        self.need_writable()
        folder, _, last = name.rpartition("/")
        return self.directory(folder) / last

    def need_writable(self) -> None:
        """Raises StoreFault when this store was opened to read only."""
        if not self.writable:
            hint = "use a command that writes, or another NEFFCACHE_DIR"
            raise StoreFault(f"the store {self.path} was opened to read only", hint=hint)

    def temporary(self, suffix: str = "") -> Path:
        """A name that no other process on any host will choose, in the same file system as everything else."""
        return Path(self.temporary_name(suffix))

    def temporary_name(self, suffix: str = "") -> str:
        """The same as a string, for who needs thousands."""
        return f"{self.path}/{layout.TMP}/{secrets.token_hex(16)}{suffix}"

    def require_space(self, needed: int) -> None:
        """Raises StoreFault before the first byte when fewer than `needed` bytes are free."""
        with storage("asking for the free space of", self.path):
            try:
                free = shutil.disk_usage(self.path).free
            except FileNotFoundError:
                free = shutil.disk_usage(self.path.parent).free
        if free < needed:
            raise StoreFault(
                f"the store {self.path} needs {needed:,} bytes and has {free:,}",
                hint="free space, or choose another place with NEFFCACHE_DIR",
                details={"needed_bytes": needed, "free_bytes": free},
            )

    def lock(self, name: str, *, timeout: float = LOCK_TIMEOUT) -> AbstractContextManager[None]:
        """A kernel lock of this store; see `kernel_lock`."""
        path = self.place(f"{layout.LOCKS}/{name}.lock")
        return kernel_lock(path, self.directory_mode & 0o666, timeout=timeout)

    def quarantine(self, path: Path, judged: Identity | None) -> Path | None:
        """Move a damaged file out of the way and say so; None when it is not ours to move or somebody did already.

        `judged` is the state that was found damaged: a file that was healed meanwhile is put back.
        """
        if not self.writable:
            return None
        target = self.place(f"{layout.QUARANTINE}/{path.name}.{secrets.token_hex(8)}")
        try:
            retrying(lambda: os.rename(path, target))
            if judged is not None and Identity.of(os.lstat(target)) != judged:
                with suppress(FileExistsError):
                    os.link(target, path)
                remove(target)
                return None
            flush_directory(path.parent)
        except FileNotFoundError:
            return None
        except (OSError, StoreFault) as error:
            log.warning("%s is damaged and cannot be moved to quarantine: %s", path, error)
            return None
        log.warning("%s is damaged; moved to %s", path, target)
        return target


@contextmanager
def kernel_lock(path: Path, mode: int, *, timeout: float) -> Iterator[None]:
    """Hold a lock on a file: it goes with its holder, however that ends. Threads exclude each other too.

    On a file system without locks the caller goes on without, because what it does is atomic anyway.
    Raises StoreFault when a live holder keeps it for `timeout` seconds.
    """
    lock = UnixFileLock(path, timeout=timeout, mode=mode, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise StoreFault(
            f"another process has held {path} for {timeout:.0f} s",
            hint="see which one with `fuser`; a process that has ended holds no lock",
            details={"path": str(path)},
        ) from error
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno not in NO_LOCKS:
            raise storage_fault(error, "locking", path) from error
        log.warning("no kernel lock on %s (%s); going on without", path, error)
    try:
        yield
    finally:
        lock.release()


def _refuse_unsafe(path: Path, status: os.stat_result) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISLNK(status.st_mode):
        why = "is a symbolic link"
    elif status.st_uid != os.geteuid():
        why = f"is owned by uid {status.st_uid}, not by uid {os.geteuid()}"
    elif mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        why = f"can be written by everybody (mode {mode:04o}, no sticky bit)"
    else:
        return
    raise StoreFault(
        f"the default store {path} {why}",
        hint="somebody else could change what you run: name the directory yourself with NEFFCACHE_DIR to trust it",
        details={"path": str(path), "mode": f"{mode:04o}", "uid": status.st_uid},
    )
