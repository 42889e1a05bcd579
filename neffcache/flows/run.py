"""Run: launch a training that uses a view, and prove that it was that job and compiled nothing.

Nothing is launched unless the manifest is complete (or the policy says otherwise). While the job runs its ranks'
reports are watched; the first one that refuses ends all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neffcache.compile.toolchain import NativeStore
from neffcache.errors import Miss, RemoteFault, Usage
from neffcache.flows.check import refuse_damage
from neffcache.flows.gate import summary
from neffcache.flows.launch import default_command, launch, refused_mark, run_environment
from neffcache.flows.missed import keep_missed
from neffcache.flows.native import Cast, blank_manifest, prove, refusal, used_keys
from neffcache.flows.remote import RemoteSettings
from neffcache.flows.request import Request
from neffcache.flows.resolve import Job, current_manifest, first_line, resolve
from neffcache.flows.trust import NOBODY, Trust, check_manifest
from neffcache.flows.warm import Progress, warm
from neffcache.flows.workers import aside, scratch
from neffcache.runtime.report import MISSED, TEXTS, RankReport
from neffcache.store.local import LocalStore
from neffcache.store.native import added, collect, overlay
from neffcache.store.records import Manifest
from neffcache.store.view import View, has_view, materialise

ON_MISS = ("fail", "compile", "warn")


@dataclass(frozen=True)
class Prepared:
    """All that a launch needs: the job, its manifest and view, and the exact environment.

    `stores` are the directories of a compiler that owns its cache: the view, or this run's own copy of it.
    """

    job: Job
    manifest: Manifest
    view: View
    stores: Path
    environment: Mapping[str, str]
    command: tuple[str, ...]


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
        progress.note(first_line(request))
        job = resolve(request, environ, place)
        progress.note(job.describe())
        for entry in job.replaced:
            meaning = " (changes what the model computes)" if entry["changes_meaning"] else ""
            progress.note(f"replaced: {entry['what']} by {entry['by']}{meaning}")
        manifest, on_miss = _manifest(job, store, environ, on_miss, remote, trust, progress)
        check_manifest(trust, manifest, store.signatures, store.get_graph)
        ready = prepare(
            job,
            manifest,
            store,
            place,
            environ=environ,
            command=command,
            on_miss=on_miss,
            steps=steps,
            dump_folder=dump_folder,
        )
        for line in version_notes(job, manifest):
            progress.note(line)
        progress.note(f"view {ready.view.path}")
        progress.note("launching " + " ".join(ready.command[:8]) + (" ..." if len(ready.command) > 8 else ""))
        status, reports = launch(ready.command, {**job.base(environ), **ready.environment}, place / "reports", output)
        document = summary(job, manifest, reports, status, on_miss=on_miss)
        native = job.native_store
        if native is not None:
            asked = native.refused(place / "private")
            _native_summary(document, native, ready, reports, on_miss, native.says(environ), asked)
        if on_miss == "compile" and store.writable and document["exit_code"] == 0:
            if native is None:
                kept = keep_missed(store, job, reports, environ, place / "reports" / MISSED, progress)
            else:
                kept = _keep_native(native, ready, store, environ, place, reports, progress)
            document["local_manifest"] = None if kept is None else kept.id
    return document


def prepare(
    job: Job,
    manifest: Manifest,
    store: LocalStore,
    place: Path,
    *,
    environ: Mapping[str, str],
    command: Sequence[str] = (),
    on_miss: str = "fail",
    steps: int | None = None,
    dump_folder: Path | None = None,
) -> Prepared:
    """The view, this run's own directories below `place`, and the exact environment and command.

    Without a `command` it is TorchTitan's under torchrun, or none at all on several nodes. Raises Miss, StoreFault.
    """
    partial = on_miss != "fail"
    # A read-only store may hold the view already, as one that `init` filled does.
    own = store.writable or has_view(store, manifest)
    view = materialise(store, manifest, where=None if own else place / "views", partial=partial)
    native, stores = job.native_store, view.path
    if native is not None and (native.overlay or partial):
        stores = overlay(store, manifest, place / "stores", partial=partial).path
    (place / "reports").mkdir()
    if native is None:
        environment = run_environment(job, view.path, place, on_miss=on_miss)
    else:
        (place / "private").mkdir()
        leading = native.environment(stores, place / "private")
        environment = run_environment(job, view.path, place, on_miss=on_miss, leading=leading)
        if on_miss == "fail":
            environment |= native.refusing(environ, place / "private", refused_mark(place / "reports"))
    _texts(store, manifest, place / "reports" / TEXTS)
    chosen = tuple(command)
    if not chosen and job.request.placement.nodes == 1:
        chosen = default_command(job, dump_folder or place / "outputs", steps)
    return Prepared(job, manifest, view, stores, environment, chosen)


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
    if job.native_store is not None:
        if on_miss == "fail":
            raise Miss(
                f"{job.request.config} is not warm: {store.root} has no complete manifest of its compiler's own cache",
                hint=f"neffcache warm {job.request.config} --native",
                details={"cache_key": job.key.cache_key},
            )
        return found or blank_manifest(job)
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


def _native_summary(
    document: dict[str, Any],
    native: NativeStore,
    ready: Prepared,
    reports: Mapping[int, RankReport],
    on_miss: str,
    says: str,
    asked: list[str],
) -> None:
    """What the compiler itself says, and what it left in its directories that the manifest does not have.

    `asked` are compiles that were refused.
    """
    more = added(ready.stores, native.rules, ready.manifest)
    document["native"] = {
        "stores": [rule.name for rule in native.rules],
        "refuses": says,
        "refused": asked[:100],
        "added": more[:100],
        "counters": {str(rank): dict(report.native.get("counters", {})) for rank, report in sorted(reports.items())},
    }
    refused = refusal(asked)
    if refused is not None:
        # It comes first: what a rank or the command said is what became of it.
        refused.details["after"] = document.get("error")
        document.update(exit_code=refused.exit_code, error=refused.to_json())
    if more and on_miss == "fail" and document["exit_code"] == 0:
        fault = Miss(
            f"the compiler wrote {len(more)} files that the manifest does not have, such as {more[0]}",
            hint=f"neffcache warm {ready.job.request.config} --native",
            details={"added": more[:100]},
        )
        document.update(exit_code=fault.exit_code, error=fault.to_json())


def _keep_native(
    native: NativeStore,
    ready: Prepared,
    store: LocalStore,
    environ: Mapping[str, str],
    place: Path,
    reports: Mapping[int, RankReport],
    progress: Progress,
) -> Manifest | None:
    """Keep what the compiler added in this run and prove it by a replay; None when there was nothing to add."""
    found = ready.manifest
    if found.complete and not store.missing(found) and not added(ready.stores, native.rules, found):
        return None
    collected = collect(store, ready.stores, native.rules, used=used_keys(reports))
    again = place / "again"
    again.mkdir()
    return prove(
        ready.job,
        native,
        store,
        environ,
        again,
        collected,
        reports,
        cast=Cast.whole(ready.job),
        seed=found,
        seconds=0.0,
        note=progress.note,
    ).manifest


def version_notes(job: Job, manifest: Manifest) -> list[str]:
    """What was not part of the toolchain when the job was warmed and is another version here: runtime and driver."""
    here, there = job.versions, manifest.versions
    return [
        f"warning: the Neuron {name} here is {here[name]}, the manifest was made beside {there[name]}"
        for name in ("runtime", "driver")
        if name in here and there.get(name, here[name]) != here[name]
    ]


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
