"""Tensors in a graph: the form of a value (what a compiler may assume) and the content of a constant."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable

import torch

from neffcache.graph.torch_internals import fake_tensor_type, modes_off
from neffcache.graph.uncacheable import Uncacheable

# Up to this many bytes a constant is written out, so that a reader of the text sees it.
_WRITTEN_OUT = 16


def check_plain(tensor: torch.Tensor) -> None:
    """Uncacheable for anything whose data is more than one strided block: subclasses, sparse, nested, quantised."""
    kind = type(tensor)
    if kind not in (torch.Tensor, torch.nn.Parameter, fake_tensor_type()):
        raise Uncacheable(f"a tensor of the class {kind.__module__}.{kind.__qualname__}")
    if tensor.is_nested:
        raise Uncacheable("a nested tensor")
    if tensor.layout != torch.strided:
        raise Uncacheable(f"a tensor of layout {tensor.layout}")
    if tensor.is_quantized:
        raise Uncacheable("a quantised tensor")
    if tensor._is_zerotensor():
        raise Uncacheable("a tensor of zeros without storage")


def form_text(
    tensor: torch.Tensor, size: Callable[[int | torch.SymInt], str], device: Callable[[torch.device], str]
) -> str:
    """`float32[2,3]/[3,1]@cpu`: dtype, shape, strides, device; +offset, conj and neg where they are not the usual."""
    check_plain(tensor)
    shape = ",".join(map(size, tensor.shape))
    strides = ",".join(map(size, tensor.stride()))
    text = f"{str(tensor.dtype).removeprefix('torch.')}[{shape}]/[{strides}]@{device(tensor.device)}"
    offset = size(tensor.storage_offset())
    if offset != "0":
        text += f" +{offset}"
    if tensor.is_conj():
        text += " conj"
    if tensor.is_neg():
        text += " neg"
    return text


def content_text(tensor: torch.Tensor) -> str:
    """The bytes of a constant, element by element in index order: in hex when few, else their SHA-256."""
    check_plain(tensor)
    if isinstance(tensor, fake_tensor_type()) or tensor.is_meta:
        raise Uncacheable("a constant tensor without data")
    with modes_off(), torch.no_grad():
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        size = plain.numel() * plain.element_size()
        data = ctypes.string_at(plain.data_ptr(), size) if size else b""
        if tensor.numel() == 1 and size <= _WRITTEN_OUT:
            return f"0x{data.hex()} = {plain.item()!r}"
    return f"0x{data.hex()}" if size <= _WRITTEN_OUT else f"sha256:{hashlib.sha256(data).hexdigest()}"
