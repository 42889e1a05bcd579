"""Qwen3 of Hugging Face transformers with tensor parallelism.

neffcache warm qwen3_hf:tiny --target cpu --world-size 2

The configuration is made in code and its weights are random, so nothing is downloaded. Keys and values lie in a static
cache, so a prompt and a token are two static shapes: the phases `prefill` and `decode`.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from neffcache.inference import Built, World, workload

LAYER_PLAN = {
    "self_attn.q_proj": ColwiseParallel(),
    "self_attn.k_proj": ColwiseParallel(),
    "self_attn.v_proj": ColwiseParallel(),
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


class Serve(nn.Module):
    """A causal language model and its static cache.

    `forward(tokens, start)` puts int64 [batch, length] tokens at `start` (int64, no dimension) into the cache and gives
    the logits of the last one, [batch, vocabulary].
    """

    def __init__(self, model: Any, cache: Any) -> None:
        super().__init__()
        self.model, self.cache = model, cache
        # The argument's name changed within transformers 5.
        known = inspect.signature(model.forward).parameters
        self.argument = "cache" if "cache" in known else "past_key_values"

    def forward(self, tokens: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        for layer in self.cache.layers:
            layer.cumulative_length.copy_(start)
        given = {self.argument: self.cache, "use_cache": True, "logits_to_keep": 1}
        logits: torch.Tensor = self.model(input_ids=tokens, **given).logits
        return logits[:, -1]


@workload
def tiny(world: World, *, layers: int = 2, batch: int = 1, prompt: int = 16, capacity: int = 32) -> Built:
    """A Qwen3 of 8 heads and 4 key-value heads over all ranks; `capacity` is how many tokens the cache holds."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, StaticCache

    config = Qwen3Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=capacity,
    )
    torch.manual_seed(0)  # the same weights on every rank
    mesh = world.mesh(tp=world.size)
    with torch.device(world.device):
        model = Qwen3ForCausalLM(config).eval()
        tokens = torch.randint(config.vocab_size, (batch, prompt))
        at = {"prefill": torch.tensor(0), "decode": torch.tensor(prompt)}
        cache = StaticCache(config, max_cache_len=capacity)
        heads = config.num_key_value_heads // world.size
        cache.early_initialization(batch, heads, config.head_dim, torch.float32, torch.device(world.device))
    for layer in model.model.layers:
        parallelize_module(layer, mesh, LAYER_PLAN)
    serve = Serve(model, cache)
    serve.compile(backend=world.backend, dynamic=False)
    return serve, {
        "prefill": {"tokens": tokens, "start": at["prefill"]},
        "decode": {"tokens": tokens[:, -1:].contiguous(), "start": at["decode"]},
    }
