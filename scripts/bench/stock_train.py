"""TorchTitan on CPU ranks without neffcache's doors: `stock_train.py TIMES_DIRECTORY TORCHTITAN_ARGUMENTS...`.

Uses the host harness (a CPU device module, plain sums in gloo), so that the same configuration trains; compiling is
all Inductor's own. Leaves the times of its optimizer steps, in seconds since the Trainer stood.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from neffcache.trace import titan


def main(times: Path, arguments: list[str]) -> None:
    titan.use_cpu()
    config = titan.load_config(arguments)
    titan.force_sum_reduction(config)
    trainer = config.build()
    started = time.monotonic()
    steps: list[float] = []
    register_optimizer_step_post_hook(lambda *_: steps.append(time.monotonic() - started))
    trainer.train()
    trainer.close()
    per_step: Any = len(trainer.optimizers.optimizers)
    (times / f"{os.environ['RANK']}.json").write_text(json.dumps(steps[::per_step]))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
