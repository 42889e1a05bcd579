"""Completing: what a word of a command line may become, from files of this host alone. Nothing heavy is imported.

A shell asks at every Tab, so whatever is wrong here is silence, never an error.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from neffcache.errors import NeffcacheError
from neffcache.flows.settings import store_root
from neffcache.flows.warmers import known
from neffcache.key.target import INSTANCES, TARGETS
from neffcache.store.local import LocalStore

Candidates = Iterator[tuple[str, str]]
"""(word, what it is)."""

MOST = 2_000
"""Words that are offered at most: a shell shows no more."""


def candidates(kind: str, begun: str, directory: str | None, environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """The words of a kind (see `KINDS`) that start with `begun`, in order, each once. `directory` is --dir."""
    found: dict[str, str] = {}
    with contextlib.suppress(NeffcacheError, OSError, ValueError):
        for word, about in KINDS[kind](directory, environ):
            if word.startswith(begun):
                found.setdefault(word, about)
            if len(found) >= MOST:
                break
    return sorted(found.items())


def _configs(directory: str | None, environ: Mapping[str, str]) -> Candidates:
    """The runs of the warmers, the configurations of the installed TorchTitan, and what the store has refs of."""
    from neffcache.trace.registries import registered

    with contextlib.suppress(NeffcacheError):  # a warmer that is not understood hides nothing else
        for run in known(environ).values():
            yield run.name, run.about or run.family
    entries = registered()
    functions = Counter(entry.function for entry in entries)
    for entry in entries:
        name = entry.function if functions[entry.function] == 1 else f"{entry.module}:{entry.function}"
        yield name, entry.family
    yield from _refs(directory, environ)


def _refs(directory: str | None, environ: Mapping[str, str]) -> Candidates:
    store = _store(directory, environ)
    for channel in store.channels():
        for _, ref in store.refs(channel):
            yield ref.config, f"{channel}, manifest {ref.manifest[:12]}"


def _manifests(directory: str | None, environ: Mapping[str, str]) -> Candidates:
    store = _store(directory, environ)
    for channel in store.channels():
        for _, ref in store.refs(channel):
            yield ref.manifest, ref.config
    for manifest in store.manifest_ids():
        yield manifest, "manifest"


def _signable(directory: str | None, environ: Mapping[str, str]) -> Candidates:
    yield from _refs(directory, environ)
    yield from _manifests(directory, environ)
    for name in _store(directory, environ).names("key"):
        yield name.rpartition("/")[2].removesuffix(".json"), "job key"


def _things(directory: str | None, environ: Mapping[str, str]) -> Candidates:
    yield from _signable(directory, environ)
    for key in _store(directory, environ).graph_keys():
        yield key, "graph"


def _channels(directory: str | None, environ: Mapping[str, str]) -> Candidates:
    yield "current", ""
    for channel in _store(directory, environ).channels():
        yield channel, ""


def _versions(directory: str | None, environ: Mapping[str, str]) -> Candidates:
    """NAME=VERSION of every toolchain that the store's refs were warmed with."""
    store = _store(directory, environ)
    for channel in store.channels():
        for _, ref in store.refs(channel):
            said = ref.request.get("versions")
            if isinstance(said, dict):
                for name, version in said.items():
                    yield f"{name}={version}", ref.config


def _families(directory: str | None, environ: Mapping[str, str]) -> Candidates:
    from neffcache.trace.registries import registered

    yield from ((entry.family, "") for entry in registered())


def _titans(directory: str | None, environ: Mapping[str, str]) -> Candidates:
    from neffcache.flows.verdicts import swept_versions

    yield from ((version, "") for version in swept_versions())


def _store(directory: str | None, environ: Mapping[str, str]) -> LocalStore:
    place = store_root(directory, environ)
    return LocalStore.open(place.value, writable=False, given=place.given)


KINDS: Mapping[str, Callable[[str | None, Mapping[str, str]], Candidates]] = {
    "config": _configs,
    "ref": _refs,
    "manifest": _manifests,
    "signable": _signable,
    "thing": _things,
    "channel": _channels,
    "version": _versions,
    "family": _families,
    "titan": _titans,
    "target": lambda *_: ((name, "") for name in TARGETS),
    "instance": lambda *_: ((row.name, row.target) for row in INSTANCES.values()),
}
