"""Every configuration of the installed TorchTitan, read from its files: nothing is imported.

A registry is a `config_registry.py` anywhere below the package; a configuration is a public function of it that needs
no argument. So a new family, experiment or entry appears by itself.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "torchtitan"
REGISTRY = "config_registry.py"
_HOMES = (("models",), ("experiments",), ("experiments", "rl", "examples"))
"""Folders below which TorchTitan's `--module` takes a short name (ConfigManager, checked on 0.3.0)."""


@dataclass(frozen=True)
class Registered:
    """One function of a registry. `module` is what `--module` takes, `gives` the annotated type ("" without one).

    `family` is a model family (`llama3`) or an experiment (`graph_trainer`); `path` the package of the registry.
    """

    family: str
    module: str
    path: str
    function: str
    gives: str


def installed_version() -> str:
    """The installed TorchTitan's version, "" when there is none."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return ""


def package_root() -> Path | None:
    """The folder of the installed package, found without importing it."""
    spec = importlib.util.find_spec(PACKAGE)
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    return Path(places[0]) if places else None


def registered(root: Path | None = None) -> list[Registered]:
    """All configurations below `root` (the installed package by default), by module and in the order of their files."""
    root = root or package_root()
    if root is None:
        return []
    short = _names(root / "models" / "__init__.py") | _names(root / "experiments" / "__init__.py")
    found: list[Registered] = []
    for path in sorted(root.rglob(REGISTRY)):
        inside = path.parent.relative_to(root).parts
        module = _module(inside, short)
        family = inside[1] if len(inside) > 1 and inside[0] in ("models", "experiments") else module
        dotted = ".".join((PACKAGE, *inside))
        found += [Registered(family, module, dotted, name, gives) for name, gives in functions(path)]
    return found


def _module(inside: tuple[str, ...], short: frozenset[str]) -> str:
    """The short name of a module where TorchTitan has one that leads there, else the dotted path."""
    for home in _HOMES:
        name = ".".join(inside[len(home) :])
        if inside[: len(home)] == home and name in short:
            return name
    return ".".join((PACKAGE, *inside))


def _names(path: Path) -> frozenset[str]:
    """Every string that a file lists: `_supported_models` and `_supported_experiments` are sets of strings."""
    if not path.is_file():
        return frozenset()
    return frozenset(
        node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def functions(path: Path) -> Iterator[tuple[str, str]]:
    """(name, annotated type) of the public functions of a registry that can be called with no argument."""
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        given = node.args
        needed = len(given.posonlyargs) + len(given.args) - len(given.defaults)
        gives = "" if node.returns is None else ast.unparse(node.returns).strip("'\"")
        if not needed and not any(default is None for default in given.kw_defaults) and gives != "None":
            yield node.name, gives
