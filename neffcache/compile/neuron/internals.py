"""The parts of torch_neuronx that neffcache touches, by name, as the documentation of Neuron 2.33 and the public source
have them. Built to that documented interface, not run on a device. Nothing here is imported before it is asked for.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

from neffcache.compile.neuron.installation import TORCH_NEURONX, version
from neffcache.errors import Unsupported
from neffcache.probing import find

DOCUMENTED = "2.14 (documentation)"
C = "torch_neuronx._C"
STATS = "_get_compilation_cache_stats"
COUNTERS = ("total_compilations", "persistent_hits", "persistent_misses", "in_memory_hits", "in_memory_misses")


def touched(name: str) -> Any:
    """A function of `torch_neuronx._C`; Unsupported naming it when the installed version has no such thing."""
    return find(C, name, library=TORCH_NEURONX, version=version(TORCH_NEURONX) or "?", checked=DOCUMENTED)


def has(name: str) -> bool:
    try:
        touched(name)
    except Unsupported:
        return False
    return True


def loaded() -> bool:
    """Whether this process has imported it: asking must not start a runtime."""
    return C in sys.modules


def stats() -> Mapping[str, int]:
    """The counters of this process. Unsupported when they are not those that are documented."""
    found = touched(STATS)()
    if not isinstance(found, dict) or any(type(found.get(name)) is not int for name in COUNTERS):
        raise Unsupported(
            f"{STATS} of torch-neuronx {version(TORCH_NEURONX)} does not count as documented",
            hint=f"neffcache was built to torch-neuronx {DOCUMENTED}",
            details={"missing": [n for n in COUNTERS if not isinstance(found, dict) or n not in found]},
        )
    return {name: value for name, value in found.items() if type(value) is int}


def synchronize() -> None:
    """Wait for compiles that were begun and not awaited (`torch.neuron.synchronize`); nothing where there is none."""
    module = getattr(sys.modules.get("torch"), "neuron", None)
    if module is not None and hasattr(module, "synchronize"):
        module.synchronize()


def memory_keys() -> frozenset[str]:
    """The in-memory keys of the graphs and operators that this process has used."""
    return frozenset(touched("_get_all_cache_keys")())


def disk_key(memory_key: str) -> str | None:
    """The on-disk key of an in-memory one, None when the entry was never persisted."""
    found = touched("get_neff_info")(memory_key)
    if isinstance(found, tuple) and found and isinstance(found[0], str):
        return found[0] or None
    return None


def load() -> Any:
    return importlib.import_module("torch_neuronx")
