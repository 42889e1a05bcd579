"""What a user waits for on the first step: eager, stock Inductor cold, stock with its own cache warm, neffcache.

All four train llama3_debugmodel on 4 gloo ranks of this machine, alternating, in one run of this script. A first step
lasts from the moment that the Trainer stands to the end of the first optimizer step; the slowest rank counts.
Prints {"seconds": {...}, "ratios": {...}} with --json; ratios are medians over rounds of ratios within a round.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CONFIG = "llama3_debugmodel"
BARS = {"warm_over_stock_warm": 0.9, "warm_over_stock_cold": 0.35}
HERE = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent


def neffcache(environ: dict[str, str], *arguments: str) -> Any:
    done = subprocess.run(
        [str(BIN / "neffcache"), *arguments, "--json"],
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"neffcache {' '.join(arguments)} ended with {done.returncode}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout)


def stock(environ: dict[str, str], arguments: list[str], cache: Path, place: Path) -> tuple[float, float]:
    """First and later step in seconds of a plain TorchTitan run, with Inductor's cache in `cache`."""
    times = place / "times"
    times.mkdir(exist_ok=True)
    for old in times.glob("*"):
        old.unlink()
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", "localhost:0", str(HERE / "stock_train.py"), str(times), *arguments),
    ]
    done = subprocess.run(
        command,
        env={**environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    found = [json.loads(path.read_text()) for path in sorted(times.glob("*.json"))]
    if done.returncode != 0 or len(found) != 4:
        raise SystemExit(f"the stock run failed\n{done.stderr[-4000:]}")
    first = max(steps[0] for steps in found)
    later = [b - a for steps in found for a, b in itertools.pairwise(steps)]
    return first, statistics.median(later)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    wanted = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in ("eager", "stock_cold", "stock_warm", "warm", "steady")}
    with tempfile.TemporaryDirectory(prefix="neffcache-bench-") as name:
        place = Path(name)
        environ = {key: value for key, value in os.environ.items() if not key.startswith("NEFFCACHE_")}
        environ.update(NEFFCACHE_DIR=str(place / "store"), TMPDIR=name)
        neffcache(environ, "warm", CONFIG)
        command = neffcache(environ, "env", CONFIG)["command"]
        arguments = [
            *command[command.index("torchtitan.train") + 1 :],
            *("--training.steps", "3", "--debug.seed", "7", "--dump_folder", str(place / "outputs")),
        ]
        eager = [word if word != "--compile.enable" else "--compile.no-enable" for word in arguments]
        stock(environ, arguments, place / "shared", place)  # fills the cache of `stock_warm`
        for number in range(wanted.rounds):
            seconds["eager"].append(stock(environ, eager, place / "unused", place)[0])
            seconds["stock_cold"].append(stock(environ, arguments, place / f"cold-{number}", place)[0])
            seconds["stock_warm"].append(stock(environ, arguments, place / "shared", place)[0])
            run = neffcache(environ, "run", CONFIG, "--steps", "3", "--set", "debug.seed=7")
            seconds["warm"].append(run["step_one"]["seconds"])
            seconds["steady"].append(run["steady_step_seconds"])
            print(
                f"round {number + 1}: " + ", ".join(f"{name} {values[-1]:.2f} s" for name, values in seconds.items()),
                file=sys.stderr,
                flush=True,
            )

    def ratio(over: str) -> float:
        return round(statistics.median(a / b for a, b in zip(seconds["warm"], seconds[over], strict=True)), 3)

    document = {
        "seconds": {name: round(statistics.median(values), 3) for name, values in seconds.items()},
        "ratios": {
            "warm_over_stock_warm": ratio("stock_warm"),
            "warm_over_stock_cold": ratio("stock_cold"),
            "warm_over_steady": ratio("steady"),
        },
        "rounds": wanted.rounds,
        "bars": BARS,
    }
    print(json.dumps(document) if wanted.json else json.dumps(document, indent=2))
    if any(document["ratios"][name] > bar for name, bar in BARS.items()):  # type: ignore[index]
        raise SystemExit("a bar is not met")


if __name__ == "__main__":
    main()
