"""Warmers: which runs a model family has, as TOML files that come with neffcache or that a user adds.

family = "llama3"
module = "llama3"                     # TorchTitan's --module, or any module with configurations

[[run]]
name = "llama3_8b"                    # what a user types
config = "llama3_8b"                  # the function, by default the name; `module` too
instance = "trn2.48xlarge"            # and target, lnc, nodes, world_size: placement when nothing else is said
set = {"parallelism.tensor_parallel_degree" = 4}

[[run]]
configs = ["llama3_1b", "llama3_3b"]  # one run of these options for each, called by the configuration's name
instance = "trn2.48xlarge"

With kind = "callable" the runs are inference workloads (neffcache.inference): module holds them, config is the
function's name, set its arguments.

Files are read from the shipped folder, from packages that name themselves in the entry point group `neffcache.warmers`,
and from the folders in NEFFCACHE_WARMERS; a later one wins.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from neffcache.errors import Usage


class _RunEntry(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    name: str = ""
    config: str = ""
    configs: list[str] = []
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
    kind: Literal["torchtitan", "callable"] = "torchtitan"
    run: list[_RunEntry] = []


@dataclass(frozen=True)
class WarmerRun:
    """A named run: a TorchTitan configuration with its options, or a callable with its arguments, and where.

    `kind` is "" where only the module tells: `module:function`.
    """

    name: str
    family: str
    module: str
    config: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    placement: Mapping[str, Any] = field(default_factory=dict)
    about: str = ""
    kind: str = "torchtitan"


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
            raise Usage(f"the folder of warmers {folder} does not exist", hint="make it, or correct NEFFCACHE_WARMERS")
        for path in sorted(folder.glob("*.toml")):
            try:
                family = msgspec.convert(tomllib.loads(path.read_text()), _Family)
            except (OSError, ValueError, msgspec.ValidationError) as fault:
                raise Usage(
                    f"the warmer {path.name} is not understood: {fault}", hint="see docs/how-to/warmers.md"
                ) from None
            for run in _runs(family, path.name):
                found[run.name] = run
    return found


def _runs(family: _Family, file: str) -> Iterator[WarmerRun]:
    """The runs of one file; Usage for one without a name, with two, or with a name that the file has already."""
    seen: set[str] = set()
    for number, entry in enumerate(family.run, start=1):
        where = f"run {number} of the warmer {file}"
        if bool(entry.name) == bool(entry.configs):
            raise Usage(f"{where} takes a name or a list of configs, one of them")
        if entry.configs and entry.config:
            raise Usage(f"{where} has configs and config: one of them")
        placement = {
            name: getattr(entry, name)
            for name in ("target", "lnc", "instance", "nodes", "world_size")
            if getattr(entry, name) is not None
        }
        for name in entry.configs or [entry.name]:
            if not name.isidentifier():
                raise Usage(f"{where} has the name {name!r}, which is not a word of letters, digits and underscores")
            if name in seen:
                raise Usage(f"{where} has the name {name} for the second time")
            seen.add(name)
            yield WarmerRun(
                name=name,
                family=family.family,
                module=entry.module or family.module,
                config=entry.config or name,
                settings=flat(entry.set),
                placement=placement,
                about=entry.about,
                kind=family.kind,
            )


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted paths: TOML reads an unquoted `a.b` as a table."""
    result: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            result.update(flat(value, f"{prefix}{name}."))
        else:
            result[prefix + name] = value
    return result


ENTRY_POINTS = "neffcache.warmers"


def packaged() -> list[Path]:
    """The folders of installed packages in the entry point group `neffcache.warmers`, by the entry's name.

    An entry's value is a package; its folder holds the TOML files. Its code is not run, but for its parents'.
    """
    folders: list[Path] = []
    for entry in sorted(importlib.metadata.entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name):
        try:
            spec = importlib.util.find_spec(entry.value)
        except ImportError:
            spec = None
        places = [] if spec is None else list(spec.submodule_search_locations or [])
        if not places:
            raise Usage(
                f"the entry point {entry.name} of {ENTRY_POINTS} names {entry.value}, which is no installed package",
                hint="reinstall or remove the package that brings it",
            )
        folders += [Path(place) for place in places]
    return folders


def known(environ: Mapping[str, str]) -> dict[str, WarmerRun]:
    """The shipped runs, those of installed packages and those of the folders in NEFFCACHE_WARMERS."""
    more = [Path(part) for part in environ.get("NEFFCACHE_WARMERS", "").split(os.pathsep) if part]
    return load([shipped(), *packaged(), *more])


def find(name: str, environ: Mapping[str, str]) -> WarmerRun:
    """The run called `name`; an unknown name is a plain TorchTitan configuration, `module:name` one or a workload.

    Usage when the name cannot be one.
    """
    runs = known(environ)
    if name in runs:
        return runs[name]
    if ":" in name:
        module, _, config = name.partition(":")
        if not module or not config.isidentifier():
            raise Usage(f"{name!r} is not module:config")
        return WarmerRun(name=name, family=module.rpartition(".")[2], module=module, config=config, kind="")
    if not name.isidentifier():
        near = difflib.get_close_matches(name, runs, n=1)
        raise Usage(
            f"{name!r} is no configuration", hint=f"did you mean {near[0]}?" if near else "neffcache plan --help"
        )
    return WarmerRun(name=name, family="", module="", config=name)
