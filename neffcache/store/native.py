"""Cache directories that compilers own: what in them is complete, kept by content and put back exactly.

A compiler's directory is a working place: beside its results lie locks, temporaries and files that somebody is still
writing. `collect` looks twice and keeps what is complete by the compiler's own rules and did not move; everything else
is named with the reason. Putting back is the view's business (`neffcache.store.view`): native artifacts of a manifest
lie in `views/<manifest id>/<store>/<path>`, and `overlay` gives one run a private copy where a compiler must write.
Which files are complete each toolchain says in its `Rules`; nothing here knows a compiler's name.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from neffcache.errors import Miss, StoreFault
from neffcache.store.files import Identity, hash_regular, storage
from neffcache.store.local import LocalStore
from neffcache.store.records import Artifact, Damaged, Manifest, RankClass, check_relative_path
from neffcache.store.view import View, materialise

Verdict = Literal["artifact", "marker", "transient", "incomplete", "foreign"]
"""What a file is to its compiler: a result; an empty file whose existence says something; a lock, log or temporary; a
result that is not finished; nothing that the rules know."""

Reason = Literal["transient", "incomplete", "foreign", "empty", "locked", "moving", "broken", "unused", "irregular"]
"""Why a file is left out: the last six are found by looking, whatever its name says."""


class Rules(Protocol):
    """One cache directory of a compiler. Paths are relative to it, with `/`; only `whole` opens a file."""

    name: str
    """Name of the store in manifests and views, `[a-z][a-z0-9_-]*`."""

    compiled: bool
    """Whether a result that appears here means that something was compiled; a cache of a cheaper stage may grow."""

    def verdict(self, path: str, names: Collection[str]) -> Verdict:
        """What the file at `path` is; `names` are all files of the directory, for entries of several files."""
        ...

    def locks(self, path: str) -> Sequence[str]:
        """The lock files whose holder may be writing `path`; a held one (flock) makes it incomplete."""
        ...

    def whole(self, path: str, file: Path) -> bool:
        """Whether an artifact's content is all there, as far as its format tells: a killed writer leaves half of it.

        Of a marker: whether what it marks is.
        """
        ...

    def graph(self, path: str) -> str | None:
        """The compiler's own key of the graph that a file belongs to, None when its name does not tell."""
        ...


@dataclass(frozen=True, slots=True)
class Collected:
    """What a compiler left: `artifacts` are in the store now, `left_out` is path -> reason, by store."""

    artifacts: tuple[Artifact, ...]
    left_out: Mapping[str, Mapping[str, Reason]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of all artifacts."""
        return sum(item.size for item in self.artifacts)


@dataclass(frozen=True, slots=True)
class _Look:
    identity: Identity
    sha256: str
    mode: int


def collect(
    store: LocalStore, stores: Path, rules: Iterable[Rules], *, used: Collection[str] | None = None
) -> Collected:
    """Keep the complete files of `stores`/<rules.name>/ as blobs; call it when the compiler's processes have ended.

    A file is complete when its rules call it an artifact (or a marker) and find it whole, no lock of it is held, it is
    a regular file, not empty (a marker may be), and is the same file with the same content at two looks, the second of
    which is the copy into the store. `used` are the graph keys that the compiler itself says this job used: files that
    belong to another graph are left out (None: it cannot say, everything in the directory is this job's).
    Raises StoreFault.
    """
    artifacts: list[Artifact] = []
    left_out: dict[str, dict[str, Reason]] = {}
    for rule in rules:
        directory = stores / rule.name
        first, left = look(directory, rule, used=used)
        with store.batch() as batch:
            for path, seen in first.items():
                try:
                    sha256 = batch.put_file(directory / path)
                    again = Identity.of(os.lstat(directory / path))
                except (StoreFault, Miss, OSError) as fault:
                    if isinstance(fault, StoreFault) and "errno" in fault.details:
                        raise
                    left[path] = "moving"
                    continue
                if (sha256, again) != (seen.sha256, seen.identity):
                    left[path] = "moving"
                    continue
                extra = {} if (graph := rule.graph(path)) is None else {"graph": graph}
                artifacts.append(Artifact(rule.name, path, sha256, seen.identity.size, seen.mode, extra))
        left_out[rule.name] = dict(sorted(left.items()))
    return Collected(tuple(sorted(artifacts, key=lambda item: (item.store, item.path))), left_out)


def look(
    directory: Path, rule: Rules, *, used: Collection[str] | None = None
) -> tuple[dict[str, _Look], dict[str, Reason]]:
    """The complete files of one directory by path, with their digests, and why each other file is not one."""
    found = walk(directory)
    names = frozenset(found)
    complete: dict[str, _Look] = {}
    left: dict[str, Reason] = {}
    for path, status in sorted(found.items()):
        if not stat.S_ISREG(status.st_mode):
            left[path] = "irregular"
            continue
        verdict = rule.verdict(path, names)
        if verdict != "artifact" and verdict != "marker":
            left[path] = verdict
        elif not status.st_size and verdict != "marker":
            left[path] = "empty"
        elif used is not None and (graph := rule.graph(path)) is not None and graph not in used:
            left[path] = "unused"
        elif any(is_held(directory / lock) for lock in rule.locks(path)):
            left[path] = "locked"
        else:
            try:
                check_relative_path(path)
                hashed = hash_regular(directory / path)
            except Damaged:
                hashed = None
            except StoreFault as fault:
                if "errno" in fault.details:
                    raise
                left[path] = "irregular"  # a name that no manifest may hold
                continue
            if hashed is None or hashed[1] != Identity.of(status):
                left[path] = "moving"
            elif not rule.whole(path, directory / path):
                left[path] = "broken"
            else:
                mode = 0o555 if status.st_mode & 0o111 else 0o444
                complete[path] = _Look(hashed[1], hashed[0], mode)
    return complete, left


def walk(directory: Path) -> dict[str, os.stat_result]:
    """Every file below a directory by its relative path, never through a link; {} when there is none."""
    found: dict[str, os.stat_result] = {}
    folders = [""]
    with storage("reading", directory):
        while folders:
            folder = folders.pop()
            with suppress(FileNotFoundError, NotADirectoryError), os.scandir(directory / folder) as entries:
                for entry in entries:
                    name = f"{folder}{entry.name}"
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(f"{name}/")
                        continue
                    with suppress(FileNotFoundError):
                        found[name] = entry.stat(follow_symlinks=False)
    return found


def is_held(lock: Path) -> bool:
    """Whether somebody holds a kernel lock on this file; one that is not there is held by nobody."""
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def added(stores: Path, rules: Iterable[Rules], manifest: Manifest) -> list[str]:
    """Complete files, as <store>/<path>, that are in a run's directories and not in its manifest: it compiled them.

    Directories whose results are not compiled are passed over.
    """
    known = {f"{item.store}/{item.path}" for item in manifest.artifacts}
    found: list[str] = []
    for rule in rules:
        if not rule.compiled:
            continue
        present = walk(stores / rule.name)
        names = frozenset(present)
        found += [f"{rule.name}/{path}" for path in present if rule.verdict(path, names) == "artifact"]
    return sorted(set(found) - known)


EXTRA = "native"
"""Name of what a native manifest says beyond artifacts: in each rank class, {phase: [the compiler's keys]}."""


def graph_keys(entry: RankClass) -> dict[str, tuple[str, ...]]:
    """The compiler's own keys of a rank class's graphs by phase; {} when it does not tell, or has no such store."""
    said = entry.extra.get(EXTRA)
    phases = said.get("phases", {}) if isinstance(said, Mapping) else {}
    return {str(phase): tuple(str(key) for key in keys) for phase, keys in phases.items()}


def all_graph_keys(manifest: Manifest) -> tuple[str, ...]:
    """Every such key of a manifest, once."""
    found = (key for entry in manifest.rank_classes for keys in graph_keys(entry).values() for key in keys)
    return tuple(dict.fromkeys(found))


def graphs_of(entry: RankClass) -> dict[str, tuple[str, ...]]:
    """Phase -> the graphs of a rank class, whoever named them: our compile keys and the compiler's own."""
    native = graph_keys(entry)
    phases = dict.fromkeys([*entry.graphs, *native])
    return {phase: (*entry.graphs.get(phase, ()), *native.get(phase, ())) for phase in phases}


def graph_count(manifest: Manifest) -> int:
    """Distinct graphs of a manifest; where a compiler names none, the files of its store."""
    return len(manifest.compile_keys()) + len(all_graph_keys(manifest)) or len(manifest.artifacts)


def overlay(store: LocalStore, manifest: Manifest, place: Path, *, partial: bool = False) -> View:
    """A run's own writable copy of a view, below `place`: what a compiler writes into it never reaches the store.

    Raises what `materialise` raises.
    """
    return materialise(store, manifest, where=place, writable_overlay=True, partial=partial)
