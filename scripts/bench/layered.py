"""llama3_405b with fewer layers and nothing else changed: what `trace.py` compares, to see what a layer costs."""

from __future__ import annotations

from typing import Any

from neffcache.trace import registry


def llama3_405b_32_layers() -> Any:
    return _first(32)


def llama3_405b_63_layers() -> Any:
    return _first(63)


def llama3_405b_126_layers() -> Any:
    return _first(126)


def _first(count: int) -> Any:
    config: Any = registry.llama3_405b_bf16()
    layers = config.model_spec.model.layers
    assert len(layers) >= count, f"the configuration has {len(layers)} layers now"
    config.model_spec.model.layers = layers[:count]
    return config
