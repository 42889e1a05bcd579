"""Other values for the fields of a configuration: the proof that a neutral field reaches no graph needs them.

`neutral` fields are those that the key leaves out; `watched` ones count, but nobody expects a graph to hold them
(learning rate, clipping): a graph that does is compiled again for each of their values.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from neffcache.key.workload import neutral_reason

WATCHED = ("optimizer.", "lr_scheduler.", "training.max_norm")

HELD = {
    "comm.mode": "a trace sets it",
    "checkpoint.enable": "a trace sets it",
    "metrics.log_freq": "a trace sets it",
    "metrics.enable_tensorboard": "a trace sets it",
    "metrics.enable_wandb": "a trace sets it",
    "debug.enable_structured_logging": "a trace sets it",
    "training.gc_debug": "needs a CUDA device",
    "profiler.enable_memory_snapshot": "needs a CUDA device",
}
"""Fields that a lint cannot vary, and why."""


@dataclasses.dataclass(frozen=True)
class Place:
    """A value somewhere in a configuration: `path` as `training.steps` or `optimizer.param_groups[0].lr`."""

    path: str
    owner: Any
    name: str | int
    value: Any
    choices: tuple[Any, ...] = ()

    def put(self, value: Any) -> None:
        if isinstance(self.name, str) and not isinstance(self.owner, dict):
            object.__setattr__(self.owner, self.name, value)
        else:
            self.owner[self.name] = value


def places(node: Any, prefix: str = "") -> Iterator[Place]:
    """Every plain value of a configuration outside of its model, lists and dictionaries included."""
    if dataclasses.is_dataclass(node):
        hints = _hints(type(node))
        items: Any = [(f.name, getattr(node, f.name), hints.get(f.name)) for f in dataclasses.fields(node)]
        names: Any = [(f"{prefix}{name}", name, value, hint) for name, value, hint in items if name != "model_spec"]
    elif isinstance(node, dict):
        names = [(f"{prefix}{key}", key, value, None) for key, value in node.items()]
    else:
        names = [(f"{prefix.rstrip('.')}[{index}]", index, value, None) for index, value in enumerate(node)]
    for path, name, value, hint in names:
        if dataclasses.is_dataclass(value) or isinstance(value, (dict, list)):
            yield from places(value, f"{path}.")
        elif isinstance(value, (bool, int, float, str)):
            yield Place(path, node, name, value, _choices(hint))


def _hints(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls)
    except (NameError, TypeError):
        return {}


def _choices(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()


def another(place: Place) -> Any:
    """A value of the same type that is not the present one; None when there is no other choice."""
    value = place.value
    if place.choices:
        return next((choice for choice in place.choices if choice != value), None)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return value + 0.25 * (abs(value) or 1.0) if isinstance(value, float) else f"{value}-other"


def variations(config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(neutral, watched): another value for each such field, by path."""
    neutral: dict[str, Any] = {}
    watched: dict[str, Any] = {}
    for place in places(config):
        if place.path in HELD or (value := another(place)) is None:
            continue
        dotted = place.path.replace("[", ".").replace("]", "")
        if neutral_reason(dotted, place.value) is not None and neutral_reason(dotted, value) is not None:
            neutral[place.path] = value
        elif place.path.startswith(WATCHED) and isinstance(place.value, float) and not isinstance(place.value, bool):
            watched[place.path] = value
    return neutral, watched


def apply(config: Any, changes: Mapping[str, Any]) -> None:
    """Put other values into a configuration; KeyError for a path that it does not have."""
    found = {place.path: place for place in places(config)}
    for path, value in changes.items():
        found[path].put(value)
