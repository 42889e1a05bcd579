"""From what somebody asks for to a pull, and what a fault of the remote then means.

Whatever asks TorchTitan is imported when there is a request to ask about: a pull of everything starts without it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from neffcache.errors import Mismatch, Miss, NeffcacheError, RemoteFault
from neffcache.flows.pull import Pulled, Target, by_key, by_ref, everything, in_channel, miss, pull
from neffcache.flows.remote import RemoteSettings, accounts
from neffcache.flows.remote_check import RemoteRow, check_targets
from neffcache.flows.trust import NOBODY, Signed, Trust, check_manifest
from neffcache.remote.tier import RemoteStore
from neffcache.remote.transfer import Progress
from neffcache.store import layout
from neffcache.store.local import LocalStore
from neffcache.store.records import Manifest

if TYPE_CHECKING:
    from neffcache.flows.request import Request
    from neffcache.flows.resolve import Job


class Notes(Protocol):
    """Somebody who is told what happens."""

    def note(self, text: str) -> None: ...


class _Told(Progress):
    """The progress of a transfer inside of another command: its beginning and its end."""

    def __init__(self, notes: Notes) -> None:
        self.note = notes.note  # type: ignore[method-assign]

    def begin(self, doing: str, count: int, size: int) -> None:
        if count:
            self.note(f"{doing} {count} files, {size:,} bytes")


@dataclass(frozen=True)
class Wanted:
    """What a pull is asked for: requests, manifests by id, everything that a channel names, everything."""

    requests: tuple[Request, ...] = ()
    manifests: tuple[str, ...] = ()
    channel: str | None = None
    collections: tuple[str, ...] = ()
    every: bool = False
    by_ref: bool = False


@dataclass(frozen=True)
class Fetched:
    """The document of a pull, why it is not whole, and the exit code."""

    document: dict[str, Any]
    fault: NeffcacheError | None = None
    exit_code: int = 0


def pull_wanted(
    settings: RemoteSettings,
    store: LocalStore,
    environ: Mapping[str, str],
    wanted: Wanted,
    *,
    progress: Progress | None = None,
    dry_run: bool = False,
    verify: bool = False,
    trust: Trust = NOBODY,
) -> Fetched:
    """Pull what is wanted; a fault of the remote ends it or not, as `on_remote_error` says.

    Raises Usage, Unsupported, StoreFault, Mismatch for what nobody in `trust` signed, and the remote's fault with the
    policy `fail`.
    """
    progress = progress or Progress()
    started = time.monotonic()
    remote = settings.open()  # asks nothing yet; what is wrong with the settings is said before TorchTitan is asked
    jobs = _jobs(environ, wanted)
    if wanted.requests and jobs is None:
        progress.note("pulling by ref, which proves only that somebody warmed this request")
    misses: list[str] = []
    targets: list[Target] = []
    pulled: Pulled | None = None
    fault: NeffcacheError | None = None
    try:
        for number, request in enumerate(wanted.requests):
            if jobs is None:
                found = _by_ref(remote, settings.channel, request)
            else:
                found = by_key(remote, jobs[number].key.cache_key, request.config)
            if found is None:
                misses.append(request.config)
            else:
                targets.append(found)
        targets += [_by_id(remote, item) for item in wanted.manifests]
        targets += in_channel(remote, wanted.channel) if wanted.channel else []
        for name in wanted.collections:
            parts = in_channel(remote, layout.COLLECTIONS, name)
            misses += [] if parts else [name]
            targets += parts
        targets += everything(remote) if wanted.every else []
        signed = Signed(trust, remote.signatures)
        for target in targets:
            for channel, name, ref in target.refs:
                signed.check_ref(channel, ref, store.ref(channel, ref.config, name))
        pulled = pull(remote, store, targets, progress=progress, dry_run=dry_run, verify=verify, approve=signed.approve)
        fault = pulled.fault()
        if fault is None and not dry_run:
            signed.keep(store, [item for item in pulled.manifests if item is not None])
    except RemoteFault as error:
        if settings.on_remote_error == "fail":
            raise
        fault = error
    document: dict[str, Any] = {
        **(pulled or Pulled(())).to_json(),
        **accounts(remote),
        "seconds": round(time.monotonic() - started, 3),
        "dry_run": dry_run,
        "remote_error": None if fault is None else fault.to_json(),
    }
    rows = [{**row, "reason": ""} for row in document["targets"]]
    rows += [{"config": name, "manifest": None, "cache_key": None, "state": "MISS", "reason": "not in the remote"}
             for name in misses]  # fmt: skip
    if fault is not None and settings.on_remote_error != "fail":
        from neffcache.flows.check import check_job, check_ref

        checked = [check_job(job, store) for job in jobs or ()] or [check_ref(item, store) for item in wanted.requests]
        stale = [item for item in checked if item.state == "HIT"]
        rows = [
            {
                "config": item.config,
                "manifest": item.manifest.id if item.manifest else None,
                "cache_key": item.cache_key,
                "state": item.state,
                "reason": "the remote failed; this is what the local store has",
            }
            for item in checked
        ] or rows
        enough = settings.on_remote_error == "compile" or (len(stale) == len(wanted.requests) and not _others(wanted))
        document["targets"] = rows
        return Fetched(document, fault, 0 if enough else fault.exit_code)
    document["targets"] = rows
    if fault is not None:
        return Fetched(document, fault, fault.exit_code)
    if misses:
        return Fetched(document, miss(remote, misses[0]), Miss.exit_code)
    if pulled is not None and not dry_run and not pulled.complete:
        return Fetched(document, Miss("a manifest is not complete: not every graph was compiled",
                                      hint="warm it and push again"), Miss.exit_code)  # fmt: skip
    return Fetched(document)


def _jobs(environ: Mapping[str, str], wanted: Wanted) -> list[Job] | None:
    """The job of every request, or None where TorchTitan cannot or shall not be asked and only a ref can tell."""
    if not wanted.requests or wanted.by_ref:
        return None
    from neffcache.flows.resolve import resolve, titan_installed

    if not titan_installed():
        return None
    from neffcache.flows.workers import aside, scratch

    with scratch(aside(environ)) as place:
        return [resolve(request, environ, place) for request in wanted.requests]


def _by_ref(remote: RemoteStore, channel: str, request: Request) -> Target | None:
    """What a channel names for a request that was said whole."""
    if request.unsaid:
        return None
    return by_ref(remote, channel, request.config, request.named(), request.digest)


def _others(wanted: Wanted) -> bool:
    return bool(wanted.manifests or wanted.channel or wanted.collections or wanted.every)


def _by_id(remote: RemoteStore, manifest_id: str) -> Target:
    found = remote.get_manifest(manifest_id)
    if found is None:
        raise miss(remote, manifest_id)
    return Target(str(found.request.get("config", manifest_id[:12])), found.id, found.cache_key)


def bring(
    settings: RemoteSettings, store: LocalStore, job: Job, progress: Notes, trust: Trust = NOBODY
) -> RemoteFault | None:
    """What `run` does before it looks at the store: pull this job unless it is here, whole and hashed.

    No request is made when it is. Damage is quarantined and healed from the remote. A fault of the remote is raised
    with the policy `fail`, else given back: with `stale-ok` a job that then lacks something ends with it, with
    `compile` what lacks is compiled.
    """
    from neffcache.flows.resolve import current_manifest

    found = current_manifest(store, job)
    if found is not None and found.complete:
        store.damaged(found)
        if not store.missing(found) and _signed_here(trust, store, found):
            return None
    try:
        remote = settings.open()
        target = by_key(remote, job.key.cache_key, job.request.config)
        if target is None:
            progress.note(f"{remote.where} has nothing for job key {job.key.cache_key}")
            return None
        signed = Signed(trust, remote.signatures)
        pulled = pull(remote, store, [target], progress=_Told(progress), approve=signed.approve)
        fault = pulled.fault()
        if fault is None:
            signed.keep(store, [item for item in pulled.manifests if item is not None])
    except RemoteFault as error:
        fault = error
    if fault is None:
        return None
    if settings.on_remote_error == "fail" or not isinstance(fault, RemoteFault):
        raise fault
    progress.note(f"warning: {fault.message}; going on with the local store")
    return fault


def _signed_here(trust: Trust, store: LocalStore, found: Manifest) -> bool:
    try:
        check_manifest(trust, found, store.signatures, store.get_graph)
    except Mismatch:
        return False
    return True


def check_remote(
    settings: RemoteSettings,
    store: LocalStore,
    environ: Mapping[str, str],
    wanted: Wanted,
    *,
    verify: bool = False,
) -> list[RemoteRow]:
    """A row for everything that is wanted. Raises Usage, Unsupported, and every fault of the remote."""
    remote = settings.open()  # asks nothing yet; what is wrong with the settings is said before TorchTitan is asked
    jobs = _jobs(environ, wanted)
    by = "ref" if jobs is None else "key"
    rows: list[RemoteRow | Target] = []
    for number, request in enumerate(wanted.requests):
        if jobs is not None:
            key = jobs[number].key.cache_key
            gone = RemoteRow(request.config, "MISS", by, key, reason="no manifest for this job key")
            rows.append(by_key(remote, key, request.config) or gone)
        else:
            said = f"not said: {', '.join(request.unsaid)}" if request.unsaid else ""
            gone = RemoteRow(
                request.config, "UNKNOWN", by, reason=said or "nobody pushed this request into this channel"
            )
            rows.append(_by_ref(remote, settings.channel, request) or gone)
    rows += in_channel(remote, wanted.channel) if wanted.channel else []
    rows += everything(remote) if wanted.every else []
    if wanted.channel or wanted.every:
        by = "ref" if wanted.channel else "key"
    found = iter(check_targets(remote, store, [row for row in rows if isinstance(row, Target)], by=by, verify=verify))
    return [next(found) if isinstance(row, Target) else row for row in rows]
