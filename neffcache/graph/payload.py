"""A graph as a compiler gets it: lean, detached from its process, as bytes.

A captured graph carries what only its process can understand: opaque inputs (meshes, process groups), names of
process groups, metadata of Dynamo. `lean` keeps what compiles: tensor inputs that are used, operators, arguments.
Everything else an artifact needs is put back by `Binding` when it runs. What is stripped is in no generated code,
so nothing that reaches the compiler is missing from the text.
"""

from __future__ import annotations

import importlib
import json
import struct
from dataclasses import dataclass
from typing import Any

import torch

from neffcache.graph.ops import TORCH_NAMESPACES, map_group_names
from neffcache.graph.serial import dump_graph, load_graph
from neffcache.graph.text import GraphText
from neffcache.graph.torch_internals import defining_module, group_ranks, is_op_overload
from neffcache.graph.uncacheable import Uncacheable

MAGIC = b"neffcache payload 2\n"


@dataclass(frozen=True)
class Binding:
    """How the arguments and results of the captured graph map to those of its lean form.

    inputs: positions of the captured graph's inputs that the lean graph takes.
    outputs: per output ["lean", i], ["input", i] (passed through) or ["constant", JSON].
    groups: alias in the lean graph -> slot of the group in `GraphText.groups`.
    """

    inputs: tuple[int, ...]
    outputs: tuple[tuple[str, Any], ...]
    groups: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        return {
            "inputs": list(self.inputs),
            "outputs": [list(entry) for entry in self.outputs],
            "groups": self.groups,
        }

    @staticmethod
    def from_json(value: dict[str, Any]) -> Binding:
        return Binding(
            tuple(value["inputs"]), tuple((kind, what) for kind, what in value["outputs"]), dict(value["groups"])
        )


def alias(text: GraphText, slot: int) -> str:
    """The name under which an artifact asks for its n-th process group; bound to a real group when it is loaded."""
    return f"neffcache.{text.sha256[:24]}.{slot}"


def lean(gm: torch.fx.GraphModule, text: GraphText) -> tuple[torch.fx.GraphModule, Binding]:
    """The part of a flat graph that compiles, and how to call it in the graph's place."""
    aliases = {use.name: alias(text, use.slot) for use in text.groups}
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    nodes = list(gm.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    inputs: list[int] = []
    for index, node in enumerate(placeholders):
        used = any(user.op != "output" for user in node.users)
        value = node.meta.get("val")
        if used and isinstance(value, (torch.Tensor, torch.SymInt)):
            copies[node] = graph.placeholder(f"a{len(inputs)}")
            copies[node].meta = {"val": value}
            inputs.append(index)
        elif used:
            raise Uncacheable(
                f"input {index} of the graph is a {type(value).__qualname__} that an operator uses",
                node=node.name,
            )
    for node in nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.op == "call_function" and any(n not in copies for n in node.all_input_nodes):
            raise Uncacheable(f"{node.target} takes an opaque input", node=node.name)
        copies[node] = graph.node_copy(node, lambda old: copies[old])
        copies[node].meta = {"val": node.meta["val"]} if "val" in node.meta else {}
        copies[node].name = f"n{len(copies)}"
        if node.op == "call_function":
            copies[node].args, copies[node].kwargs = map_group_names(copies[node], lambda name: aliases.get(name, name))
    position = {node: index for index, node in enumerate(placeholders)}
    outputs: list[tuple[str, Any]] = []
    results: list[torch.fx.Node] = []
    for value in nodes[-1].args[0]:
        if not isinstance(value, torch.fx.Node):
            json.dumps(value)  # constants of a flat graph are numbers or None
            outputs.append(("constant", value))
        elif value in position:
            outputs.append(("input", position[value]))
        else:
            outputs.append(("lean", len(results)))
            results.append(copies[value])
    graph.output(tuple(results))
    module = torch.fx.GraphModule(_attributes(gm, graph), graph, class_name="Lean")
    module.recompile()
    return module, Binding(tuple(inputs), tuple(outputs), {alias(text, use.slot): use.slot for use in text.groups})


def _attributes(gm: torch.fx.GraphModule, graph: torch.fx.Graph) -> dict[str, Any]:
    """The constants and sub-graphs that `graph` takes from `gm`, by name; sub-graphs are made lean too."""
    found: dict[str, Any] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            value: Any = gm
            for name in str(node.target).split("."):
                value = getattr(value, name)
            found[str(node.target)] = _lean_subgraph(value, node) if isinstance(value, torch.fx.GraphModule) else value
    return found


def _lean_subgraph(gm: torch.fx.GraphModule, owner: torch.fx.Node) -> torch.fx.GraphModule:
    """A sub-graph without what its process put beside the operators.

    Raises Uncacheable for one that names process groups or brings settings of its own: neither is carried over.
    """
    if gm.meta:
        raise Uncacheable(f"its sub-graph brings settings of its own ({', '.join(map(str, gm.meta))})", node=owner.name)
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in gm.graph.nodes:
        copies[node] = graph.node_copy(node, lambda old: copies[old])
        copies[node].meta = {"val": node.meta["val"]} if "val" in node.meta else {}
        if node.op == "call_function":
            named: list[str] = []
            map_group_names(node, lambda name, named=named: named.append(name) or name)  # type: ignore[misc]
            if named:
                raise Uncacheable("a process group inside of a sub-graph", node=node.name)
    module = torch.fx.GraphModule(_attributes(gm, graph), graph, class_name="LeanSubgraph")
    module.recompile()
    return module


def _relative(ranks: tuple[int, ...]) -> list[int]:
    return [rank - min(ranks) for rank in ranks]


def defining_modules(module: torch.fx.GraphModule) -> list[str]:
    """Modules that another process must import so that this graph's operators exist, sub-graphs included.

    Raises Uncacheable for an operator that the program itself defines: nobody else can import that.
    """
    found: set[str] = set()

    def note(value: Any) -> Any:
        if is_op_overload(value) and value.namespace not in TORCH_NAMESPACES:
            name = defining_module(value)
            if name == "__main__":
                raise Uncacheable(f"{value} is defined in __main__, which a compile worker cannot import")
            found.add(name)
        return value

    for inner in module.modules():
        for node in inner.graph.nodes if isinstance(inner, torch.fx.GraphModule) else ():
            note(node.target)
            torch.fx.node.map_aggregate((node.args, node.kwargs), note)
    return sorted(found - {""})


def pack(gm: torch.fx.GraphModule, text: GraphText) -> bytes:
    """Bytes from which another process can compile this graph: binding, groups, operators' modules, the lean graph."""
    module, binding = lean(gm, text)
    head = {
        "binding": binding.to_json(),
        "groups": {alias(text, use.slot): _relative(group_ranks(use.name)) for use in text.groups},
        "modules": defining_modules(module),
    }
    header = json.dumps(head).encode()
    return MAGIC + struct.pack("<Q", len(header)) + header + dump_graph(module)


@dataclass(frozen=True)
class Payload:
    """An unpacked graph: `ranks` of each group alias are relative to the group's lowest rank."""

    module: torch.fx.GraphModule
    binding: Binding
    groups: dict[str, tuple[int, ...]]


def unpack(data: bytes) -> Payload:
    """The graph of `pack`, once the modules that define its operators are imported.

    ValueError for bytes that are none, ImportError for a module that is not here.
    """
    if not data.startswith(MAGIC):
        raise ValueError("not a neffcache graph payload")
    (length,) = struct.unpack_from("<Q", data, len(MAGIC))
    start = len(MAGIC) + 8
    head = json.loads(data[start : start + length])
    for name in head["modules"]:
        importlib.import_module(name)
    return Payload(
        load_graph(data[start + length :]),
        Binding.from_json(head["binding"]),
        {name: tuple(ranks) for name, ranks in head["groups"].items()},
    )
