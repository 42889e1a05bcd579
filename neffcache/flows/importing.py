"""Import of a cache that others filled: what is complete there becomes a named collection, the rest is said by name.

The source is walked once, entry by entry; nothing of it is held in memory but what is kept. Content goes into the
store in batches, each safe on the disk before the next one begins, and gets its names at the end: a killed import has
published nothing, and the next one goes on with what was copied.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from neffcache.compile.neuron.layouts import (
    REASONS,
    STORES,
    Spot,
    Verdict,
    Wrong,
    beside_reason,
    check_of,
    compiler_of,
    judge,
    key_of,
    path_of,
    spot,
)
from neffcache.errors import Miss, StoreFault, Usage
from neffcache.flows import collections
from neffcache.flows.collections import CHANNEL, Part
from neffcache.flows.origins import File, Origin
from neffcache.remote.transfer import Progress
from neffcache.store.blobs import Batch
from neffcache.store.local import LocalStore
from neffcache.store.records import Artifact, check_relative_path

BATCH_FILES, BATCH_BYTES = 512, 256 << 20
"""What becomes safe together. A killed import loses at most this much."""
EXAMPLES = 10
"""Paths that are named for each reason; the counts are whole."""
MODE = 0o444


@dataclass
class Tally:
    """found = imported + present + left_out, in entries and in files; `present` are those that the collection has
    already, copies within the source among them."""

    found: int = 0
    imported: int = 0
    present: int = 0
    left_out: Counter[str] = field(default_factory=Counter)

    def to_json(self) -> dict[str, int]:
        return {
            "found": self.found,
            "imported": self.imported,
            "present": self.present,
            "left_out": self.left_out.total(),
        }


@dataclass(frozen=True)
class Kept:
    """One manifest of the collection, and how many of its entries are new."""

    part: Part
    manifest: str
    entries: int
    new: int


@dataclass
class Imported:
    """What an import did. `copied` are the blobs that were written, `folded` the entries that are equal copies."""

    source: str
    name: str
    entries: Tally = field(default_factory=Tally)
    files: Tally = field(default_factory=Tally)
    folded: int = 0
    copied: int = 0
    copied_bytes: int = 0
    examples: dict[str, list[str]] = field(default_factory=dict)
    kept: list[Kept] = field(default_factory=list)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "collection": self.name,
            "entries": self.entries.to_json(),
            "files": self.files.to_json(),
            "folded": self.folded,
            "copied": {"blobs": self.copied, "bytes": self.copied_bytes},
            "left_out": [
                {
                    "reason": reason,
                    "means": REASONS[reason],
                    "entries": self.entries.left_out[reason],
                    "files": self.files.left_out[reason],
                    "examples": self.examples[reason],
                }
                for reason in REASONS
                if self.files.left_out[reason]
            ],
            "manifests": [
                {
                    "manifest": item.manifest,
                    "layout": item.part.layout,
                    "compiler": item.part.compiler,
                    "entries": item.entries,
                    "new": item.new,
                }
                for item in self.kept
            ],
            "seconds": round(self.seconds, 3),
        }


@dataclass(slots=True)
class _Entry:
    """Files that belong together; `path` of the source, without those in it."""

    path: str
    where: Spot
    files: dict[str, File]


@dataclass(slots=True)
class _Have:
    """An entry that the collection has: its artifacts by path in the store, and the tags of the files of the source."""

    artifacts: dict[str, Artifact]
    tags: dict[str, str] = field(default_factory=dict)
    ours: bool = False


def import_cache(
    origin: Origin,
    store: LocalStore,
    name: str,
    *,
    compiler: str | None = None,
    progress: Progress | None = None,
) -> Imported:
    """Copy every complete entry of a source into the store, and name all of them as the collection `name`.

    What a collection of that name has already stays. `compiler`: the version that made it, where the layout does not
    say. Raises Usage for a name that a configuration has, StoreFault, and the source's fault when all of it is gone.
    """
    collections.check_name(name)
    if any(ref.config == name for channel in store.channels() if channel != CHANNEL for _, ref in store.refs(channel)):
        raise Usage(f"{name} is a configuration of {store.root}", hint="--as NAME: another name for the collection")
    return _Import(origin, store, Imported(origin.where, name), compiler, progress or Progress()).run()


class _Import:
    def __init__(
        self, origin: Origin, store: LocalStore, result: Imported, compiler: str | None, progress: Progress
    ) -> None:
        self.origin, self.store, self.result, self.progress = origin, store, result, progress
        self.compiler = compiler
        self.have: dict[Part, dict[str, _Have]] = {}
        """What the collection has, and what comes to it: entries by their name."""
        self.before: dict[Part, str | None] = {}
        """The manifest that it had when it was read."""
        self.had: dict[Part, int] = {}
        self.changed: set[Part] = set()
        self.copying: set[str] = set()
        """Blobs of the batch that is not in the store yet."""

    def run(self) -> Imported:
        started = time.monotonic()
        self.progress.begin("importing", *self.origin.totals())
        try:
            with ThreadPoolExecutor(self.origin.at_once, thread_name_prefix="import") as pool:
                for part in self._batches():
                    self._copy(part, pool)
        finally:
            self.progress.end()
        self._name()
        self.result.seconds = time.monotonic() - started
        return self.result

    # What is there

    def _entries(self) -> Iterator[_Entry]:
        """The entries of the source, one after the other; what belongs to none is left out on the way."""
        above = f"{self.origin.name}/" if self.origin.name else ""

        def key(file: File) -> tuple[str, str, str] | None:
            where = spot(f"{above}{file.path}")
            return None if where is None else (where.kind, where.above, where.entry)

        for which, group in itertools.groupby(self.origin.files(), key):
            if which is None:
                for file in group:
                    self._file(file, file.reason or _bad_name(file.path) or beside_reason(file.path))
                continue
            places = {place: file for file in group if (place := spot(f"{above}{file.path}")) is not None}
            where = next(iter(places))
            files = {place.file: file for place, file in places.items()}
            yield _Entry(f"{where.above}{where.entry}".removeprefix(above), where, files)

    def _batches(self) -> Iterator[list[tuple[_Entry, Verdict]]]:
        """Complete entries, as many as become safe together; two copies of one are never in one batch."""
        batch: list[tuple[_Entry, Verdict]] = []
        names: set[str] = set()
        count = size = 0
        for entry in self._entries():
            self.result.entries.found += 1
            verdict = self._judged(entry)
            if verdict.layout is None:
                self._leave(entry, verdict.reason)
                continue
            files = [entry.files[name] for name in verdict.keep]
            more = sum(file.size for file in files)
            if batch and (count + len(files) > BATCH_FILES or size + more > BATCH_BYTES or entry.where.entry in names):
                yield batch
                batch, names, count, size = [], set(), 0, 0
            batch.append((entry, verdict))
            names.add(entry.where.entry)
            count, size = count + len(files), size + more
        if batch:
            yield batch

    def _judged(self, entry: _Entry) -> Verdict:
        found = judge(entry.where, {name: file.size for name, file in entry.files.items()})
        if found.layout is None:
            reasons = [file.reason for file in entry.files.values()]
            return Verdict(None, reasons[0]) if all(reasons) else found
        for name in found.keep:
            file = entry.files[name]
            if reason := file.reason or _bad_name(file.path, path_of(found.layout, entry.where.entry, name)):
                return Verdict(None, reason)
        return found

    # What is kept

    def _copy(self, batch: list[tuple[_Entry, Verdict]], pool: ThreadPoolExecutor) -> None:
        needed = 0
        for entry, verdict in batch:
            # What the collection has is read here, before threads ask for it.
            if entry.where.entry not in self._known(self._part(entry, verdict)):
                needed += sum(entry.files[name].size for name in verdict.keep)
        self.store.require_space(needed)
        with self.store.batch() as blobs:
            waiting = [pool.submit(self._entry, entry, verdict, blobs) for entry, verdict in batch]
            try:
                done = [future.result() for future in waiting]
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        self.copying.clear()
        self.origin.copied()
        copied = {sha256: size for _, _, written in done for sha256, size in written.items()}
        self.result.copied += len(copied)
        self.result.copied_bytes += sum(copied.values())
        for (entry, verdict), (reason, artifacts, _) in zip(batch, done, strict=True):
            self._account(entry, verdict, reason, artifacts)

    def _part(self, entry: _Entry, verdict: Verdict) -> Part:
        assert verdict.layout is not None
        return Part(verdict.layout, compiler_of(verdict.layout, entry.where.entry) or self.compiler)

    def _known(self, part: Part) -> dict[str, _Have]:
        if part not in self.have:
            before = collections.current(self.store, self.result.name, part)
            self.before[part] = None if before is None else before.id
            self.have[part] = {} if before is None else _had(before.artifacts)
            self.had[part] = len(self.have[part])
        return self.have[part]

    def _entry(self, entry: _Entry, verdict: Verdict, blobs: Batch) -> tuple[str, dict[str, Artifact], dict[str, int]]:
        """(why it is left out or "", what it adds to the collection by path in its store, the blobs it wrote)."""
        assert verdict.layout is not None
        layout, key = verdict.layout, entry.where.entry
        sizes = {name: file.size for name, file in entry.files.items()}
        have = self._known(self._part(entry, verdict)).get(key)
        paths = {name: path_of(layout, key, name) for name in verdict.keep}
        written: dict[str, int] = {}
        if have is not None and all(
            path in have.artifacts and (tag := entry.files[name].tag) and have.tags.get(path) == tag
            for name, path in paths.items()
        ):
            return "", {}, written
        digests: dict[str, str | None] = {}
        try:
            for name, path in paths.items():
                file, check = entry.files[name], check_of(layout, name, sizes)
                digests[name] = self.origin.sha256(file, check, needed=have is not None)
                known = None if have is None else have.artifacts.get(path)
                if known is not None and known.sha256 != digests[name]:
                    return "differs", {}, written
            made: dict[str, Artifact] = {}
            for name, path in paths.items():
                if have is not None and path in have.artifacts:
                    continue
                file, sha256 = entry.files[name], digests[name]
                if sha256 is None or (sha256 not in self.copying and self.store.blob_size(sha256) != file.size):
                    sha256 = self.origin.copy(file, blobs, check_of(layout, name, sizes), sha256)
                    self.copying.add(sha256)
                    if self.store.blob_size(sha256) is None:
                        written[sha256] = file.size
                self.progress.moved(file.size)
                made[path] = Artifact(STORES[layout], path, sha256, file.size, MODE, {"graph": key_of(key)})
        except Wrong as wrong:
            return wrong.reason, {}, written
        return "", made, written

    # What is said

    def _account(self, entry: _Entry, verdict: Verdict, reason: str, made: Mapping[str, Artifact]) -> None:
        if reason:
            self._leave(entry, reason)
            return
        assert verdict.layout is not None
        part = self._part(entry, verdict)
        known = self._known(part)
        have = known.get(entry.where.entry)
        if made:
            self.changed.add(part)
        paths = {path_of(verdict.layout, entry.where.entry, name): entry.files[name].tag for name in verdict.keep}
        tags = {path: tag for path, tag in paths.items() if tag}
        if have is None:
            known[entry.where.entry] = _Have(dict(made), tags, ours=True)
            self.result.entries.imported += 1
        else:
            have.artifacts.update(made)
            have.tags.update(tags)
            self.result.entries.present += 1
            self.result.folded += have.ours
        for name in verdict.keep:
            self.result.files.found += 1
            if path_of(verdict.layout, entry.where.entry, name) in made:
                self.result.files.imported += 1
            else:
                self.result.files.present += 1
        for name, why in verdict.beside.items():
            self._file(entry.files[name], entry.files[name].reason or why)

    def _leave(self, entry: _Entry, reason: str) -> None:
        self.result.entries.left_out[reason] += 1
        self.result.files.found += len(entry.files)
        self.result.files.left_out[reason] += len(entry.files)
        self._example(reason, entry.path)

    def _file(self, file: File, reason: str) -> None:
        self.result.files.found += 1
        self.result.files.left_out[reason] += 1
        self._example(reason, file.path)

    def _example(self, reason: str, path: str) -> None:
        named = self.result.examples.setdefault(reason, [])
        if len(named) < EXAMPLES:
            named.append(printable(path))

    # What it is called

    def _name(self) -> None:
        """One manifest a part. What somebody else added meanwhile stays, and comes first."""
        for part in sorted(self.have, key=str):
            with self.store.base.lock(f"collection-{self.result.name}"):
                self._name_part(part)

    def _name_part(self, part: Part) -> None:
        name, entries = self.result.name, self.have[part]
        manifest_id, had, changed = self.before[part], self.had[part], part in self.changed
        if collections.current_id(self.store, name, part) != manifest_id:
            found = collections.current(self.store, name, part)
            entries = {} if found is None else _had(found.artifacts)
            manifest_id, had = None if found is None else found.id, len(entries)
            changed = _add(entries, self.have[part])
        if not entries:
            return
        if changed or manifest_id is None:
            every = (item for have in entries.values() for item in have.artifacts.values())
            manifest_id = collections.put(self.store, name, part, every).id
        self.result.kept.append(Kept(part, manifest_id, len(entries), len(entries) - had))


def fault_of(result: Imported) -> StoreFault | Miss | None:
    """Why an import did not do what was asked for; None when it did, whatever was left out as no result."""
    if not result.kept:
        return Miss(
            f"{result.source} has no complete entry of a layout that is known",
            hint="give the root of a cache, such as /var/tmp/neuron-compile-cache; see docs/how-to/import.md",
        )
    lost = result.files.left_out["unreadable"] + result.files.left_out["moving"]
    if lost:
        return StoreFault(
            f"{lost} files of {result.source} could not be read, or changed meanwhile; the rest is in the store",
            hint="import again when nobody writes there, with the right to read all of it",
        )
    return None


def printable(path: str) -> str:
    """A path of a source as it may be shown: whoever named a file must not write on a terminal."""
    return path if path.isprintable() else path.encode("unicode_escape", "backslashreplace").decode("ascii")


def _bad_name(*paths: str) -> str:
    try:
        for path in paths:
            check_relative_path(path)
        return ""
    except StoreFault:
        return "name"


def _had(artifacts: tuple[Artifact, ...]) -> dict[str, _Have]:
    found: dict[str, _Have] = {}
    for (_, entry), items in collections.by_entry(artifacts).items():
        found[entry] = _Have({item.path: item for item in items})
    return found


def _add(entries: dict[str, _Have], more: Mapping[str, _Have]) -> bool:
    """Add what contradicts nothing; whether there was any."""
    changed = False
    for key, have in more.items():
        known = entries.setdefault(key, have)
        new = have.artifacts.keys() - known.artifacts.keys()
        if known is have or (new and _agree(known.artifacts, have.artifacts)):
            known.artifacts.update(have.artifacts)
            changed = True
    return changed


def _agree(left: Mapping[str, Artifact], right: Mapping[str, Artifact]) -> bool:
    return all(left[path].sha256 == right[path].sha256 for path in left.keys() & right.keys())
