"""Load artifacts of the host toolchain into a training process, running no compiler.

Host artifacts hold code. They are read only from a view, whose files were checked against the manifest's digests.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from neffcache.compile.host import build, constants, torch_internals
from neffcache.errors import Mismatch, StoreFault
from neffcache.graph.payload import Binding
from neffcache.graph.text import GraphText
from neffcache.graph.torch_internals import group_ranks

_bound: dict[str, tuple[int, ...]] = {}


def load_graph(host: Path, compile_key: str, text: GraphText) -> tuple[Callable[[list[Any]], list[Any]], Binding]:
    """The compiled graph `compile_key` of a view's `host` directory, bound to this process's groups.

    `text` is the canonical form of the graph that asks; its groups get the artifact's aliases. Whoever uses the result
    for another graph of the same key must `bind_groups` for that one too.
    Raises StoreFault when a file is missing or does not belong, Mismatch for another build of torch.
    """
    try:
        meta = json.loads((host / build.meta_path(compile_key)).read_bytes())
    except (OSError, ValueError) as fault:
        raise StoreFault(f"the artifact of {compile_key} cannot be read: {fault}") from None
    if meta.get("schema") != 1 or meta.get("compile_key") != compile_key:
        raise StoreFault(f"the artifact of {compile_key} is of another graph or a newer neffcache")
    binding = Binding.from_json(meta["binding"])
    bind_groups(binding, text)
    # A load inside Dynamo's compile must not report its strides to the compile in flight.
    with (
        torch._guards.tracing(None),
        torch._subclasses.fake_tensor.unset_fake_temporarily(),
        torch_internals.kernels_from(host / build.kernels_path(compile_key), frozenset(meta["kernels"])),
    ):
        held = [constants.from_json(entry) for entry in meta["constants"]]
        try:
            artifact = torch_internals.load_artifact(os.fspath(host / build.code_path(compile_key)))
        except torch_internals.KernelMissing as missing:
            raise StoreFault(f"the artifact of {compile_key} lacks its library {missing}") from None
        except AssertionError as fault:
            raise Mismatch(f"the artifact of {compile_key} was made by another build of torch ({fault})") from None
        except (OSError, ImportError) as fault:
            raise StoreFault(f"the artifact of {compile_key} cannot be loaded: {fault}") from None
    return caller(artifact, binding, held), binding


def caller(
    artifact: Callable[..., Any], binding: Binding, held: Sequence[torch.Tensor] = ()
) -> Callable[[list[Any]], list[Any]]:
    """A boxed callable with the captured graph's own arguments and results; `held` are the graph's constants."""
    inputs, outputs = binding.inputs, binding.outputs
    passed = [what for kind, what in outputs if kind == "input"]

    def run(given: list[Any]) -> list[Any]:
        lean = [given[index] for index in inputs]
        kept = {index: given[index] for index in passed}
        given.clear()
        results: Sequence[Any] = artifact(*held, *lean)
        return [results[what] if kind == "lean" else kept[what] if kind == "input" else what for kind, what in outputs]

    return run


def bind_groups(binding: Binding, text: GraphText) -> None:
    """Register the artifact's group aliases for the live groups of the graph that asks.

    Raises Mismatch when one alias would have to mean two groups in one process.
    """
    for name, slot in binding.groups.items():
        live = next(use.name for use in text.groups if use.slot == slot)
        ranks = group_ranks(live)
        if name not in _bound:
            torch_internals.register_group(name, torch_internals.find_group(live))
            _bound[name] = ranks
        elif _bound[name] != ranks:
            raise Mismatch(
                f"two process groups of this rank, {list(_bound[name])} and {list(ranks)}, share one compiled graph",
                hint="this mesh cannot share the graph; please report it with the configuration",
            )
