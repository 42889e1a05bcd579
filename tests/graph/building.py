"""Small flat graphs, made by hand as AOTAutograd would hand them over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._library.fake_class_registry import FakeScriptObject
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.value_ranges import ValueRanges

from neffcache.graph.text import GraphText, canonical_text

aten = torch.ops.aten
GROUPS = {"0": tuple(range(8)), "tp": (0, 1, 2, 3), "tp_again": (0, 1, 2, 3), "tp_next": (4, 5, 6, 7), "dp": (0, 4)}


def resolve(name: str) -> tuple[int, ...]:
    return GROUPS[name]


class Build:
    """A graph under construction; `output` ends it."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.attributes: dict[str, Any] = {}

    def input(self, value: Any = None, *, name: str = "x") -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(2, 3) if value is None else value
        return node

    def call(self, target: Callable[..., Any], *args: Any, val: Any = None, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = torch.empty(2, 3) if val is None else val
        return node

    def get(self, value: Any, *, name: str = "constant") -> fx.Node:
        self.attributes[name] = value
        node = self.graph.get_attr(name)
        if isinstance(value, torch.Tensor):
            node.meta["val"] = value
        return node

    def output(self, *results: Any) -> fx.GraphModule:
        self.graph.output(results)
        # Set from outside, because a GraphModule generates Python, which not every argument here has a spelling in.
        gm = fx.GraphModule(torch.nn.Module(), fx.Graph())
        gm._graph = self.graph
        for name, value in self.attributes.items():
            setattr(gm, name, value)
        return gm


def write(gm: fx.GraphModule) -> GraphText:
    return canonical_text(gm, resolve_group=resolve)


def with_argument(value: Any) -> GraphText:
    """A graph that differs from another such graph in one argument only."""
    build = Build()
    x = build.input()
    return write(build.output(build.call(aten.add.Tensor, x, value)))


def with_input(value: Any) -> GraphText:
    build = Build()
    x = build.input(value)
    return write(build.output(build.call(aten.neg.default, x)))


def with_constant(value: Any) -> GraphText:
    build = Build()
    x = build.input()
    return write(build.output(build.call(aten.add.Tensor, x, build.get(value))))


def mesh(ranks: Any, names: tuple[str, ...] | None = None, device: str = "cpu") -> DeviceMesh:
    """A mesh that needs no process group."""
    array = torch.tensor(ranks)
    return DeviceMesh(device, array, mesh_dim_names=names, _init_backend=False, _rank=int(array.min()))


def opaque(value: Any) -> FakeScriptObject:
    """`value` as tracing sees it."""
    return FakeScriptObject(value, "stand-in", value)


class Sizes:
    """Symbolic sizes of one shape environment. Their original names follow from `sources`."""

    def __init__(self) -> None:
        self.env = ShapeEnv()

    def backed(self, source: str, hint: int = 7, span: tuple[int, int] | None = None) -> torch.SymInt:
        origin = ConstantSource(source)
        symbol = self.env.create_symbol(hint, origin, DimDynamic.DYNAMIC)
        if span is not None:
            self.env.var_to_range[symbol] = ValueRanges(*span)
        made = self.env.create_symintnode(symbol, hint=hint, source=origin)
        assert isinstance(made, torch.SymInt)
        return made

    def unbacked(self) -> torch.SymInt:
        return self.env.create_unbacked_symint()

    def fake(self, shape: Sequence[int | torch.SymInt], stride: Sequence[int | torch.SymInt]) -> torch.Tensor:
        with FakeTensorMode(shape_env=self.env):
            return torch.empty_strided(shape, stride)
