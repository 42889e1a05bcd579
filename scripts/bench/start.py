#!/usr/bin/env python3
"""How long the command line takes to start: `neffcache --version` against the same in bare click.

Both are console scripts of one Python, measured alternating in one run; the ratio is that of the medians. Also holds
that `--help` and `--version` import nothing heavy. Exit 1 when the bar or that rule does not hold.

    .venv/bin/python scripts/bench/start.py [--rounds 20] [--json]
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
from pathlib import Path

BAR = 1.5
HEAVY = ("torch", "torchtitan", "botocore", "rich", "diskcache", "numpy", "asyncio")

CLICK = """\
import click

@click.command()
@click.version_option("0.1.0", prog_name="bare")
def main():
    pass
"""

# What pip writes for a console script.
SCRIPT = """\
#!{python}
import re
import sys
from {module} import main
if __name__ == "__main__":
    sys.argv[0] = re.sub(r"(-script\\.pyw|\\.exe)?$", "", sys.argv[0])
    sys.exit(main())
"""

IMPORTED = """\
import json, sys
sys.argv = ["neffcache", sys.argv[1]]
from neffcache.cli.main import main
try:
    main()
except SystemExit as done:
    if done.code not in (0, None):
        raise
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})), file=sys.stderr)
"""


def environment() -> dict[str, str]:
    # Installed programs have their bytecode on disk; a machine that forbids writing it would measure the compiler.
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def seconds(command: list[str], env: dict[str, str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL, env=env)
    return time.perf_counter() - start


def heavy_imports(option: str) -> list[str]:
    """Which of HEAVY `neffcache OPTION` imports."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, option], check=True, capture_output=True, text=True, env=environment()
    )
    loaded = set(json.loads(done.stderr.splitlines()[-1]))
    return sorted(loaded.intersection(HEAVY))


def measure(rounds: int) -> dict[str, float]:
    """Median seconds of each program, alternating; `python` is the interpreter doing nothing, the floor of both."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "bare_click.py").write_text(CLICK)
        programs = {"click": "bare_click", "neffcache": "neffcache.cli.main"}
        commands = {"python": [sys.executable, "-c", "pass"]}
        for name, module in programs.items():
            script = folder / f"run-{name}"
            script.write_text(SCRIPT.format(python=sys.executable, module=module))
            script.chmod(0o755)
            commands[name] = [str(script), "--version"]
        taken: dict[str, list[float]] = {name: [] for name in commands}
        for command in commands.values():  # warms the page cache and writes bytecode
            seconds(command, environment())
        for _ in range(rounds):
            for name, command in commands.items():
                taken[name].append(seconds(command, environment()))
    return {name: statistics.median(values) for name, values in taken.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    arguments = parser.parse_args()

    medians = measure(arguments.rounds)
    ratio = medians["neffcache"] / medians["click"]
    heavy = {option: heavy_imports(option) for option in ("--help", "--version")}
    holds = ratio <= BAR and not any(heavy.values())
    document = {
        "ratios": {"version_over_click": round(ratio, 3)},
        "bars": {"version_over_click": BAR},
        "seconds": {name: round(value, 4) for name, value in medians.items()},
        "rounds": arguments.rounds,
        "heavy_imports": heavy,
        "holds": holds,
    }
    if arguments.json:
        print(json.dumps(document, indent=1))
    else:
        for name, value in medians.items():
            print(f"{name:10} {value * 1000:7.1f} ms")
        print(f"version_over_click {ratio:.3f} (bar {BAR})")
        for option, names in heavy.items():
            print(f"{option} imports {', '.join(names) or 'nothing heavy'}")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
