"""A `neuronx-cc` that refuses to compile, first on PATH: in a strict run a miss then ends the job before a compile.

Whether TorchNeuron starts the program that PATH finds is asked of the installed version (probe `shim_honoured`).
Where it does not, the counters are watched, and one compile may begin.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from neffcache.compile.neuron.installation import PROGRAM

FOLDER = "refusing"
LOG = "refused-compiles"
"""Beside the shim: one line a compile that it refused, the compiler's arguments."""

_SCRIPT = """#!/bin/sh
# neffcache: stands first on PATH in a strict run. Questions go to the real compiler, a compile is refused.
if [ "$1" != compile ]; then exec {real} "$@"; fi
printf '%s\\n' "$*" >> {log}
: > {mark}
echo "neffcache: this run must compile nothing, and it asked for: neuronx-cc $*" >&2
exit 1
"""


def install(private: Path, environ: Mapping[str, str], real: Path, mark: Path) -> dict[str, str]:
    """Write the shim below `private`; the PATH that finds it first. A refused compile also makes the file `mark`."""
    folder = private / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / PROGRAM
    quoted = {"real": real, "log": private / LOG, "mark": mark}
    program.write_text(_SCRIPT.format(**{name: shlex.quote(str(path)) for name, path in quoted.items()}))
    program.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{environ.get('PATH', os.defpath)}"}


def without(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment whose PATH leads past every shim, to the compiler that is installed."""
    kept = [part for part in environ.get("PATH", os.defpath).split(os.pathsep) if Path(part).name != FOLDER]
    return {**environ, "PATH": os.pathsep.join(kept)}


def refused(private: Path) -> list[str]:
    """The command lines that were refused so far."""
    try:
        return (private / LOG).read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []
