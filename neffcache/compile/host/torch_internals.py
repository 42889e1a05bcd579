"""The private parts of Inductor that the host toolchain touches, checked on torch 2.14.

- `torch._inductor.codecache.CppCodeCache.load_async` and `_load_library`: Inductor names its `.so` files by a hash of a
  command line that holds absolute paths, so artifacts of one install prefix would be compiled again under another.
  Here they are named by their source alone.
- `standalone_compile`, `CompiledArtifact`, `get_cpp_compiler` of `torch._inductor`.
- `torch._C._distributed_c10d`: names of process groups.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from neffcache.key.canonical import sha256_hex
from neffcache.probing import require

CHECKED_ON = "2.14"
TOUCHED = (
    ("torch._inductor", "standalone_compile"),
    ("torch._inductor", "CompiledArtifact"),
    ("torch._inductor.codecache", "torch_key"),
    ("torch._inductor.codecache", "CppCodeCache.load_async"),
    ("torch._inductor.codecache", "CppCodeCache._load_library"),
    ("torch._inductor.cpp_builder", "get_cpp_compiler"),
    ("torch._inductor.runtime.cache_dir_utils", "temporary_cache_dir"),
    ("torch._inductor.utils", "clear_caches"),
    ("torch._C._distributed_c10d", "_register_process_group"),
    ("torch._C._distributed_c10d", "_resolve_process_group"),
    ("torch._C._distributed_c10d", "_unregister_process_group"),
    ("torch._guards", "tracing"),
    ("torch._subclasses.fake_tensor", "unset_fake_temporarily"),
)


def probe() -> None:
    """Raise Unsupported naming the first private function that this torch does not have."""
    require(TOUCHED, library="torch", version=torch.__version__, checked=CHECKED_ON)


def kernel_name(cls: type, source: str, optimized: str | None, extra_flags: Any) -> str:
    """A name for a C++ library by what is compiled, free of paths: 64 hex digits.

    Paths of the private cache directory may stand in the source (headers that Inductor wrote there); they are masked.
    """
    masked = [re.sub(r'(#include\s+")[^"]*/([^"/]+")', r"\1\2", text) if text else "" for text in (source, optimized)]
    parts = [cls.__qualname__, *masked, json.dumps(list(extra_flags))]
    return sha256_hex("\0".join(parts).encode())


@contextlib.contextmanager
def _replaced(load_async: Callable[..., Any]) -> Iterator[None]:
    cache: Any = importlib.import_module("torch._inductor.codecache").CppCodeCache
    original = cache.__dict__["load_async"]
    cache.load_async = classmethod(load_async)
    try:
        yield
    finally:
        cache.load_async = original


def load_artifact(path: str) -> Any:
    """A compiled graph from torch's own serialised form; AssertionError when another build of torch wrote it."""
    inductor: Any = importlib.import_module("torch._inductor")
    return inductor.CompiledArtifact.load(path=path, format="binary")


def standalone_compile(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    """Inductor's own way to a compiled graph that can be saved."""
    inductor: Any = importlib.import_module("torch._inductor")
    return inductor.standalone_compile(module, inputs, dynamic_shapes="from_example_inputs", aot=True)


def source_digest() -> str:
    """Torch's own digest of its Python sources, Inductor's among them: a patched torch of the same version differs."""
    codecache: Any = importlib.import_module("torch._inductor.codecache")
    key: bytes = codecache.torch_key()
    return key.hex()


def register_group(name: str, group: Any) -> None:
    """Let operators that name a process group `name` find `group`."""
    c10d: Any = importlib.import_module("torch._C._distributed_c10d")
    c10d._register_process_group(name, group)


def unregister_group(name: str) -> None:
    c10d: Any = importlib.import_module("torch._C._distributed_c10d")
    c10d._unregister_process_group(name)


def find_group(name: str) -> Any:
    """The process group that operators of this process call `name`."""
    c10d: Any = importlib.import_module("torch._C._distributed_c10d")
    return c10d._resolve_process_group(name)


@contextlib.contextmanager
def kernels_recorded() -> Iterator[dict[str, Path]]:
    """While it is open, every C++ library that Inductor builds and loads is entered as name -> file."""
    from torch._inductor.codecache import CppCodeCache

    built: dict[str, Path] = {}
    original = CppCodeCache.__dict__["load_async"].__func__

    def load_async(
        cls: Any, main_code: str, device_type: str = "cpu", submit_fn: Any = None, extra_flags: Any = (), **given: Any
    ) -> Any:
        load = original(cls, main_code, device_type, submit_fn, extra_flags, **given)
        name = kernel_name(cls, main_code, given.get("optimized_code"), extra_flags)

        def loaded() -> Any:
            library = load()
            built[name] = Path(getattr(library, "__file__", None) or library._name)
            return library

        return loaded

    with _replaced(load_async):
        yield built


class KernelMissing(Exception):
    """An artifact asks for a library that it did not bring."""


@contextlib.contextmanager
def kernels_from(directory: Path, names: frozenset[str]) -> Iterator[None]:
    """While it is open, C++ libraries come from `directory`/<name>.so and nothing is compiled.

    KernelMissing for a library that is not among `names`.
    """

    def load_async(
        cls: Any, main_code: str, device_type: str = "cpu", submit_fn: Any = None, extra_flags: Any = (), **given: Any
    ) -> Any:
        name = kernel_name(cls, main_code, given.get("optimized_code"), extra_flags)
        path = directory / f"{name}.so"
        if name not in names or not path.exists():
            raise KernelMissing(name)
        library: list[Any] = []

        def loaded() -> Any:
            if not library:
                library.append(cls._load_library(os.fspath(path), name))
            return library[0]

        return loaded

    with _replaced(load_async):
        yield
