"""Launch: the variables that a job's processes see, TorchTitan's command, and a watch over its ranks' reports."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from neffcache import variables
from neffcache.errors import CommandFailed
from neffcache.flows.resolve import Job, with_own
from neffcache.lifetime import end_group
from neffcache.runtime.report import REFUSED, RankReport, any_refused, read_reports

GRACE = 10.0
"""Seconds that a job has to end by itself after one of its ranks refused."""

TORCHRUN_GRACE = 35.0
"""Seconds after SIGTERM; torchrun takes 30 to end ranks that do not listen."""


def run_environment(
    job: Job, view: Path, place: Path, *, on_miss: str, leading: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The variables that `run` sets, all of them before Python starts. Directories below `place` are this run's own.

    `leading` are those that lead a compiler to its directories: every rank must see exactly these.
    """
    return {
        **job.environment,
        variables.MANIFEST: str(view / "manifest.json"),
        variables.REPORTS: str(place / "reports"),
        variables.ON_MISS: on_miss,
        variables.HARNESS: "1" if job.harness else "0",
        # Inductor writes the sources of what it loads; nobody else's cache may be found there.
        "TORCHINDUCTOR_CACHE_DIR": str(place / "inductor"),
        **({} if leading is None else {**leading, variables.EXPECTED: json.dumps(dict(leading), sort_keys=True)}),
    }


def refused_mark(reports: Path) -> Path:
    """The file that a refusing compiler makes: the watch over a launch looks for it."""
    return reports / f"{REFUSED}compiler"


def alone(rank: int, world_size: int) -> dict[str, str]:
    """What makes a process that no launcher started one rank of a fake process group."""
    size = str(world_size)
    return {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": "1", "NGPU": size}


INFER = "neffcache.runtime.infer"
"""What runs a callable: it needs no script of its own."""


def single_command(job: Job, dump_folder: Path, steps: int) -> tuple[str, ...]:
    """TorchTitan, or a callable, as one rank of a fake process group (`comm.mode`, which no graph sees)."""
    if job.called:
        return (sys.executable, "-m", INFER, *job.arguments, "--steps", str(steps), "--fake")
    own = {"--dump_folder": str(dump_folder), "--training.steps": str(steps), "--comm.mode": "fake_backend"}
    return (sys.executable, "-m", "torchtitan.train", *with_own(job.arguments, own))


def default_command(job: Job, dump_folder: Path, steps: int | None) -> tuple[str, ...]:
    """TorchTitan, or what calls a callable, under torchrun on this node."""
    arguments = list(job.arguments)
    if job.called:
        program = [INFER, *arguments, *([] if steps is None else ["--steps", str(steps)])]
    else:
        own = {} if "--dump_folder" in arguments else {"--dump_folder": str(dump_folder)}
        if steps is not None:
            own["--training.steps"] = str(steps)
        program = ["torchtitan.train", *with_own(arguments, own)]
    ranks = job.request.placement.ranks_per_node
    return (
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-ranks-filter", "0"),
        *("-m", *program),
    )


def launch(
    command: Sequence[str], environ: Mapping[str, str], reports: Path, output: Callable[[], Any] | None
) -> tuple[int, dict[int, RankReport]]:
    """Start the command in a group of its own, watch its ranks' reports, end it when one refuses; (status, reports)."""
    stream = output() if output is not None else None
    try:
        process = subprocess.Popen(
            list(command),
            env=dict(environ),
            stdout=stream,
            stderr=None if stream is None else stream,
            start_new_session=True,
        )
    except OSError as fault:
        raise CommandFailed(f"the command cannot be started: {fault}", hint="what follows -- is a program") from None
    deadline: float | None = None
    try:
        while (status := process.poll()) is None:
            if deadline is None and any_refused(reports):
                deadline = time.monotonic() + GRACE
            if deadline is not None and time.monotonic() > deadline:
                _end(process)
            time.sleep(0.1)
    except BaseException:
        _end(process)
        raise
    _end(process)
    return status, read_reports(reports)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a launched command and every process below it.

    torchrun puts each rank into a session of its own and gives it 30 s; whoever survives that is killed.
    """
    below: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        below = psutil.Process(process.pid).children(recursive=True)
    end_group(process, grace=TORCHRUN_GRACE)
    for child in below:
        with contextlib.suppress(psutil.Error):
            child.kill()
    psutil.wait_procs(below, timeout=5)
