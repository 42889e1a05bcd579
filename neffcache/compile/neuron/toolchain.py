"""The neuron toolchain: TorchNeuron and neuronx-cc. Built to the documented interface, not run on a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neffcache.compile.neuron import environment as contract
from neffcache.compile.neuron import identity as neuron
from neffcache.compile.neuron import installation
from neffcache.compile.toolchain import Identity
from neffcache.errors import Usage
from neffcache.key.option_table import Mode
from neffcache.key.options import Options

BACKEND = "neuron"


class NeuronToolchain:
    """TorchNeuron compiles and caches by itself; what it keeps is collected, put back and counted."""

    name = neuron.NAME
    capabilities = frozenset({"native_store"})
    harness = False

    def __init__(
        self, options: Options, target: str, lnc: int, ranks_per_node: int, settings: Mapping[str, Any]
    ) -> None:
        self.options = options
        self.target = target
        self.lnc = lnc
        self.ranks_per_node = ranks_per_node
        self.stack = installation.stack()
        self.mode: Mode = "compile" if _on(settings.get("compile.enable", True)) else "eager"

    @property
    def first_line(self) -> str:
        found = installation.version(installation.COMPILER) or "of unknown version"
        stack = {"native": "TorchNeuron", "xla": "torch-neuronx on PyTorch/XLA"}.get(self.stack, "torch-neuronx")
        return f"toolchain neuron: {stack}, neuronx-cc {found}; built to the documented interface, not run on a device"

    def identity(self, environ: Mapping[str, str], world_size: int) -> Identity:
        return neuron.identity(environ)

    def environment(self, environ: Mapping[str, str], world_size: int) -> dict[str, str]:
        return dict(self._contract(environ).variables)

    def cleared(self) -> tuple[str, ...]:
        return self._contract({}).cleared

    def settings(self, said: Mapping[str, Any]) -> dict[str, Any]:
        """Graphs through backend `neuron` unless compiling is off, and no profiler, which would time the first step."""
        ours: dict[str, Any] = {"profiler.enable_profiling": False}
        if self.stack == "native" and self.mode == "compile":
            ours |= {"compile.enable": True, "compile.backend": BACKEND}
        for name, value in ours.items():
            if name in said and _text(said[name]) != _text(value):
                raise Usage(
                    f"{name} contradicts: the neuron toolchain needs {_text(value)}, --set or the warmer has "
                    f"{_text(said[name])}",
                    hint=f"leave {name} out",
                    details={"needed": _text(value), "said": _text(said[name])},
                )
        if _text(said.get("compile.mode", "default")) not in ("default", "none"):
            raise Usage(
                f"compile.mode is {said['compile.mode']}, and TorchNeuron takes the default mode only",
                hint="leave compile.mode out",
            )
        return {name: value for name, value in ours.items() if name not in said}

    def _contract(self, environ: Mapping[str, str]) -> contract.Contract:
        return contract.environment(
            environ,
            options=self.options,
            target=self.target,
            lnc=self.lnc,
            stack=self.stack,
            mode=self.mode,
            ranks_per_node=self.ranks_per_node,
        )


def _on(value: Any) -> bool:
    return _text(value) not in ("false", "0", "no")


def _text(value: Any) -> str:
    return str(value).strip().lower()
