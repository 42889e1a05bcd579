"""A stub of TorchNeuron, not TorchNeuron: see ../../README.md."""

from __future__ import annotations

import os
import sys
import types

from torch_neuronx import _C

__all__ = ["_C"]

os.environ.setdefault("NKI_ENABLE_TRACE_CACHE", "1")


def _autoload() -> None:
    """What the entry point `torch.backends` calls at `import torch`."""
    torch = sys.modules["torch"]
    neuron = types.ModuleType("torch.neuron")
    neuron.synchronize = lambda: None
    neuron.get_dynamo_metrics = lambda: {}
    torch.neuron = neuron
