"""The workload document: what a job computes and the code that turns it into graphs, as JSON.

Made by the tracer before a warm and again by the process that runs from what it really received: a Trainer.Config, or
the arguments of an inference workload. `key/` decides which of its fields count.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from neffcache.errors import Unsupported
from neffcache.graph.callables import describe_json
from neffcache.inference import Workload
from neffcache.key.canonical import digest, sha256_hex
from neffcache.key.environment import graph_environment
from neffcache.key.workload import CALLABLE
from neffcache.trace import hub, inference, titan

ALWAYS = ("torchtitan", "spmd_types")
"""Packages whose code makes the graphs of every TorchTitan job."""

VERSIONED = ("torchao", "torchdata", "tyro", "transformers", "fla", "einops", "helion", "triton")
"""Packages that a configuration may pull in and that the toolchain does not count: by version, when installed.

Not by what happens to be imported: that depends on who asks first.
"""


def workload_document(config: Any, environ: Mapping[str, str]) -> dict[str, Any]:
    """The whole document of a Trainer.Config: {"config", "sources", "environment", "torchtitan", "packages"}, and
    {"files"} of a configuration that takes its shapes from Hugging Face.

    Raises Unsupported for a value that has no canonical form, and for a file that cannot be read.
    """
    packages: set[str] = set(ALWAYS)
    encoded = encode(config, packages, "config")
    for target in config.override.imports:
        packages.add((target if isinstance(target, str) else target[0]).rpartition(".")[0])
    files = hub.contents(config)
    return {
        "config": encoded,
        "sources": sources(packages),
        "environment": graph_environment(environ),
        "torchtitan": titan.version(),
        "packages": {name: version for name in VERSIONED if (version := _version(name))},
        **({"files": files} if files else {}),
    }


def inference_document(workload: Workload, arguments: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """The document of a workload with these arguments: {"kind", "config", "sources", "environment", "packages"}.

    `sources` are those of its own code, file by file, and of every package that this code imports, as one digest each:
    transformers has thousands of files.
    """
    own, others = inference.imports(workload.module)
    return {
        "kind": CALLABLE,
        "config": {"callable": workload.name, "arguments": dict(arguments)},
        "sources": {
            **sources(own),
            **{name: {"sha256": entry["sha256"]} for name, entry in sources(others).items() if name not in own},
        },
        "environment": graph_environment(environ),
        "packages": {name: version for name in VERSIONED if (version := _version(name))},
    }


def package_versions(document: Mapping[str, Any]) -> dict[str, str]:
    """The installed versions of the packages whose sources a document counts, as far as they have one."""
    return {name: version for name in document["sources"] if (version := _version(name))}


def _version(name: str) -> str:
    """The installed version, "" when there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def encode(value: Any, packages: set[str], path: str) -> Any:
    """JSON of a configuration value; the modules that define its types and callables are added to `packages`."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, enum.Enum):
        return {"$enum": f"{type(value).__qualname__}.{value.name}"}
    if isinstance(value, (torch.dtype, torch.device, torch.layout)):
        return {"$torch": str(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        packages.add(type(value).__module__)
        fields = {
            field.name: encode(getattr(value, field.name), packages, f"{path}.{field.name}")
            for field in dataclasses.fields(value)
        }
        return {"$type": f"{type(value).__module__}.{type(value).__qualname__}", **fields}
    if isinstance(value, Mapping):
        return {str(key): encode(item, packages, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item, packages, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return {"$set": sorted((encode(item, packages, path) for item in value), key=digest)}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, type):
        packages.add(value.__module__)
        return {"$class": f"{value.__module__}.{value.__qualname__}"}
    if callable(value):
        module = getattr(value, "__module__", None) or getattr(getattr(value, "func", None), "__module__", None)
        if module:
            packages.add(module)
        return describe_json(value, lambda item: encode(item, packages, path))
    raise Unsupported(
        f"{path} holds a {type(value).__module__}.{type(value).__qualname__}, which has no canonical form",
        hint="a workload must be made of data classes, numbers, text, callables and containers of them",
    )


_NOT_SOURCES = frozenset(sys.stdlib_module_names) | {"torch", "builtins", "__main__", "numpy"}


def sources(modules: set[str]) -> dict[str, dict[str, Any]]:
    """Content of every Python file of the packages that hold `modules`, by package-relative path.

    {"torchtitan": {"sha256": ..., "files": {"trainer.py": <sha256>, ...}}}. No absolute path, time, .pyc, shebang or
    VCS state goes in: a wheel and a checkout of the same bytes agree. torch and the standard library are the
    toolchain's part. Of neffcache itself only the harness counts.
    """
    found: dict[str, dict[str, Any]] = {}
    for module in sorted(modules):
        top = module.partition(".")[0]
        if top in _NOT_SOURCES or not top:
            continue
        if top == "neffcache":
            top = titan.HARNESS if module.startswith(titan.HARNESS) else ""
        if top and top not in found:
            files = dict(_files(top))
            found[top] = {"sha256": digest(files), "files": files}
    return found


def _files(name: str) -> Iterator[tuple[str, str]]:
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise Unsupported(f"the package {name} of this configuration cannot be found again", details={"package": name})
    if spec.submodule_search_locations is None:
        if spec.origin is not None and spec.origin.endswith(".py"):
            yield Path(spec.origin).name, sha256_hex(_source_bytes(Path(spec.origin)))
        return
    for root in sorted(spec.submodule_search_locations):
        base = Path(root)
        for path in sorted(base.rglob("*.py")):
            yield path.relative_to(base).as_posix(), sha256_hex(_source_bytes(path))


def _source_bytes(path: Path) -> bytes:
    data = path.read_bytes()
    if data.startswith(b"#!"):
        # Installers rewrite the first line of scripts.
        return data.partition(b"\n")[2]
    return data
