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
    neuron.get_dynamo_metrics = dict
    torch.neuron = neuron
    _stub_device()


def _stub_device() -> None:
    """The CPU stands for the device that this stub has not; TorchTitan's averages become sums, which gloo can do."""
    import wrapt

    def utils(module: types.ModuleType) -> None:
        from neffcache.trace import titan

        titan.use_cpu(module)

    def trainer(module: types.ModuleType) -> None:
        from neffcache.trace import titan

        titan.wrap_trainer(module, titan.force_sum_reduction, lambda trainer: None)

    wrapt.register_post_import_hook(utils, "torchtitan.tools.utils")
    wrapt.register_post_import_hook(trainer, "torchtitan.trainer")
