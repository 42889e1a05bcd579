"""A stub of `torch.compile(backend="neuron")`: a graph's own text stands for StableHLO; torch runs it on the CPU."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd

from torch_neuronx import _C


def _ir(gm: Any) -> bytes:
    lines = []
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        shape = f" : {tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else ""
        lines.append(f"{node.format_node()}{shape}")
    if os.environ.get("STUB_LOCATIONS") == "1":
        lines += [str(node.stack_trace) for node in gm.graph.nodes if node.stack_trace]
    return "\n".join(lines).encode()


def _compile(gm: Any, inputs: Any) -> Any:
    ir = _ir(gm)
    base = hashlib.sha256(ir).hexdigest()
    debug = os.environ.get("TORCH_NEURONX_DEBUG_DIR")
    key = _C.compile_graph(base, ir, b"all_reduce" in ir or b"all_gather" in ir)
    if debug and os.environ.get("TORCH_NEURONX_PRESERVE_COMPILATION_ARTIFACTS") == "1":
        name = f"graph_{time.time_ns()}"
        for kind, ending, data in (("stablehlo", "mlir", ir), ("neff", "neff", _C.get_neff_info(key)[1])):
            folder = Path(debug, kind, f"proc_{os.environ.get('RANK', '0')}")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.{ending}").write_bytes(data)
    if os.environ.get("TORCH_NEURONX_COMPILE_ONLY") == "1":
        return _unexecuted(gm)
    return gm.forward


def _unexecuted(gm: Any) -> Any:
    """Results of the right shape with nothing in them."""
    outputs = next(node for node in gm.graph.nodes if node.op == "output").args[0]

    def run(*_: Any) -> Any:
        return [
            torch.zeros(node.meta["val"].shape, dtype=node.meta["val"].dtype)
            if isinstance(getattr(node, "meta", {}).get("val"), torch.Tensor)
            else None
            for node in outputs
        ]

    return run


neuron = aot_autograd(fw_compiler=_compile, bw_compiler=_compile)
