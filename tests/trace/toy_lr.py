"""Registries outside TorchTitan whose blocks bake in a number that no graph should hold, as a lint must find."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.models.llama3.parallelize import parallelize_llama
from torchtitan.trainer import Trainer

_planted: list[float] = []


class PlantingTrainer(Trainer):
    """Hands a number of its configuration to the model behind everybody's back."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def __init__(self, config: Config) -> None:
        _planted.append(config.optimizer.param_groups[0].optimizer_kwargs["lr"])
        super().__init__(config)


def toy_lr() -> PlantingTrainer.Config:
    """Every block multiplies by the learning rate."""
    base = llama3_debugmodel()
    fields = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
    fields["model_spec"] = dataclasses.replace(base.model_spec, parallelize_fn=scaled_by_learning_rate)
    return PlantingTrainer.Config(**fields)


def toy_steps() -> Trainer.Config:
    """Every block multiplies by the number of steps, a field that the job key leaves out."""
    base = llama3_debugmodel()
    base.model_spec = dataclasses.replace(base.model_spec, parallelize_fn=scaled_by_steps)
    return base


def scaled_by_learning_rate(model: Any, **given: Any) -> Any:
    return _scaled(model, 1.0 + _planted[-1], given)


def scaled_by_steps(model: Any, **given: Any) -> Any:
    return _scaled(model, 1.0 + given["training"].steps, given)


def _scaled(model: Any, factor: float, given: dict[str, Any]) -> Any:
    def multiply(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        return output * factor

    for block in model.layers.values():
        block.register_forward_hook(multiply)
    return parallelize_llama(model, **given)
