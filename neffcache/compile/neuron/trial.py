"""The program of a probe: compiles one small graph with backend `neuron` and writes down what it saw.

Run as a script, from copies under several paths: `python trial.py ANSWER.json PLACE`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def small(x: Any, y: Any) -> Any:
    return (x @ y).relu() + 1.0


def main(answer: Path, place: Path) -> int:
    import torch

    from neffcache.compile.neuron import internals

    document: dict[str, Any] = {"neffs": [], "graph_neffs": [], "counted": None, "graph": {}}
    cache = place / "stores" / "neff"
    internals.load()
    # TorchNeuron registers itself as torch's accelerator.
    found = torch.accelerator.current_accelerator(check_available=False)
    device = "cpu" if found is None or found.type == "cuda" else found.type
    with torch.no_grad():
        x, y = torch.ones(16, 32, device=device), torch.ones(32, 16, device=device)
        before = neffs(cache)
        torch.compile(small, backend="neuron", fullgraph=True)(x, y)
        internals.synchronize()
    document["neffs"] = neffs(cache)
    document["graph_neffs"] = sorted(set(document["neffs"]) - set(before))
    try:
        document["counted"] = dict(internals.stats())
    except Exception as fault:
        document["counted_error"] = str(fault)
    document["graph"] = compile_graph(place)
    answer.write_text(json.dumps(document))
    return 0


def neffs(cache: Path) -> list[str]:
    return sorted(path.relative_to(cache).as_posix() for path in cache.rglob("*.neff") if path.stat().st_size)


def compile_graph(place: Path) -> dict[str, Any]:
    """Compile the StableHLO that the back end preserved, once more and by itself; compare its key with the recipe."""
    from neffcache.compile.neuron import internals
    from neffcache.key.native import torchneuron_disk_key

    preserved = sorted((place / "debug").rglob("stablehlo/**/*.*"))
    if not preserved:
        return {"error": "no StableHLO was preserved"}
    ir = preserved[0].read_bytes()
    try:
        memory = internals.touched("compile_graph")("neffcache-probe", ir, False)
        internals.synchronize()
        disk, neff = internals.touched("get_neff_info")(memory)
    except Exception as fault:
        return {"error": f"{type(fault).__name__}: {str(fault)[:200]}"}
    return {"neff_bytes": len(neff), "recipe": disk == torchneuron_disk_key(memory, ir) if disk else None}


if __name__ == "__main__":
    os.environ.pop("PYTHONHASHSEED", None)
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
