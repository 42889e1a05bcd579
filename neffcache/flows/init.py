"""Init: what a container does before the training starts: fetch a job's files, make its view, say so in one line.

By ref, because the image has no torch: whether the training is that job, the training process proves. It may run any
number of times, in any number of containers of a node that share one store: one fetches, the others find it.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from neffcache.errors import Mismatch, Miss, NeffcacheError, RemoteFault
from neffcache.flows.check import UNPROVED, another, unknown
from neffcache.flows.request import CHANNEL, Request
from neffcache.flows.sources import Source
from neffcache.flows.trust import NOBODY, Graphs, Trust, check_content, statement_of
from neffcache.store.local import LocalStore
from neffcache.store.records import Damaged, Manifest, Ref, Signatures
from neffcache.store.view import View, materialise

TERMINATION_LOG = "/dev/termination-log"
TERMINATION_BYTES = 4096
"""What Kubernetes keeps of a termination log."""


def spread(seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
    """Wait a random part of `seconds`, so that a thousand containers do not ask in the same moment."""
    if seconds > 0:
        sleep(random.uniform(0, seconds))


def init(
    request: Request,
    store: LocalStore,
    source: Source,
    *,
    channel: str = CHANNEL,
    trust: Trust = NOBODY,
    on_remote_error: str = "stale-ok",
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """The contract's document of `init` for one request; a fault is in it, with its exit code, and not raised.

    A remote that cannot be asked does not matter with `stale-ok` when the store holds all that it said last; it is a
    miss with `compile`, so that who starts the training may go on, and a fault otherwise.
    """
    started, before = time.monotonic(), source.requests
    document: dict[str, Any] = {
        "config": request.config,
        "state": "UNKNOWN",
        "by": "ref",
        "identity": "unproved",
        "reason": "",
        "manifest": None,
        "cache_key": None,
        "serial": None,
        "stale": False,
        "view": None,
        "environment": {},
        "bytes": 0,
    }
    try:
        document |= _init(request, store, source, channel, trust, on_remote_error, note)
        document["exit_code"] = 0 if document["state"] == "HIT" else Miss.exit_code
    except NeffcacheError as fault:
        missed = isinstance(fault, Miss) or (isinstance(fault, RemoteFault) and on_remote_error == "compile")
        document |= {
            "state": "MISS" if missed else "ERROR",
            "reason": fault.message,
            "error": fault.to_json(),
            "exit_code": Miss.exit_code if missed else fault.exit_code,
        }
    return {**document, "seconds": round(time.monotonic() - started, 3), "requests": source.requests - before}


def _init(
    request: Request,
    store: LocalStore,
    source: Source,
    channel: str,
    trust: Trust,
    on_remote_error: str,
    note: Callable[[str], None],
) -> dict[str, Any]:
    if request.unsaid:
        return {"reason": unknown(request, store)}
    name = request.digest
    known = _known(store, channel, request.config, name)
    stale = False
    try:
        ref = source.ref(channel, request.config, name)
    except RemoteFault as fault:
        if on_remote_error == "fail" or known is None:
            raise
        note(f"{fault.message}; going on with what the store knows")
        ref, stale = known, True
    if ref is None:
        return {"reason": unknown(request, store).replace("this store", source.where)}
    if foreign := another(request, ref):
        return {"reason": foreign}
    statement, asked = _signed(trust, channel, ref, store, source, known)

    def approve(manifest: Manifest, graph: Graphs) -> None:
        if manifest.cache_key != ref.cache_key:
            raise Mismatch(
                f"the ref of {ref.config} in {source.where} names a manifest of another job key",
                hint="warm and push it again",
                details={"ref": ref.cache_key, "manifest": manifest.cache_key},
            )
        check_content(statement, manifest, graph)

    view, manifest, fetched = _view(ref, store, source, approve)
    for signatures in asked:
        store.put_signatures(signatures)
    _adopt(store, channel, ref, name)
    note(f"view {view.path}")
    return {
        "state": "HIT",
        "identity": "ref",
        "reason": UNPROVED,
        "manifest": manifest.id,
        "cache_key": manifest.cache_key,
        "serial": ref.serial,
        "stale": stale,
        "view": str(view.path),
        "environment": {"NEFFCACHE_DIR": str(store.root), **manifest.environment},
        "bytes": fetched,
    }


def _known(store: LocalStore, channel: str, config: str, name: str) -> Ref | None:
    """The ref that this store took last, None for a damaged one."""
    try:
        return store.ref(channel, config, name)
    except Damaged:
        return None


def _signed(
    trust: Trust, channel: str, ref: Ref, store: LocalStore, source: Source, known: Ref | None
) -> tuple[Mapping[str, Any] | None, list[Signatures]]:
    """The statement that covers a ref: one that is here, else one of the source, and what is to be kept of that.

    Raises Mismatch.
    """
    with suppress(Mismatch, Damaged):
        return statement_of(trust, channel, ref, store.signatures, known), []
    asked: list[Signatures] = []

    def ask(manifest_id: str, signer: str) -> Signatures | None:
        found = source.signatures(manifest_id, signer)
        asked.extend([found] if found is not None else [])
        return found

    return statement_of(trust, channel, ref, ask, known), asked


def _view(
    ref: Ref, store: LocalStore, source: Source, approve: Callable[[Manifest, Graphs], None]
) -> tuple[View, Manifest, int]:
    """The view, made from what is here or fetched; damage that is found on the way is fetched again, once."""
    fetched = 0
    for last in (False, True):
        manifest = _whole(store, ref.manifest)
        if manifest is None:
            fetched += source.fetch(ref, store, approve)
            manifest = _whole(store, ref.manifest)
        if manifest is None:
            raise Miss(f"{source.where} did not give all of manifest {ref.manifest[:12]} of {ref.config}")
        approve(manifest, store.get_graph)
        try:
            return materialise(store, manifest), manifest, fetched
        except Damaged:  # it is in quarantine now
            if last:
                raise
    raise AssertionError


def _whole(store: LocalStore, manifest_id: str) -> Manifest | None:
    """A complete manifest with all that it names, by existence and size."""
    try:
        found = store.get_manifest(manifest_id)
    except Damaged:
        return None
    return found if found is not None and found.complete and not store.missing(found) else None


def _adopt(store: LocalStore, channel: str, ref: Ref, name: str) -> None:
    """Let the store say what the source said; nothing is written when it does already."""
    pointer = store.pointer(ref.cache_key)
    if pointer is None or pointer.manifest != ref.manifest:
        store.set_pointer(ref.cache_key, ref.manifest)
    if _known(store, channel, ref.config, name) != ref:
        store.put_ref(channel, ref.config, name, ref)


def one_line(documents: list[dict[str, Any]], limit: int | None = None) -> str:
    """The documents as one line of JSON: one as it is, several as a list; with a limit in bytes, shortened to fit."""
    long = ("environment", "error", "reason", "identity", "by", "view", "seconds", "requests")
    for dropped in (0, 1, 2, len(long)):
        shown = [{name: value for name, value in item.items() if name not in long[:dropped]} for item in documents]
        line = json.dumps(shown[0] if len(shown) == 1 else shown)
        if limit is None or len(line.encode()) <= limit:
            return line
    codes = [item["exit_code"] for item in documents]
    return json.dumps({"configs": len(documents), "ready": codes.count(0), "exit_code": first_failure(documents)})


def first_failure(documents: list[dict[str, Any]]) -> int:
    """The exit code of the whole: that of the first that is not ready."""
    return next((item["exit_code"] for item in documents if item["exit_code"]), 0)


def leave_message(path: Path, documents: list[dict[str, Any]]) -> None:
    """Write the line where Kubernetes looks for it, if there is such a file. Raises OSError."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    with os.fdopen(descriptor, "w") as file:
        file.write(one_line(documents, TERMINATION_BYTES) + "\n")
