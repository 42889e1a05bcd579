"""What one fake run of a job shows: every compiled graph once, and the operators outside of them."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from neffcache.graph.neuron import findings
from neffcache.graph.payload import pack
from neffcache.graph.text import GraphText, canonical_text
from neffcache.graph.uncacheable import Uncacheable
from neffcache.key.canonical import digest
from neffcache.trace import torch_fakes, torch_internals


@dataclass
class CapturedGraph:
    """One flat graph: `text` and `settings` are what its compile key is made of, `payload` what compiles."""

    kind: str
    name: str
    phase: str
    text: GraphText
    settings: dict[str, Any]
    payload: bytes | None
    reason: str = ""

    @property
    def data_dependent(self) -> bool:
        """Whether sizes in it are known only when it runs, each and every symbolic one."""
        return self.text.data_dependent

    def identity(self) -> tuple[str, str]:
        return self.text.sha256, digest(self.settings)


@dataclass
class Capture:
    """Collects the graphs of a run; equal graphs (text and settings) are kept once, in the order of first use.

    With `inspect` each is also looked at for what TorchNeuron cannot take: `neuron`.
    """

    payloads: bool = True
    inspect: bool = False
    phase: str = "first_step"
    graphs: dict[tuple[str, str], CapturedGraph] = field(default_factory=dict)
    calls: int = 0
    uncacheable: dict[str, str] = field(default_factory=dict)
    neuron: list[dict[str, Any]] = field(default_factory=list)

    def compiler(
        self, kind: str, gm: torch.fx.GraphModule, inputs: Sequence[Any], settings: torch_internals.Settings
    ) -> Callable[..., Any]:
        """A compiler for `torch_internals.aot_backend`: keeps the graph, returns a callable of shapes only.

        A graph that cannot be written down is kept by name, with the reason.
        """
        self.calls += 1
        name = torch_internals.compile_name(gm, kind)
        try:
            text, using = canonical_text(gm), settings()
        except Uncacheable as fault:
            self.uncacheable[name] = fault.message
            if self.inspect:
                self.neuron += [found.to_json(name) for found in findings(gm)]
            return shapes_only(gm)
        identity = text.sha256, digest(using)
        if identity not in self.graphs:
            if self.inspect:
                self.neuron += [found.to_json(name) for found in findings(gm)]
            payload, reason = self._payload(gm, text)
            self.graphs[identity] = CapturedGraph(kind, name, self.phase, text, using, payload, reason)
        return shapes_only(gm)

    def _payload(self, gm: torch.fx.GraphModule, text: GraphText) -> tuple[bytes | None, str]:
        """The graph as bytes, or why this toolchain cannot compile it apart."""
        if not self.payloads:
            return None, ""
        if text.data_dependent:
            return None, "sizes in it depend on data, so it runs operator by operator"
        if text.symbolic:
            return None, "its shapes are not static, and the host toolchain compiles static shapes only"
        try:
            return pack(gm, text), ""
        except Uncacheable as fault:
            return None, fault.message


def shapes_only(gm: torch.fx.GraphModule) -> Callable[[list[Any]], list[Any]]:
    """A boxed callable with the outputs' shapes, strides and types but no arithmetic."""
    nodes = list(gm.graph.nodes)
    inputs = {node: index for index, node in enumerate(n for n in nodes if n.op == "placeholder")}
    outputs = list(nodes[-1].args[0])

    def make(value: Any, given: list[Any]) -> Any:
        if not isinstance(value, torch.fx.Node):
            return value
        if value in inputs:
            return given[inputs[value]]
        meta = value.meta.get("val")
        if isinstance(meta, torch.Tensor):
            return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=meta.device)
        return meta

    def run(given: list[Any]) -> list[Any]:
        with not_eager():
            results = [make(value, given) for value in outputs]
        given.clear()
        return results

    return run


_ours = threading.local()


@contextlib.contextmanager
def not_eager() -> Iterator[None]:
    """Operators in here are the tracer's own, no part of the program."""
    _ours.depth = getattr(_ours, "depth", 0) + 1
    try:
        yield
    finally:
        _ours.depth -= 1


_NOT_OPERATORS = ("prim", "profiler")
_DEVICE: Any = torch.ops.prim.device.default


class EagerOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that run outside compiled graphs: name, shapes, dtypes and scalars of each.

    "Not captured": no artifact of the host toolchain covers them; on Neuron each is a NEFF of its own.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: collections.Counter[str] = collections.Counter()

    @classmethod
    def is_infra_mode(cls) -> bool:
        # Dynamo refuses to compile under a mode that is not infrastructure.
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _NOT_OPERATORS:
            # C++ asks every FakeTensor for its device, twice for each operator: not worth another dispatch.
            device = torch_fakes.device(args[0]) if func is _DEVICE else None
            return device or func(*args, **(kwargs or {}))
        for kind in types:
            if issubclass(kind, DTensor):
                return NotImplemented  # seen again as the local operators that it becomes
        if torch_internals.compiling():
            return func(*args, **(kwargs or {}))
        if not getattr(_ours, "depth", 0):
            self.seen[eager_text(func, args, kwargs or {})] += 1
        answer = torch_fakes.known(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if answer is None else answer[0]


def eager_text(func: Any, args: Any, kwargs: Any) -> str:
    """One line for an eager operator call: overload, then shapes, dtypes and scalars; no values of tensors."""

    def show(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if isinstance(value, (list, tuple)):
            shown = [show(item) for item in value]
            if len(shown) > 4 and len(set(shown)) == 1:
                return f"[{shown[0]} x {len(shown)}]"
            return "[" + ", ".join(shown) + "]"
        if value is None or isinstance(value, (bool, int, float, torch.dtype, torch.layout, torch.memory_format)):
            return repr(value)
        if isinstance(value, torch.device):
            return value.type
        if isinstance(value, str):
            return "str"  # names of process groups are counters
        return type(value).__qualname__

    given = [show(value) for value in args] + [f"{name}={show(value)}" for name, value in sorted(kwargs.items())]
    return f"{func}({', '.join(given)})"
