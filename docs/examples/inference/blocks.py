"""A small module with tensor parallelism.

neffcache warm blocks:tiny --target cpu --world-size 2
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from neffcache.inference import Built, World, workload


class Block(nn.Module):
    """A gated MLP with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, 4 * width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


@workload
def tiny(world: World, *, layers: int = 2, width: int = 64, batch: int = 2, length: int = 16) -> Built:
    """Blocks over all ranks as one tensor-parallel group; `prefill` is a whole prompt, `decode` one position."""
    torch.manual_seed(0)  # the same weights on every rank
    mesh = world.mesh(tp=world.size)
    with torch.device(world.device):
        model = nn.Sequential(*(Block(width) for _ in range(layers)))
        prompt, token = torch.randn(batch, length, width), torch.randn(batch, 1, width)
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model:
        parallelize_module(block, mesh, plan)
    model.compile(backend=world.backend, dynamic=False)
    return model.eval(), {"prefill": prompt, "decode": token}
