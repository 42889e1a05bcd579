"""Worker processes: whatever needs torch runs in a fresh Python, so that commands stay light and traces stay pure.

A worker is a module called as `python -m MODULE IN.json OUT.json`. It leaves {"result": ...} or {"error": ...}.
Called as `python -m MODULE --series` it imports once and answers question after question, each in a fork.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from neffcache.errors import Bug, NeffcacheError, StoreFault, Unsupported, revive
from neffcache.lifetime import die_with_parent, end_group
from neffcache.variables import without_rank

SERIES = "--series"

Work = Callable[[dict[str, Any]], dict[str, Any]]


class Worker:
    """A running worker; `result()` waits for it. Ended with its group when the block is left early."""

    def __init__(self, module: str, document: Mapping[str, Any], environ: Mapping[str, str], directory: Path) -> None:
        self.module = module
        self._place = Path(tempfile.mkdtemp(prefix="worker-", dir=directory))
        (self._place / "in.json").write_text(json.dumps(document))
        self._log = (self._place / "log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(self._place / "in.json"), str(self._place / "out.json")],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=without_rank(environ),
            start_new_session=True,
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._log.close()
        if self._process.poll() is None:
            end_group(self._process)

    def result(self, *, seconds: float | None = None, memory: int | None = None) -> dict[str, Any]:
        """The worker's result. Raises the worker's own NeffcacheError, Bug when it left none.

        With limits the worker is ended, and Unsupported raised, when it takes longer or more resident bytes.
        """
        if seconds is not None or memory is not None:
            _limited(self.module, self._process, self._ended, seconds, memory)
        return _read(self.module, self._place / "out.json", self._process.wait(), self._place / "log")

    def _ended(self, within: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(within)
            return True
        return False


class Series:
    """A worker that has imported what it needs and answers many questions, each in a fork of its own."""

    def __init__(self, module: str, environ: Mapping[str, str], directory: Path) -> None:
        self.module = module
        self._place = Path(tempfile.mkdtemp(prefix="series-", dir=directory))
        self._log = (self._place / "log").open("wb")
        self._asked = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, SERIES],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=without_rank(environ),
            start_new_session=True,
        )

    def __enter__(self) -> Series:
        return self

    def __exit__(self, *_: object) -> None:
        self._log.close()
        end_group(self._process)

    def ask(
        self, document: Mapping[str, Any], *, seconds: float | None = None, memory: int | None = None
    ) -> dict[str, Any]:
        """The answer to one question. Raises the worker's own NeffcacheError, Bug when it left none.

        With limits, as `Worker.result` has them; what exceeds one is the end of the series too.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._asked += 1
        source, target = (self._place / f"{self._asked}.{kind}.json" for kind in ("in", "out"))
        source.write_text(json.dumps(document))
        said = b""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps([str(source), str(target)]).encode() + b"\n")
            self._process.stdin.flush()
            if seconds is not None or memory is not None:
                _limited(self.module, self._process, self._answered, seconds, memory)
            said = self._process.stdout.readline()
        status = int(said) if said.strip() else self._process.wait()
        return _read(self.module, target, status, self._place / "log")

    def _answered(self, within: float) -> bool:
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], within)[0])

    @property
    def alive(self) -> bool:
        return self._process.poll() is None


def _limited(
    module: str,
    process: subprocess.Popen[bytes],
    done: Callable[[float], bool],
    seconds: float | None,
    memory: int | None,
) -> None:
    """Wait until `done(seconds to wait)`; beyond a limit end the process's group and raise Unsupported."""
    started = time.monotonic()
    while not done(0.5):
        over = ""
        if seconds is not None and time.monotonic() - started > seconds:
            over = f"takes longer than {seconds:.0f} s"
        elif memory is not None and resident(process.pid) > memory:
            over = f"needs more than {memory / 1e9:.1f} GB of memory"
        if over:
            end_group(process)
            raise Unsupported(f"{module.rpartition('.')[2]} {over} and was ended", details={"class": "limit"})


def _read(module: str, target: Path, status: int, log_file: Path) -> dict[str, Any]:
    """What a worker left in `target` when it ended with `status`."""
    try:
        answer: dict[str, Any] = json.loads(target.read_bytes())
    except (OSError, ValueError):
        log = log_file.read_text(errors="replace").strip()
        last = log.splitlines()[-1] if log else "it said nothing"
        killed = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        raise Bug(
            f"{module} {killed}: {last[:400]}",
            hint="likely out of memory" if status == -9 else "",
            details={"log": log[-20000:]},
        ) from None
    if "error" in answer:
        raise revive(answer["error"])
    result: dict[str, Any] = answer["result"]
    return result


def resident(pid: int) -> int:
    """Resident bytes of a process and its children, 0 when it is gone."""
    import psutil

    total = 0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                total += each.memory_info().rss
    return total


def call(module: str, document: Mapping[str, Any], environ: Mapping[str, str], directory: Path) -> dict[str, Any]:
    """Run one worker to its end."""
    with Worker(module, document, environ, directory) as worker:
        return worker.result()


def aside(environ: Mapping[str, str]) -> Path:
    """Where a command that only reads the store keeps what it needs meanwhile."""
    return Path(environ.get("TMPDIR") or tempfile.gettempdir())


@contextlib.contextmanager
def scratch(root: Path) -> Iterator[Path]:
    """A private directory that is gone afterwards, however the block ends."""
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="flow-", dir=root, ignore_cleanup_errors=True) as place:
        yield Path(place)


def answer(work: Work) -> int:
    """`main` of a worker module: reads IN.json, calls `work(document)`, writes OUT.json by rename."""
    die_with_parent()
    _write(work, Path(sys.argv[1]), Path(sys.argv[2]))
    return 0


def answer_series(prepare: Callable[[], None], work: Work) -> int:
    """`main` of a worker module that was called for a series: imports by `prepare()`, forks for each question."""
    die_with_parent()
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed goes to the log
    prepare()
    for line in sys.stdin:
        source, target = json.loads(line)
        child = os.fork()
        if child == 0:
            die_with_parent()
            status = 1
            try:
                _write(work, Path(source), Path(target))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        replies.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
    return 0


def _write(work: Work, source: Path, target: Path) -> None:
    try:
        document: dict[str, Any] = {"result": work(json.loads(source.read_bytes()))}
    except NeffcacheError as fault:
        document = {"error": fault.to_json()}
    except OSError as fault:
        document = {"error": StoreFault(f"a worker could not read or write: {fault}").to_json()}
    temporary = target.with_suffix(".tmp")
    temporary.write_text(json.dumps(document))
    os.replace(temporary, target)
