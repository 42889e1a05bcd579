"""No false hits: pairs of small graphs that differ in exactly one thing never share a key."""

from __future__ import annotations

import dataclasses
import functools
import operator
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

from neffcache.graph.text import canonical_text
from tests.graph.building import Build, Sizes, aten, mesh
from tests.graph.functions import adder

PAIRS = 5_000

UNARY = (aten.neg.default, aten.relu.default, aten.abs.default, aten.exp.default, aten.sin.default, aten.cos.default)
BINARY = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.maximum.default)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.complex64)
COLLECTIVE = torch.ops._c10d_functional.all_reduce.default


@dataclass(frozen=True)
class Spec:
    """Everything a graph is made from. Equal specs make equal graphs; any other spec means other code."""

    ops: tuple[Any, ...]
    operands: tuple[tuple[int, int], ...]
    argument: Any
    constant: tuple[str, torch.dtype, tuple[float, ...]]
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    span: tuple[int, int] | None
    group: tuple[int, ...]
    mesh: tuple[tuple[int, ...], tuple[str, ...], tuple[int, ...]]
    closure: Any
    bound: Any
    attribute: Any

    def key(self) -> str:
        """repr tells 1, 1.0, True and "1" apart, as the text must."""
        return repr(self)


def build(spec: Spec) -> str:
    """The key of the spec's graph."""
    made = Build()
    x = made.input(
        torch.empty(1, dtype=spec.dtype, device="meta").as_strided(spec.shape, spec.stride, spec.offset), name="x"
    )
    nodes = [x]
    if spec.span is not None:
        nodes.append(made.input(Sizes().backed("n", hint=spec.span[0], span=spec.span), name="n"))
    kind, dtype, content = spec.constant
    tensor = torch.tensor(content[0] if kind == "0-dim" else content, dtype=dtype)
    nodes += [made.get(tensor), made.get(spec.attribute, name="attribute")]
    for op, (left, right) in zip(spec.ops, spec.operands, strict=True):
        args = (nodes[left % len(nodes)],) if op in UNARY else (nodes[left % len(nodes)], nodes[right % len(nodes)])
        nodes.append(made.call(op, *args))
    nodes.append(made.call(aten.add.Tensor, nodes[-1], spec.argument))
    nodes.append(made.call(COLLECTIVE, nodes[-1], "sum", "group"))
    nodes.append(
        made.call(torch.ops.higher_order.hints_wrapper, nodes[-1], functools.partial(adder(spec.closure), spec.bound))
    )
    nodes.append(made.call(operator.getitem, nodes[-1], mesh_of(*spec.mesh)))
    return canonical_text(made.output(nodes[-1]), resolve_group=lambda _: spec.group).sha256


@functools.cache
def mesh_of(sizes: tuple[int, ...], names: tuple[str, ...], ranks: tuple[int, ...]) -> DeviceMesh:
    return mesh(torch.tensor(ranks).reshape(sizes).tolist(), names)


def normal(ranks: list[int]) -> tuple[int, ...]:
    """Membership as it counts: from rank 0."""
    return tuple(rank - min(ranks) for rank in ranks)


leaf = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=4), st.binary(max_size=3),
    st.complex_numbers(allow_nan=False), st.sampled_from(DTYPES),
)  # fmt: skip
argument = st.recursive(
    leaf,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.builds(slice, inner, inner, inner)
    ),
    max_leaves=4,
)
shape = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)
group = st.lists(st.integers(0, 15), min_size=1, max_size=6, unique=True).map(normal)
span = st.tuples(st.integers(2, 9), st.integers(10, 999))
MESH_SIZES = ((6,), (2, 3), (3, 2), (1, 6))


@st.composite
def meshes(draw: st.DrawFn) -> Any:
    sizes = draw(st.sampled_from(MESH_SIZES))
    names = draw(st.permutations(["dp", "tp", "cp"]))[: len(sizes)]
    return sizes, tuple(names), tuple(draw(st.permutations(range(6))))


@st.composite
def constants(draw: st.DrawFn) -> Any:
    kind = draw(st.sampled_from(["0-dim", "1-dim"]))
    dtype = draw(st.sampled_from((torch.float64, torch.int64)))
    number = st.floats(allow_nan=False) if dtype.is_floating_point else st.integers(-(2**40), 2**40)
    return kind, dtype, tuple(draw(st.lists(number, min_size=1, max_size=1 if kind == "0-dim" else 5)))


ops = st.lists(st.sampled_from(UNARY + BINARY), min_size=1, max_size=4).map(tuple)
numbers = st.integers(0, 6)


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    chosen = draw(ops)
    sizes = draw(shape)
    return Spec(
        ops=chosen,
        operands=tuple((n, n + 1) for n in range(len(chosen))),
        argument=draw(leaf),
        constant=draw(constants()),
        dtype=draw(st.sampled_from(DTYPES)),
        shape=sizes,
        stride=tuple(range(1, len(sizes) + 1)),
        offset=0,
        # A shape environment is slow to make, so most graphs are static.
        span=draw(span) if draw(numbers) == 0 else None,
        group=draw(group),
        mesh=draw(meshes()),
        closure=draw(leaf),
        bound=draw(leaf),
        attribute=draw(leaf),
    )


def replaced_one(items: tuple[Any, ...], place: int, new: Any) -> tuple[Any, ...]:
    return tuple(new if index == place % len(items) else item for index, item in enumerate(items))


CHANGES: dict[str, st.SearchStrategy[Any]] = {
    "argument": argument,
    "constant": constants(),
    "dtype": st.sampled_from(DTYPES),
    "offset": st.integers(1, 99),
    "group": group,
    "mesh": meshes(),
    "closure": argument,
    "bound": argument,
    "attribute": argument,
}
KINDS = ("op", "stride", "shape", *CHANGES)


@st.composite
def pairs(draw: st.DrawFn) -> list[tuple[str, Spec, Spec]]:
    """For every kind of difference: its name, a graph, and the graph with that one thing changed."""
    base = draw(specs())
    spanned = dataclasses.replace(base, span=draw(span))
    place = draw(st.integers(0, 3))
    old = base.ops[place % len(base.ops)]
    op = draw(st.sampled_from([op for op in (UNARY if old in UNARY else BINARY) if op is not old]))
    made = [
        ("op", base, dataclasses.replace(base, ops=replaced_one(base.ops, place, op))),
        ("stride", base, dataclasses.replace(base, stride=replaced_one(base.stride, place, draw(st.integers(10, 99))))),
        ("shape", base, dataclasses.replace(base, shape=replaced_one(base.shape, place, draw(st.integers(6, 99))))),
        ("span", spanned, dataclasses.replace(spanned, span=draw(span))),
    ]
    made += [(what, base, dataclasses.replace(base, **{what: draw(new)})) for what, new in CHANGES.items()]
    return [pair for pair in made if pair[1].key() != pair[2].key()]


KINDS = ("op", "stride", "shape", "span", *CHANGES)


def test_five_thousand_pairs_that_differ_in_one_thing_share_no_key() -> None:
    tried: dict[str, int] = dict.fromkeys(KINDS, 0)
    spec_of: dict[str, str] = {}

    @settings(max_examples=PAIRS // 10, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(pairs())
    def check(made: list[tuple[str, Spec, Spec]]) -> None:
        if sum(tried.values()) >= PAIRS:
            return
        known: dict[str, str] = {}
        for what, *both in made:
            tried[what] += 1
            for spec in both:
                if spec.key() not in known:
                    known[spec.key()] = build(spec)
            assert len({known[spec.key()] for spec in both}) == 2, what
        # Beyond the pairs: no two of all the graphs share a key either.
        for spec_key, graph_key in known.items():
            assert spec_of.setdefault(graph_key, spec_key) == spec_key

    check()
    assert sum(tried.values()) >= PAIRS, tried
    assert min(tried.values()) > PAIRS // 20, tried
