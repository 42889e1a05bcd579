#!/usr/bin/env python3
"""What `neffcache key` costs beyond importing torch and TorchTitan, and what it costs when nothing has changed.

Three commands alternate in one run, each in fresh processes: a bare Python that imports torch and torchtitan.trainer;
`neffcache key` that asks TorchTitan (NEFFCACHE_RESOLVE_CACHE=0); and one that this host remembers. "Own" is the second
less the first, from the medians. Exit 1 when a bar does not hold.

    .venv/bin/python scripts/bench/key.py [--rounds 5] [--config llama3_8b] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

OWN_BAR = 2.0
"""Seconds."""

IMPORTS = "import torch, torchtitan.trainer"
BAR = 0.2
"""Of a remembered answer over the bare imports that it spares."""


def seconds(command: list[str], **variables: str) -> float:
    start = time.perf_counter()
    subprocess.run(
        command, check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL, env={**os.environ, **variables}
    )
    return time.perf_counter() - start


def measure(config: str, rounds: int) -> dict[str, float]:
    """Median seconds of each of the three, after one unmeasured round that warms the page cache and the memory."""
    key = [sys.executable, "-m", "neffcache.cli.main", "key", config, "--lnc", "2"]
    taken: dict[str, list[float]] = {"imports": [], "asked": [], "remembered": []}
    with tempfile.TemporaryDirectory() as place:
        caches = {"XDG_CACHE_HOME": place}
        for number in range(rounds + 1):
            found = {
                "imports": seconds([sys.executable, "-c", IMPORTS]),
                "asked": seconds(key, NEFFCACHE_RESOLVE_CACHE="0", **caches),
                "remembered": seconds(key, **caches),
            }
            if number:
                for name, value in found.items():
                    taken[name].append(value)
    return {name: statistics.median(values) for name, values in taken.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--config", default="llama3_8b")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    arguments = parser.parse_args()

    medians = measure(arguments.config, arguments.rounds)
    own = medians["asked"] - medians["imports"]
    ratio = medians["remembered"] / medians["imports"]
    holds = own < OWN_BAR and ratio < BAR
    document = {
        "config": arguments.config,
        "ratios": {
            "asked_over_imports": round(medians["asked"] / medians["imports"], 3),
            "remembered_over_imports": round(ratio, 4),
        },
        "seconds": {**{name: round(value, 3) for name, value in medians.items()}, "own": round(own, 3)},
        "bars": {"own_seconds": OWN_BAR, "remembered_over_imports": BAR},
        "rounds": arguments.rounds,
        "holds": holds,
    }
    if arguments.json:
        print(json.dumps(document, indent=1))
    else:
        for name, value in document["seconds"].items():  # type: ignore[attr-defined]
            print(f"{name:12} {value:7.3f} s")
        print(f"remembered_over_imports {ratio:.4f} (bar {BAR}); own {own:.3f} s (bar {OWN_BAR})")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
