"""A real Dask scheduler and real worker processes, started as a user would."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class DaskCluster:
    """`address` is what --executor takes; a killed worker is not started again."""

    address: str
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)


@contextlib.contextmanager
def dask_cluster(place: Path, environ: Mapping[str, str], workers: int = 2) -> Iterator[DaskCluster]:
    """A scheduler on a free port of the loopback, and workers of one thread each."""
    from distributed import Client

    place.mkdir(parents=True, exist_ok=True)
    file = place / "scheduler.json"
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, module: str, *words: str) -> subprocess.Popen[bytes]:
        with (place / f"{name}.log").open("wb") as log:
            command = [sys.executable, "-m", f"distributed.cli.{module}", *words]
            process = subprocess.Popen(
                command, env=dict(environ), cwd=place, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        started.append(process)
        return process

    common = ("--host", "127.0.0.1", "--scheduler-file", str(file))
    try:
        start("scheduler", "dask_scheduler", *common, "--port", "0", "--no-dashboard", "--no-show")
        cluster = DaskCluster("")
        for number in range(workers):
            words = ("--nthreads", "1", "--no-nanny", "--no-dashboard", "--local-directory", str(place / f"w{number}"))
            cluster.workers.append(start(f"worker-{number}", "dask_worker", *common, *words))
        deadline = time.monotonic() + 120
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        cluster.address = "dask://" + json.loads(file.read_text())["address"].removeprefix("tcp://")
        with Client(f"tcp://{cluster.address.removeprefix('dask://')}", set_as_default=False, timeout=60) as client:
            client.wait_for_workers(workers, timeout=120)
        yield cluster
    finally:
        for process in reversed(started):
            process.kill()
            process.wait()
