"""Each kind of value has its own text: two values that differ never share one, and the same value always has one."""

from __future__ import annotations

import enum
import functools
import math
import operator
from typing import Any

import pytest
import torch
from torch import fx
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard
from torch.fx.immutable_collections import immutable_dict, immutable_list

from neffcache.graph import values
from neffcache.graph.text import Uncacheable
from tests.graph.building import Build, Sizes, aten, mesh, opaque, with_argument, with_constant, with_input, write

pytestmark = [pytest.mark.fast, pytest.mark.filterwarnings("ignore:.*(quantized|nested):UserWarning")]


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Count(enum.IntEnum):
    ONE = 1


class Word(str):
    pass


# Per kind: values that must all differ from each other.
DIFFERENT: dict[str, list[Any]] = {
    "scalars of other types": [None, True, 1, 1.0, 1 + 0j, "1", b"1", "None", "True", Count.ONE, [1], (1,), {1: 1}],
    "bool": [True, False],
    "int": [0, 1, -1, 2**63, 2**64],
    "float": [0.0, -0.0, 1.5, 1.5000000000000002, 1e300, math.nan, -math.nan, math.inf, -math.inf],
    "complex": [1j, -1j, complex(0.0, -1.0), complex(-0.0, 1.0), complex(math.nan, 1)],
    "str": ["", " ", "a", "A", 'a"', "a\\", "a\n", "a\\n", "ä", "a\u0308", "[1]"],
    "bytes": [b"", b"a", b"b", b"\x00"],
    "ellipsis": [..., "...", None],
    "dtype": [torch.float32, torch.float64, torch.bfloat16, "torch.float32"],
    "layout": [torch.strided, torch.sparse_coo],
    "memory format": [torch.contiguous_format, torch.channels_last, torch.preserve_format],
    "device": [torch.device("cpu"), torch.device("cuda"), torch.device("meta"), "cpu"],
    "range": [range(3), range(4), range(1, 3), range(0, 3, 2), [0, 1, 2]],
    "slice": [slice(None), slice(1), slice(1, None), slice(None, None, 1), slice(1, 2), slice(1.0)],
    "list": [[], [1], [1, 2], [2, 1], [[1], 2], [[1, 2]], [True], [None]],
    "tuple": [(), (1,), (1, 2), (2, 1), ((1,), 2), ((1, 2),)],
    "containers": [[1, 2], (1, 2), {1: 2}, slice(1, 2), range(1, 2)],
    "size": [torch.Size([]), torch.Size([1]), torch.Size([2])],
    "dict": [{}, {"a": 1}, {"a": 2}, {"b": 1}, {1: 1}, {"1": 1}, {1.0: 1}, {(1,): 1}, {"a": 1, "b": 2}],
    "enum": [Colour.RED, Colour.BLUE, Count.ONE],
    "operator": [aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.add, torch.ops.higher_order.cond],
    "callable": [operator.add, operator.sub, math.sqrt, torch.sym_max, int, functools.partial(operator.add, 1)],
    "placement": [Shard(0), Shard(1), Replicate(), Partial("sum"), Partial("avg")],
    "mesh": [
        mesh([0, 1, 2, 3]), mesh([[0, 1], [2, 3]]), mesh([[0, 2], [1, 3]]), mesh([0, 1]), mesh([0, 2, 4, 6]),
        mesh([0, 1, 2, 3], ("tp",)), mesh([0, 1, 2, 3], ("dp",)), mesh([0, 1, 2, 3], device="cuda"),
    ],
}  # fmt: skip

# Per kind: values that a compiler cannot tell apart.
SAME: dict[str, tuple[Any, Any]] = {
    "bool": (True, bool(1)),
    "int": (12345678901, int("12345678901")),
    "float": (0.1 + 0.2, 0.30000000000000004),
    "nan": (math.nan, float("nan")),
    "complex": (complex(1, 2), 1 + 2j),
    "str": ("group", "".join(["gr", "oup"])),
    "bytes": (b"ab", bytes([97, 98])),
    "ellipsis": (..., Ellipsis),
    "dtype": (torch.float32, torch.float),
    "layout": (torch.strided, torch.empty(1).layout),
    "memory format": (torch.channels_last, torch.channels_last),
    "device": (torch.device("cuda", 0), torch.device("cuda", 3)),
    "range": (range(3), range(*slice(3).indices(9))),
    "slice": (slice(1), slice(None, 1, None)),
    "list": ([1, 2], immutable_list([1, 2])),
    "tuple": ((1, "a"), (1, *"a")),
    "size": (torch.Size([1]), torch.empty(1).shape),
    "dict": ({"a": 1, "b": 2}, immutable_dict({"b": 2, "a": 1})),
    "enum": (Colour.RED, Colour(1)),
    "operator": (aten.add.Tensor, torch.ops.aten.add.Tensor),
    "callable": (functools.partial(operator.add, 1), functools.partial(operator.add, 1)),
    "placement": (Shard(1), Shard(1)),
    "mesh": (mesh([0, 1, 2, 3]), mesh([4, 5, 6, 7])),
    "wrapped mesh": (mesh([0, 1]), opaque(mesh([0, 1]))),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_values_that_differ_have_texts_that_differ(kind: str) -> None:
    texts = [with_argument(value).text for value in DIFFERENT[kind]]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("kind", SAME)
def test_equal_values_have_one_text(kind: str) -> None:
    left, right = SAME[kind]
    assert with_argument(left).sha256 == with_argument(right).sha256


def test_every_kind_of_the_closed_list_has_a_pair_that_differs_and_one_that_does_not() -> None:
    for types_seen in (
        {type(value) for group in DIFFERENT.values() for value in group},
        {type(value) for pair in SAME.values() for value in pair} | {type(None)},
    ):
        listed = set(values._PLAIN) | set(values._CONTAINERS)
        assert listed - {immutable_list, immutable_dict} <= types_seen


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (object(), "object"),
        ({1, 2}, "set"),
        (Word("a"), "Word"),
        (torch.Generator(), "Generator"),
        (torch.empty(2, device="meta"), "without data"),
        (Sizes().fake([2], [1]), "without data"),
        (torch.eye(2).to_sparse(), "layout"),
        (torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested"),
        (torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8), "quantised"),
        (torch._efficientzerotensor((2,)), "zeros"),
        ("\ud800", "Unicode"),
        ([1, [object()]], "object"),
        (torch.ops.higher_order.triton_kernel_wrapper_functional, "triton_kernel_wrapper_functional"),
        (type("Local", (), {}), "Local"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isascii() and value.isprintable() else "",
)
def test_a_value_outside_the_closed_list_is_refused_by_name(value: Any, word: str) -> None:
    with pytest.raises(Uncacheable, match=word) as refusal:
        with_argument(value)
    assert refusal.value.node == "add_tensor"
    assert refusal.value.exit_code == 8


def test_a_subclass_of_tensor_is_refused() -> None:
    class Mine(torch.Tensor):
        pass

    with pytest.raises(Uncacheable, match="Mine"):
        with_constant(torch.ones(2).as_subclass(Mine))


CONSTANTS = {
    "value": [torch.tensor(2.5), torch.tensor(2.25), torch.tensor(-0.0), torch.tensor(0.0), torch.tensor(math.nan)],
    "dtype": [torch.tensor(1), torch.tensor(1.0), torch.tensor(True), torch.tensor(1, dtype=torch.int32)],
    "shape": [torch.tensor(1), torch.tensor([1]), torch.tensor([[1]]), torch.tensor([], dtype=torch.int64)],
    "content": [torch.arange(100), torch.arange(100).flip(0), torch.arange(1, 101)],
    "one bit": [torch.zeros(1000), torch.zeros(1000).index_fill(0, torch.tensor(999), 5e-324 * 2**970)],
    "stride": [torch.ones(3, 3), torch.ones(3, 3).as_strided((3, 3), (1, 3))],
    "conjugate": [torch.tensor([1j]), torch.tensor([1j]).conj(), torch.tensor([-1j])],
    "narrow floats": [torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.float8_e4m3fn)],
}


@pytest.mark.parametrize("kind", CONSTANTS)
def test_constant_tensors_count_by_form_and_content(kind: str) -> None:
    texts = [with_constant(tensor).text for tensor in CONSTANTS[kind]]
    assert len(set(texts)) == len(texts)


def test_equal_constant_tensors_have_one_text() -> None:
    scalar = with_constant(torch.tensor(2.5))
    assert scalar.sha256 == with_constant(torch.nn.Parameter(torch.full((), 2.5))).sha256
    assert "= 2.5)" in scalar.text
    assert with_constant(torch.arange(50)).sha256 == with_constant(torch.arange(50)).sha256


def test_constants_are_read_under_an_ambient_fake_mode() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    constant = torch.arange(10)
    outside = with_constant(constant)
    build = Build()
    gm = build.output(build.call(aten.add.Tensor, build.input(), build.get(constant)))
    with FakeTensorMode():
        assert write(gm).sha256 == outside.sha256


FORMS = {
    "dtype": [torch.empty(2, 3), torch.empty(2, 3, dtype=torch.float64), torch.empty(2, 3, dtype=torch.int32)],
    "shape": [torch.empty(6), torch.empty(2, 3), torch.empty(3, 2), torch.empty(())],
    "stride": [torch.empty_strided((2, 3), (3, 1)), torch.empty_strided((2, 3), (1, 2))],
    "offset": [torch.empty(8)[:4], torch.empty(8)[1:5], torch.empty(8)[2:6]],
    "device": [torch.empty(2), torch.empty(2, device="meta")],
    "conj": [torch.empty(2, dtype=torch.complex64), torch.empty(2, dtype=torch.complex64).conj()],
    "neg": [torch.empty(2), torch._neg_view(torch.empty(2))],
    "not a tensor": [torch.empty(2), 2, 2.0, True, None, [torch.empty(2)], (torch.empty(2),), "2"],
}


@pytest.mark.parametrize("kind", FORMS)
def test_inputs_and_results_count_by_form(kind: str) -> None:
    def with_result(value: Any) -> str:
        build = Build()
        node = build.call(aten.neg.default, build.input())
        node.meta["val"] = value
        return write(build.output(node)).text

    for texts in ([with_input(value).text for value in FORMS[kind]], [with_result(value) for value in FORMS[kind]]):
        assert len(set(texts)) == len(texts)


def test_inputs_of_one_form_have_one_text_whatever_they_hold() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    fake = FakeTensorMode().from_tensor(torch.ones(2, 3))
    assert with_input(torch.zeros(2, 3)).sha256 == with_input(torch.nn.Parameter(torch.ones(2, 3))).sha256
    assert with_input(torch.zeros(2, 3)).sha256 == with_input(fake).sha256


def test_two_devices_of_one_type_in_a_graph_are_refused() -> None:
    build = Build()
    x = build.input()
    one = build.call(aten.to.device, x, torch.device("cuda", 0))
    gm = build.output(build.call(aten.to.device, one, torch.device("cuda", 1)))
    with pytest.raises(Uncacheable, match="two cuda devices"):
        write(gm)


def test_a_node_of_another_graph_is_refused() -> None:
    stranger = fx.Graph().placeholder("stranger")
    with pytest.raises(Uncacheable, match="stranger"):
        with_argument([stranger])
