"""Run: launch a training that uses a view, and prove that it was that job and compiled nothing.

Nothing is launched unless the manifest is complete (or the policy says otherwise). While the job runs its ranks'
reports are watched; the first one that refuses ends all of them.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from neffcache import variables
from neffcache.errors import CommandFailed, Miss, RemoteFault, Usage
from neffcache.flows.check import refuse_damage
from neffcache.flows.gate import summary
from neffcache.flows.missed import keep_missed
from neffcache.flows.remote import RemoteSettings
from neffcache.flows.request import Request
from neffcache.flows.resolve import FIRST_LINE, Job, resolve
from neffcache.flows.trust import NOBODY, Trust, check_manifest
from neffcache.flows.warm import Progress, current_manifest, warm
from neffcache.flows.workers import aside, scratch
from neffcache.lifetime import end_group
from neffcache.runtime.report import MISSED, TEXTS, RankReport, any_refused, read_reports
from neffcache.store.local import LocalStore
from neffcache.store.records import Manifest
from neffcache.store.view import View, has_view, materialise

GRACE = 10.0
"""Seconds that a job has to end by itself after one of its ranks refused."""

TORCHRUN_GRACE = 35.0
"""Seconds after SIGTERM; torchrun takes 30 to end ranks that do not listen."""

ON_MISS = ("fail", "compile", "warn")


@dataclass(frozen=True)
class Prepared:
    """All that a launch needs: the job, its manifest and view, and the exact environment."""

    job: Job
    manifest: Manifest
    view: View
    environment: Mapping[str, str]
    command: tuple[str, ...]


def run_environment(job: Job, view: Path, place: Path, *, on_miss: str) -> dict[str, str]:
    """The variables that `run` sets, all of them before Python starts. Directories below `place` are this run's own."""
    return {
        **job.environment,
        variables.MANIFEST: str(view / "manifest.json"),
        variables.REPORTS: str(place / "reports"),
        variables.ON_MISS: on_miss,
        variables.HARNESS: "1",
        # Inductor writes the sources of what it loads; nobody else's cache may be found there.
        "TORCHINDUCTOR_CACHE_DIR": str(place / "inductor"),
    }


def default_command(job: Job, dump_folder: Path, steps: int | None) -> tuple[str, ...]:
    """TorchTitan under torchrun, on this node."""
    arguments = list(job.arguments)
    if "--dump_folder" not in arguments:
        arguments += ["--dump_folder", str(dump_folder)]
    if steps is not None:
        arguments += ["--training.steps", str(steps)]
    ranks = job.request.placement.ranks_per_node
    return (
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-ranks-filter", "0"),
        *("-m", "torchtitan.train", *arguments),
    )


def check_environment(environ: Mapping[str, str]) -> None:
    """Refuse settings under which the doors would stay shut. Raises Usage."""
    said = environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    if said != "1":  # torch loads no extension for any other value
        raise Usage(
            f"TORCH_DEVICE_BACKEND_AUTOLOAD={said} keeps us out of the training process: nothing can be proved",
            hint="unset TORCH_DEVICE_BACKEND_AUTOLOAD",
        )


def run(
    request: Request,
    store: LocalStore,
    environ: Mapping[str, str],
    *,
    command: Sequence[str] = (),
    on_miss: str = "fail",
    steps: int | None = None,
    dump_folder: Path | None = None,
    remote: RemoteSettings | None = None,
    progress: Progress | None = None,
    output: Callable[[], Any] | None = None,
    trust: Trust = NOBODY,
) -> dict[str, Any]:
    """The contract's document of `run`; its `exit_code` says how it ended. With a `remote` what lacks is pulled first.

    Raises NeffcacheError for what keeps the job from being launched, Mismatch for a manifest nobody in `trust` signed.
    """
    progress = progress or Progress()
    check_environment(environ)
    if request.placement.nodes > 1 and not command:
        raise Usage(
            f"{request.config} runs on {request.placement.nodes} nodes: give the command of this node",
            hint="neffcache run CONFIG -- torchrun --nnodes ... COMMAND, on every node",
        )
    # A read-only store is read; what a run writes beside it goes to the system's temporary place.
    with scratch(store.root / "tmp" if store.writable else aside(environ)) as place:
        progress.note(FIRST_LINE[request.toolchain])
        job = resolve(request, environ, place)
        progress.note(job.describe())
        for entry in job.replaced:
            meaning = " (changes what the model computes)" if entry["changes_meaning"] else ""
            progress.note(f"replaced: {entry['what']} by {entry['by']}{meaning}")
        manifest, on_miss = _manifest(job, store, environ, on_miss, remote, trust, progress)
        check_manifest(trust, manifest, store.signatures, store.get_graph)
        ready = prepare(
            job, manifest, store, place, command=command, on_miss=on_miss, steps=steps, dump_folder=dump_folder
        )
        progress.note(f"view {ready.view.path}")
        progress.note("launching " + " ".join(ready.command[:8]) + (" ..." if len(ready.command) > 8 else ""))
        status, reports = _launch(ready.command, {**environ, **ready.environment}, place / "reports", output)
        document = summary(job, manifest, reports, status, on_miss=on_miss)
        if on_miss == "compile" and store.writable and document["exit_code"] == 0:
            kept = keep_missed(store, job, reports, environ, place / "reports" / MISSED, progress)
            document["local_manifest"] = None if kept is None else kept.id
    return document


def prepare(
    job: Job,
    manifest: Manifest,
    store: LocalStore,
    place: Path,
    *,
    command: Sequence[str] = (),
    on_miss: str = "fail",
    steps: int | None = None,
    dump_folder: Path | None = None,
) -> Prepared:
    """The view, this run's own directories below `place`, and the exact environment and command.

    Without a `command` it is TorchTitan's under torchrun, or none at all on several nodes. Raises Miss, StoreFault.
    """
    # A read-only store may hold the view already, as one that `init` filled does.
    own = store.writable or has_view(store, manifest)
    view = materialise(store, manifest, where=None if own else place / "views", partial=on_miss != "fail")
    (place / "reports").mkdir()
    _texts(store, manifest, place / "reports" / TEXTS)
    chosen = tuple(command)
    if not chosen and job.request.placement.nodes == 1:
        chosen = default_command(job, dump_folder or place / "outputs", steps)
    return Prepared(job, manifest, view, run_environment(job, view.path, place, on_miss=on_miss), chosen)


def manifest_to_run(
    job: Job, store: LocalStore, environ: Mapping[str, str], on_miss: str, progress: Progress
) -> Manifest:
    """The complete manifest of this job: the store's, or one made by tracing again when all graphs have records.

    Raises Miss naming what lacks (policy `fail`), StoreFault for damage.
    """
    found = current_manifest(store, job)
    if found is not None and found.complete:
        refuse_damage(store, found)
        lacking = store.missing(found)
        if not lacking:
            return found
        if on_miss == "fail":
            raise Miss(
                f"manifest {found.id[:12]} of {job.request.config} needs {len(lacking)} files that the store lacks",
                hint=f"neffcache warm {job.request.config}",
                details={"cache_key": job.key.cache_key, "missing": [entry.path for entry in lacking]},
            )
        return found
    if not store.writable:
        raise Miss(
            f"{job.request.config} has no complete manifest in the read-only store {store.root}",
            hint=f"neffcache warm {job.request.config}, or give a store that can be written",
            details={"cache_key": job.key.cache_key},
        )
    progress.note(f"no manifest for job key {job.key.cache_key}: tracing again, compiling nothing")
    healed = warm(job.request, store, environ, compile_missing=False, progress=progress, job=job)
    if healed.complete and healed.manifest is not None:
        progress.note(f"every graph has a record: local manifest {healed.manifest.id[:12]}")
        return healed.manifest
    if on_miss == "fail" or healed.candidate is None:
        raise Miss(
            f"{job.request.config} is not warm: {healed.skipped} of {healed.total} graphs have no record",
            hint=f"neffcache warm {job.request.config}",
            details={"cache_key": job.key.cache_key, "graphs": healed.to_json()["graphs"]},
        )
    return healed.candidate


def _manifest(
    job: Job,
    store: LocalStore,
    environ: Mapping[str, str],
    on_miss: str,
    remote: RemoteSettings | None,
    trust: Trust,
    progress: Progress,
) -> tuple[Manifest, str]:
    """The manifest to run after a pull, and what a miss then means. Raises the remote's fault where it is to blame."""
    fault: RemoteFault | None = None
    if remote is not None:
        from neffcache.flows.fetching import bring

        fault = bring(remote, store, job, progress, trust)
        if fault is not None and remote.on_remote_error == "compile":
            on_miss = "compile"
    try:
        return manifest_to_run(job, store, environ, on_miss, progress), on_miss
    except Miss:
        if fault is not None:
            raise fault from None  # the store is cold because the remote failed: that is no miss
        raise


def _texts(store: LocalStore, manifest: Manifest, directory: Path) -> None:
    """The graph texts of a manifest, for a rank that must name the nearest record of a graph it misses."""
    directory.mkdir()
    for key in manifest.compile_keys():
        record = store.get_graph(key)
        if record is not None and store.has_blob(record.text):
            (directory / f"{key}.txt").symlink_to(store.blob_path(record.text))


def _launch(
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
