"""Notes about this host's installations that are dear to make: content digests and answers of probes.

They lie beside the user's caches and never in a store, which may be shared: a digest is remembered by device, inode and
times of files, and those mean something on one host only. Losing them costs seconds.
"""

from __future__ import annotations

import json
import os
import platform
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neffcache.key.canonical import digest


class Notes:
    """JSON documents by name in a directory of this user and host; one that cannot be kept is forgotten silently."""

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory

    @classmethod
    def of_host(cls, environ: Mapping[str, str]) -> Notes:
        """Below `$XDG_CACHE_HOME/neffcache-host`. A directory that somebody else could write to is not believed."""
        base = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME", os.path.expanduser("~")), ".cache")
        directory = Path(base, "neffcache-host", _host())
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = os.lstat(directory)
        except OSError:
            return cls(None)
        ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
        return cls(directory if ours else None)

    def get(self, kind: str, key: Any) -> dict[str, Any] | None:
        """What was noted under this key; whatever is not a note of ours is none."""
        if self.directory is None:
            return None
        try:
            found = json.loads(self._path(kind, key).read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(found, dict) or found.get("schema") != 1 or found.get("key") != digest(key):
            return None
        note = found.get("note")
        return note if isinstance(note, dict) else None

    def put(self, kind: str, key: Any, note: Mapping[str, Any]) -> None:
        if self.directory is None:
            return
        try:
            handle, temporary = tempfile.mkstemp(prefix=".note-", dir=self.directory)
            with os.fdopen(handle, "w") as file:
                json.dump({"schema": 1, "key": digest(key), "note": dict(note)}, file)
            os.replace(temporary, self._path(kind, key))
        except OSError:
            return

    def _path(self, kind: str, key: Any) -> Path:
        assert self.directory is not None
        return self.directory / f"{kind}-{digest(key)[:32]}.json"


def _host() -> str:
    """A name for this host: several share a home directory, and device numbers repeat."""
    try:
        machine = Path("/etc/machine-id").read_text().strip()
    except OSError:
        machine = ""
    return digest({"machine": machine, "node": platform.node()})[:16]
