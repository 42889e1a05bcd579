"""Job keys to read and compare, without tracing."""

from __future__ import annotations

from collections.abc import Mapping

from neffcache.flows.request import Request
from neffcache.flows.resolve import resolve
from neffcache.flows.workers import aside, scratch
from neffcache.key.compare import Difference, compare_components
from neffcache.key.job import Component, JobKey
from neffcache.store.local import LocalStore
from neffcache.store.records import Manifest


def key_of(request: Request, environ: Mapping[str, str]) -> JobKey:
    """The job key of a request; asks TorchTitan in a worker."""
    with scratch(aside(environ)) as place:
        return resolve(request, dict(environ), place).key


def manifest_key(found: Manifest) -> JobKey:
    """The job key that a manifest was made for."""
    parts = {name: Component(name, str(v["sha256"]), v["value"]) for name, v in found.components.items()}
    return JobKey(found.cache_key, parts)


def load_key(store: LocalStore, name: str) -> JobKey | None:
    """The key of a manifest of the store by its id or its job key (or the beginning of one), None when none matches."""
    if len(name) < 6 or set(name) - set("0123456789abcdef"):
        return None
    for found in store.manifests():
        if found.id.startswith(name) or found.cache_key.startswith(name):
            return manifest_key(found)
    return None


def compare(left: JobKey, right: JobKey) -> list[Difference]:
    """Field by field, only in components whose SHA-256 differ."""
    return compare_components(left.components, right.components)
