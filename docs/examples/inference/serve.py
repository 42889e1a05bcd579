"""A program of one's own around a workload.

neffcache run blocks_tp2 -- torchrun --nproc-per-node 2 serve.py
"""

from __future__ import annotations

import argparse

import torch
from blocks import tiny

from neffcache.inference import World, call, step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=4)
    said = parser.parse_args()
    world = World.here()
    module, inputs = tiny(world, layers=said.layers, width=32)
    with torch.no_grad():
        x = call(module, inputs["prefill"])[:, -1:]
        for _ in range(said.tokens):
            x = call(module, x.contiguous())
            step()
    if world.rank == 0:
        print(f"the last output has the mean {x.mean().item():.4f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
