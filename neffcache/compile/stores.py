"""Which compiler-owned store a toolchain has: asked by what its identity says, without importing torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neffcache.compile.toolchain import NativeStore


def native_store(toolchain: Mapping[str, Any]) -> NativeStore | None:
    """The native store of a toolchain identity's value (a manifest's component), None when its artifacts are ours."""
    owner = toolchain.get("native_store")
    if owner == "inductor":
        from neffcache.compile.host.native import InductorStore

        return InductorStore()
    if owner in ("torchneuron", "libneuronxla"):
        from neffcache.compile.neuron.native import LibneuronxlaStore, TorchNeuronStore

        return TorchNeuronStore(toolchain) if owner == "torchneuron" else LibneuronxlaStore()
    return None
