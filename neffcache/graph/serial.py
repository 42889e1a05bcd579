"""Bytes of a lean graph, by torch's own GraphPickler (private; checked on torch 2.14).

These bytes live for one warm only, in a directory of their own, between the process that traced and the one that
compiles; no store holds them.
"""

from __future__ import annotations

from typing import cast

import torch


def dump_graph(module: torch.fx.GraphModule) -> bytes:
    from torch.fx._graph_pickler import GraphPickler, Options

    return GraphPickler.dumps(module, Options(ops_filter=None))


def load_graph(data: bytes) -> torch.fx.GraphModule:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx._graph_pickler import GraphPickler
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    module = cast(torch.fx.GraphModule, GraphPickler.loads(data, FakeTensorMode(shape_env=ShapeEnv())))
    module.recompile()
    return module
