"""Processes that end with whoever started them, on Linux; elsewhere nothing is promised.

Run as a script, `python lifetime.py MARK` is a guard: see `guard`. It needs nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping

_PR_SET_PDEATHSIG = 1

MARK = "NEFFCACHE_WORKER"
"""Variable in the environment of a worker's children, whatever group or session they move to."""


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends (prctl(2), PR_SET_PDEATHSIG)."""
    if sys.platform.startswith("linux"):
        parent = os.getppid()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def end_group(process: subprocess.Popen[bytes], *, grace: float = 5.0) -> None:
    """End a process that leads its own group, and all of the group: SIGTERM, then SIGKILL after `grace` seconds."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def guard(mark: str, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process that outlives this one just long enough to kill every process marked with `mark`.

    It notices by a pipe that closes however this process ends, SIGKILL included. A compiler starts programs of its own
    that no signal to a dead worker would reach. Keep the result: when its pipe is closed, the guard acts.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={name: value for name, value in environ.items() if name != MARK},
        start_new_session=True,
        cwd="/",
    )


def end_marked(prefix: str) -> int:
    """Kill every process of this user whose environment has a mark that begins so; how many there were."""
    ended: set[int] = set()
    for _ in range(200):
        found = set(_marked(prefix))
        if not found:
            break
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        ended |= found
        time.sleep(0.01)  # a killed process keeps its environment until the kernel is done with it
    return len(ended)


def _marked(prefix: str) -> Iterator[int]:
    if not sys.platform.startswith("linux"):
        return
    wanted = f"{MARK}={prefix}".encode()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                with open(f"/proc/{name}/environ", "rb") as file:
                    if any(entry.startswith(wanted) for entry in file.read().split(b"\0")):
                        yield int(name)


def _guard(mark: str) -> None:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    while sys.stdin.buffer.read(1):
        pass
    end_marked(mark)


if __name__ == "__main__":
    _guard(sys.argv[1])
