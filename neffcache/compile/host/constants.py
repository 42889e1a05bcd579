"""Constant tensors of a graph, as inputs: Inductor's serialised form of a graph does not hold them.

`standalone_compile(aot=True)` lifts every tensor attribute to an input that comes before all others, and drops the
values when it is saved (torch 2.14). So they are made inputs here, and their values stand in the artifact's own
document.
"""

from __future__ import annotations

import base64
import ctypes
from collections.abc import Mapping
from typing import Any

import torch

from neffcache.graph.tensors import check_plain


def lifted(module: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    """The same graph with its own constant tensors as its first inputs, and their values in that order.

    Constants of sub-graphs stay where they are. The module itself when it has none.
    """
    found: dict[str, torch.Tensor] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            value = _attribute(module, str(node.target))
            if isinstance(value, torch.Tensor):
                check_plain(value)
                found.setdefault(str(node.target), value.detach())
    if not found:
        return module, []
    graph = torch.fx.Graph()
    inputs: dict[str, torch.fx.Node] = {}
    for number, (name, value) in enumerate(found.items()):
        inputs[name] = graph.placeholder(f"c{number}")
        inputs[name].meta = {"val": value}
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr" and str(node.target) in inputs:
            copies[node] = inputs[str(node.target)]
        else:
            copies[node] = graph.node_copy(node, lambda old: copies[old])
    kept = {str(node.target): _attribute(module, str(node.target)) for node in graph.nodes if node.op == "get_attr"}
    return torch.fx.GraphModule(kept, graph, class_name="Lifted"), list(found.values())


def _attribute(module: torch.fx.GraphModule, path: str) -> Any:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    return value


def to_json(tensor: torch.Tensor) -> dict[str, Any]:
    """Type, shape, strides and bytes (base64, in index order) of a tensor."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    size = plain.numel() * plain.element_size()
    data = ctypes.string_at(plain.data_ptr(), size) if size else b""
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "data": base64.b64encode(data).decode(),
    }


def from_json(entry: Mapping[str, Any]) -> torch.Tensor:
    """The tensor of `to_json`, on the CPU."""
    dtype: torch.dtype = getattr(torch, entry["dtype"])
    data = bytearray(base64.b64decode(entry["data"]))
    found = torch.empty_strided(entry["shape"], entry["stride"], dtype=dtype)
    if data:
        found.copy_(torch.frombuffer(data, dtype=dtype).reshape(entry["shape"]))
    return found
