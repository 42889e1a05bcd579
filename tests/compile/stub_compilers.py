"""Stub compilers for the pool: functions that a worker process calls in a compiler's place. No graph, no torch."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from neffcache.compile.toolchain import Compiled, CompileRequest, Product
from neffcache.errors import CompileFailed


def echo(request: CompileRequest, into: Path) -> Compiled:
    """Copies the payload."""
    into.mkdir(parents=True, exist_ok=True)
    (into / "code").write_bytes(request.payload.read_bytes())
    return Compiled(request.compile_key, [Product("host", f"{request.compile_key}/code", into / "code")], 0.1, 1000)


def picky(request: CompileRequest, into: Path) -> Compiled:
    """Refuses, breaks, or dies as the payload says."""
    wish = request.payload.read_text()
    if wish == "refuse":
        raise CompileFailed("the stub refuses", hint="ask nicely", details={"code": "STUB1"})
    if wish == "break":
        raise RuntimeError("a bug in the stub")
    if wish == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if wish == "die once":
        flag = request.payload.with_suffix(".died")
        if not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return echo(request, into)


def environment(request: CompileRequest, into: Path) -> Compiled:
    """Writes down what it sees of its environment."""
    into.mkdir(parents=True, exist_ok=True)
    (into / "code").write_text(os.environ.get("OMP_NUM_THREADS", "unset"))
    return Compiled(request.compile_key, [Product("host", "code", into / "code")], 0.1, 1000)


def timed(request: CompileRequest, into: Path) -> Compiled:
    """Takes the seconds of the payload and leaves when it began and ended; `hang` never ends."""
    wish = request.payload.read_text()
    began = time.monotonic()
    time.sleep(600 if wish == "hang" else float(wish))
    into.mkdir(parents=True, exist_ok=True)
    (into / "times").write_text(f"{began} {time.monotonic()}")
    return Compiled(request.compile_key, [Product("host", "times", into / "times")], 0.1, 1000)
