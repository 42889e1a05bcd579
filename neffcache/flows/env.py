"""Env: everything that `run` would set up for a launch, left to somebody else who launches."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from neffcache.compile.neuron import installation
from neffcache.compile.neuron.layouts import READS, STORES, VARIABLES
from neffcache.errors import StoreFault, Usage
from neffcache.flows import collections
from neffcache.flows.request import Request
from neffcache.flows.resolve import first_line, resolve
from neffcache.flows.run import Prepared, check_environment, manifest_to_run, prepare
from neffcache.flows.trust import NOBODY, Trust, check_manifest
from neffcache.flows.warm import Progress
from neffcache.flows.workers import aside, scratch
from neffcache.store.local import LocalStore
from neffcache.store.records import Manifest
from neffcache.store.view import View, materialise

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


def env_of_collection(
    store: LocalStore, name: str, environ: Mapping[str, str], *, layout: str | None = None
) -> tuple[View, dict[str, str], Path]:
    """A view of a collection, what points its package to it, and the directory that was made for it.

    The package may write there: what it adds never reaches the store. Raises Miss for no such collection, Usage when
    it cannot be told which of its manifests is meant; Damaged, StoreFault.
    """
    item = _meant(collections.require(store, name), name, layout)
    own = _directory(store, item.manifest, environ)
    try:
        # libneuronxla makes locks beside what it reads; the others add files, and change none that are there.
        writable = item.part.layout == "libneuronxla"
        view = materialise(store, item.manifest, where=own, writable_overlay=writable)
    except BaseException:
        shutil.rmtree(own, ignore_errors=True)
        raise
    place = view.path / STORES[item.part.layout]
    return view, {VARIABLES[item.part.layout]: str(place)}, own


def _meant(found: Sequence[collections.Named], name: str, layout: str | None) -> collections.Named:
    installed = installation.version(installation.COMPILER)
    wanted = layout or READS.get(installation.stack())
    chosen = [item for item in found if item.part.layout == wanted] or ([] if layout else list(found))
    if len(chosen) > 1:
        chosen = [item for item in chosen if item.part.compiler == installed] or chosen
    if len(chosen) == 1:
        return chosen[0]
    there = "; ".join(f"{item.manifest.id[:12]} ({item.part})" for item in found)
    raise Usage(
        f"the collection {name} has {len(chosen)} manifests that could be meant: {there}",
        hint="--layout chooses one; of several compilers the installed one's is taken, or export one by its id",
    )


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
