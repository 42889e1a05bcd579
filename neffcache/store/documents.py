"""The JSON files of a store: read without a lock, written once or replaced whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic

from neffcache.errors import StoreFault
from neffcache.store import layout
from neffcache.store.files import (
    Identity,
    Written,
    flush_directory,
    flush_each,
    flush_file,
    names,
    publish,
    read_regular,
    remove,
    replace,
    write_temporary,
)
from neffcache.store.records import Damaged, RecordT, decode, encode
from neffcache.store.root import Root, log

MODE = 0o444


class Documents(Generic[RecordT]):
    """All files of one kind of record. `name_of` gives the name that a record must have: none can be misplaced."""

    def __init__(self, root: Root, kind: type[RecordT], name_of: Callable[[RecordT], str]) -> None:
        self.root = root
        self.kind = kind
        self.name_of = name_of
        self._published: dict[str, tuple[Identity, RecordT]] = {}
        """What this process has written and read back: as long as the file is that one, it need not be read again."""

    def read(self, name: str) -> RecordT | None:
        """The record of that name, or None when it is absent.

        Raises Damaged (and quarantines the file) when it is not a whole record of that name, StoreFault for an unknown
        schema and for an error of the file system.
        """
        identity, record = self._published.get(name, (None, None))
        if identity is not None and self._identity(name) == identity:
            return record
        found = self._read(name)
        return found[1] if found else None

    def read_bytes(self, name: str) -> bytes | None:
        """The same, as the bytes that were checked."""
        found = self._read(name)
        return found[0] if found else None

    def read_or_heal(self, name: str) -> RecordT | None:
        """The same for a writer that has a good record at hand: a damaged one is quarantined and counts as absent."""
        try:
            return self.read(name)
        except Damaged:
            return None

    def check(self, name: str, data: bytes) -> RecordT:
        """The record in `data`, which must belong under `name`. Raises Damaged, StoreFault for an unknown schema."""
        record = decode(self.kind, data)
        if self.name_of(record) != name:
            raise Damaged(f"{name} holds a {self.kind.__name__} that belongs to {self.name_of(record)}")
        return record

    def publish(self, record: RecordT) -> bool:
        """Write a record unless its name is taken (the first writer wins); whether this call did. Raises StoreFault."""
        return self.publish_all([record])[0]

    def publish_all(self, records: Sequence[RecordT]) -> list[bool]:
        """The same for many, all flushed before the first is visible. Raises StoreFault."""
        written: list[tuple[Written, Path, bool]] = []
        try:
            for record in records:
                written.append(self._write(record, flush=False))
            flush_each(flush_file, [made.path for made, _, _ in written])
            published = [publish(made.path, path) for made, path, _ in written]
        finally:
            for made, _, _ in written:
                remove(made.path)
        for folder in {path.parent for _, path, _ in written}:
            flush_directory(folder)
        for record, (made, _, same), new in zip(records, written, published, strict=True):
            if new and same:
                self._published[self.name_of(record)] = (made.identity, record)
        return published

    def replace(self, record: RecordT) -> None:
        """Write a record over whatever has its name; readers see the old or the new one. Raises StoreFault."""
        written, path, _ = self._write(record)
        replace(written.path, path)
        flush_directory(path.parent)

    def names(self, folder: str) -> list[str]:
        """The names of the records in a folder, in order; other files are orphans and left alone. Raises StoreFault."""
        found = (f"{folder}/{name}" for name in names(self.root.path / folder))
        return [name for name in found if layout.parse(name)]

    def all(self, folder: str) -> list[RecordT]:
        """Every good record in a folder. A damaged one is logged and quarantined, one of a newer schema logged."""
        good: list[RecordT] = []
        for name in self.names(folder):
            try:
                record = self.read(name)
            except StoreFault as error:
                if "errno" in error.details:  # the file system, not this record
                    raise
                log.warning("%s is left out: %s", name, error.message)
                continue
            if record is not None:
                good.append(record)
        return good

    def _read(self, name: str) -> tuple[bytes, RecordT] | None:
        path = self.root.path / name
        identity: Identity | None = None
        try:
            found = read_regular(path)
            if found is None:
                return None
            data, identity = found
            return data, self.check(name, data)
        except Damaged as error:
            raise self._damaged(path, identity, error) from error

    def _write(self, record: RecordT, *, flush: bool = True) -> tuple[Written, Path, bool]:
        """The file under a temporary name, the path that it shall have, and whether it reads as this very record."""
        name, data = self.name_of(record), encode(record)
        same = self.check(name, data) == record  # what cannot be read back is never written
        path = self.root.place(name)
        return write_temporary(self.root.temporary_name(), [data], MODE, flush=flush), path, same

    def _identity(self, name: str) -> Identity | None:
        try:
            return Identity.of(os.lstat(f"{self.root.path}/{name}"))
        except OSError:  # to be met again, and named, by whoever reads it
            return None

    def _damaged(self, path: Path, identity: Identity | None, error: Damaged) -> Damaged:
        moved = self.root.quarantine(path, identity)
        return Damaged(
            f"{path} is damaged: {error.message}",
            hint="pull it from the remote or warm again; the damaged file is kept in quarantine/ until you remove it",
            details={"record": path.stem, "path": str(path), "quarantined": str(moved) if moved else None},
        )
