"""What the neuron toolchain is: TorchNeuron, neuronx-cc, NKI and the torch around them, by version and by content.

The runtime's version is not part of it, so that a host without devices can warm; it is in `versions` and checked at
run. What cannot be told is refused: an unknown compiler has no key.
"""

from __future__ import annotations

import re
import subprocess
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neffcache.compile.neuron import installation, shim
from neffcache.compile.neuron.content import Program, Tree, content_digest
from neffcache.compile.neuron.installation import COMPILER, LIBNEURONXLA, NKI, TORCH, TORCH_NEURONX
from neffcache.compile.neuron.notes import Notes
from neffcache.compile.toolchain import Identity
from neffcache.errors import Unsupported

NAME = "neuron"
_VERSION = re.compile(r"(?:[Vv]ersion|neuronx-cc)[ :]+(\d+\.\d[\w.+-]*)")
NATIVE_STORES: Mapping[str, str] = {"native": "torchneuron", "xla": "libneuronxla"}
REASONS: Mapping[str, str] = {
    "absent": "the Neuron toolchain is not installed: there is no package torch_neuronx",
    "placeholder": "torch_neuronx here is PyPI's empty placeholder, not TorchNeuron",
}
HINT = "install TorchNeuron from the vendor's package index, or use --toolchain host"


def identity(environ: Mapping[str, str], *, asking: bool = True) -> Identity:
    """The identity of this installation. Raises Unsupported (exit 8) naming what cannot be told and why.

    A training process starts no compiler: with `asking` false the program on PATH is not asked for its version, which
    whoever launched the process has done.
    """
    environ = shim.without(environ)
    stack = installation.stack()
    if stack in REASONS:
        raise Unsupported(REASONS[stack], hint=HINT)
    notes = Notes.of_host(environ)
    framework = LIBNEURONXLA if stack == "xla" else None
    parts: dict[str, Any] = {
        "name": NAME,
        "stack": stack,
        "native_store": NATIVE_STORES[stack],
        TORCH_NEURONX: _package(TORCH_NEURONX, notes),
        COMPILER: compiler(environ, notes, asking=asking),
        NKI: _nki(notes),
        TORCH: _package(TORCH, notes, suffix=".py"),
        # Names the extension modules that this Python loads.
        "python": sysconfig.get_config_var("SOABI") or sysconfig.get_python_version(),
    }
    if framework is not None:
        parts[framework] = _package(framework, notes)
    versions = installation.versions(environ)
    versions["compiler"] = f"neuronx-cc {parts[COMPILER]['version']}"
    return Identity(NAME, parts, versions)


def _package(distribution: str, notes: Notes, *more: Program, suffix: str = "") -> dict[str, str]:
    """Version and content of one package. Raises Unsupported for one that is absent, empty, or has no version."""
    places = installation.places(distribution)
    if not places:
        raise Unsupported(f"{distribution} is not installed, so the toolchain has no identity", hint=HINT)
    if installation.is_placeholder(distribution):
        raise Unsupported(f"{distribution} here is an empty placeholder, not the vendor's package", hint=HINT)
    version = installation.version(distribution)
    if version is None:
        raise Unsupported(
            f"the version of {distribution} cannot be told: its package is there, its metadata is not",
            hint="install it with pip from the vendor's package index",
        )
    trees = [
        Tree(distribution if not index else f"{distribution}-{index}", place, suffix)
        for index, place in enumerate(places)
    ]
    return {"version": version, "sha256": content_digest([*trees, *more], notes)}


def compiler(environ: Mapping[str, str], notes: Notes, *, asking: bool = True) -> dict[str, str]:
    """Version and content of the compiler. TorchNeuron starts it by name, so the program that PATH finds counts too.

    Raises Unsupported when that program is not of the package that this Python sees: which of the two would compile
    cannot be told.
    """
    path = installation.compiler_program(environ)
    if path is None:
        raise Unsupported(
            f"{installation.PROGRAM} is not on PATH, so what compiles cannot be told",
            hint="activate the environment that it is installed in",
        )
    found = _package(COMPILER, notes, Program(installation.PROGRAM, path))
    told = program_version(path, environ, notes, found) if asking else found["version"]
    if told != found["version"]:
        raise Unsupported(
            f"two compilers: the package {COMPILER} is {found['version']}, {installation.PROGRAM} on PATH says {told}",
            hint="activate one environment, so that PATH and Python find the same compiler",
            details={"package": found["version"], "program": told, "path": str(path)},
        )
    return found


def program_version(path: Path, environ: Mapping[str, str], notes: Notes, package: Mapping[str, str]) -> str:
    """The version that `neuronx-cc --version` gives. Raises Unsupported when it gives none."""
    key = {"path": str(path), **package}
    if (known := notes.get("version", key)) is not None and isinstance(known.get("version"), str):
        return str(known["version"])
    try:
        done = subprocess.run(
            [path, "--version"], env=dict(environ), capture_output=True, text=True, timeout=120, check=True
        )
    except (OSError, subprocess.SubprocessError) as fault:
        raise Unsupported(
            f"{installation.PROGRAM} does not answer --version, so the compiler is unknown",
            hint="run it by hand; a missing library or a broken environment says so there",
            details={"fault": str(fault)[:300]},
        ) from None
    match = _VERSION.search(done.stdout) or _VERSION.search(done.stderr)
    if match is None:
        raise Unsupported(f"{installation.PROGRAM} --version names no version", details={"said": done.stdout[:300]})
    notes.put("version", key, {"version": match[1]})
    return match[1]


def _nki(notes: Notes) -> dict[str, str] | None:
    """NKI's own package; None where it comes inside neuronx-cc and is counted there."""
    return _package(NKI, notes) if installation.places(NKI) else None
