"""Every private name of PyTorch that this room touches. Checked on torch 2.14; `probe` names what is missing."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from neffcache.errors import Unsupported
from neffcache.probing import find, missing

CHECKED = "2.14"

# Module, attribute path in it. Looked up at use, so that a missing name is a sentence and not an ImportError somewhere.
TOUCHED: tuple[tuple[str, str], ...] = (
    ("torch._ops", "OpOverload"),
    ("torch._ops", "OpOverloadPacket"),
    ("torch._ops", "HigherOrderOperator"),
    ("torch._subclasses.fake_tensor", "FakeTensor"),
    ("torch._library.fake_class_registry", "FakeScriptObject"),
    ("torch.utils._python_dispatch", "_disable_current_modes"),
    ("torch.fx.experimental.sym_node", "SymNode.expr"),
    ("torch.fx.experimental.symbolic_shapes", "ShapeEnv.replace"),
    ("torch.distributed.distributed_c10d", "_resolve_process_group"),
    ("torch._library.custom_ops", "OPDEFS"),
    ("torch._library.simple_registry", "singleton"),
    ("torch._C", "_dispatch_dump"),
)
REGISTRARS = tuple(f"torch.{name}" for name in ("library", "_library.custom_ops", "_library.triton"))
"""Modules that register operators for others; their files say nothing."""

# Attributes that a ShapeEnv has only once it is made.
SHAPE_ENV_TOUCHED = (
    "var_to_range",
    "backed_var_to_val",
    "var_to_hint_override",
    "size_like",
    "guards",
    "deferred_runtime_asserts",
)


def _missing(name: str) -> Unsupported:
    return missing(name, library="torch", version=torch.__version__, checked=CHECKED)


def _find(module: str, path: str) -> Any:
    """The object at `path` in `module`; Unsupported (exit 8) naming it when this torch has no such thing."""
    return find(module, path, library="torch", version=torch.__version__, checked=CHECKED)


def probe() -> None:
    """Look for everything in TOUCHED; raises Unsupported (exit 8) with the first name that is missing."""
    for module, path in TOUCHED:
        if not module.startswith("torch.distributed") or torch.distributed.is_available():
            _find(module, path)
    env = _find("torch.fx.experimental.symbolic_shapes", "ShapeEnv")()
    for name in SHAPE_ENV_TOUCHED:
        _env_attribute(env, name)


def is_op_overload(value: object) -> bool:
    return isinstance(value, _find("torch._ops", "OpOverload"))


def is_op_packet(value: object) -> bool:
    return isinstance(value, _find("torch._ops", "OpOverloadPacket"))


def is_higher_order(value: object) -> bool:
    return isinstance(value, _find("torch._ops", "HigherOrderOperator"))


def fake_tensor_type() -> type[torch.Tensor]:
    found: type[torch.Tensor] = _find("torch._subclasses.fake_tensor", "FakeTensor")
    return found


def unwrapped(value: object) -> object:
    """The real object behind the stand-in that tracing uses for meshes and process groups; else `value` itself."""
    if isinstance(value, _find("torch._library.fake_class_registry", "FakeScriptObject")):
        # The stand-in answers unknown attributes with an error of its own, so its slot is read directly.
        return object.__getattribute__(value, "real_obj")
    return value


@contextmanager
def modes_off() -> Iterator[None]:
    """Without ambient fake or proxy modes: compilers are called under them, and constants must be read for real."""
    with _find("torch.utils._python_dispatch", "_disable_current_modes")():
        yield


def group_ranks(name: str) -> tuple[int, ...]:
    """Global ranks of the process group registered as `name`, in group order. LookupError when there is none."""
    if not torch.distributed.is_available():
        raise LookupError(name)
    resolve = _find("torch.distributed.distributed_c10d", "_resolve_process_group")
    try:
        return tuple(torch.distributed.get_process_group_ranks(resolve(name)))
    except (RuntimeError, ValueError, KeyError) as error:
        raise LookupError(f"no process group is called {name!r}") from error


@dataclass(frozen=True)
class Symbolic:
    """What a SymInt, SymFloat or SymBool stands for: a sympy expression and the environment of its symbols."""

    expr: Any
    env: Any


def symbolic(value: torch.SymInt | torch.SymFloat | torch.SymBool) -> Symbolic | None:
    """None for symbolic numbers that are no expression, such as the ragged size of a nested tensor."""
    node = value.node
    env = getattr(node, "shape_env", None)
    if env is None or not isinstance(node, _find("torch.fx.experimental.sym_node", "SymNode")):
        return None
    return Symbolic(node.expr, env)


def _env_attribute(env: Any, name: str) -> Any:
    if not hasattr(env, name):
        raise _missing(f"ShapeEnv.{name}")
    return getattr(env, name)


@dataclass(frozen=True)
class SymbolFacts:
    """What the shape environment knows about one symbol. `hint` is None for an unbacked one."""

    lower: Any
    upper: Any
    hint: Any
    override: Any
    size_like: bool


def symbol_facts(env: Any, symbol: Any) -> SymbolFacts | None:
    """None when the environment never heard of the symbol."""
    span = _env_attribute(env, "var_to_range").get(symbol)
    if span is None:
        return None
    return SymbolFacts(
        lower=span.lower,
        upper=span.upper,
        hint=_env_attribute(env, "backed_var_to_val").get(symbol),
        override=_env_attribute(env, "var_to_hint_override").get(symbol),
        size_like=symbol in _env_attribute(env, "size_like"),
    )


def assumptions(env: Any) -> list[Any]:
    """Guards and runtime asserts as sympy booleans, with known equalities put in, in no particular order."""
    facts = [guard.expr for guard in _env_attribute(env, "guards")]
    for asserts in _env_attribute(env, "deferred_runtime_asserts").values():
        facts += [item.expr for item in asserts]
    return [env.replace(fact) for fact in facts]


def defining_module(operator: Any) -> str:
    """The module of Python whose import defines an operator; "" where nothing tells (C++, or torch itself).

    `custom_op` of torch keeps the function that it wraps; the dispatcher keeps the file that made the Library, and
    the registry of fake implementations the file of each, as `FILE:LINE`.
    """
    name = operator._schema.name
    definition = _find("torch._library.custom_ops", "OPDEFS").get(name)
    if definition is not None:
        return str(definition._init_fn.__module__)
    registered = re.search(r"^debug: registered at (.+)$", _find("torch._C", "_dispatch_dump")(name), re.MULTILINE)
    entry = _find("torch._library.simple_registry", "singleton").get(name)
    kernel = None if entry is None else entry.fake_impl.kernel
    places = [registered[1] if registered else "", "" if kernel is None else str(kernel.source)]
    files = {getattr(module, "__file__", None): name for name, module in list(sys.modules.items())}
    found = (files.get(place.rpartition(":")[0], "") for place in places)
    return next((module for module in found if module and module not in REGISTRARS), "")
