#!/usr/bin/env python3
"""How much of the machine the pool uses, over a stub compiler that burns a known time of one core.

efficiency = ideal seconds (work / workers) over measured seconds of the compiles; overhead per graph = what is left,
in worker seconds. A stub compiler compiles nothing: this measures neffcache, never a compiler.
Measure on a quiet machine. Exit code 1 when the efficiency is below --least.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from tests.stubs.stub import Stub  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=1.0, help="CPU seconds of each compile")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--least", type=float, default=0.9, help="efficiency below which this fails")
    parser.add_argument("--report", type=Path, help="also write the HTML report of the run")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="neffcache-bench-") as place:
        stub = Stub.install(Path(place) / "stub")
        files = stub.ir(**{f"g{number:03}": f"burn {given.seconds}" for number in range(given.graphs)})
        words: list[str | Path] = [*files, "--jobs", str(given.workers)]
        if given.report is not None:
            words += ["--report", given.report.absolute()]
        began = time.monotonic()
        answer = stub.run(*words, timeout=3600)
        total = time.monotonic() - began
        if answer.code != 0:
            print(answer.stderr, file=sys.stderr)
            return 1
        measured = answer.document["seconds"]["compile"]
    ideal = given.graphs * given.seconds / given.workers
    efficiency, overhead = ideal / measured, (measured - ideal) * given.workers / given.graphs
    document = {
        "graphs": given.graphs,
        "workers": given.workers,
        "cpus": len(os.sched_getaffinity(0)),
        "seconds": {
            "each": given.seconds,
            "ideal": ideal,
            "compile": measured,
            "command": round(total, 3),
            "overhead_per_graph": round(overhead, 4),
        },
        "ratios": {"efficiency": round(efficiency, 3)},
    }
    if given.json:
        print(json.dumps(document))
    else:
        print(
            f"{given.graphs} compiles of {given.seconds} s on {given.workers} workers: ideal {ideal:.1f} s, measured "
            f"{measured:.1f} s, efficiency {efficiency:.3f}, overhead {1000 * overhead:.0f} ms a graph, "
            f"whole command {total:.1f} s"
        )
    return 0 if efficiency >= given.least else 1


if __name__ == "__main__":
    sys.exit(main())
