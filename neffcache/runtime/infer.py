"""Call a workload and run its phases, as `neffcache run` does without a command; also outside of it.

    torchrun --nproc-per-node 2 -m neffcache.runtime.infer module:function --set layers=4 --steps 3

The gate of a rank is not here: it is in `rank`, which sees the workload being called.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from neffcache.errors import NeffcacheError
from neffcache.inference import World, call, step
from neffcache.trace.inference import load, tensors

STEPS = 3


def outputs_digest(value: Any) -> str:
    """SHA-256 of the bytes of every tensor in an output, in order: this rank's part of a DTensor."""
    from torch.distributed.tensor import DTensor

    whole = hashlib.sha256()
    for tensor in tensors(value):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        whole.update(f"{local.dtype}{list(local.shape)}".encode())
        whole.update(local.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def infer(arguments: Sequence[str], steps: int, *, fake: bool) -> dict[str, dict[str, Any]]:
    """What each phase did: {"first_seconds", "steady_seconds", "outputs"}; one step runs each phase once."""
    workload, given = load(arguments)
    world = World.here(fake=fake)
    module, phases = workload(world, **given)
    calls: dict[str, dict[str, Any]] = {}
    with torch.no_grad():
        for number in range(steps):
            for name, inputs in phases.items():
                started = time.perf_counter()
                outputs = call(module, inputs)
                # Of a fake group or a compile-only run there are no values.
                digest = "" if fake else outputs_digest(outputs)
                seconds = round(time.perf_counter() - started, 4)
                if number == 0:
                    calls[name] = {"first_seconds": seconds, "steady_seconds": None}
                else:
                    calls[name]["steady_seconds"] = seconds
                calls[name]["outputs"] = digest
            step()
    return calls


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m neffcache.runtime.infer", description=__doc__)
    parser.add_argument("workload", metavar="module:function")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="an argument; repeatable")
    parser.add_argument("--steps", type=int, default=STEPS, help="how often every phase runs (default: %(default)s)")
    parser.add_argument("--fake", action="store_true", help="one process of a group that carries nothing")
    said = parser.parse_args()
    words = [said.workload, *(word for pair in said.set for word in ("--set", pair))]
    try:
        calls = infer(words, said.steps, fake=said.fake)
    except NeffcacheError as fault:
        print(f"error: {fault.message}" + (f"\nhint: {fault.hint}" if fault.hint else ""), file=sys.stderr)
        return fault.exit_code
    from neffcache.runtime.doors import current_rank

    rank = current_rank()
    if rank is not None:
        rank.report.calls = calls
    if torch.distributed.get_rank() == 0:
        for name, did in calls.items():
            then = "" if did["steady_seconds"] is None else f", then {did['steady_seconds']} s"
            print(f"{name}: first call {did['first_seconds']} s{then}; outputs {did['outputs'][:16]}", flush=True)
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
