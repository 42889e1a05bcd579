"""FakeTensorMode at the speed of what a trace does most: views, fresh tensors, and writing. Checked on torch 2.14.

For every operator FakeTensorMode makes a key of all its arguments, looks for it in a cache, and builds the answer anew:
a quarter of a millisecond. FSDP cuts each parameter into a piece for every rank, and gathers each of every layer; an
optimizer's step names all of them. For a FakeTensor of plain, static sizes

- a view, a fresh tensor (also one like a meta tensor), and what FSDP and DTensor ask their collectives for, is what the
  operator's meta kernel gives, as FakeTensorMode itself would ask it;
- an operator that gives nothing back and only writes into FakeTensors does nothing, for they hold nothing.

Everything else goes to FakeTensorMode: symbolic sizes, tensors that have a value (`torch.tensor(1.0)`), subclasses, and
all that happens while a graph is made, where a training process asks it too. Outside of graphs a training process asks
the kernels, and so is the stride of a dimension of size 1 here, which FakeTensorMode makes up otherwise: llama3_8b's
first layer had a graph more in a trace than on any rank.
And FSDP, which cuts a parameter into all pieces to take one or two of them, gets those.

What is touched: `FakeTensorMode.dispatch`, `in_kernel_invocation_manager`, FakeTensor's constructor and its fields
`fake_mode`, `fake_device`, `constant`, `real_tensor`, `dispatch_keys`; `Tensor._has_symbolic_sizes_strides`; FSDP's
`_chunk_with_empty`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any

import torch

from neffcache.probing import require
from neffcache.trace import torch_internals

CHECKED_ON = "2.14"
TOUCHED = (
    ("torch._subclasses.fake_tensor", "FakeTensor"),
    ("torch._subclasses.fake_tensor", "FakeTensorMode.dispatch"),
    ("torch._subclasses.fake_tensor", "in_kernel_invocation_manager"),
    ("torch", "Tensor._has_symbolic_sizes_strides"),
    ("torch.distributed.fsdp._fully_shard._fsdp_param", "_chunk_with_empty"),
)

fakes: Any = importlib.import_module("torch._subclasses.fake_tensor")
aten: Any = torch.ops.aten
VIEWS = frozenset({
    aten.view.default, aten.as_strided.default, aten.detach.default, aten.alias.default, aten.split.Tensor,
    aten.split_with_sizes.default, aten.slice.Tensor, aten.select.int, aten.transpose.int, aten.t.default,
    aten.unsqueeze.default, aten.permute.default, aten.expand.default,
})  # fmt: skip
LIKE = frozenset({aten.empty_like.default, aten.zeros_like.default, aten.new_empty.default, aten.new_zeros.default})
COLLECTIVES = ("fsdp::all_gather_copy_in", "_c10d_functional::all_reduce", "_c10d_functional::wait_tensor")
FRESH = frozenset({aten.empty.memory_format, aten.empty_strided.default, aten.zeros.default})

Answer = tuple[Any] | None
"""What an operator gives, in a tuple; None when FakeTensorMode has to be asked."""


def probe() -> None:
    """Raise Unsupported naming the first thing that this torch does not have."""
    require(TOUCHED, library="torch", version=torch.__version__, checked=CHECKED_ON)


@contextlib.contextmanager
def fakes_at_once() -> Iterator[None]:
    """In here FakeTensorMode is asked only about what is not known at once."""
    sharded: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param")
    whole, pieces = fakes.FakeTensorMode.dispatch, sharded._chunk_with_empty

    def dispatch(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = None if torch_internals.compiling() else at_once(mode, func, args, kwargs or {})
        return whole(mode, func, types, args, kwargs or {}) if known is None else known[0]

    global _short
    before, _short = _short, True
    fakes.FakeTensorMode.dispatch = dispatch
    sharded._chunk_with_empty = lambda tensor, num_chunks, dim: Pieces(tensor, num_chunks, dim)
    try:
        yield
    finally:
        fakes.FakeTensorMode.dispatch = whole
        _short = before
        sharded._chunk_with_empty = pieces


class Pieces:
    """What `torch.chunk` gives, filled with empty tensors to `count`, each made when it is asked for."""

    def __init__(self, tensor: torch.Tensor, count: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, count, dim

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        whole = self._tensor.size(self._dim)
        if not 0 <= index < self._count:
            raise IndexError(index)
        length = -(-whole // self._count)
        start = index * length
        if whole and start >= whole:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(length, whole - start))


_short = False  # whether `fakes_at_once` is in force


def known(func: Any, args: Any, kwargs: Any) -> Answer:
    """`at_once` for a mode above FakeTensorMode, which need not dispatch then. Not for what belongs to a graph."""
    first: Any = next(iter(_listed(args[0])), None) if args else None
    return at_once(first.fake_mode, func, args, kwargs) if _short and type(first) is fakes.FakeTensor else None


def at_once(mode: Any, func: Any, args: Any, kwargs: Any) -> Answer:
    """The answer of one operator, when no cache is needed for it."""
    if func in VIEWS or func.name() in COLLECTIVES:
        return _kernel(mode, func, args, kwargs)
    if func in LIKE:
        return _fresh(mode, func, args, kwargs) if _plain(mode, args[0]) or _meta(args[0]) else None
    if func in FRESH:
        return _fresh(mode, func, args, kwargs)
    if func is aten.cat.out:
        return _concatenated(mode, *args, **kwargs)
    if written := _written(func):
        given = [args[place] if place < len(args) else kwargs.get(name, ()) for place, name in written]
        return (None,) if all(_plain(mode, each) for item in given for each in _listed(item)) else None
    return None


def device(value: Any) -> torch.device | None:
    """The device that a FakeTensor stands for; None while a kernel sees it as a meta tensor, and for other tensors."""
    if type(value) is not fakes.FakeTensor or value.fake_mode.in_kernel_invocation:
        return None
    found: torch.device = value.fake_device
    return found


def _kernel(mode: Any, func: Any, args: Any, kwargs: Any) -> Answer:
    """What the meta kernel of an operator of FakeTensors, and of lists of them, gives."""
    tensors: list[Any] = [each for item in args for each in _listed(item) if isinstance(each, torch.Tensor)]
    others = [item for item in args if not any(isinstance(each, torch.Tensor) for each in _listed(item))]
    if kwargs or not all(_plain(mode, each) for each in tensors) or not all(_static(each) for each in others):
        return None
    device = tensors[0].fake_device
    if any(each.fake_device != device for each in tensors):
        return None
    with fakes.in_kernel_invocation_manager(mode):
        made = func(*args)

    def fake(each: Any) -> Any:
        return each if type(each) is fakes.FakeTensor else fakes.FakeTensor(mode, each, device)

    if isinstance(made, torch.Tensor):
        return (fake(made),)
    return (type(made)(fake(each) for each in made),)


def _fresh(mode: Any, func: Any, args: Any, kwargs: Any) -> Answer:
    like = func in LIKE
    if not all(_static(each) for each in (*args[1 if like else 0 :], *kwargs.values())) or kwargs.get("pin_memory"):
        return None
    own = getattr(args[0], "fake_device", torch.device("meta")) if like else torch.device("cpu")
    device = kwargs.get("device") or own
    if device.type == "meta" or (device.type != "cpu" and device.index is None):
        return None
    with fakes.in_kernel_invocation_manager(mode):
        made = func(*args, **{**kwargs, "device": torch.device("meta")})
    return (fakes.FakeTensor(mode, made, device),)


def _concatenated(mode: Any, tensors: Any, dim: int = 0, *, out: Any) -> Answer:
    if not all(_plain(mode, each) for each in (*tensors, out)):
        return None
    shapes = {tuple(each.shape) for each in tensors}
    ranks = {len(shape) for shape in shapes}
    if len(ranks) != 1 or not -min(ranks) <= dim < min(ranks):
        return None
    dim %= min(ranks)
    if len({(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}) != 1:
        return None
    shape = list(next(iter(shapes)))
    shape[dim] = sum(each.shape[dim] for each in tensors)
    return (out,) if list(out.shape) == shape else None  # another one is an error, or resized


@functools.cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Place and name of what an operator writes, of one that gives nothing back and changes no shape; else nothing."""
    schema = getattr(func, "_schema", None)
    if schema is None or schema.returns:
        return ()
    name = func.name().partition(".")[0]
    if not name.startswith(("aten::_foreach_", "aten::_fused_", "fsdp::")) and name != "aten::split_with_sizes_copy":
        return ()
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _plain(mode: Any, value: Any) -> bool:
    """Whether it is a FakeTensor of this mode, of static sizes and without a value."""
    return (
        type(value) is fakes.FakeTensor
        and value.fake_mode is mode
        and value.constant is None
        and value.real_tensor is None
        and value.dispatch_keys is None
        and not value._has_symbolic_sizes_strides
        and value.layout is torch.strided
    )


def _meta(value: Any) -> bool:
    """Whether it is a plain meta tensor, of which a model is built before it gets a device."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.device.type == "meta"
        and value.layout is torch.strided
        and not value._has_symbolic_sizes_strides
    )


_STATIC = (str, int, bool, float, type(None), torch.dtype, torch.layout, torch.device, torch.memory_format)


def _static(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(type(each) is int for each in value)
    return type(value) in _STATIC


def _listed(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else (value,)
