#!/usr/bin/env python3
"""What tracing costs, by family: seconds, memory and unique graphs, and that it grows neither with ranks nor layers.

Each row is one fresh process that traces rank 0 (what `neffcache configs --probe` does): "trace" is the trace alone,
"process" with imports and the build. The rows of one family at several sizes come with how much the cost grew; a bar
that does not hold is exit 1; of a growth row the faster of two is taken. Without arguments one configuration of every
family and the growth rows.

    .venv/bin/python scripts/bench/trace.py [CONFIG ...] [--all] [--growth] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from neffcache.compile.host.identity import environment
from neffcache.flows.everything import everything
from neffcache.flows.request import make_request
from neffcache.flows.workers import Worker, scratch

FAMILIES = (
    "llama3_8b", "llama3_405b", "llama3_8b_simple_fsdp", "qwen3_32b", "qwen3_30b_a3b", "deepseek_v3_16b",
    "deepseek_v3_671b", "gpt_oss_20b", "kimi_k2_5", "muse_glimmer_30b", "qwen35_9b", "graph_trainer_llama3_8b",
)  # fmt: skip
LARGE = ("llama3_405b", "deepseek_v3_671b")
LARGE_SECONDS, LARGE_BYTES = 30.0, 2_000_000_000
"""Bars of a trace at 512 ranks."""

GROWTH = {
    "ranks": [("llama3_8b", {"nodes": nodes}) for nodes in (1, 4, 16)],
    "layers": [("llama3_405b", {"layers": layers}) for layers in (32, 63, 126)],
}
GROWS = {"ranks": 1.6, "layers": 2.0}
"""Bars of the largest over the smallest of a growth row, in seconds: for 16 times the ranks, and for 4 times the layers
of one model (each of which FSDP gathers and an optimizer steps, but which compile nothing of their own)."""


@dataclass
class Row:
    config: str
    ranks: int
    seconds: float = 0.0
    process_seconds: float = 0.0
    peak_bytes: int = 0
    graphs: int = 0
    nodes: int = 0
    refused: str = ""
    broken: list[str] = field(default_factory=list)


def measure(name: str, place: Path, *, layers: int = 0, **where: Any) -> Row:
    """One row; with `layers` of a configuration of `layered.py`, at the mesh and world of the one it is made of."""
    request = make_request(name, environ=os.environ, **where)
    world = request.placement.world_size
    document = {
        "module": request.module,
        "function": request.function,
        "settings": dict(request.settings),
        "world_size": world,
        "cpu": True,
        "hidden": [],
    }
    if layers:
        name = f"{name}_{layers}_layers"
        document |= {"module": "scripts.bench.layered", "function": name}
    started = time.monotonic()
    variables = {**os.environ, **environment(os.environ, world), "PYTHONPATH": sys.path[0]}
    with Worker("neffcache.flows.worker_probe", document, variables, place) as worker:
        found = worker.result()
    row = Row(name, world, process_seconds=round(time.monotonic() - started, 1), peak_bytes=found["peak_bytes"])
    if "refused" in found:
        row.refused = found["refused"]["message"][:160]
        return row
    row.seconds = round(found["seconds"], 1)
    row.graphs, row.nodes = len(found["graphs"]), sum(graph["nodes"] for graph in found["graphs"])
    if name in LARGE and (row.seconds > LARGE_SECONDS or row.peak_bytes > LARGE_BYTES):
        row.broken.append(f"over {LARGE_SECONDS:.0f} s or {LARGE_BYTES / 1e9:.0f} GB")
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*")
    parser.add_argument("--all", action="store_true", help="every run that can be traced")
    parser.add_argument("--growth", action="store_true", help="only the growth rows")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    names = given.configs or ([] if given.growth else list(FAMILIES))
    if given.all:
        names = [entry.name for entry in everything(os.environ) if entry.supported]
    rows: list[Row] = []
    growth: dict[str, dict[str, Any]] = {}
    with scratch(Path(tempfile.gettempdir())) as place:
        for name in names:
            rows.append(measure(name, place))
            show(rows[-1], given.json)
        for what, series in {} if given.configs or given.all else GROWTH.items():
            twice = [[measure(name, place, **where) for name, where in series] for _ in range(2)]
            grown = [min(pair, key=lambda row: row.seconds) for pair in zip(*twice, strict=True)]
            for row in grown:
                show(row, given.json)
            ratio = max(row.seconds for row in grown) / max(0.1, min(row.seconds for row in grown))
            graphs = [row.graphs for row in grown]
            growth[what] = {"ratio": round(ratio, 2), "graphs": graphs, "bar": GROWS[what]}
            growth[what]["holds"] = ratio <= GROWS[what] and len(set(graphs)) == 1 and all(graphs)
            rows += grown
            print(f"with {what}: {ratio:.2f} times the seconds, graphs {graphs}", file=sys.stderr)
    broken = [row for row in rows if row.broken] or [one for one in growth.values() if not one["holds"]]
    if given.json:
        print(json.dumps({"rows": [vars(row) for row in rows], "growth": growth, "holds": not broken}))
    return 1 if broken else 0


def show(row: Row, quiet: bool) -> None:
    told = row.refused or (
        f"trace {row.seconds:6.1f} s  process {row.process_seconds:6.1f} s  {row.peak_bytes / 1e9:5.2f} GB  "
        f"{row.graphs:3} graphs  {row.nodes:6} nodes {' '.join(row.broken)}"
    )
    print(f"{row.config:32} {row.ranks:5} ranks  {told}", file=sys.stderr if quiet else sys.stdout, flush=True)


if __name__ == "__main__":
    sys.exit(main())
