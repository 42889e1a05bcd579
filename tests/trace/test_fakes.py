"""What a trace knows at once about FakeTensors is what FakeTensorMode says; everything else is asked there."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from neffcache.trace import torch_fakes, torch_internals  # noqa: E402
from neffcache.trace.capture import EagerOps  # noqa: E402

aten: Any = torch.ops.aten


@contextlib.contextmanager
def asked(*, within: Callable[[], bool] = lambda: True) -> Iterator[list[str]]:
    """The operators that FakeTensorMode itself is asked about, while `within()`."""
    names: list[str] = []
    whole = torch_fakes.fakes.FakeTensorMode.dispatch

    def dispatch(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "prim" and within():
            names.append(func.name())
        return whole(mode, func, types, args, kwargs or {})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_fakes.fakes.FakeTensorMode, "dispatch", dispatch)
        yield names


def told(value: Any) -> Any:
    """All that can be seen of a FakeTensor."""
    if isinstance(value, torch.Tensor):
        return (
            type(value).__name__, tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device,
            value.requires_grad, value.is_contiguous(), value._is_view(), value.layout, value._version,
            value.untyped_storage().nbytes(), value.is_inference(),
        )  # fmt: skip
    if isinstance(value, (list, tuple)):
        return [told(each) for each in value]
    return value


def both(program: Callable[[], Any]) -> tuple[list[str], list[str]]:
    """Runs a program without and with the short way, compares all that it gives, and says what was asked each time."""
    seen = []
    for short in (False, True):
        ops = EagerOps()
        with contextlib.ExitStack() as stack:
            names = stack.enter_context(asked())
            if short:
                stack.enter_context(torch_fakes.fakes_at_once())
            stack.enter_context(torch_internals.fake_mode())
            with ops:
                result = program()
            seen.append((told(result), dict(ops.seen), list(names)))
    assert seen[0][0] == seen[1][0]
    assert seen[0][1] == seen[1][1], "the eager operators of a job stay what they were"
    return seen[0][2], seen[1][2]


def of(*shape: int, **options: Any) -> Any:
    return torch.empty(shape, **options)


VIEWS: dict[str, Callable[[Any], Any]] = {
    "view": lambda x: x.view(-1, 2),
    "as_strided": lambda x: x.as_strided((3, 2), (2, 1), 4),
    "detach": lambda x: x.detach(),
    "alias": lambda x: aten.alias(x),
    "split": lambda x: torch.chunk(x, 3, dim=1),
    "split_with_sizes": lambda x: torch.split(x, [1, 5], dim=1),
    "slice": lambda x: x[1:3, ::2],
    "select": lambda x: x[-1],
    "transpose": lambda x: x.transpose(0, 1),
    "t": lambda x: x.t(),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "permute": lambda x: x.permute(1, 0),
    "expand": lambda x: x.unsqueeze(0).expand(5, -1, -1),
    "narrow": lambda x: x.narrow(0, 2, 2),
}
FRESH: dict[str, Callable[[Any], Any]] = {
    "empty": lambda x: torch.empty(3, 4, dtype=torch.bfloat16),
    "empty_device": lambda x: torch.empty((3,), device="cpu"),
    "empty_strided": lambda x: torch.empty_strided((3, 4), (1, 3), dtype=torch.int64),
    "zeros": lambda x: torch.zeros(2, 3, dtype=torch.float64),
    "channels_last": lambda x: torch.empty(2, 3, 4, 5, memory_format=torch.channels_last),
    "empty_like": lambda x: torch.empty_like(x.t(), dtype=torch.float16),
    "zeros_like": lambda x: torch.zeros_like(x.t(), memory_format=torch.preserve_format),
    "new_empty": lambda x: x.new_empty(0),
    "new_zeros": lambda x: x.new_zeros((7, 2), dtype=torch.int32),
    "scalar": lambda x: torch.zeros(()),
}


COLLECTIVES: dict[str, Callable[[], Any]] = {
    "fsdp::all_gather_copy_in": lambda: torch.ops.fsdp.all_gather_copy_in([of(3), of(2)], of(20), [3, 2], 5, 2),
    "_c10d_functional::all_reduce": lambda: torch.ops._c10d_functional.all_reduce(of(4, 6).t(), "sum", "group"),
    "_c10d_functional::wait_tensor": lambda: torch.ops._c10d_functional.wait_tensor(of(4, 6).t()),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_give_what_the_mode_says(name: str) -> None:
    import torch.distributed.fsdp._fully_shard._fsdp_collectives  # noqa: F401  # it registers them

    whole, short = both(COLLECTIVES[name])
    assert name in whole
    assert name not in short


def test_what_is_gathered_lies_in_the_output() -> None:
    import torch.distributed.fsdp._fully_shard._fsdp_collectives  # it registers them

    with torch_fakes.fakes_at_once(), torch_internals.fake_mode():
        out = of(20)
        part, whole = torch.ops.fsdp.all_gather_copy_in([of(5)], out, [5], 5, 2)
    assert whole is out
    assert part.untyped_storage()._cdata == out.untyped_storage()._cdata
    assert part.storage_offset() == 10


@pytest.mark.parametrize("parameter", [False, True])
def test_a_meta_tensor_gets_a_device_as_by_the_mode(parameter: bool) -> None:
    shaped = torch.empty(4, 6, device="meta").t()
    meta = torch.nn.Parameter(shaped) if parameter else shaped
    whole, short = both(lambda: torch.empty_like(meta, device="cpu"))
    assert "aten::empty_like" in whole
    assert "aten::empty_like" not in short


@pytest.mark.parametrize("name", [*VIEWS, *FRESH])
@pytest.mark.parametrize("grad", [False, True])
def test_views_and_fresh_tensors_are_those_of_the_mode(name: str, grad: bool) -> None:
    operator = (VIEWS | FRESH)[name]
    whole, short = both(lambda: operator(of(4, 6, requires_grad=grad)))
    assert len(short) < len(whole)


@given(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=4), st.data())
def test_strides_are_those_of_an_eager_run_where_a_dimension_has_size_1(shape: list[int], data: st.DataObject) -> None:
    """FakeTensorMode makes up its own; a first layer with another stride is another graph."""
    order = data.draw(st.permutations(range(len(shape))))
    into = [*data.draw(st.permutations([size for size in shape if size > 1]))]
    for place in data.draw(st.lists(st.integers(0, 3), max_size=3)):
        into.insert(place, 1)

    def program() -> Any:
        one = of(*shape).permute(order)
        try:
            return one.view(into).stride(), one.unsqueeze(0).stride(), one.detach().stride()
        except RuntimeError:
            return "refused"

    real = program()
    with torch_fakes.fakes_at_once(), torch_internals.fake_mode():
        assert program() == real


def test_a_graph_is_made_as_a_training_process_makes_it() -> None:
    """There FakeTensorMode is asked about everything."""

    def program(x: Any) -> Any:
        return x.view(6, 4).detach() + torch.zeros(6, 4)

    def compiled() -> list[str]:
        torch._dynamo.reset()
        with asked(within=torch_internals.compiling) as names, torch_fakes.fakes_at_once(), torch_internals.fake_mode():
            torch.compile(program, backend="aot_eager")(of(4, 6))
        return names

    short = compiled()
    assert {"aten::view", "aten::zeros", "aten::detach"} <= set(short)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_fakes, "at_once", lambda *_: None)
        whole = compiled()
    assert short == whole


def test_a_view_shares_the_storage_of_what_it_is_a_view_of() -> None:
    with torch_fakes.fakes_at_once(), torch_internals.fake_mode():
        one = of(4, 6)
        for name, operator in VIEWS.items():
            made = operator(one)
            for each in made if isinstance(made, (list, tuple)) else [made]:
                assert each.untyped_storage()._cdata == one.untyped_storage()._cdata, name


@given(st.lists(st.integers(0, 5), min_size=1, max_size=3), st.integers(1, 7), st.data())
def test_pieces_are_those_of_chunk_filled_with_empty_ones(shape: list[int], count: int, data: st.DataObject) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty

    dim = data.draw(st.integers(0, len(shape) - 1))
    tensor = of(*shape)
    pieces = torch_fakes.Pieces(tensor, count, dim)
    chunks = _chunk_with_empty(tensor, count, dim)
    assert len(pieces) == len(chunks) == count
    for piece, chunk in zip(pieces, chunks, strict=True):
        assert (piece.shape, piece.stride(), piece.dtype) == (chunk.shape, chunk.stride(), chunk.dtype)
        assert not chunk.numel() or piece.data_ptr() == chunk.data_ptr()
    with pytest.raises(IndexError):
        pieces[count]


def lists() -> tuple[list[Any], list[Any]]:
    return [of(2, 3), of(4)], [of(2, 3), of(4)]


def adam() -> Any:
    tensors, grads = lists()
    for tensor, grad in zip(tensors, grads, strict=True):
        tensor.requires_grad_()
        tensor.grad = grad
    optimizer = torch.optim.AdamW(tensors, fused=True)
    optimizer.step()
    optimizer.step()
    return tensors, [list(state.values()) for state in optimizer.state.values()]


def foreach() -> Any:
    tensors, others = lists()
    torch._foreach_add_(tensors, others)
    return tensors


def cat() -> Any:
    out = of(2, 12)
    return torch.cat(torch.chunk(of(8, 3), 4, dim=0), dim=-1, out=out) is out, out


def split() -> Any:
    out = [of(2, 1), of(2, 3)]
    return torch.split_with_sizes_copy(of(2, 4), [1, 3], 1, out=out), out


def gather() -> Any:
    import torch.distributed.fsdp._fully_shard._fsdp_collectives  # it registers them

    out = [of(2, 1), of(2, 3)]
    torch.ops.fsdp.split_with_sizes_copy(of(2, 4), [1, 3], dim=1, out=out)
    whole = of(4, 3)
    torch.ops.fsdp.chunk_cat([of(4, 3)], dim=0, num_chunks=4, out=whole.view(4, -1))
    return out, whole


@pytest.mark.parametrize(
    ("program", "name"),
    [
        (adam, "aten::_fused_adamw_"),
        (foreach, "aten::_foreach_add_.List"),
        (cat, "aten::cat.out"),
        (split, "aten::split_with_sizes_copy.out"),
        (gather, "fsdp::split_with_sizes_copy"),
        (gather, "fsdp::chunk_cat"),
    ],
)
def test_what_only_writes_does_the_same_without_being_run(program: Callable[[], Any], name: str) -> None:
    whole, short = both(program)
    assert name in whole
    assert name not in short


def test_a_counter_that_has_a_value_goes_on_counting() -> None:
    """As a step of an optimizer, which is read as a number."""

    def count() -> float:
        step = torch.tensor(1.0)
        torch._foreach_add_([step], 1)
        return float(step.detach().view(1).view(()).item())

    assert count() == 2.0
    _, short = both(count)
    assert "aten::_foreach_add_.Scalar" in short


def test_what_is_not_static_goes_to_the_mode() -> None:
    def symbolic() -> Any:
        size = torch.nonzero(torch.ones(3, 2))
        torch._check(size.shape[0] > 2)
        made = torch.empty(size.shape[0], 2)
        return made.view(-1).ndim, size.detach().ndim

    _, short = both(symbolic)
    assert {"aten::empty.memory_format", "aten::view", "aten::detach"} <= set(short)


def test_an_output_that_does_not_fit_is_as_torch_has_it() -> None:
    both(lambda: torch.cat([of(2), of(3)], out=of(0)))
    both(lambda: torch.cat([of(0), of(2, 3)], dim=1, out=of(2, 3)))
    for short in (False, True):
        with contextlib.ExitStack() as stack:
            if short:
                stack.enter_context(torch_fakes.fakes_at_once())
            stack.enter_context(torch_internals.fake_mode())
            with pytest.raises(RuntimeError):
                torch.cat([of(2, 3), of(3, 2)], dim=0, out=of(5, 3))
            with pytest.raises(IndexError):
                torch.cat([of(2, 3), of(2, 3)], dim=2, out=of(2, 6))
            with pytest.raises(RuntimeError):
                of(2, 3).view(5)


def test_what_changes_a_shape_or_gives_something_back_is_asked() -> None:
    mode = torch_internals.fake_mode()
    with mode:
        one = of(2, 3)
    real = of(2, 3)
    other = torch_internals.fake_mode()
    for func, arguments in (
        (aten.unsqueeze_.default, (one, 0)),
        (aten.add_.Tensor, (one, one)),
        (aten._foreach_add.List, ([one], [one])),
        (aten._foreach_norm.Scalar, ([one],)),
        (aten._assert_async.default, (one,)),
        (aten._foreach_add_.List, ([real], [real])),
        (aten.view.default, (real, [6])),
        (aten.zeros_like.default, (real,)),
    ):
        assert torch_fakes.at_once(mode, func, arguments, {}) is None, func
    assert torch_fakes.at_once(mode, aten._foreach_add_.List, ([one], [real]), {}) == (None,)
    assert torch_fakes.at_once(other, aten.view.default, (one, [6]), {}) is None
    for device in ("meta", "cuda"):
        assert torch_fakes.at_once(mode, aten.zeros.default, ([2],), {"device": torch.device(device)}) is None


def test_devices_are_those_of_the_mode() -> None:
    with torch_internals.fake_mode() as mode:
        one = of(2)
    assert torch_fakes.device(one) == torch.device("cpu")
    assert torch_fakes.device(of(2)) is None
    with torch_fakes.fakes.in_kernel_invocation_manager(mode):
        assert torch_fakes.device(one) is None


def test_everything_is_as_before_afterwards() -> None:
    import torch.distributed.fsdp._fully_shard._fsdp_param as sharded

    before = torch_fakes.fakes.FakeTensorMode.dispatch, sharded._chunk_with_empty
    with torch_fakes.fakes_at_once():
        assert torch_fakes.fakes.FakeTensorMode.dispatch is not before[0]
    assert (torch_fakes.fakes.FakeTensorMode.dispatch, sharded._chunk_with_empty) == before


def test_a_mode_above_answers_without_a_dispatch_and_only_then() -> None:
    with torch_internals.fake_mode():
        one = of(4, 6)
    answers = (aten.view.default, (one, [24]), {}), (aten._foreach_add_.List, ([one], [one]), {})
    assert [torch_fakes.known(*answer) for answer in answers] == [None, None]
    with torch_fakes.fakes_at_once():
        with torch_fakes.fakes_at_once():
            pass
        assert None not in [torch_fakes.known(*answer) for answer in answers]
        for func, arguments in (
            (aten.empty.memory_format, ([2],)),
            (aten.view.default, (of(2), [2])),
            (aten.cat, ([],)),
        ):
            assert torch_fakes.known(func, arguments, {}) is None
    assert [torch_fakes.known(*answer) for answer in answers] == [None, None]


def test_no_operator_is_both() -> None:
    for one, other in itertools.combinations((torch_fakes.VIEWS, torch_fakes.LIKE, torch_fakes.FRESH), 2):
        assert not one & other
