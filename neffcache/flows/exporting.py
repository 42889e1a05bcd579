"""Export as a directory that an installed package reads: the entries of manifests in the layout that they have.

A layout is never turned into another one: the names of its entries are keys of its own recipe, and under those of
another no package would look. An entry appears whole or not at all, and one that is there is never replaced.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neffcache.compile.neuron.installation import Stack
from neffcache.compile.neuron.layouts import READS, VARIABLES, Layout
from neffcache.errors import Miss, Usage
from neffcache.flows.collections import by_entry
from neffcache.store.files import (
    flush_each,
    flush_file,
    hash_regular,
    names,
    publish,
    remove,
    storage,
    write_temporary,
)
from neffcache.store.local import LocalStore
from neffcache.store.records import Artifact, Damaged, Manifest

AUTO = "auto"
BUILDING = ".neffcache-export-"
STALE = 86_400.0  # seconds after which what a killed export left is removed
TOGETHER = 256
"""Entries that are flushed together before the first of them appears."""


@dataclass
class Exported:
    """What an export wrote. entries = written + present + kept (those of the same name that hold something else);
    `others` are entries of layouts that were not asked for."""

    directory: str
    layouts: Sequence[Layout]
    entries: int = 0
    written: int = 0
    present: int = 0
    kept: list[str] = field(default_factory=list)
    others: Counter[str] = field(default_factory=Counter)
    bytes: int = 0

    @property
    def environment(self) -> dict[str, str]:
        """What points the packages to the directory."""
        return {VARIABLES[layout]: self.directory for layout in self.layouts}

    def to_json(self) -> dict[str, Any]:
        return {
            "directory": self.directory,
            "layouts": list(self.layouts),
            "entries": {
                "total": self.entries,
                "written": self.written,
                "present": self.present,
                "kept": len(self.kept),
            },
            "kept": self.kept[:100],
            "others": dict(self.others),
            "bytes": self.bytes,
            "environment": self.environment,
        }


def choose(asked: str, there: Iterable[Layout], stack: Stack) -> list[Layout]:
    """The layouts to write: the one that was asked for; with `auto` what the installed package reads, where it is
    there, else all that there are. Raises Miss."""
    found = sorted(set(there))
    if asked != AUTO:
        wanted = [item for item in found if item == asked]
    else:
        reads = READS.get(stack)
        wanted = [reads] if reads in found and reads is not None else found
    if not wanted:
        has = f"what there is has {', '.join(found)}" if found else "there is nothing of a Neuron package's cache"
        raise Miss(
            f"there are no entries of the layout {asked}: {has}",
            hint="a layout cannot be turned into another one; compile what that package asks for",
        )
    return wanted


def export_directory(
    store: LocalStore, manifests: Sequence[Manifest], where: Path, *, layout: str = AUTO, stack: Stack = "absent"
) -> Exported:
    """Write the entries of complete manifests below `where`, which may hold some already.

    Raises Miss for a layout that they do not have and for files that the store lacks; Usage when two manifests want
    different files in one place, Damaged, StoreFault.
    """
    entries = _united(manifests)
    layouts = choose(layout, (kind for kind, _ in entries), stack)
    result = Exported(os.path.abspath(where), layouts)
    result.others.update(kind for kind, _ in entries if kind not in layouts)
    chosen = [items for (kind, _), items in sorted(entries.items()) if kind in layouts]
    with storage("creating", where):
        where.mkdir(parents=True, exist_ok=True)
    _sweep(where)
    building = where / f"{BUILDING}{secrets.token_hex(8)}"
    with storage("creating", building):
        building.mkdir(mode=0o700)
    try:
        for start in range(0, len(chosen), TOGETHER):
            _write(store, chosen[start : start + TOGETHER], where, building, result)
    finally:
        remove(building)
    return result


def _united(manifests: Sequence[Manifest]) -> dict[tuple[Layout, str], list[Artifact]]:
    entries: dict[tuple[Layout, str], list[Artifact]] = {}
    for made in manifests:
        for place, items in by_entry(made.artifacts).items():
            other = entries.setdefault(place, items)
            if {item.path: item.sha256 for item in other} != {item.path: item.sha256 for item in items}:
                raise Usage(
                    f"two of the manifests have different files for {place[1]}",
                    hint="export them into directories of their own, by the ids that neffcache ls shows",
                )
    return entries


def _write(store: LocalStore, entries: list[list[Artifact]], where: Path, building: Path, result: Exported) -> None:
    ready: list[tuple[Path, Path, list[Artifact]]] = []
    files: list[Path] = []
    for number, items in enumerate(entries):
        result.entries += 1
        place = _place(where, items)
        if os.path.lexists(place):
            _there(place, items, result)
            continue
        folder = building / str(number)
        alone = place.suffix == ".neff"
        with storage("writing", folder):
            folder.mkdir()
        for item in items:
            files.append(_copy(store, item, folder / item.path.rpartition("/")[2]))
        ready.append((files[-1] if alone else folder, place, items))
    flush_each(flush_file, files)
    for made, place, items in ready:
        with storage("writing", place):
            place.parent.mkdir(parents=True, exist_ok=True)
            if not _appear(made, place):
                _there(place, items, result)
                continue
        result.written += 1
        result.bytes += sum(item.size for item in items)
    for made, _, _ in ready:
        remove(made if made.parent == building else made.parent)


def _place(where: Path, items: list[Artifact]) -> Path:
    """Where an entry lies: a NEFF alone where its layout has no folder for it, else the folder of its files."""
    first = items[0].path
    if len(items) == 1 and first.endswith(".neff") and items[0].store == "neff":
        return where / first
    return where / first.rpartition("/")[0]


def _appear(made: Path, place: Path) -> bool:
    """Give a whole entry its place unless that is taken; whether this call did."""
    if not made.is_dir():
        return publish(made, place)
    try:
        os.chmod(made, 0o777 & ~_umask())
        os.rename(made, place)  # takes the place of an empty directory, which is no entry
    except OSError:
        if not os.path.lexists(place):
            raise
        return False
    return True


def _there(place: Path, items: list[Artifact], result: Exported) -> None:
    folder = place.parent if place.suffix == ".neff" else place
    try:
        same = all(
            (found := hash_regular(folder / item.path.rpartition("/")[2])) is not None and found[0] == item.sha256
            for item in items
        )
    except Damaged:
        same = False
    if same:
        result.present += 1
    else:
        result.kept.append(items[0].path)


def _copy(store: LocalStore, item: Artifact, target: Path) -> Path:
    """A copy, never a link: the package may write to it."""
    blob = store.blob_path(item.sha256)
    with storage("reading", blob):
        written = write_temporary(target, _pieces(blob), 0o666 & ~_umask(), flush=False)
    if written.sha256 != item.sha256:
        raise Damaged(f"blob {item.sha256} changed while it was copied", hint="run `neffcache verify`")
    return target


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from iter(lambda: file.read(1 << 20), b"")


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _sweep(where: Path) -> None:
    """Remove what killed exports left; a live one's is younger."""
    for name in names(where):
        if name.startswith(BUILDING):
            try:
                old = time.time() - os.lstat(where / name).st_mtime > STALE
            except OSError:
                continue
            if old:
                remove(where / name)
