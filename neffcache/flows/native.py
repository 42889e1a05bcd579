"""Caches that compilers own: warm by running the real job, collect, and prove by a second run.

A warm starts in an empty private directory, or in what the store has of this very job key (an unfinished warm, or a
manifest that lost a file). The real ranks train until the steady step; what the compiler left complete becomes the
manifest's artifacts. Then a fresh process group trains again from a view of them: only if it compiled nothing is the
manifest complete, and what each rank used there makes its rank class.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neffcache.compile.neuron.operators import Operators, group
from neffcache.compile.toolchain import NativeStore
from neffcache.errors import CommandFailed, CompileFailed, Miss, NeffcacheError, StoreFault, Unsupported
from neffcache.flows.gate import fault_of
from neffcache.flows.launch import alone, default_command, launch, refused_mark, run_environment, single_command
from neffcache.flows.resolve import Job
from neffcache.flows.tracing import representative_ranks
from neffcache.runtime.report import RankReport
from neffcache.store.files import write_temporary
from neffcache.store.local import LocalStore
from neffcache.store.native import EXTRA, Collected, all_graph_keys, collect, graph_count, overlay
from neffcache.store.ranks import fold_ranks
from neffcache.store.records import Artifact, Manifest, RankClass, encode, manifest
from neffcache.store.view import discard

STEPS = 3
"""Training steps of a warm and of its replay: the first, the steady one, and one that must add nothing."""

RECORD = "record"
"""What a rank does in the first run of a warm, where `run` says fail, compile or warn: say what was used."""

_ERROR_CODE = re.compile(r"\[(NCC_[A-Z0-9]+)\]")
"""A code of neuronx-cc in its log: the same input is refused again."""

Reports = Mapping[int, RankReport]
Note = Callable[[str], None]


@dataclass(frozen=True)
class Cast:
    """Which ranks run in a warm: rank -> the ranks that it stands for.

    `apart` are the variables under which each of them runs alone, in a fake process group, and executes nothing; None:
    all ranks run together.
    """

    members: Mapping[int, tuple[int, ...]]
    apart: Mapping[str, str] | None = None

    @classmethod
    def whole(cls, job: Job) -> Cast:
        return cls({rank: (rank,) for rank in range(job.world_size)})

    @classmethod
    def corners(cls, job: Job, apart: Mapping[str, str]) -> Cast:
        """The first and the last rank, which differ in every coordinate of the mesh."""
        last = job.world_size - 1
        return cls({0: tuple(range(last)) or (0,), **({last: (last,)} if last else {})}, apart)

    def reporting(self, job: Job) -> int:
        """How many ranks must report."""
        return job.request.placement.ranks_per_node if self.apart is None else len(self.members)


@dataclass(frozen=True)
class NativeWarm:
    """A complete manifest and how it came about.

    Of its graphs `hit` were there before, as far as the compiler names them. Seconds of the two runs.
    """

    manifest: Manifest
    collected: Collected
    hit: int
    record_seconds: float
    replay_seconds: float
    operators: Operators | None = None

    @property
    def graphs(self) -> int:
        return graph_count(self.manifest)

    def describe(self) -> str:
        return describe(self.collected)

    def to_json(self) -> dict[str, Any]:
        kept = Counter(item.store for item in self.collected.artifacts)
        return {
            "stores": [
                {"store": name, "files": kept[name], "left_out": dict(Counter(left.values()))}
                for name, left in self.collected.left_out.items()
            ],
            "bytes": self.collected.size,
            **({} if self.operators is None else {"operators": self.operators.to_json()}),
            "seconds": {"record": round(self.record_seconds, 3), "replay": round(self.replay_seconds, 3)},
        }


def warm_native(
    job: Job, store: LocalStore, environ: Mapping[str, str], place: Path, *, seed: Manifest | None, note: Note
) -> NativeWarm:
    """Run the job twice and keep its compiler's cache: a complete manifest that the job key's pointer names.

    Raises Unsupported, CompileFailed or what a rank said; what is complete of a failed warm is kept for the next one.
    """
    native = _native(job)
    native.check_environment(job.base(environ))
    placement = job.request.placement
    apart = native.apart(job.base(environ), placement.target, placement.lnc, note)
    cast = Cast.whole(job) if apart is None else Cast.corners(job, apart)
    if apart is None and placement.nodes > 1:
        raise Unsupported(
            f"{job.request.config} runs on {job.request.placement.nodes} nodes, and its compiler's own cache can only "
            "be warmed by the real job",
            hint="warm it without --native, or give a placement of one node",
        )
    if seed is not None:
        try:
            return _warm(job, native, store, environ, place / "seeded", cast, seed, note)
        except (CompileFailed, Unsupported) as fault:
            note(f"what the store had of this job did not do ({fault.message}): starting from nothing")
    return _warm(job, native, store, environ, place / "empty", cast, None, note)


def _warm(
    job: Job,
    native: NativeStore,
    store: LocalStore,
    environ: Mapping[str, str],
    place: Path,
    cast: Cast,
    seed: Manifest | None,
    note: Note,
) -> NativeWarm:
    stores = private_stores(job, native, store, place, seed)
    before = "no cache" if seed is None else "what the store has"
    who = f"{job.world_size} ranks train" if cast.apart is None else "single ranks compile and execute nothing for"
    note(f"recording: {who} {STEPS} steps from {before}, with the compiler's cache in {stores}")
    started, log = time.monotonic(), place / "record" / "log"
    try:
        with plain_path(stores) as seen:
            status, reports = train(
                job, native, blank_manifest(job), seen, environ, place / "record", cast, on_miss=RECORD
            )
            if cast.apart is not None and status == 0 and len(classes_of(reports, native, cast)) > 1:
                cast = Cast(representative_ranks(job.mesh, job.world_size), cast.apart)
                note(f"graphs differ by rank: compiling for {len(cast.members)} ranks")
                log = place / "all" / "log"
                status, reports = train(
                    job, native, blank_manifest(job), seen, environ, place / "all", cast, on_miss=RECORD
                )
    except BaseException:  # interrupted: its processes have ended, hours of compiling may lie there
        _keep(job, store, collect(store, stores, native.rules))
        raise
    seconds = time.monotonic() - started
    native.measured(environ, [report.native.get("counters", {}) for report in reports.values()])
    fault = _recording_fault(job, reports, status, log, cast)
    collected = collect(store, stores, native.rules, used=None if fault else used_keys(reports))
    note(describe(collected))
    if fault is not None:
        _keep(job, store, collected)
        raise fault
    return prove(
        job, native, store, environ, place, collected, reports, cast=cast, seed=seed, seconds=seconds, note=note
    )


def prove(
    job: Job,
    native: NativeStore,
    store: LocalStore,
    environ: Mapping[str, str],
    place: Path,
    collected: Collected,
    reports: Reports,
    *,
    cast: Cast,
    seed: Manifest | None,
    seconds: float,
    note: Note,
) -> NativeWarm:
    """Train once more, in fresh processes, from a view of what was collected; a compile is an error.

    Raises Unsupported when something is compiled again: this compiler's cache does not hold the job.
    """
    candidate = native_manifest(job, collected.artifacts, classes_of(reports, native, cast), complete=False)
    _unfinished(store, candidate)
    started = time.monotonic()
    # Which keys a rank uses is what this run shows; that it compiles nothing is what it must show.
    replayed = native_manifest(job, collected.artifacts, blank_manifest(job).rank_classes, complete=False)
    view = overlay(store, replayed, place / "views")
    note(f"replaying: fresh processes run the same from a view of the collected files, {view.path}")
    try:
        status, again = train(job, native, replayed, view.path, environ, place / "replay", cast, on_miss="fail")
    finally:
        discard(view)
    asked = native.refused(place / "replay" / "private")
    fault = refusal(asked) or fault_of(again, status, cast.reporting(job), "fail")
    if isinstance(fault, Miss):
        raise Unsupported(
            f"a fresh process group compiled again what had just been kept: {fault.message}",
            hint="the compiler's cache cannot hold all of this job; warm it without --native where that is possible",
            details=fault.details,
        )
    if fault is not None:
        raise _with_log(fault, place / "replay" / "log")
    operators = operators_of(collected, reports)
    if operators is not None and (storm := operators.storm()) is not None:
        note(f"warning: {storm}")
    made = store.put_manifest(native_manifest(job, collected.artifacts, classes_of(again, native, cast), complete=True))
    store.set_pointer(job.key.cache_key, made.id)
    known = set() if seed is None else set(all_graph_keys(seed)) & set(all_graph_keys(made))
    return NativeWarm(made, collected, len(known), seconds, time.monotonic() - started, operators)


def operators_of(collected: Collected, reports: Reports) -> Operators | None:
    """What was kept, by the operator that it was compiled for; None where the compiler does not say."""
    labels: dict[str, str] = {}
    for report in reports.values():
        labels.update(report.native.get("labels", {}))
    named = [labels.get(item.extra.get("graph", "")) for item in collected.artifacts]
    return group(name for name in named if name is not None) if labels else None


def private_stores(job: Job, native: NativeStore, store: LocalStore, place: Path, seed: Manifest | None) -> Path:
    """The directory of one warm for one toolchain id and job key, holding exactly what `seed` has."""
    root = place / "stores" / job.toolchain_id
    root.mkdir(parents=True)
    if seed is not None:
        return overlay(store, seed, root, partial=True).path
    stores = root / job.key.cache_key
    for rule in native.rules:
        (stores / rule.name).mkdir(parents=True)
    return stores


@contextlib.contextmanager
def plain_path(directory: Path) -> Iterator[Path]:
    """A link to `directory` whose path has no space in it: Inductor's C++ command breaks at one."""
    for base in dict.fromkeys((tempfile.gettempdir(), "/tmp", "/var/tmp")):
        if len(base.split()) == 1 and os.access(base, os.W_OK | os.X_OK):
            break
    else:
        raise StoreFault("there is no directory for temporary files whose path has no space", hint="set TMPDIR")
    with tempfile.TemporaryDirectory(prefix="neffcache-", dir=base) as place:
        link = Path(place) / "stores"
        link.symlink_to(directory.resolve(), target_is_directory=True)
        yield link


def train(
    job: Job,
    native: NativeStore,
    made: Manifest,
    stores: Path,
    environ: Mapping[str, str],
    place: Path,
    cast: Cast,
    *,
    on_miss: str,
) -> tuple[int, dict[int, RankReport]]:
    """TorchTitan for `STEPS` steps with the compiler's directories below `stores`; (status, reports).

    Under torchrun, or each rank of the cast by itself. What it prints is in `place`/log.
    """
    for name in ("reports", "private"):
        (place / name).mkdir(parents=True)
    write_temporary(place / "manifest.json", [encode(made)], 0o444, flush=False)
    leading = native.environment(stores, place / "private")
    environment = {
        **job.base(environ),
        **run_environment(job, place, place, on_miss=on_miss, leading=leading),
        **(native.refusing(environ, place / "private", refused_mark(place / "reports")) if on_miss == "fail" else {}),
    }
    command = default_command(job, place / "outputs", STEPS)
    with (place / "log").open("wb") as log:
        if cast.apart is None:
            return launch(command, environment, place / "reports", lambda: log)
        status, reports = 0, dict[int, RankReport]()
        for rank in cast.members:
            one = {**environment, **cast.apart, **alone(rank, job.world_size)}
            single = single_command(job, place / "outputs", STEPS)
            status, reports = launch(single, one, place / "reports", lambda: log)
            if status != 0:
                break
        return status, reports


def used_keys(reports: Reports) -> frozenset[str] | None:
    """Every key that the compiler said a rank used; None when one of them could not say."""
    if not reports or not all(report.native.get("named") for report in reports.values()):
        return None
    return frozenset(
        key
        for report in reports.values()
        for keys in (*report.native["phases"].values(), report.native["others"])
        for key in keys
    )


def classes_of(reports: Reports, native: NativeStore, cast: Cast | None = None) -> tuple[RankClass, ...]:
    """Ranks that used the same keys in the same phases (and missed as often), put together with whom they stand for."""
    found: dict[tuple[Any, ...], list[int]] = {}
    for rank, report in sorted(reports.items()):
        phases = report.native.get("phases", {})
        misses = report.native.get("misses", 0) if native.misses_repeat else None
        shape = (tuple((phase, tuple(sorted(keys))) for phase, keys in sorted(phases.items())), misses)
        found.setdefault(shape, []).extend((rank,) if cast is None else cast.members[rank])
    return tuple(
        RankClass(
            fold_ranks(ranks),
            {},
            {
                EXTRA: {
                    "phases": {phase: list(keys) for phase, keys in phases},
                    **({} if misses is None else {"misses": misses}),
                }
            },
        )
        for (phases, misses), ranks in found.items()
    )


def native_manifest(
    job: Job, artifacts: Iterable[Artifact], classes: Iterable[RankClass], *, complete: bool
) -> Manifest:
    """A manifest of files alone: what the compiler keys is its own business."""
    ranks = tuple(classes)
    phases = {phase for entry in ranks for phase in entry.extra.get(EXTRA, {}).get("phases", {})}
    return manifest(
        cache_key=job.key.cache_key,
        components={name: {"sha256": part.sha256, "value": part.value} for name, part in job.key.components.items()},
        request=job.request.to_json(),
        complete=complete,
        phases=sorted(phases),
        rank_classes=ranks,
        artifacts=artifacts,
        environment=dict(job.environment),
        versions=dict(job.versions),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        host={"machine": platform.machine(), "system": platform.system()},
    )


def describe(collected: Collected) -> str:
    """One line on what was kept and what was left out."""
    kept = Counter(item.store for item in collected.artifacts)
    parts = []
    for name, left in collected.left_out.items():
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(Counter(left.values()).items()))
        parts.append(f"{name}: {kept[name]} files" + (f", left out {reasons}" if reasons else ""))
    return f"collected {'; '.join(parts)} ({collected.size:,} bytes)"


def _native(job: Job) -> NativeStore:
    native = job.native_store
    assert native is not None, "the caller asked the job"
    return native


def blank_manifest(job: Job) -> Manifest:
    """Of a job of which nothing is kept: what a run may need is not known."""
    return native_manifest(job, (), (RankClass(fold_ranks(range(job.world_size)), {}),), complete=False)


def refusal(asked: Sequence[str]) -> Miss | None:
    """What it means that a refusing compiler was asked to compile; None when it was not."""
    if not asked:
        return None
    return Miss(
        f"a compiler was asked for {len(asked)} compiles and refused them, the first: {asked[0][:300]}",
        hint="neffcache warm the configuration again",
        details={"refused": list(asked[:20])},
    )


def _recording_fault(job: Job, reports: Reports, status: int, log: Path, cast: Cast) -> NeffcacheError | None:
    """Why the first run cannot be collected as a whole; None when it can."""
    fault = fault_of(reports, status, cast.reporting(job), RECORD)
    if fault is not None:
        return _with_log(fault, log)
    last = f"steady_step_{STEPS - 1}"
    moving = sorted(rank for rank, report in reports.items() if report.native.get("phases", {}).get(last))
    if moving:
        return Unsupported(
            f"step {STEPS} still adds graphs on ranks {moving[:8]}: the shapes of this configuration are not static",
            details={"ranks": moving},
        )
    return None


def _with_log(fault: NeffcacheError, log: Path) -> NeffcacheError:
    """A launched command that failed by itself is a failed warm, with its last words."""
    if not isinstance(fault, CommandFailed):
        return fault
    said = log.read_text(errors="replace") if log.exists() else ""
    refused = _ERROR_CODE.search(said)
    why = fault.message if refused is None else f"its compiler refused a graph with {refused[1]}"
    return CompileFailed(
        f"the job that should be warmed does not run: {why}",
        hint="it must train here before its cache can be kept; its own last words:",
        details={**fault.details, "log": said[-20000:], **({} if refused is None else {"code": refused[1]})},
    )


def _keep(job: Job, store: LocalStore, collected: Collected) -> None:
    """What is complete of a warm that failed, for the next one."""
    if collected.artifacts:
        _unfinished(store, native_manifest(job, collected.artifacts, blank_manifest(job).rank_classes, complete=False))


def _unfinished(store: LocalStore, made: Manifest) -> None:
    """Keep an incomplete manifest where the next warm of the job key looks for it, unless there is a complete one."""
    put = store.put_manifest(made)
    pointer = store.pointer(made.cache_key)
    current = None if pointer is None else store.get_manifest(pointer.manifest)
    if current is None or not current.complete:
        store.set_pointer(made.cache_key, put.id)
