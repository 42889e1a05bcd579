"""From a request to a job: what TorchTitan makes of it, the toolchain, and the job key."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from neffcache.errors import Unsupported, Usage
from neffcache.flows.request import Request
from neffcache.flows.workers import call
from neffcache.key.canonical import digest
from neffcache.key.job import JobKey, job_key
from neffcache.key.target import Mesh, placement_warnings, resolve_mesh
from neffcache.key.workload import workload_component


@dataclass(frozen=True)
class Job:
    """A resolved request. `arguments` are TorchTitan's; `environment` is what every process of the job must see."""

    request: Request
    key: JobKey
    arguments: tuple[str, ...]
    mesh: Mesh
    replaced: tuple[Mapping[str, Any], ...]
    warnings: tuple[str, ...]
    environment: Mapping[str, str]
    versions: Mapping[str, str]
    option_values: Mapping[str, str]

    @property
    def toolchain_id(self) -> str:
        return self.key.components["toolchain"].sha256

    @property
    def world_size(self) -> int:
        return self.request.placement.world_size

    def describe(self) -> str:
        """One line on what was resolved."""
        mesh = ", ".join(f"{name} {degree}" for name, degree in asdict(self.mesh).items() if degree > 1)
        return (
            f"{self.request.config}: {self.world_size} ranks ({mesh or 'no parallelism'}), "
            f"{self.request.placement.target} at LNC {self.request.placement.lnc}; "
            f"torch {self.versions['torch']}, TorchTitan {self.versions['torchtitan']}, {self.versions['compiler']}"
        )


def choose_toolchain(name: str) -> str:
    """`host` or `neuron` for `host|neuron|auto`; Unsupported when neuron was asked for and is not there."""
    state = neuron_state()
    if name == "neuron" or (name == "auto" and state == "native"):
        if state != "native":
            raise Unsupported(
                {
                    "absent": "the Neuron toolchain is not installed: there is no package torch_neuronx",
                    "placeholder": "torch_neuronx here is PyPI's empty placeholder, not TorchNeuron",
                    "xla": "torch_neuronx here is the older PyTorch/XLA stack, which this version does not warm",
                }[state],
                hint="install TorchNeuron from the vendor's package index, or use --toolchain host",
            )
        raise Unsupported(
            "the Neuron toolchain is not built in this version of neffcache",
            hint="use --toolchain host; its artifacts are no NEFFs",
        )
    return "host"


def said_toolchain(name: str) -> str:
    """`host` or `neuron` for a request by ref, which needs neither: for `auto` the installed one, "" when none is."""
    if name != "auto":
        return name
    return "neuron" if neuron_state() == "native" else "host" if titan_installed() else ""


FIRST_LINE = {"host": "toolchain host: Inductor on this CPU; its artifacts are no NEFFs"}
"""What every command that uses a toolchain says first, so that nobody can take a host artifact for a NEFF."""


def neuron_state() -> str:
    """`absent`, `placeholder`, `xla` or `native`, told by what the package holds, without importing it."""
    spec = importlib.util.find_spec("torch_neuronx")
    if spec is None:
        return "absent"
    places = [Path(place) for place in spec.submodule_search_locations or []]
    files = {path.name for place in places for path in place.iterdir()} if places else set()
    if any(name.startswith("_C") for name in files):
        return "native"
    return "xla" if any(name.startswith(("xla", "_XLAC")) for name in files) else "placeholder"


def titan_installed() -> bool:
    """Whether TorchTitan and torch can be imported here, told without importing them."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "torchtitan"))


def toolchain_environment(environ: Mapping[str, str], world_size: int) -> dict[str, str]:
    """What the host toolchain needs in the environment, before Python imports torch."""
    from neffcache.compile.host.identity import environment

    return environment(environ, world_size)


def resolve(request: Request, environ: Mapping[str, str], directory: Path) -> Job:
    """Ask TorchTitan, in a worker; raises Usage, Unsupported."""
    if not titan_installed():
        raise Unsupported(
            f"what {request.config} means only TorchTitan can tell, and it is not installed here",
            hint="pip install 'neffcache[host]'; without it: neffcache check --by-ref, ls, show, verify",
        )
    world = request.placement.world_size
    environment = toolchain_environment(environ, world)
    found = call(
        "neffcache.flows.worker_resolve",
        {
            "module": request.module,
            "function": request.function,
            "settings": dict(request.settings),
            "world_size": world,
            "cpu": True,
        },
        {**environ, **environment},
        directory,
    )
    mesh = resolve_mesh(Mesh(**found["mesh"]), world)
    toolchain = found["toolchain"]["value"]
    key = job_key(
        workload=workload_component(found["document"]),
        target=request.placement.target_component(),
        lnc=request.placement.lnc_component(),
        toolchain=toolchain,
        options=request.options.component(),
    )
    if key.components["toolchain"].sha256 != digest(toolchain):
        raise Usage("the toolchain's identity has no canonical form")
    return Job(
        request=request,
        key=key,
        arguments=tuple(found["arguments"]),
        mesh=mesh,
        replaced=tuple(found["replaced"]),
        warnings=tuple(placement_warnings(mesh, request.placement)),
        environment=environment,
        versions={**found["toolchain"]["versions"], "torchtitan": found["torchtitan"]},
        option_values=found["options"],
    )
