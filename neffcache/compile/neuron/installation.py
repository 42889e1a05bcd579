"""What of the Neuron software and hardware is here, told from files alone: nothing of it is imported or started.

TorchNeuron (torch-neuronx 2.14 and later) has a C++ part of its own, `_C`. The older torch-neuronx stands on
PyTorch/XLA. The packages of these names on PyPI are empty placeholders: importing them works and proves nothing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Stack = Literal["absent", "placeholder", "xla", "native"]

TORCH_NEURONX, COMPILER, NKI, LIBNEURONXLA, TORCH = "torch-neuronx", "neuronx-cc", "nki", "libneuronxla", "torch"
MODULES: Mapping[str, str] = {
    TORCH_NEURONX: "torch_neuronx",
    COMPILER: "neuronxcc",
    NKI: "nki",
    LIBNEURONXLA: "libneuronxla",
    TORCH: "torch",
}
"""Distribution -> the package that it installs."""

PROGRAM = "neuronx-cc"
LIBRARIES = "opt/aws/neuron/lib"
DRIVER_VERSION = "sys/module/neuron/version"
_DEVICE = re.compile(r"neuron[0-9]+")
_RUNTIME = re.compile(r"libnrt\.so\.(\d+\.\d[\w.+-]*)")


def stack() -> Stack:
    """Which torch_neuronx is installed."""
    names = {path.name for place in places(TORCH_NEURONX) for path in place.iterdir()}
    if not names and not places(TORCH_NEURONX):
        return "absent"
    if any(name.startswith("_C") for name in names):
        return "native"
    return "xla" if any(name.startswith(("xla", "_XLAC")) for name in names) else "placeholder"


def places(distribution: str) -> list[Path]:
    """The directories of a distribution's package, [] when it cannot be imported."""
    try:
        spec = importlib.util.find_spec(MODULES[distribution])
    except (ImportError, ValueError):
        return []
    return (
        [] if spec is None else [Path(place) for place in spec.submodule_search_locations or () if os.path.isdir(place)]
    )


def version(distribution: str) -> str | None:
    """The installed version, None when it is not installed or does not say."""
    try:
        return importlib.metadata.version(distribution) or None
    except importlib.metadata.PackageNotFoundError:
        return None


def is_placeholder(distribution: str) -> bool:
    """Whether the package has nothing in it but an `__init__.py`."""
    found = places(distribution)
    return bool(found) and all(
        path.name in ("__init__.py", "__pycache__") for place in found for path in place.iterdir()
    )


def compiler_program(environ: Mapping[str, str]) -> Path | None:
    """The `neuronx-cc` that PATH finds."""
    found = shutil.which(PROGRAM, path=environ.get("PATH", os.defpath))
    return None if found is None else Path(found)


@dataclass(frozen=True)
class Hardware:
    """The devices of this host. None: not there, or it does not say."""

    devices: int
    driver: str | None
    runtime: str | None

    def to_json(self) -> dict[str, object]:
        return {"devices": self.devices, "driver": self.driver, "runtime": self.runtime}


def hardware(environ: Mapping[str, str], root: Path = Path("/")) -> Hardware:
    """Devices (`/dev/neuron0` ...), driver (`/sys/module/neuron/version`) and runtime (the full name of libnrt.so)."""
    return Hardware(
        devices=sum(1 for path in _entries(root / "dev") if _DEVICE.fullmatch(path.name)),
        driver=_text(root / DRIVER_VERSION),
        runtime=runtime_version(environ, root),
    )


def runtime_version(environ: Mapping[str, str], root: Path = Path("/")) -> str | None:
    """The Neuron runtime's version: what `libnrt.so.1` is a link to, where the loader would look for it first."""
    folders = [Path(part) for part in environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if part]
    for folder in (*folders, root / LIBRARIES):
        named = [match[1] for path in _entries(folder) if (match := _RUNTIME.fullmatch(path.name))]
        linked = _RUNTIME.fullmatch(os.path.basename(os.path.realpath(folder / "libnrt.so.1")))
        if linked:
            return linked[1]
        if len(named) == 1:
            return named[0]
    return None


def versions(environ: Mapping[str, str], root: Path = Path("/")) -> dict[str, str]:
    """What is here and has a version: for people, and for checks at run time."""
    found: dict[str, str | None] = {name: version(name) for name in MODULES}
    found["runtime"] = runtime_version(environ, root)
    found["driver"] = _text(root / DRIVER_VERSION)
    return {name: text for name, text in found.items() if text}


def _entries(folder: Path) -> Iterator[Path]:
    try:
        yield from sorted(folder.iterdir())
    except OSError:
        return


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except (OSError, UnicodeDecodeError):
        return None
