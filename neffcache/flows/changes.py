"""What to change so that one field of a job key becomes that of another job."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from neffcache.flows.request import setting_text
from neffcache.key.compare import MISSING, Difference
from neffcache.key.job import Component

Kind = Literal["option", "environment", "install", "code", "machine", "none"]

_PLACE = {"target.target": "--target", "lnc.lnc": "--lnc", "lnc.world_size": "--world-size"}
_STEP = re.compile(r'\[("(?:[^"\\]|\\.)*")\]|\[(\d+)\]|([^.\[\]]+)')


@dataclass(frozen=True)
class Change:
    """One thing to do: a command-line option, a variable, a package, code, another machine; "none": nothing helps.

    `path` is the field of the job key that it is about.
    """

    path: str
    kind: Kind
    what: str

    def to_json(self) -> dict[str, str]:
        return {"path": self.path, "kind": self.kind, "change": self.what}


@dataclass(frozen=True)
class Other:
    """The job that this one shall become. `options` are TorchTitan's options here, by dotted path."""

    components: Mapping[str, Component]
    versions: Mapping[str, Any]
    options: Mapping[str, Any]

    def value(self, component: str, *path: str) -> Any:
        """A value inside a component, None when there is none."""
        found: Any = self.components[component].value if component in self.components else None
        for name in path:
            found = found.get(name) if isinstance(found, Mapping) else None
        return found


def changes(differences: Sequence[Difference], other: Other) -> list[Change]:
    """What makes each difference (left: here, right: the other) go away; each thing once, in their order."""
    found: dict[str, Change] = {}
    for difference in differences:
        kind, what = _change(difference, other)
        found.setdefault(what, Change(difference.path, kind, what))
    return list(found.values())


def steps(path: str) -> list[str]:
    """The names and indices of a difference's path: `a.b[0]["c.d"]` -> a, b, 0, c.d."""
    return [json.loads(quoted) if quoted else index or name for quoted, index, name in _STEP.findall(path)]


def _change(difference: Difference, other: Other) -> tuple[Kind, str]:
    component, *inside = steps(difference.path)
    if not inside:
        return "none", f"the component {component} is missing on one side"
    if difference.path in _PLACE:
        return "option", f"{_PLACE[difference.path]} {difference.right}"
    if component == "workload":
        return _workload(inside, difference.right, other)
    if component == "toolchain":
        return _toolchain(inside, difference.right, other)
    if component == "options":
        tokens = other.value("options", "options") or ()
        given = " ".join(f"--option={token}" for token in tokens)
        return "option", given or "no compiler option: neither --option nor NEURON_CC_FLAGS"
    return "none", f"{difference.path} cannot be chosen"


def _workload(inside: Sequence[str], right: Any, other: Other) -> tuple[Kind, str]:
    part, *names = inside
    if part == "config" and names[:1] == ["arguments"] and len(names) > 1:
        return "option", f"--set {names[1]}={setting_text(other.value('workload', 'config', *names[:2]))}"
    if part == "config" and names:
        return _setting(names, other)
    if part == "environment" and names:
        return _variable(names[0], right)
    if part == "torchtitan":
        return "install", f"TorchTitan {right}"
    if part == "packages" and names:
        return "install", f"no {names[0]} (or nothing that imports it)" if right is MISSING else f"{names[0]} {right}"
    if part == "files" and names:
        return "install", f"another {names[0]} of Hugging Face"
    if part == "sources" and names:
        return "code", f"the same code of {names[0]}; --trace tells whether the graphs differ: when not, run goes on"
    return "none", f"{part} cannot be chosen"


def _setting(names: Sequence[str], other: Other) -> tuple[Kind, str]:
    """The option that a field of the configuration is, or the list that holds the field."""
    for end in range(len(names), 0, -1):
        option = ".".join(names[:end])
        if option in other.options:
            value = other.value("workload", "config", *names[:end])
            items = value if isinstance(value, (list, tuple)) else [value]
            if any(item is None or isinstance(item, (Mapping, list, tuple)) for item in items):
                return "none", f"{option} cannot be given the other's value on the command line"
            return "option", f"--set {option}={setting_text(value)}"
    return "none", f"{names[0]} is set by the code of the configuration, not by an option"


def _toolchain(inside: Sequence[str], right: Any, other: Other) -> tuple[Kind, str]:
    part, *names = inside
    version = other.versions.get(part)
    if part == "name":
        return "option", f"--toolchain {right}"
    if part == "torch":
        return "install", f"torch {version or right}"
    if part == "python":
        return "install", f"Python {version or right}"
    if part == "compiler":
        return "install", f"the very same compiler{f', {version}' if version else ''}"
    if part == "threads":
        return _variable("OMP_NUM_THREADS", str(right))
    if part == "environment" and names:
        return _variable(names[0], right)
    if part in ("libc", "instruction_set"):
        return "machine", f"a machine with the same {part.replace('_', ' ')}"
    if part == "settings":
        return "code", f"PyTorch's setting {'.'.join(names)} = {right}"
    return "none", f"{part} of the toolchain cannot be chosen"


def _variable(name: str, right: Any) -> tuple[Kind, str]:
    return "environment", f"export {name}={right}" if isinstance(right, str) else f"unset {name}"
