"""Env: everything that `run` would set up for a launch, left to somebody else who launches."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from neffcache.errors import StoreFault
from neffcache.flows.request import Request
from neffcache.flows.resolve import first_line, resolve
from neffcache.flows.run import Prepared, check_environment, manifest_to_run, prepare
from neffcache.flows.trust import NOBODY, Trust, check_manifest
from neffcache.flows.warm import Progress
from neffcache.flows.workers import aside, scratch
from neffcache.store.local import LocalStore
from neffcache.store.records import Manifest

RUNS = "runs"
"""Directory of a store for the launches that `env` prepared; each is removed by whoever launched."""


def env(
    request: Request,
    store: LocalStore,
    environ: Mapping[str, str],
    *,
    command: Sequence[str] = (),
    on_miss: str = "fail",
    progress: Progress | None = None,
    trust: Trust = NOBODY,
) -> tuple[Prepared, Path]:
    """What a launch needs, and the directory that was made for it: <store>/runs/<manifest id>-<random>/.

    Of a read-only store the directory lies in the system's temporary place. Raises what `run` raises before it
    launches.
    """
    progress = progress or Progress()
    check_environment(environ)
    with scratch(store.root / "tmp" if store.writable else aside(environ)) as place:
        progress.note(first_line(request))
        job = resolve(request, environ, place)
        manifest = manifest_to_run(job, store, environ, on_miss, progress)
        check_manifest(trust, manifest, store.signatures, store.get_graph)
    own = _directory(store, manifest, environ)
    try:
        return prepare(job, manifest, store, own, environ=environ, command=command, on_miss=on_miss), own
    except BaseException:
        shutil.rmtree(own, ignore_errors=True)
        raise


def _directory(store: LocalStore, manifest: Manifest, environ: Mapping[str, str]) -> Path:
    """A new private directory for one launch. Raises StoreFault."""
    name = f"{manifest.id[:12]}-"
    try:
        if not store.writable:
            return Path(tempfile.mkdtemp(prefix=f"neffcache-{name}", dir=aside(environ)))
        own = store.root / RUNS / f"{name}{secrets.token_hex(6)}"
        own.parent.mkdir(exist_ok=True)
        own.mkdir(mode=0o700)
        return own
    except OSError as fault:
        raise StoreFault(
            f"a directory for this run cannot be made: {os.strerror(fault.errno or 0)}",
            hint="check owner, mode and space of the store, or choose another place with NEFFCACHE_DIR",
            details={"path": str(fault.filename)},
        ) from fault
