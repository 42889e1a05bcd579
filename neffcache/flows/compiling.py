"""Compile what is missing, keep what compiled, remember what was refused: the same for traced jobs and IR files."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neffcache.compile import pool
from neffcache.compile.cluster import SCHEME, Address, Cluster
from neffcache.compile.failures import policy
from neffcache.compile.neuron.error_codes import advice
from neffcache.compile.pool import Event
from neffcache.compile.schedule import Forecast, forecast
from neffcache.compile.toolchain import Compiled, CompileRequest
from neffcache.errors import CompileFailed, NeffcacheError, StoreFault, Unsupported, Usage
from neffcache.flows.costs import Capacity, Costs, Estimate, Family, capacity, costs_of
from neffcache.store.index import Cost, Failure, Index
from neffcache.store.local import LocalStore
from neffcache.store.records import GraphRecord

if TYPE_CHECKING:
    from neffcache.flows.sharing import Together
    from neffcache.remote.refusals import Refusal

log = logging.getLogger("neffcache.flows")

SPACE = 256 * 1024 * 1024
"""Bytes that must be free in the store before anything is started."""

HEARTBEAT = 20.0
"""Seconds between two signs of life of whoever compiles a shared graph."""

LOG_TAIL = 4000
"""Characters of a failed compile's log that stand in JSON and in a report; the store keeps all of it."""


@dataclass(frozen=True)
class How:
    """How to compile: the same options on every command that does."""

    jobs: int | None = None
    executor: str = "local"
    time_limit: float | None = None
    retry_failed: bool = False
    share: str | None = None


@dataclass(frozen=True)
class Unit:
    """One graph to compile.

    `keep` records what it compiled to, with what the compiler said; `adopt` is told of a record made by others.
    """

    request: CompileRequest
    nodes: int
    keep: Callable[[Compiled], GraphRecord]
    adopt: Callable[[GraphRecord], None] = lambda _: None

    @property
    def key(self) -> str:
        return self.request.compile_key


@dataclass(frozen=True)
class Attempt:
    """One try at one graph, for a timeline: seconds since the compiles began."""

    compile_key: str
    name: str
    worker: str
    began: float
    ended: float
    outcome: str


@dataclass
class Tally:
    """What came of all units: compiled + adopted + failed + skipped = units.

    `stopped` says why the rest was not started, `unshared` why not all of it could be shared.
    """

    compiled: int = 0
    adopted: int = 0
    failed: int = 0
    skipped: int = 0
    retries: int = 0
    remembered: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0
    workers: int = 0
    failures: list[NeffcacheError] = field(default_factory=list)
    stopped: NeffcacheError | None = None
    unshared: NeffcacheError | None = None
    attempts: list[Attempt] = field(default_factory=list)
    costs: dict[str, tuple[float, int]] = field(default_factory=dict)
    forecast: Forecast | None = None
    capacity: Capacity | None = None

    def fault(self, what: str, total: int) -> NeffcacheError | None:
        """The error of the command, first error first; None when nothing failed."""
        if self.stopped is not None:
            return self.stopped
        if not self.failures:
            return self.unshared
        return CompileFailed(
            f"{self.failed} of {total} graphs of {what} failed: {self.failures[0].message}",
            hint="what compiled is kept; run the same command again to try the rest",
        )


def ordered(units: Iterable[Unit], costs: Costs) -> list[tuple[Unit, Estimate]]:
    """Longest first, as they are started."""
    found = [(unit, costs.estimate(unit.key, unit.nodes)) for unit in units]
    return sorted(found, key=lambda item: (-item[1].seconds, -item[0].nodes, item[0].key))


def expected(estimates: Sequence[Estimate], room: Capacity) -> Forecast:
    """What compiling these takes here, in this order."""
    return forecast([(item.seconds, item.room_bytes) for item in estimates], room.slots, room.budget)


def compile_units(
    units: Sequence[Unit],
    store: LocalStore,
    how: How,
    *,
    family: Family,
    toolchain_id: str,
    environment: Mapping[str, str],
    compiler: str,
    place: Path,
    event: Callable[[Event], None] = lambda _: None,
) -> Tally:
    """Compile and keep `units`. What fails is in the tally; what stops all of it (store, cluster) is raised."""
    tally = Tally()
    if not units:
        return tally
    started = time.monotonic()
    check_executor(how.executor)
    with costs_of(store, remember=True, family=family) as costs:
        memory = _Refusals(costs.index, toolchain_id)
        todo: list[Unit] = []
        for unit in units:
            if how.retry_failed:
                memory.forget(unit.key)
            if (told := memory.replayed(unit)) is None:
                todo.append(unit)
                continue
            tally.remembered += 1
            _failed(tally, _found_log(store, told))
            event(Event(unit.key, "failed", fault=told))
        if todo:
            store.require_space(SPACE)
            _run(todo, store, how, tally, costs, memory, environment, compiler, place, event)
    tally.seconds = time.monotonic() - started
    return tally


def check_executor(text: str) -> Address | None:
    """The address of a Dask cluster, None for `local`. Raises Usage for anything else."""
    if text == "local":
        return None
    if not text.startswith(f"{SCHEME}://"):
        raise Usage(
            f"an executor is `local` or dask://host:port, not {text!r}", hint="--executor dask://scheduler:8786"
        )
    return Address.parse(text)


def _run(
    todo: Sequence[Unit],
    store: LocalStore,
    how: How,
    tally: Tally,
    costs: Costs,
    memory: _Refusals,
    environment: Mapping[str, str],
    compiler: str,
    place: Path,
    event: Callable[[Event], None],
) -> None:
    planned = ordered(todo, costs)
    room = capacity(how.jobs)
    executor: Cluster | None = None
    if (address := check_executor(how.executor)) is not None:
        executor = Cluster(address, len(todo), environment, compiler)
        room = replace(room, slots=executor.connect(), budget=None)
    tally.capacity = room
    tally.forecast = expected([estimate for _, estimate in planned], room)
    tally.workers = min(room.slots, len(todo))
    requests = [
        replace(
            unit.request,
            time_limit=how.time_limit if unit.request.time_limit is None else unit.request.time_limit,
            peak_bytes=estimate.room_bytes,
        )
        for unit, estimate in planned
    ]
    by_key = {unit.key: unit for unit in todo}
    begun: dict[str, Event] = {}
    together = _together(how, store, requests, room.slots, memory)
    try:
        for happened in pool.run(
            requests,
            jobs=room.slots,
            directory=place / "compile",
            environment=environment,
            compiler=compiler,
            budget=room.budget,
            executor=executor,
            feed=together,
        ):
            unit, record = by_key[happened.compile_key], None
            if happened.happening == "started":
                _close(tally, begun, unit, replace(happened, happening="retried"))  # its worker was lost
                begun[unit.key] = happened
            elif happened.happening != "queued":
                _close(tally, begun, unit, happened)
            if happened.compiled is not None:
                record = unit.keep(happened.compiled)
                cost = Cost(happened.compiled.seconds, happened.compiled.peak_bytes, unit.nodes)
                costs.measured(unit.key, cost)
                tally.costs[unit.key] = (happened.compiled.seconds, happened.compiled.peak_bytes)
                tally.compiled += 1
                tally.peak_bytes = max(tally.peak_bytes, happened.compiled.peak_bytes)
            elif happened.happening == "adopted" and together is not None:
                unit.adopt(together.adopted[unit.key])
                tally.adopted += 1
            elif happened.fault is not None:
                _went_wrong(tally, memory, unit, happened, _with_log(store, happened.fault))
                tally.remembered += bool(happened.fault.details.get("replayed"))
            claimed = happened.fault is None or not happened.fault.details.get("replayed")
            if together is not None and claimed and happened.happening in ("done", "failed", "skipped"):
                together.settle(unit.key, record, memory.refusal(unit.key, happened.fault))
            event(happened)
    finally:
        if together is not None:
            tally.unshared = together.close()


def _together(
    how: How, store: LocalStore, requests: Sequence[CompileRequest], slots: int, memory: _Refusals
) -> Together | None:
    if how.share is None:
        return None
    from neffcache.flows.remote import RemoteOptions, RemoteSettings
    from neffcache.flows.sharing import Together

    remote = RemoteSettings.read(RemoteOptions(remote=how.share), os.environ).open()
    if not remote.conditional():
        raise Unsupported(
            f"{remote.where} ignores conditional writes, so nobody can hold a lease there",
            hint="leave --share out and push when all is compiled",
        )
    try:
        heartbeat = float(os.environ.get("NEFFCACHE_LEASE_HEARTBEAT") or HEARTBEAT)
    except ValueError:
        raise Usage("NEFFCACHE_LEASE_HEARTBEAT is no number of seconds", hint="leave it out: it is 20") from None
    replay = None if how.retry_failed else memory.told
    return Together(remote, store, requests, ahead=slots + 1, heartbeat=heartbeat, replay=replay)


def _went_wrong(tally: Tally, memory: _Refusals, unit: Unit, happened: Event, fault: NeffcacheError) -> None:
    if happened.happening == "retried":
        tally.retries += 1
    elif happened.happening == "failed":
        memory.remember(unit.key, fault)
        _failed(tally, fault)
    elif happened.happening == "skipped":
        tally.skipped += 1
        tally.stopped = tally.stopped or fault


def _failed(tally: Tally, fault: NeffcacheError) -> None:
    tally.failed += 1
    tally.failures.append(fault)


def _close(tally: Tally, begun: dict[str, Event], unit: Unit, ended: Event) -> None:
    first = begun.pop(unit.key, None)
    if first is not None:
        kind = ended.happening if ended.fault is None else str(ended.fault.details.get("class", ended.happening))
        tally.attempts.append(Attempt(unit.key, unit.request.name, first.worker, first.at, ended.at, kind))


def _with_log(store: LocalStore, fault: NeffcacheError) -> NeffcacheError:
    """The same fault with its log as a blob: `details` get its digest, its path and its end."""
    said = fault.details.pop("log", None)
    if said:
        text = str(said)
        fault.details["log_tail"] = text[-LOG_TAIL:]
        if (blob := _kept_log(store, text.encode())) is not None:
            fault.details["log"] = blob
            fault.details["log_file"] = str(store.blob_path(blob))
    return fault


def _found_log(store: LocalStore, fault: NeffcacheError) -> NeffcacheError:
    """A remembered fault with the log that the store still has of it."""
    with contextlib.suppress(NeffcacheError):
        blob = str(fault.details.get("log", ""))
        if blob:
            fault.details["log_tail"] = store.read_blob(blob).decode(errors="replace")[-LOG_TAIL:]
            fault.details["log_file"] = str(store.blob_path(blob))
    return fault


def _kept_log(store: LocalStore, data: bytes) -> str | None:
    if not data:
        return None
    try:
        return store.put_blob(data)
    except StoreFault as fault:
        log.warning("a compiler's log is not kept: %s", fault.message)
        return None


class _Refusals:
    """What the index knows of graphs that this toolchain refuses. Whatever is wrong with it costs only its memory."""

    def __init__(self, index: Index | None, toolchain_id: str) -> None:
        self._index = index
        self._toolchain = toolchain_id

    def replayed(self, unit: Unit) -> NeffcacheError | None:
        """The remembered refusal of a unit, with its age."""
        with contextlib.suppress(Exception):
            found = None if self._index is None else self._index.failure(unit.key, self._toolchain)
            if found is not None:
                return _replayed(unit.request, found)
        return None

    def told(self, request: CompileRequest, refusal: Refusal) -> NeffcacheError | None:
        """The failure of a unit that another machine's compiler refused; None for another compiler's word."""
        if refusal.toolchain != self._toolchain:
            return None
        return _replayed(
            request,
            Failure(refusal.toolchain, refusal.code, f"another machine's compiler says {refusal.code}", "", refusal.at),
        )

    def refusal(self, key: str, fault: NeffcacheError | None) -> Refusal | None:
        """What others may be told of a failure."""
        if fault is None or not policy(fault).remembered:
            return None
        from neffcache.remote.refusals import Refusal

        return Refusal(1, key, self._toolchain, str(fault.details["code"]), int(time.time()))

    def remember(self, key: str, fault: NeffcacheError) -> None:
        if self._index is None or not policy(fault).remembered or fault.details.get("replayed"):
            return
        details = fault.details
        with contextlib.suppress(Exception):
            self._index.put_failure(
                key,
                Failure(self._toolchain, str(details["code"]), fault.message, str(details.get("log", "")), time.time()),
            )

    def forget(self, key: str) -> None:
        if self._index is not None:
            with contextlib.suppress(Exception):
                self._index.forget_failure(key)


def _replayed(request: CompileRequest, found: Failure) -> NeffcacheError:
    old = age(time.time() - found.at)
    details: dict[str, Any] = {
        "class": "refused",
        "compile_key": request.compile_key,
        "name": request.name,
        "code": found.code,
        "replayed": True,
        "age_seconds": round(time.time() - found.at),
    }
    if found.log:
        details["log"] = found.log
    return CompileFailed(
        f"{request.name} was refused {old} ago and is not tried again: {found.message}",
        hint=f"{advice(found.code)}; --retry-failed tries it again",
        details=details,
    )


def age(seconds: float) -> str:
    """A span of time for people."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
