"""Configurations that warmers need and that TorchTitan's registries do not have as such.

Each is put together from TorchTitan's own parts; `--module neffcache.trace.registry --config NAME` names it.
"""

from __future__ import annotations

from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import CompileConfig
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_70b
from torchtitan.trainer import Trainer


def llama3_405b_bf16() -> Trainer.Config:
    """TorchTitan's llama3_405b without float8 and asynchronous TP, which it takes on GPUs only."""
    config = llama3_70b()
    config.model_spec = model_registry("405B")
    config.hf_assets_path = "./assets/hf/Llama-3.1-405B"
    config.optimizer = default_adamw(lr=8e-5)
    config.lr_scheduler = LRSchedulersContainer.Config(warmup_steps=600)
    config.training.local_batch_size = 2
    config.training.steps = 3000
    config.compile = CompileConfig(enable=True, components=["model"])
    return config
