"""The content of installed packages, free of where they lie: same version and other bytes are another compiler."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from neffcache.compile.neuron.notes import Notes
from neffcache.errors import Unsupported
from neffcache.key.canonical import digest, sha256_hex
from neffcache.store.blobs import SETTLED_NS

READERS = 8
"""Threads; hashing leaves the interpreter lock, and a package on a network mount waits for its server."""

NOT_CONTENT = ("__pycache__",)


@dataclass(frozen=True)
class Tree:
    """Files below `base` that count, under `name`. `suffix`: only those; "" is all."""

    name: str
    base: Path
    suffix: str = ""


@dataclass(frozen=True)
class Program:
    """One file. An installer writes the interpreter's path into a script's first line, which does not count."""

    name: str
    path: Path


def content_digest(parts: Sequence[Tree | Program], notes: Notes) -> str:
    """SHA-256 over relative names and content of all files of `parts`.

    Remembered by device, inode, size, mtime and ctime of each file. Raises Unsupported when a part has no file, cannot
    be read, or changes while it is read: what cannot be told has no key.
    """
    files = _files(parts)
    states = _states(files)
    seen = sha256_hex(repr(states).encode())
    known = notes.get("content", seen)
    if known is not None and isinstance(known.get("sha256"), str):
        return str(known["sha256"])
    with ThreadPoolExecutor(READERS) as pool:
        hashes = dict(zip(files, pool.map(_sha256, files.values()), strict=True))
    if _states(files) != states:
        raise Unsupported(
            f"the files of {', '.join(part.name for part in parts)} change while they are read",
            hint="wait for the installation to end",
        )
    found = digest(hashes)
    newest = max(max(state[3:]) for _, state in states)
    if time.time_ns() - newest > SETTLED_NS:  # else a further change could leave no trace in the times
        notes.put("content", seen, {"sha256": found, "files": len(files)})
    return found


def _files(parts: Sequence[Tree | Program]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for part in parts:
        inside = {part.name: part.path} if isinstance(part, Program) else dict(_below(part))
        if not inside:
            raise Unsupported(f"{part.name} has no files, so what it is cannot be told", hint="install it again")
        found.update(inside)
    return found


def _below(tree: Tree) -> Iterator[tuple[str, Path]]:
    seen: set[str] = set()
    for folder, folders, names in os.walk(tree.base, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:  # a link that leads back
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if name not in NOT_CONTENT)
        for name in sorted(names):
            if name.endswith(tree.suffix) and not name.endswith((".pyc", ".pyo")):
                path = Path(folder, name)
                yield f"{tree.name}/{path.relative_to(tree.base).as_posix()}", path


def _states(files: Mapping[str, Path]) -> list[tuple[str, tuple[int, int, int, int, int]]]:
    """Each file's name and device, inode, size, mtime and ctime."""
    try:
        return [
            (name, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
            for name, path in files.items()
            for status in (os.stat(path),)
        ]
    except OSError as fault:
        raise _unreadable(fault) from None


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            first = file.readline(4096)
            if first.startswith(b"#!"):
                rest = file.read()
                if rest.startswith(b"'''exec'"):  # the form for a path that is too long for a first line
                    rest = rest.partition(b"\n' '''\n")[2]
                return hashlib.sha256(rest).hexdigest()
            file.seek(0)
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as fault:
        raise _unreadable(fault) from None


def _unreadable(fault: OSError) -> Unsupported:
    return Unsupported(
        f"a file of the toolchain cannot be read: {fault.strerror or fault}",
        hint="install it again, or check its owner and mode",
        details={"path": str(fault.filename)},
    )
