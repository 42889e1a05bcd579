"""Compiles in spawned worker processes of this machine, one `ProcessPoolExecutor` a slot.

One process a pool: a worker that dies costs its own graph and no other, and it is known which one had it.
A worker leads a process group of its own, so that Ctrl-C reaches only the parent, which then ends every group. It dies
with its parent, and a guard (`lifetime.guard`) ends the compilers that it leaves.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import signal
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from neffcache.compile.toolchain import Compiled, CompileRequest
from neffcache.errors import NeffcacheError
from neffcache.lifetime import MARK, die_with_parent, end_marked, guard
from neffcache.variables import without_rank

Compiler = Callable[[CompileRequest, Path], Compiled]

_compile: Compiler | None = None
_guard: subprocess.Popen[bytes] | None = None


def prepare(environment: Mapping[str, str], compiler: str, log: Path, mark: str) -> None:
    """First thing in a worker, before torch is imported: environment, group, log, guard, compiler."""
    global _compile, _guard
    die_with_parent()
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    rankless = without_rank(os.environ)
    os.environ.clear()
    os.environ.update({**rankless, **environment, MARK: mark})
    _guard = guard(mark, os.environ)
    module, _, name = compiler.rpartition(".")
    _compile = getattr(importlib.import_module(module), name)


def work(request: CompileRequest, into: Path) -> Compiled | NeffcacheError:
    """One compile, in a worker. A fault is a value here: an exception would lose its hint on the way."""
    assert _compile is not None
    try:
        return _compile(request, into)
    except NeffcacheError as fault:
        return type(fault)(fault.message, hint=fault.hint, details=fault.details)


@dataclass
class Local:
    """`slots` workers on this machine; see `pool.Executor`."""

    slots: int
    environment: Mapping[str, str]
    compiler: str
    logs: Path
    shares_memory: bool = True
    lost: tuple[type[BaseException], ...] = (BrokenExecutor,)
    _mark: str = field(default_factory=lambda: secrets.token_hex(8))
    _pools: dict[int, ProcessPoolExecutor] = field(default_factory=dict)
    _started: Callable[[str, str], None] = field(default=lambda key, worker: None)

    def open(self, started: Callable[[str, str], None]) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)
        self._started = started

    def ready(self, slot: int) -> bool:
        return slot in self._pools and not _broken(self._pools[slot])

    def submit(self, slot: int, request: CompileRequest, into: Path) -> Future[Compiled | NeffcacheError]:
        pool = self._pool(slot)
        self._started(request.compile_key, f"worker {slot + 1}")
        try:
            return pool.submit(work, request, into)
        except BrokenExecutor as fault:  # it died this moment, while it was idle
            future: Future[Compiled | NeffcacheError] = Future()
            future.set_exception(fault)
            return future

    def kill(self, slot: int) -> None:
        for worker in _processes(self._pools.get(slot)):
            _kill(worker)

    def last_words(self, slot: int) -> str:
        with contextlib.suppress(OSError):
            return self._log(slot).read_text(errors="replace")[-4000:]
        return ""

    def close(self, *, idle: bool) -> None:
        pools = list(self._pools.values())
        if idle:
            for pool in pools:
                pool.shutdown(wait=False)  # idle workers end by themselves, all at once
            return
        workers = [worker for pool in pools for worker in _processes(pool)]
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            _kill(worker)
        end_marked(f"{self._mark}-")
        for worker in workers:
            worker.join(5)

    def _log(self, slot: int) -> Path:
        return self.logs / f"worker-{slot + 1}.log"

    def _pool(self, slot: int) -> ProcessPoolExecutor:
        if slot in self._pools and _broken(self._pools[slot]):
            self._pools.pop(slot).shutdown(wait=False)
        if slot not in self._pools:
            # A mark of its own: the guard of the worker that died must not end the children of this one.
            mark = f"{self._mark}-{slot}-{secrets.token_hex(4)}"
            self._pools[slot] = ProcessPoolExecutor(
                1,
                mp_context=get_context("spawn"),
                initializer=prepare,
                initargs=(dict(self.environment), self.compiler, self._log(slot), mark),
            )
        return self._pools[slot]


def _broken(pool: ProcessPoolExecutor) -> bool:
    return bool(getattr(pool, "_broken", False))


def _processes(pool: ProcessPoolExecutor | None) -> list[Any]:
    return list((getattr(pool, "_processes", None) or {}).values())


def _kill(worker: Any) -> None:
    if worker.pid is not None and worker.is_alive():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)
