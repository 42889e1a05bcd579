"""What a node calls: an operator by its overload, a higher-order operator of the closed list, a pinned function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from neffcache.graph.callables import describe
from neffcache.graph.torch_internals import is_higher_order, is_op_overload, is_op_packet
from neffcache.graph.uncacheable import Uncacheable

# Operators whose meaning the version of torch fixes. Others may be redefined under the same name: their schema counts.
TORCH_NAMESPACES = frozenset({"aten", "prims", "prim", "_c10d_functional", "_c10d_functional_autograd", "inductor"})

GROUP_NAMESPACES = TORCH_NAMESPACES | {"_dtensor", "symm_mem", "c10d_functional"}

# Higher-order operators whose whole meaning is in their operands. The others hold Python objects or numbers that point
# into tables of this process (a Triton kernel is called by its index): equal texts would not mean equal code.
HIGHER_ORDER = frozenset(
    {
        "associative_scan",
        "auto_functionalized",
        "auto_functionalized_v2",
        "cond",
        "flex_attention",
        "flex_attention_backward",
        "foreach_map",
        "hints_wrapper",
        "inline_asm_elementwise",
        "invoke_subgraph",
        "map_impl",
        "out_dtype",
        "run_and_save_rng_state",
        "run_const_graph",
        "run_with_rng_state",
        "scan",
        "strict_mode",
        "switch",
        "tag_activation_checkpoint",
        "while_loop",
        "while_loop_stack_output",
        "with_effects",
        "wrap",
        "wrap_with_autocast",
        "wrap_with_set_grad_enabled",
    }
)


def operator_text(operator: Any) -> str:
    """An operator as a value or a target; Uncacheable for a higher-order one that is not on the closed list."""
    if is_op_overload(operator):
        if operator.namespace in TORCH_NAMESPACES:
            return str(operator)
        tags = ",".join(sorted(str(tag) for tag in operator.tags))
        return f"{operator} <{operator._schema} [{tags}]>"
    if is_op_packet(operator):
        return f"packet({operator})"
    name = operator.name()
    if name not in HIGHER_ORDER or not type(operator).__module__.startswith("torch."):
        raise Uncacheable(f"the higher-order operator {name}, whose meaning is not all in its operands")
    return f"higher_order.{name}"


def is_operator(value: object) -> bool:
    return is_op_overload(value) or is_op_packet(value) or is_higher_order(value)


def target_text(target: Any, value: Callable[[Any], str]) -> str:
    return operator_text(target) if is_operator(target) else describe(target, value)


def argument_names(target: Any, args: tuple[Any, ...]) -> list[str]:
    """The schema's name of each positional argument, "" where there is none.

    A higher-order operator that runs another operator takes that one's arguments after it.
    """
    if is_op_overload(target):
        names = [argument.name for argument in target._schema.arguments]
        return (names + [""] * len(args))[: len(args)]
    for place, arg in enumerate(args):
        if is_op_overload(arg) and is_higher_order(target):
            return [""] * (place + 1) + argument_names(arg, args[place + 1 :])
    return [""] * len(args)


def names_group(argument: str) -> bool:
    """Whether a string argument of this name may be the name of a process group."""
    return "group" in argument or argument in ("pg", "pg_name")


def must_be_group(target: Any, argument: str) -> bool:
    """Whether torch itself takes the name of a process group here, so that an unknown name is no mere string."""
    if argument not in ("group", "group_name"):
        return False
    return not is_op_overload(target) or target.namespace in GROUP_NAMESPACES


def map_group_names(node: fx.Node, rename: Callable[[str], str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and keywords of a call with `rename` applied to every string that stands in the place of a group name.

    The text finds group names by the same rule, so whoever renames groups in a graph renames all that the text shows.
    """

    def renamed(name: str, value: Any) -> Any:
        return rename(value) if isinstance(value, str) and names_group(name) else value

    names = argument_names(node.target, node.args)
    args = tuple(renamed(name, value) for name, value in zip(names, node.args, strict=True))
    return args, {name: renamed(name, value) for name, value in node.kwargs.items()}
