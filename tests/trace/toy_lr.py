"""A configuration outside TorchTitan: its block bakes in two numbers that no graph should hold, as a lint must find."""

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
    """Hands its learning rate to the model behind everybody's back."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def __init__(self, config: Config) -> None:
        _planted.append(config.optimizer.param_groups[0].optimizer_kwargs["lr"])
        super().__init__(config)


def toy() -> PlantingTrainer.Config:
    """One block, which multiplies by the learning rate and the number of steps; the job key leaves the latter out."""
    base = llama3_debugmodel()
    fields = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
    model = dataclasses.replace(base.model_spec.model, layers=base.model_spec.model.layers[:1])
    fields["model_spec"] = dataclasses.replace(base.model_spec, model=model, parallelize_fn=scaled)
    return PlantingTrainer.Config(**fields)


def scaled(model: Any, **given: Any) -> Any:
    """parallelize_llama of a model whose blocks multiply what they return."""
    rate, steps = 1.0 + _planted[-1], 1.0 + given["training"].steps

    def multiply(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        return output * rate * steps

    for block in model.layers.values():
        block.register_forward_hook(multiply)
    return parallelize_llama(model, **given)
