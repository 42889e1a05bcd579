"""One exact text for each kind of argument, from a closed list. Anything else is Uncacheable, by name.

Exact means injective: two values that a compiler could tell apart have two texts (1, 1.0, True and "1"; a list and a
tuple; 0.0 and -0.0), and a value has one text in every process, on every rank and from every directory.
"""

from __future__ import annotations

import enum
import json
import math
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.immutable_collections import immutable_dict, immutable_list

from neffcache.graph.callables import describe, is_callable_value
from neffcache.graph.groups import GroupTable
from neffcache.graph.ops import is_operator, operator_text
from neffcache.graph.symbols import SymbolTable
from neffcache.graph.tensors import content_text, form_text
from neffcache.graph.torch_internals import unwrapped
from neffcache.graph.uncacheable import Uncacheable


def float_text(number: float) -> str:
    """Shortest text that reads back to the same float; nan, inf, -inf and -0.0 are themselves."""
    if math.isnan(number):
        return "-nan" if math.copysign(1.0, number) < 0 else "nan"
    return repr(number)


def string_text(text: str) -> str:
    """JSON-quoted, in ASCII. Lone surrogates are refused: a pair of them would read as another character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Uncacheable(f"a string that is no valid Unicode: {text!r}") from error
    return json.dumps(text)


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


@dataclass
class Values:
    """Writes the values of one graph; `inline` writes a sub-graph, and the tables number what is met on the way."""

    symbols: SymbolTable
    groups: GroupTable
    inline: Callable[[fx.GraphModule], str]
    nodes: dict[fx.Node, str] = field(default_factory=dict)
    _devices: dict[str, int] = field(default_factory=dict)
    _contents: dict[int, tuple[torch.Tensor, str]] = field(default_factory=dict)

    def text(self, value: Any) -> str:
        """The text of an argument; a tensor here is a constant and counts by content."""
        plain = _PLAIN.get(type(value))
        if plain is not None:
            return plain(value)
        container = _CONTAINERS.get(type(value))
        if container is not None:
            return container(self, value)
        return self._other(value)

    def form(self, value: Any) -> str:
        """The text of a result: tensors by form only, everything else as an argument would be."""
        value = unwrapped(value)
        if isinstance(value, torch.Tensor):
            return form_text(value, self._size, self.device)
        if isinstance(value, list):
            return "[" + ", ".join(map(self.form, value)) + "]"
        if isinstance(value, tuple) and not isinstance(value, torch.Size):
            return _tuple_text([self.form(item) for item in value])
        if isinstance(value, dict):
            return _dict_text([(self.text(key), self.form(item)) for key, item in value.items()])
        return self.text(value)

    def constant(self, tensor: torch.Tensor) -> str:
        """Form and content of a constant tensor."""
        known = self._contents.get(id(tensor))
        if known is None:
            # Kept with the tensor, so that its id is not given to another one meanwhile.
            known = self._contents[id(tensor)] = (tensor, content_text(tensor))
        return f"tensor({form_text(tensor, self._size, self.device)}, {known[1]})"

    def device(self, device: torch.device) -> str:
        """The type only, since an index is a matter of the rank; a graph that spans two indices cannot be told so."""
        index: int | None = device.index
        if index is not None and self._devices.setdefault(device.type, index) != index:
            raise Uncacheable(f"two {device.type} devices in one graph")
        return device.type

    def named(self, value: Any, *, must: bool) -> str:
        """A string in the place of a group's name: its membership; unknown names are strings unless `must` is set."""
        if isinstance(value, str) and (must or self.groups.knows(value)):
            return self.groups.group(value)
        return self.text(value)

    def _size(self, size: int | torch.SymInt) -> str:
        return self.symbols.text(size) if isinstance(size, torch.SymInt) else str(size)

    def _other(self, value: Any) -> str:
        value = unwrapped(value)
        if isinstance(value, fx.Node):
            if value not in self.nodes:
                raise Uncacheable(f"a reference to {value}, which this graph does not define before it")
            return self.nodes[value]
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return f"{type(value).__name__.lower()}({self.symbols.text(value)})"
        if isinstance(value, torch.Tensor):
            return self.constant(value)
        if isinstance(value, torch.device):
            return f"device({self.device(value)})"
        if isinstance(value, fx.GraphModule):
            return self.inline(value)
        if isinstance(value, enum.Enum):
            return f"enum({_type_name(value)},{value.name},{self.text(value.value)})"
        if isinstance(value, DeviceMesh):
            return self.groups.mesh(value)
        if torch.distributed.is_available() and isinstance(value, torch.distributed.ProcessGroup):
            return self.groups.group(value.group_name)
        if is_operator(value):
            return f"op({operator_text(value)})"
        if type(value).__module__.startswith("torch.") and hasattr(value, "__fx_repr__"):
            # Placements of DTensor and other constants of torch: by contract an expression that makes them again.
            return f"constant({_type_name(value)},{string_text(value.__fx_repr__()[0])})"
        if is_callable_value(value):
            return describe(value, self.text)
        raise Uncacheable(f"a value of the type {_type_name(value)}")


def _tuple_text(items: list[str]) -> str:
    return "(" + ", ".join(items) + ("," if len(items) == 1 else "") + ")"


def _dict_text(items: list[tuple[str, str]]) -> str:
    return "{" + ", ".join(f"{key}: {item}" for key, item in sorted(items)) + "}"


# Looked up by exact type: a bool is no int here, and a subclass of str may mean anything.
_PLAIN: dict[type, Callable[[Any], str]] = {
    types.NoneType: repr,
    bool: repr,
    int: repr,
    float: float_text,
    complex: lambda value: f"complex({float_text(value.real)},{float_text(value.imag)})",
    str: string_text,
    bytes: lambda value: f"bytes({value.hex()})",
    types.EllipsisType: lambda _: "...",
    range: lambda value: f"range({value.start},{value.stop},{value.step})",
    torch.dtype: str,
    torch.layout: str,
    torch.memory_format: str,
}
_CONTAINERS: dict[type, Callable[[Values, Any], str]] = {
    list: lambda values, value: "[" + ", ".join(map(values.text, value)) + "]",
    tuple: lambda values, value: _tuple_text([values.text(item) for item in value]),
    torch.Size: lambda values, value: "size[" + ", ".join(map(values.text, value)) + "]",
    dict: lambda values, value: _dict_text([(values.text(key), values.text(item)) for key, item in value.items()]),
    slice: lambda values, value: f"slice({','.join(map(values.text, (value.start, value.stop, value.step)))})",
}
_CONTAINERS[immutable_list] = _CONTAINERS[list]
_CONTAINERS[immutable_dict] = _CONTAINERS[dict]
