"""Whether a file can be a whole NEFF, told from its header.

A NEFF is a header of 1024 bytes and an archive. The header begins with three little-endian 64-bit numbers: the
packaging version (1 or 2), the size of the header, the size of what follows it. Source: `KLR/NEFF/Basic.lean` of the
public repository leanprover/KLR (copyright Amazon). A packaging version that is not known here is accepted unread: a
good NEFF of a later compiler must not be refused.
"""

from __future__ import annotations

import struct
from pathlib import Path

HEADER = 1024
KNOWN_VERSIONS = (1, 2)
_START = struct.Struct("<QQQ")
START = _START.size
"""Bytes of a file that `wrong_start` looks at."""
NO_VERSION = 1 << 16
"""A number this large is no packaging version: the file is text, an archive, or something else."""


def header(data_size: int, version: int = 2) -> bytes:
    """A header for `data_size` bytes of archive, with zeros where nothing is checked. For stubs and tests."""
    return _START.pack(version, HEADER, data_size).ljust(HEADER, b"\0")


def wrong(path: Path) -> str | None:
    """What is wrong with the file, or None when it can be a NEFF."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(START)
    except FileNotFoundError:
        return "there is none"
    if not path.is_file():
        return "it is no file"
    return wrong_start(start, size)


def wrong_start(start: bytes, size: int) -> str | None:
    """The same of a file of `size` bytes that begins with `start`: `START` bytes, or all when it is shorter."""
    if size == 0:
        return "it is empty"
    if size <= HEADER:
        return f"it has {size} bytes, no more than a header"
    version, header_size, data_size = _START.unpack(start[:START])
    if version == 0:
        return "its header is empty"
    if version >= NO_VERSION:
        return "it does not begin as a NEFF does"
    if version not in KNOWN_VERSIONS:
        return None
    if header_size != HEADER:
        return f"its header says that it is {header_size} bytes long, not {HEADER}"
    if HEADER + data_size > size:
        return f"it is cut off: {size} of {HEADER + data_size} bytes"
    return None
