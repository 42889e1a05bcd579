"""The settings of a compiler that change generated code, read where a graph is captured and enforced where it compiles.

Inductor's configuration can be changed by the program (TorchTitan's async TP sets `_micro_pipeline_tp`) or by one
`torch.compile(options=...)` call, and some of PyTorch's global switches change lowering. All of it reaches the
compiler, so all of it is in the compile key (`env`), but for the entries named here with a reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from neffcache.graph.uncacheable import Uncacheable
from neffcache.key.canonical import digest

NEUTRAL = {
    "trace": "dumps and logs of a compile",
    "worker_start_method": "how compile workers are started",
    "compile_threads": "how many compile at once",
    "worker_suppress_logging": "logs",
    "fx_graph_cache": "Inductor's own cache, not its output",
    "fx_graph_remote_cache": "Inductor's own cache, not its output",
    "autotune_local_cache": "Inductor's own cache, not its output",
    "autotune_remote_cache": "Inductor's own cache, not its output",
    "bundled_autotune_remote_cache": "Inductor's own cache, not its output",
    "cpp_cache_precompile_headers": "how headers are read, not what they say",
    "cpp.cxx": "the compiler's identity is in the toolchain id by content",
    "cuda": "no CUDA device reaches a host artifact",
    "cutlass": "no CUDA device reaches a host artifact",
    "xpu": "no XPU device reaches a host artifact",
    "rocm": "no ROCm device reaches a host artifact",
    "triton.unique_kernel_names": "names for profiles",
    "debug": "dumps and logs of a compile",
    "_save_config_ignore": "a list of names for Inductor's own use",
    "_cache_config_ignore_prefix": "a list of names for Inductor's own use",
    "_cache_config_factory_keys": "a list of names for Inductor's own use",
}
"""Prefix of an Inductor setting -> why it is left out of the key."""


def _neutral(name: str) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in NEUTRAL)


def _json(name: str, value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_json(name, item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_json(name, item) for item in value), key=repr)
    if isinstance(value, dict):
        return {str(key): _json(name, item) for key, item in value.items()}
    if isinstance(value, torch.dtype):
        return str(value)
    raise Uncacheable(f"Inductor's setting {name} holds a {type(value).__qualname__}, which cannot be put into a key")


def inductor_settings() -> dict[str, Any]:
    """Every setting of Inductor but the neutral ones, as JSON.

    All of them, not those that differ from a default: defaults are read from the environment at import.
    """
    from torch._inductor import config

    return {name: _json(name, value) for name, value in config.get_config_copy().items() if not _neutral(name)}


def _deterministic() -> Any:
    return torch.utils.deterministic


def _compiler() -> Any:
    return torch.compiler.config


def numeric_switches() -> dict[str, Any]:
    """PyTorch's global switches that change lowering or the meaning of an operator.

    Raises Uncacheable when PyTorch itself cannot say what is set.
    """
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError as fault:
        raise Uncacheable(f"the float32 precision is set for each operator apart: {fault}") from None
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill_uninitialized_memory": bool(_deterministic().fill_uninitialized_memory),
        "float32_matmul_precision": precision,
        "threads": torch.get_num_threads(),
        "compile_on_one_rank": bool(torch.compiler.config.compile_on_one_rank),
        "mkldnn": torch.backends.mkldnn.enabled,
        "default_dtype": str(torch.get_default_dtype()),
    }


def current_settings() -> dict[str, Any]:
    """What reaches the compiler beside the graph, as JSON: {"inductor": ..., "switches": ...}."""
    return {"inductor": inductor_settings(), "switches": numeric_switches()}


@contextlib.contextmanager
def enforced(settings: Mapping[str, Any]) -> Iterator[None]:
    """Compile under exactly these settings."""
    from torch._inductor import config

    before = numeric_switches()
    with config.patch({name: _restored(config, name, value) for name, value in settings["inductor"].items()}):
        _switch(settings["switches"])
        try:
            if digest(current_settings()) != digest(dict(settings)):
                raise Uncacheable("the settings of the capture cannot be brought about in a compile worker")
            yield
        finally:
            _switch(before)


def _restored(config: Any, name: str, value: Any) -> Any:
    default = config._config[name].default
    if isinstance(default, tuple) and isinstance(value, list):
        return tuple(value)
    if isinstance(default, (set, frozenset)) and isinstance(value, list):
        return type(default)(value)
    return value


def _switch(switches: Mapping[str, Any]) -> None:
    torch.use_deterministic_algorithms(switches["deterministic"], warn_only=switches["deterministic_warn_only"])
    _deterministic().fill_uninitialized_memory = switches["fill_uninitialized_memory"]
    torch.set_float32_matmul_precision(switches["float32_matmul_precision"])
    torch.backends.mkldnn.enabled = switches["mkldnn"]
    torch.set_num_threads(switches["threads"])
    _compiler().compile_on_one_rank = switches["compile_on_one_rank"]
    torch.set_default_dtype(getattr(torch, switches["default_dtype"].removeprefix("torch.")))
