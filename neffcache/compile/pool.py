"""Compile many graphs in spawned worker processes, and say what happens to each.

Workers are a `concurrent.futures.ProcessPoolExecutor`. Each leads a process group of its own, so that Ctrl-C reaches
only the parent, which then ends every group with the compilers in it; each dies with the parent. A worker that dies
takes the pool with it: what was not finished is tried once more, one at a time, so that the culprit is known.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any, Literal

from neffcache.compile.toolchain import Compiled, CompileRequest
from neffcache.errors import NeffcacheError
from neffcache.lifetime import die_with_parent
from neffcache.variables import without_rank

Happening = Literal["queued", "started", "done", "failed"]


@dataclass(frozen=True)
class Event:
    """What became of one graph; `seconds` since it was started, `fault` when it failed."""

    compile_key: str
    happening: Happening
    seconds: float = 0.0
    compiled: Compiled | None = None
    fault: NeffcacheError | None = None


_started: SimpleQueue[str] | None = None
_compile: Callable[[CompileRequest, Path], Compiled] | None = None


def _prepare(environment: Mapping[str, str], started: SimpleQueue[str], compiler: str, logs: Path) -> None:
    """First thing in a worker, before torch is imported: environment, group, log, compiler."""
    global _started, _compile
    die_with_parent()
    with (logs / f"worker-{os.getpid()}.log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    rankless = without_rank(os.environ)
    os.environ.clear()
    os.environ.update({**rankless, **environment})
    _started = started
    module, _, name = compiler.rpartition(".")
    _compile = getattr(importlib.import_module(module), name)


def _work(request: CompileRequest, into: Path) -> Compiled | NeffcacheError:
    assert _started is not None
    assert _compile is not None
    _started.put(request.compile_key)
    try:
        return _compile(request, into)
    except NeffcacheError as fault:
        return type(fault)(fault.message, hint=fault.hint, details=fault.details)


@dataclass
class _Pool:
    """An executor and what is needed to end it, its workers and their compilers."""

    jobs: int
    environment: Mapping[str, str]
    compiler: str
    logs: Path
    started: SimpleQueue[str] = field(init=False)
    executor: ProcessPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        context = get_context("spawn")
        self.logs.mkdir(parents=True, exist_ok=True)
        self.started = context.SimpleQueue()
        self.executor = ProcessPoolExecutor(
            self.jobs,
            mp_context=context,
            initializer=_prepare,
            initargs=(dict(self.environment), self.started, self.compiler, self.logs),
        )

    def end(self, *, idle: bool) -> None:
        """End the workers; at once, with the compilers in their groups, unless they are `idle`."""
        if idle:
            self.executor.shutdown()
            self.started.close()
            return
        workers = list((getattr(self.executor, "_processes", None) or {}).values())
        self.executor.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            if worker.pid is not None and worker.is_alive():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(worker.pid, signal.SIGKILL)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)
        for worker in workers:
            worker.join(5)


def run(
    requests: Sequence[CompileRequest],
    *,
    jobs: int,
    directory: Path,
    environment: Mapping[str, str],
    compiler: str,
) -> Iterator[Event]:
    """Compile every request; yields what happens. `compiler` names a function (request, directory) -> Compiled.

    A failed graph never stops the others. Leaving the iterator early ends all workers.
    """
    for request in requests:
        yield Event(request.compile_key, "queued")
    left = {request.compile_key: request for request in requests}
    common: dict[str, Any] = {"directory": directory, "environment": environment, "compiler": compiler}
    suspects: set[str] = set()
    yield from _round(left, jobs=jobs, suspects=suspects, last=False, **common)
    # Those that a dead worker may have had: one at a time. Those that had not been started: together, as before.
    innocent = {key: request for key, request in left.items() if key not in suspects}
    yield from _round(innocent, jobs=jobs, suspects=suspects, last=False, **common)
    for key, request in left.items():
        if key in suspects or key in innocent:
            yield from _round({key: request}, jobs=1, suspects=set(), last=True, **common)


def _round(
    left: dict[str, CompileRequest],
    *,
    jobs: int,
    directory: Path,
    environment: Mapping[str, str],
    compiler: str,
    suspects: set[str],
    last: bool,
) -> Iterator[Event]:
    """One pool over `left`; what is finished is taken out of it.

    When a worker dies, what was started and not finished joins `suspects`; with `last` it is this graph's failure.
    """
    if not left:
        return
    pool = _Pool(min(jobs, len(left)), environment, compiler, directory)
    begun: dict[str, float] = {}
    finished = False
    try:
        futures: dict[Future[Compiled | NeffcacheError], str] = {}
        for key, request in left.items():
            try:
                futures[pool.executor.submit(_work, request, directory / key)] = key
            except BrokenProcessPool:
                break  # the futures that exist say so too
        while futures:
            done, _ = wait(futures, timeout=0.2, return_when=FIRST_COMPLETED)
            while not pool.started.empty():
                key = pool.started.get()
                begun[key] = time.monotonic()
                yield Event(key, "started")
            for future in done:
                key = futures.pop(future)
                seconds = round(time.monotonic() - begun.get(key, time.monotonic()), 3)
                try:
                    outcome = future.result()
                except BrokenProcessPool:
                    if not last:
                        suspects.update(begun.keys() & left.keys() or {key})
                        return
                    outcome = NeffcacheError(
                        f"the worker that compiled {key} died, the second time alone; likely out of memory",
                        hint="try again with more memory; its last words are in the log",
                        details={"compile_key": key, "class": "killed", "log": _last_words(directory)},
                    )
                except Exception as fault:
                    outcome = NeffcacheError(
                        f"the compile of {key} broke: {type(fault).__name__}: {str(fault)[:300]}",
                        details={"compile_key": key, "class": "broken"},
                    )
                left.pop(key, None)
                if isinstance(outcome, NeffcacheError):
                    yield Event(key, "failed", seconds, fault=outcome)
                else:
                    yield Event(key, "done", seconds, compiled=outcome)
        finished = True
    finally:
        pool.end(idle=finished)


def _last_words(directory: Path) -> str:
    """The end of the newest worker log."""
    logs = sorted(directory.glob("worker-*.log"), key=lambda path: path.stat().st_mtime)
    return logs[-1].read_text(errors="replace")[-4000:] if logs else ""


def default_jobs(free_bytes: int, per_worker_bytes: int, wanted: int | None = None) -> int:
    """Workers that fit into memory and CPUs; at least one. Both sizes in bytes."""
    if wanted is not None:
        return max(1, wanted)
    fitting = free_bytes // max(1, per_worker_bytes)
    return max(1, min(len(os.sched_getaffinity(0)), fitting))


def memory_limit() -> int:
    """Bytes that this process tree may use: the cgroup's limit where there is one, else the machine's free memory."""
    free = _meminfo("MemAvailable")
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            left = int(Path(limit).read_text()) - int(Path(used).read_text())
            free = min(free, max(0, left))
    return free


def _meminfo(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    return 1 << 34
