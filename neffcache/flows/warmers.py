"""Warmers: which runs a model family has, as TOML files that come with neffcache or that a user adds.

family = "llama3"
module = "llama3"                     # TorchTitan's --module

[[run]]
name = "llama3_8b"                    # what a user types
config = "llama3_8b"                  # the registry function, by default the name; `module` too
instance = "trn2.48xlarge"            # and target, lnc, nodes, world_size: placement when nothing else is said
set = {"parallelism.tensor_parallel_degree" = 4}
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from neffcache.errors import Usage


class _RunEntry(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    name: str
    config: str = ""
    module: str = ""
    about: str = ""
    target: str | None = None
    lnc: int | None = None
    instance: str | None = None
    nodes: int | None = None
    world_size: int | None = None
    set: dict[str, Any] = {}


class _Family(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    family: str
    module: str
    run: list[_RunEntry] = []


@dataclass(frozen=True)
class WarmerRun:
    """A named run: a TorchTitan configuration, its options and its default placement."""

    name: str
    family: str
    module: str
    config: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    placement: Mapping[str, Any] = field(default_factory=dict)
    about: str = ""


def shipped() -> Path:
    """The folder of the shipped warmers: inside an installed package, or at the top of a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "_warmers"
    return inside if inside.is_dir() else package.parent / "warmers"


def load(folders: Iterable[Path]) -> dict[str, WarmerRun]:
    """Every run of the TOML files in `folders` by name, later folders winning; Usage names the file that is wrong."""
    found: dict[str, WarmerRun] = {}
    for folder in folders:
        if not folder.is_dir():
            raise Usage(f"the folder of warmers {folder} does not exist")
        for path in sorted(folder.glob("*.toml")):
            try:
                family = msgspec.convert(tomllib.loads(path.read_text()), _Family)
            except (OSError, ValueError, msgspec.ValidationError) as fault:
                raise Usage(f"the warmer {path.name} is not understood: {fault}") from None
            for entry in family.run:
                placement = {
                    name: getattr(entry, name)
                    for name in ("target", "lnc", "instance", "nodes", "world_size")
                    if getattr(entry, name) is not None
                }
                found[entry.name] = WarmerRun(
                    name=entry.name,
                    family=family.family,
                    module=entry.module or family.module,
                    config=entry.config or entry.name,
                    settings=flat(entry.set),
                    placement=placement,
                    about=entry.about,
                )
    return found


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted paths: TOML reads an unquoted `a.b` as a table."""
    result: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            result.update(flat(value, f"{prefix}{name}."))
        else:
            result[prefix + name] = value
    return result


def known(environ: Mapping[str, str]) -> dict[str, WarmerRun]:
    """The shipped runs and those of the folders in NEFFCACHE_WARMERS."""
    more = [Path(part) for part in environ.get("NEFFCACHE_WARMERS", "").split(os.pathsep) if part]
    return load([shipped(), *more])


def find(name: str, environ: Mapping[str, str]) -> WarmerRun:
    """The run called `name`; `module:config` or an unknown name is a plain TorchTitan configuration.

    Usage when the name cannot be one.
    """
    runs = known(environ)
    if name in runs:
        return runs[name]
    if ":" in name:
        module, _, config = name.partition(":")
        if not module or not config.isidentifier():
            raise Usage(f"{name!r} is not module:config")
        return WarmerRun(name=name, family=module.rpartition(".")[2], module=module, config=config)
    if not name.isidentifier():
        near = difflib.get_close_matches(name, runs, n=1)
        raise Usage(
            f"{name!r} is no configuration", hint=f"did you mean {near[0]}?" if near else "neffcache plan --help"
        )
    return WarmerRun(name=name, family="", module="", config=name)
