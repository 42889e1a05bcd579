"""One `neuronx-cc` process: single IR files (StableHLO or HLO) to NEFFs.

Built to the documented command line; not run on a device. Every compile has a private working directory (the compiler
writes side files with fixed names), a process group, a time limit, and an artifact that is looked at before it counts.
"""

from __future__ import annotations

import functools
import os
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from neffcache.compile import memory
from neffcache.compile.failures import LOG_KEPT, failure, of_exit
from neffcache.compile.neuron import neff
from neffcache.compile.neuron.content import Program, Tree, content_digest
from neffcache.compile.neuron.notes import Notes
from neffcache.compile.pool import expired
from neffcache.compile.toolchain import Compiled, CompileRequest, Identity, Product
from neffcache.errors import Mismatch, Unsupported
from neffcache.key.compare import differences
from neffcache.lifetime import end_group

NAME = "neuronx-cc"
STORE = "neff"
COMPILER = "neffcache.compile.neuron.driver.compile_ir"
SAMPLES = 0.5
"""Seconds between two looks at the memory of the compiler and its children."""

_VERSION = re.compile(r"\d+\.\d+[\w.+-]*")


def neff_path(compile_key: str) -> str:
    """Where the NEFF of a single IR file lies in its store. It is no name of TorchNeuron's: see `key.native`."""
    return f"ir/{compile_key}.neff"


def arguments(target: str, lnc: int, options: Sequence[str]) -> list[str]:
    """What stands between the IR file and `--output`. `options` come last: the right-most of two equal ones wins."""
    return ["--framework", "XLA", "--target", target, "--lnc", str(lnc), *options]


def program(environ: Mapping[str, str]) -> Path:
    """The `neuronx-cc` on PATH. Raises Unsupported when there is none."""
    found = shutil.which(NAME, path=environ.get("PATH"))
    if found is None:
        raise Unsupported(
            "there is no neuronx-cc on PATH, so IR files cannot be compiled here",
            hint="install the Neuron compiler from the vendor's package index (docs/how-to/install.md)",
        )
    return Path(found)


def identity(environ: Mapping[str, str]) -> Identity:
    """What compiles: its version and the bytes of the program and its package.

    Raises Unsupported when the version cannot be told; a fault of the machine (a missing library, a stale mount) is
    told here once, before any graph is started.
    """
    found = program(environ)
    status = found.stat()
    version, sha256 = _asked(found, status.st_mtime_ns, status.st_size)
    value = {"name": NAME, "version": version, "sha256": sha256}
    return Identity(NAME, value, {"compiler": f"neuronx-cc {version}"})


@functools.cache
def _asked(found: Path, mtime_ns: int, size: int) -> tuple[str, str]:
    try:
        said = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.SubprocessError) as fault:
        raise Unsupported(f"{found} cannot be started: {fault}") from None
    version = _VERSION.search(said.stdout) or _VERSION.search(said.stderr)
    if said.returncode or version is None:
        words = (said.stderr.strip() or said.stdout.strip() or "nothing").splitlines()[-1][:300]
        raise Unsupported(
            f"{found} --version ended with status {said.returncode} and told no version: {words}",
            hint="mend the installation: what cannot be identified is never used for a key",
        )
    data = found.read_bytes()
    parts: list[Tree | Program] = [
        Program(NAME, found),
        *(Tree(folder.name, folder) for folder in _packages(found, data)),
    ]
    return version[0], content_digest(parts, Notes.of_host(os.environ))


def _packages(found: Path, data: bytes) -> list[Path]:
    """The package `neuronxcc` of the environment that the program belongs to."""
    prefix = found.resolve().parent.parent
    places = list(prefix.glob("lib/python3*/site-packages/neuronxcc"))
    if not places and data.startswith(b"#!"):
        interpreter = Path(os.fsdecode(data[2:].split(b"\n", 1)[0].strip().split(b" ")[0]))
        places = list(interpreter.parent.parent.glob("lib/python3*/site-packages/neuronxcc"))
    return sorted(places)


def compile_ir(request: CompileRequest, into: Path) -> Compiled:
    """Compile one IR file below `into`, which must be private to this compile.

    `settings`: `arguments` (a list), `suffix` of the IR file. Raises Mismatch when this machine has another compiler
    than the one in the compile key, else the failure as `failures` classes it.
    """
    here = identity(os.environ)
    if different := differences(dict(request.toolchain), dict(here.value)):
        raise Mismatch(
            f"the worker that should compile {request.name} has another compiler: {different[0]}",
            hint="give every worker the same compiler package",
            details={"differences": [entry.to_json() for entry in different]},
        )
    started = time.monotonic()
    work = into / "work"
    (work / "tmp").mkdir(parents=True)
    source = work / f"graph{request.settings['suffix']}"
    try:
        os.link(request.payload, source)
    except OSError:
        shutil.copyfile(request.payload, source)
    made, log = into / "model.neff", into / "log"
    command = [os.fspath(program(os.environ)), "compile", source.name, *request.settings["arguments"]]
    starved = memory.killed_count()
    status, peak = _watched([*command, "--output", os.fspath(made)], work, log, request)
    said = log_text(log)
    if status:
        starving = memory.killed_count() > starved
        fault = of_exit(request.compile_key, request.name, status, said, starved=starving)
        fault.details["peak_bytes"] = peak
        raise _advised(fault)
    if wrong := neff.wrong(made):
        raise failure(
            "no-artifact",
            f"the compiler of {request.name} ended well, but of its NEFF {wrong}",
            hint="nothing is published or remembered; the next run tries again",
            compile_key=request.compile_key,
            name=request.name,
            log=said,
        )
    shutil.rmtree(work, ignore_errors=True)
    product = Product(STORE, neff_path(request.compile_key), made)
    return Compiled(request.compile_key, [product], round(time.monotonic() - started, 3), peak, log)


def _watched(command: Sequence[str], work: Path, log: Path, request: CompileRequest) -> tuple[int, int]:
    """Run the compiler to its end or its limit: exit status (negative: by that signal), peak resident bytes."""
    environment = {name: value for name, value in os.environ.items() if name != "NEURON_CC_FLAGS"}
    environment["TMPDIR"] = os.fspath(work / "tmp")
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=work, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment, process_group=0
        )
    deadline = None if request.time_limit is None else time.monotonic() + request.time_limit
    try:
        peak = 0
        with _ends(process.pid) as ended:
            while not ended(SAMPLES):
                peak = max(peak, _resident(process.pid))
                if deadline is not None and time.monotonic() > deadline:
                    raise expired(request, log_text(log))
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        return process.returncode, max(peak, usage.ru_maxrss * 1024)
    finally:
        # Also after a good end: what it left behind would write into a directory that is gone.
        if process.returncode is None:
            end_group(process, grace=2.0)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def _ends(pid: int) -> Iterator[Callable[[float], bool]]:
    """A function that waits at most so many seconds for a child to end, and says whether it has; it reaps nothing."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:  # a sandbox or a kernel before 5.3
        yield lambda seconds: _has_ended(pid, seconds)
        return
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        yield lambda seconds: bool(poll.poll(seconds * 1000))
    finally:
        os.close(descriptor)


def _has_ended(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _resident(pid: int) -> int:
    """Resident bytes of a process and all below it, shared pages counted once a process."""
    total = 0
    with suppress(psutil.Error):
        top = psutil.Process(pid)
        for each in (top, *top.children(recursive=True)):
            with suppress(psutil.Error):
                total += each.memory_info().rss
    return total


def log_text(log: Path) -> str:
    """What the compiler said, at most `LOG_KEPT` characters of it: the beginning and the end."""
    try:
        size = log.stat().st_size
        with log.open("rb") as file:
            head = file.read(LOG_KEPT // 3)
            file.seek(max(len(head), size - 2 * LOG_KEPT // 3))
            tail = file.read()
    except OSError:
        return ""
    gap = size - len(head) - len(tail)
    middle = f"\n[... {gap} bytes left out ...]\n".encode() if gap > 0 else b""
    return (head + middle + tail).decode(errors="replace")


def _advised(fault: Any) -> Any:
    from neffcache.compile.neuron.error_codes import advice

    if code := fault.details.get("code"):
        fault.hint = advice(code)
    return fault
