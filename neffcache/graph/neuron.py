"""What TorchNeuron's documentation says it cannot take, or computes otherwise, looked for in flat graphs.

A verdict by reading: nothing was compiled or run on a device. Sources: the TorchNeuron operator and `torch.compile`
pages and the neuronx-cc error list (Neuron 2.33).
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from neffcache.graph.torch_internals import is_op_overload

LONGEST_SORT = 16_384
LARGEST_K = 16_384

RULES = {
    "grouped-mm": "torch._grouped_mm forces a graph break, which is an error under fullgraph",
    "sort": f"sort and argsort take a dimension of at most {LONGEST_SORT} elements",
    "topk": f"topk takes k below {LARGEST_K}",
    "dynamic-shape": "every size must be static",
    "float8": "float8, MXFP8 and NVFP4 kernels of GPUs do not exist there",
    "complex": "neuronx-cc refuses complex numbers (NCC_EVRF004)",
    "custom-kernel": "a Triton kernel or a custom operator needs an implementation of its own there",
    "flex-attention": "FlexAttention has a Triton lowering only",
    "wide-type": "float64 and int64 are computed in 32 bits",
}
CHANGES = frozenset({"wide-type"})
"""Rules that change what is computed; every other one stops a compile."""

_SORTS = ("sort", "argsort", "msort")
_NARROW = ("float8", "float4")
_HOST_NAMESPACES = frozenset(
    {
        "aten",
        "prims",
        "prim",
        "_c10d_functional",
        "_c10d_functional_autograd",
        "c10d_functional",
        "_dtensor",
        "inductor",
    }
    | {"device_mesh", "profiler", "higher_order", "spmd_types", "bucketing", "fsdp", "c10d"}
)


@dataclass(frozen=True)
class Finding:
    """One rule that a graph meets: at `node` first, at `count` nodes in all."""

    rule: str
    node: str
    detail: str
    count: int = 1

    def to_json(self, graph: str) -> dict[str, Any]:
        effect = "changes" if self.rule in CHANGES else "stops"
        return {"rule": self.rule, "effect": effect, "graph": graph, **vars(self), "why": RULES[self.rule]}


def findings(gm: fx.GraphModule) -> list[Finding]:
    """Every rule that `gm` or a sub-graph of it meets, with the first node of each."""
    found: dict[str, Finding] = {}
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                for each in _of_node(node, found):
                    before = found.get(each.rule)
                    found[each.rule] = each if before is None else replace(before, count=before.count + 1)
    return list(found.values())


def _of_node(node: fx.Node, found: Container[str]) -> Iterator[Finding]:
    values = _tensors(node.meta.get("val"))
    if any(isinstance(size, torch.SymInt) for value in values for size in value.shape):
        # To write symbolic sizes out takes long, and is read of the first node only.
        detail = "" if "dynamic-shape" in found else f"{node.target}: {_shape(values)}"
        yield Finding("dynamic-shape", node.name, detail)
    dtypes = [str(value.dtype).removeprefix("torch.") for value in values]
    if any(name.startswith(_NARROW) for name in dtypes):
        yield Finding("float8", node.name, f"{node.target}: {', '.join(dtypes)}")
    if any(value.dtype.is_complex for value in values):
        yield Finding("complex", node.name, f"{node.target}: {', '.join(dtypes)}")
    if node.op != "call_function":
        return
    if any(name in ("float64", "int64") for name in dtypes):
        yield Finding("wide-type", node.name, f"{node.target}: {', '.join(dtypes)}")
    yield from _of_operator(node)


def _of_operator(node: fx.Node) -> Iterator[Finding]:
    target: Any = node.target
    name = target.name() if hasattr(target, "name") and callable(target.name) else getattr(target, "__name__", "")
    base = name.rpartition("::")[2].partition(".")[0]
    if "grouped_mm" in base:
        yield Finding("grouped-mm", node.name, str(target))
    elif base.startswith("flex_attention"):
        yield Finding("flex-attention", node.name, base)
    elif "triton" in base:
        yield Finding("custom-kernel", node.name, base)
    elif is_op_overload(target) and target.namespace not in _HOST_NAMESPACES:
        yield Finding("custom-kernel", node.name, str(target))
    elif base in _SORTS:
        shape = _shape_of(node.args[0])
        dim = _argument(node, "dim", -1)
        if shape and isinstance(dim, int) and isinstance(shape[dim], int) and shape[dim] > LONGEST_SORT:
            yield Finding("sort", node.name, f"{target} over {shape[dim]} elements")
    elif base == "topk":
        k = _argument(node, "k", 0)
        if isinstance(k, int) and k >= LARGEST_K:
            yield Finding("topk", node.name, f"{target} with k = {k}")


def _argument(node: fx.Node, name: str, default: Any) -> Any:
    if name in node.kwargs:
        return node.kwargs[name]
    target: Any = node.target
    names = [argument.name for argument in target._schema.arguments] if is_op_overload(target) else []
    place = names.index(name) if name in names else len(node.args)
    return node.args[place] if place < len(node.args) else default


def _shape_of(value: Any) -> tuple[Any, ...]:
    found = _tensors(value.meta.get("val")) if isinstance(value, fx.Node) else []
    return tuple(found[0].shape) if found else ()


def _shape(values: list[torch.Tensor]) -> str:
    return ", ".join("x".join(str(size) for size in value.shape) for value in values)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [item for item in value if isinstance(item, torch.Tensor)] if isinstance(value, (list, tuple)) else []
