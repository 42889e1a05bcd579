"""The canonical text of a flat AOTAutograd graph. Equal text means: a compiler given this graph makes the same code.

One line a node, in order, numbered instead of named; sub-graphs stand in braces where they are first used. What the
text does not show (names, stack traces, every other entry of `node.meta`) must not reach the compiler.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from neffcache.graph import torch_internals
from neffcache.graph.difference import first_difference
from neffcache.graph.groups import GroupTable, GroupUse
from neffcache.graph.ops import argument_names, must_be_group, names_group, target_text
from neffcache.graph.symbols import SymbolTable
from neffcache.graph.uncacheable import Uncacheable
from neffcache.graph.values import Values, string_text

__all__ = ["FORMAT", "GraphText", "GroupUse", "Uncacheable", "canonical_text", "first_difference"]

FORMAT = "neffcache graph 1"


@dataclass(frozen=True)
class GraphText:
    """A graph as text. `nodes` counts those of sub-graphs too; `inputs` are the placeholders, unused ones included."""

    text: str
    sha256: str
    nodes: int
    inputs: int
    groups: tuple[GroupUse, ...]
    symbolic: bool

    @property
    def data_dependent(self) -> bool:
        """Whether sizes are symbolic and every symbol is unbacked: what a tensor holds decides, at each call anew.

        The text then holds no size that data gave, so neither does a key.
        """
        header = itertools.takewhile(lambda line: not line.startswith("%"), self.text.splitlines())
        symbols = [line for line in header if line.startswith("symbol ")]
        return bool(symbols) and all(" unbacked" in line for line in symbols)


def canonical_text(gm: fx.GraphModule, *, resolve_group: Callable[[str], tuple[int, ...]] | None = None) -> GraphText:
    """Write `gm` down. `resolve_group` gives the ranks of a process group by name, LookupError when there is none;
    by default torch.distributed is asked. Raises Uncacheable with the node and the reason.
    """
    with torch_internals.modes_off():
        symbols = SymbolTable()
        contents: dict[int, tuple[torch.Tensor, str]] = {}
        writer = _Writer(symbols, resolve_group or torch_internals.group_ranks, contents)
        lines = writer.graph(gm)
        symbols.settle()
        if symbols.used:
            # Names of symbols depend on all of the graph, so such a graph is written again with the names known.
            writer = _Writer(symbols, resolve_group or torch_internals.group_ranks, contents)
            lines = writer.graph(gm)
        header = symbols.header()
    inputs = sum(node.op == "placeholder" for node in gm.graph.nodes)
    text = "\n".join([FORMAT, f"inputs {inputs}", *header, *lines]) + "\n"
    return GraphText(
        text=text,
        sha256=hashlib.sha256(text.encode()).hexdigest(),
        nodes=writer.nodes,
        inputs=inputs,
        groups=tuple(sorted(writer.groups.uses.values(), key=lambda use: (use.slot, use.name))),
        symbolic=bool(symbols.names),
    )


@dataclass
class _Writer:
    """One pass over a graph and its sub-graphs."""

    symbols: SymbolTable
    resolve: Callable[[str], tuple[int, ...]]
    contents: dict[int, tuple[torch.Tensor, str]]
    nodes: int = 0
    groups: GroupTable = field(init=False)
    values: Values = field(init=False)
    _inlined: dict[int, int] = field(default_factory=dict)
    _depth: int = 0

    def __post_init__(self) -> None:
        self.groups = GroupTable(self.resolve)
        self.values = Values(self.symbols, self.groups, self._inline, _contents=self.contents)

    def graph(self, gm: fx.GraphModule) -> list[str]:
        outer, self.values.nodes = self.values.nodes, {}
        lines = []
        for node in gm.graph.nodes:
            self.nodes += 1
            try:
                line = self._line(gm, node)
            except Uncacheable as refusal:
                raise refusal.at(node.name) from refusal.__cause__
            if node.op == "output":
                lines.append(line)
            else:
                self.values.nodes[node] = name = f"%{len(self.values.nodes)}"
                lines.append(f"{name} = {line}")
        self.values.nodes = outer
        return lines

    def _inline(self, gm: fx.GraphModule) -> str:
        """The sub-graph in braces, or its number when it stands further up."""
        if id(gm) in self._inlined:
            return f"graph#{self._inlined[id(gm)]}"
        number = self._inlined[id(gm)] = len(self._inlined)
        self._depth += 1
        body = "\n".join("  " * self._depth + line for line in self.graph(gm))
        self._depth -= 1
        return f"graph#{number} {{\n{body}\n{'  ' * self._depth}}}"

    def _line(self, gm: fx.GraphModule, node: fx.Node) -> str:
        if node.op == "placeholder":
            return self._placeholder(node)
        if node.op == "output":
            return f"output {self.values.text(node.args[0])}"
        if node.op == "get_attr":
            return f"get {self.values.text(_attribute(gm, str(node.target)))}"
        if node.op == "call_function":
            return f"{self._call(node)} : {self._result(node)}"
        raise Uncacheable(f"a {node.op} node, which a flat graph does not have")

    def _placeholder(self, node: fx.Node) -> str:
        if node.args:
            raise Uncacheable("an input with a default value")
        if "val" not in node.meta:
            if self._depth:
                return "input ?"  # operands of the call that runs the sub-graph say what it is
            raise Uncacheable("an input without metadata")
        value = node.meta["val"]
        real = torch_internals.unwrapped(value)
        if real is not value and not node.users and not isinstance(real, torch.Generator):
            # Nobody reads this mesh or group: it takes a place in the call and nothing else.
            return f"input unused {type(real).__module__}.{type(real).__qualname__}"
        return f"input {self.values.form(value)}"

    def _result(self, node: fx.Node) -> str:
        return self.values.form(node.meta["val"]) if "val" in node.meta else "?"

    def _call(self, node: fx.Node) -> str:
        def argument(name: str, value: Any) -> str:
            if names_group(name):
                return self.values.named(value, must=must_be_group(node.target, name))
            return self.values.text(value)

        names = argument_names(node.target, node.args)
        parts = [argument(name, value) for name, value in zip(names, node.args, strict=True)]
        for name in sorted(node.kwargs):
            shown = name if name.isidentifier() else string_text(name)
            parts.append(f"{shown}={argument(name, node.kwargs[name])}")
        return f"{target_text(node.target, self.values.text)}({', '.join(parts)})"


def _attribute(gm: fx.GraphModule, path: str) -> Any:
    found: Any = gm
    for part in path.split("."):
        if not hasattr(found, part):
            raise Uncacheable(f"the attribute {path} does not exist")
        found = getattr(found, part)
    return found
