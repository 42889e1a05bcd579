"""What a process read, file by file and directory by directory: its answer holds for as long as none of it changed.

A `Recorder` hears Python's audit events (PEP 578), so a file is stamped at the moment it is opened and a directory when
it is listed: sources, byte code (stamped as its source), data files, the listings that imports and globs go by, and
what was looked for and is absent. `os.stat` and its like are wrapped, to hear of mere questions. What the kernel's
loader mapped and what was imported before the recorder began is stamped at the end. Whatever cannot be vouched for is a
doubt, and an answer with a doubt is never used again.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import os
import shutil
import site
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import all_suffixes
from pathlib import Path
from typing import Any

RACY = 2_000_000_000
"""Nanoseconds: a file that was written so shortly before it was read may be written again within one tick of a coarse
clock and look the same (git calls such an entry racy)."""

FileStamp = list[int] | None
"""Device, inode, size in bytes, mtime and ctime in ns of what a path leads to; None: nothing is there."""

IMPORTABLE = (*all_suffixes(), ".pth", ".dist-info", ".egg-info", ".egg-link", ".egg")
IMPORTERS = frozenset({"_frozen_importlib_external", "importlib._bootstrap_external", "importlib.metadata"})
"""Modules of Python that list directories to find modules and installed distributions."""

ASKED = "neffcache.asked"
"""Our own event: somebody asks what is at a path."""

KERNEL = ("/proc/", "/sys/", "/dev/")
KERNEL_READS = (
    *("/proc/self/", "/proc/cpuinfo", "/proc/sys/kernel/random/boot_id", "/sys/devices/system/cpu/"),
    *("/dev/null", "/dev/urandom"),
)
"""Files of the kernel that a worker may read: what they say of CPU and boot is in `remembered.circumstances`."""

UNKNOWN_EVENTS = ("os.fork", "os.exec", "os.system", "os.startfile", "sqlite3.connect", "urllib.Request")
UNKNOWN_PREFIXES = ("socket.connect", "socket.get", "socket.sendto", "http.client", "ftplib", "imaplib", "smtplib")
LOCAL_NAME = "socket.gethostname"


_stat = os.stat


def file_stamp(path: str) -> FileStamp:
    """The stamp of a file, links followed."""
    try:
        status = _stat(path)
    except (OSError, ValueError):
        return None
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def kind_stamp(path: str) -> int | None:
    """What is at a path (a directory, a socket ...), None when nothing is."""
    try:
        return stat.S_IFMT(_stat(path).st_mode)
    except (OSError, ValueError):
        return None


def listing_stamp(path: str) -> str | None:
    """SHA-256 of the names in a directory, None when it cannot be listed. Byte code has no say in what is imported."""
    return _names_stamp(path, lambda _: True)


def import_stamp(path: str) -> str | None:
    """The same of the names that an import may find, or that tell what is installed."""
    return _names_stamp(path, lambda name: name.isidentifier() or name.endswith(IMPORTABLE))


def _names_stamp(path: str, counts: Callable[[str], bool]) -> str | None:
    try:
        names = os.listdir(path)
    except (OSError, ValueError):
        return None
    if os.path.basename(path) == "__pycache__":
        names = [name for name in names if ".pyc" not in name]
    kept = sorted(os.fsencode(name) for name in names if name != "__pycache__" and counts(name))
    return hashlib.sha256(b"\0".join(kept)).hexdigest()


@dataclass(frozen=True)
class Provenance:
    """What was read, by absolute path: files, directories as a program lists them, and directories as imports do.

    `kinds` are places of which somebody only asked what is there. `doubt` says why the answer must not be used again;
    empty: it may.
    """

    files: Mapping[str, FileStamp]
    listings: Mapping[str, str | None]
    imports: Mapping[str, str | None]
    kinds: Mapping[str, int | None]
    doubt: str = ""

    def changed(self) -> str | None:
        """The first path that is not what it was, None when all are."""
        for name, stamp_of in STAMPS.items():
            for path, stamp in getattr(self, name).items():
                if stamp_of(path) != stamp:
                    return str(path)
        return None

    def to_json(self) -> dict[str, Any]:
        return {name: dict(getattr(self, name)) for name in STAMPS} | {"doubt": self.doubt}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Provenance:
        """KeyError, TypeError or ValueError for anything that `to_json` did not write."""
        return cls(**{name: dict(value[name]) for name in STAMPS}, doubt=str(value["doubt"]))


STAMPS: dict[str, Callable[[str], Any]] = {
    "files": file_stamp,
    "listings": listing_stamp,
    "imports": import_stamp,
    "kinds": kind_stamp,
}


@dataclass
class Recorder:
    """Listens from its making until `provenance` is asked for.

    `programs` may be started; each is stamped with the files that it goes by, and any other is a doubt.
    An audit hook cannot be taken off again, so at most one is made in a process, and that for a worker.
    """

    programs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    ignore: frozenset[str] = frozenset()
    started: int = field(default_factory=time.time_ns)
    files: dict[str, tuple[FileStamp, int]] = field(default_factory=dict)
    listings: dict[str, str | None] = field(default_factory=dict)
    imports: dict[str, str | None] = field(default_factory=dict)
    kinds: dict[str, int | None] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)
    _busy: threading.local = field(default_factory=threading.local)
    _over: bool = False

    def __post_init__(self) -> None:
        self._search()
        sys.addaudithook(self._heard)
        # No event tells of these, and `os.path.exists` is a question too. Imports do not go through them.
        for name in ("stat", "lstat", "access"):
            setattr(os, name, self._asking(getattr(os, name)))

    def _asking(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def ask(path: Any, *arguments: Any, **given: Any) -> Any:
            if not isinstance(path, int) and given.get("dir_fd") is None:
                self._heard(ASKED, (path,))
            return call(path, *arguments, **given)

        return ask

    def _search(self) -> None:
        """Stamp the places where imports are looked for: directories, archives, and those that do not exist."""
        for path in search_path() - self.imports.keys():
            self.imports[path] = import_stamp(path)
            if not os.path.isdir(path):
                self.files.setdefault(path, (file_stamp(path), self.started))

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._over or getattr(self._busy, "here", False):
            return
        self._busy.here = True
        try:
            self._note(event, arguments)
        except Exception as fault:
            self.doubts.append(f"{event} was not understood: {fault}")
        finally:
            self._busy.here = False

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            written = flags & os.O_ACCMODE == os.O_WRONLY or flags & (os.O_TRUNC | os.O_EXCL)
            if not isinstance(path, int) and not written:
                self._read(os.path.abspath(os.fsdecode(path)))
        elif event == ASKED:
            self._asked(os.path.abspath(os.fsdecode(arguments[0])))
        elif event in ("os.listdir", "os.scandir"):
            path = arguments[0]
            if isinstance(path, int):
                self.doubts.append("it lists a directory by its descriptor")
            else:
                importer = sys._getframe(2).f_globals.get("__name__") in IMPORTERS
                self._listed(os.path.abspath(os.fsdecode(path or ".")), by_import=importer)
        elif event in ("subprocess.Popen", "os.posix_spawn"):
            self._program(os.fsdecode(arguments[0]))
        elif event in UNKNOWN_EVENTS or (event.startswith(UNKNOWN_PREFIXES) and event != LOCAL_NAME):
            self.doubts.append(f"it calls {event}")

    def _read(self, path: str) -> None:
        if _of_kernel(path):
            if not path.startswith(KERNEL_READS):
                self.doubts.append(f"it reads {path}")
            return
        path = source_of(path)
        if path not in self.files and path not in self.ignore:
            self.files[path] = file_stamp(path), time.time_ns()

    def _asked(self, path: str) -> None:
        kind = kind_stamp(path)
        if kind == stat.S_IFREG and not _of_kernel(path):
            self._read(path)
        elif path not in self.ignore:
            self.kinds.setdefault(path, kind)

    def _listed(self, path: str, *, by_import: bool) -> None:
        if _of_kernel(path):
            if not path.startswith(KERNEL_READS):
                self.doubts.append(f"it lists {path}")
        elif by_import:
            if path not in self.imports:
                self.imports[path] = import_stamp(path)
        elif path not in self.listings:
            self.listings[path] = listing_stamp(path)

    def _program(self, name: str) -> None:
        goes_by = self.programs.get(os.path.basename(name))
        path = shutil.which(name)
        if goes_by is None or path is None:
            self.doubts.append(f"it starts {name}")
            return
        for part in (os.path.abspath(path), *goes_by):
            self._read(part)

    def provenance(self, doubts: Iterable[str] = ()) -> Provenance:
        """End the recording. `doubts` are the caller's own."""
        self._over = True
        found = [*doubts, *self.doubts]
        for path in imported_files() | mapped_files() | startup_files():
            if not _of_kernel(path):
                self.files.setdefault(path, (file_stamp(path), self.started))
        self._search()
        for path in {os.path.abspath(place or ".") for place in os.get_exec_path()} - self.listings.keys():
            self.listings[path] = listing_stamp(path)
        files = {path: stamp for path, (stamp, _) in self.files.items()}
        made = Provenance(files, dict(self.listings), dict(self.imports), dict(self.kinds))
        if (moved := made.changed()) is not None:
            found.append(f"{moved} was changed meanwhile")
        for name, (stamp, at) in self.files.items():
            if stamp is not None and stamp[4] > at - RACY:
                found.append(f"{name} was written just before it was read")
        return dataclasses.replace(made, doubt=found[0] if found else "")


def _of_kernel(path: str) -> bool:
    return f"{path}/".startswith(KERNEL)


def source_of(path: str) -> str:
    """The source of byte code in a `__pycache__`, which Python checks against it; any other path as it is."""
    if path.endswith(".pyc") and os.path.basename(os.path.dirname(path)) == "__pycache__":
        try:
            return importlib.util.source_from_cache(path)
        except ValueError:
            return path
    return path


def imported_files() -> set[str]:
    """Files of all imported modules, the standard library's and compiled ones among them."""
    found: set[str] = set()
    for module in list(sys.modules.values()):
        try:
            inside = vars(module)  # asking a lazy module for an attribute would import more
        except TypeError:
            continue
        for path in (inside.get("__file__"), getattr(inside.get("__spec__"), "origin", None)):
            if isinstance(path, str) and os.path.isabs(path):
                found.add(source_of(path))
    return found


def mapped_files() -> set[str]:
    """Every file that this process has mapped: the interpreter and all shared libraries."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return set()
    words = (line.split(maxsplit=5) for line in lines)
    return {parts[5] for parts in words if len(parts) == 6 and parts[5].startswith("/")}


def startup_files() -> set[str]:
    """What Python reads before any program's first line: pyvenv.cfg, the .pth files of its site directories."""
    found = {os.path.join(sys.prefix, "pyvenv.cfg"), sys.executable}
    for folder in [*site.getsitepackages(), site.getusersitepackages()]:
        found.update(str(path) for path in Path(folder).glob("*.pth"))
    return found


def search_path() -> set[str]:
    """Where imports are looked for, absent places too: a file there may hide another."""
    return {os.path.abspath(place or ".") for place in (*sys.path, *sys.path_importer_cache) if isinstance(place, str)}
