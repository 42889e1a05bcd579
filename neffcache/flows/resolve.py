"""From a request to a job: what TorchTitan (or the callable's module) makes of it, the toolchain, and the job key."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from neffcache.compile.host.native import InductorStore as HostStore
from neffcache.compile.neuron import installation
from neffcache.compile.neuron.environment import unread
from neffcache.compile.stores import native_store
from neffcache.compile.toolchain import NativeStore, Toolchain
from neffcache.compile.toolchains import choose, toolchain
from neffcache.errors import Unsupported, Usage
from neffcache.flows.remembered import ask
from neffcache.flows.request import Request
from neffcache.flows.settings import KNOWN
from neffcache.key.canonical import digest
from neffcache.key.job import JobKey, job_key
from neffcache.key.target import Mesh, placement_warnings, resolve_mesh
from neffcache.key.workload import CALLABLE, TORCHTITAN, workload_component
from neffcache.store.local import LocalStore
from neffcache.store.records import Manifest, is_collection


def with_own(arguments: Sequence[str], own: Mapping[str, str]) -> list[str]:
    """TorchTitan's arguments with `own` ones in place of theirs, right after --module and --config.

    Not at the end: what follows a choice such as `activation-checkpoint:none` is taken for an option of it.
    """
    words = list(arguments)
    for name in own:
        while name in words:
            at = words.index(name)
            del words[at : at + 2]
    return [*words[:CHOICE], *(word for pair in own.items() for word in pair), *words[CHOICE:]]


CHOICE = 4
"""Words of --module M --config C, which a job's arguments begin with."""


@dataclass(frozen=True)
class Job:
    """A resolved request. `arguments` are TorchTitan's, or the callable's name and arguments as `Workload.words` has
    them; `environment` is what every process of the job must see.

    Of a callable's mesh nothing is known before it is called: any two ranks may differ, as along `tp`.

    `remembered`: TorchTitan was not asked now, because nothing has changed since it was.
    """

    request: Request
    key: JobKey
    arguments: tuple[str, ...]
    mesh: Mesh
    replaced: tuple[Mapping[str, Any], ...]
    warnings: tuple[str, ...]
    environment: Mapping[str, str]
    versions: Mapping[str, str]
    option_values: Mapping[str, str]
    cleared: tuple[str, ...] = ()
    harness: bool = True
    remembered: bool = False
    kind: str = "torchtitan"

    def base(self, environ: Mapping[str, str]) -> dict[str, str]:
        """`environ` without the variables that no process of the job may see, and with those that all must see."""
        return {**{name: value for name, value in environ.items() if name not in self.cleared}, **self.environment}

    @property
    def trace_arguments(self) -> tuple[str, ...]:
        """The arguments for a trace on the CPU, which captures graphs where Inductor would take them."""
        if self.harness or self.called:
            return self.arguments
        return tuple(with_own(self.arguments, {"--compile.backend": "inductor"}))

    @property
    def called(self) -> bool:
        """Whether the job is a callable's, not TorchTitan's."""
        return self.kind == CALLABLE

    @property
    def toolchain_id(self) -> str:
        return self.key.components["toolchain"].sha256

    @property
    def native_store(self) -> NativeStore | None:
        """The compiler-owned store that this job keeps and serves, None when its artifacts are ours."""
        return native_store(self.key.components["toolchain"].value)

    @property
    def world_size(self) -> int:
        return self.request.placement.world_size

    def describe(self) -> str:
        """One line on what was resolved."""
        mesh = ", ".join(f"{name} {degree}" for name, degree in asdict(self.mesh).items() if degree > 1)
        told = " ".join(self.arguments) if self.called else mesh or "no parallelism"
        code = "".join(
            f", {'TorchTitan' if name == 'torchtitan' else name} {self.versions[name]}"
            for name in ("torchtitan", "transformers")
            if name in self.versions
        )
        return (
            f"{self.request.config}: {self.world_size} ranks ({told}), "
            f"{self.request.placement.target} at LNC {self.request.placement.lnc}; "
            f"torch {self.versions['torch']}{code}, {self.versions['compiler']}"
            + ("; the compiler's own cache" if self.native_store is not None else "")
            + (" (remembered: nothing has changed)" if self.remembered else "")
        )


def toolchain_of(request: Request) -> Toolchain:
    """The toolchain of a request, as an object to ask."""
    return toolchain(
        request.toolchain,
        native=request.native,
        options=request.options,
        target=request.placement.target,
        lnc=request.placement.lnc,
        ranks_per_node=request.placement.ranks_per_node,
        settings=request.settings,
    )


def first_line(request: Request) -> str:
    """What every command that uses a toolchain says first, so that nobody can take a host artifact for a NEFF."""
    return toolchain_of(request).first_line


def said_toolchain(name: str) -> str:
    """`host` or `neuron` for a request by ref, which needs neither: for `auto` the installed one, "" when none is."""
    if name != "auto":
        return name
    return "neuron" if choose("auto") == "neuron" else "host" if titan_installed() else ""


def titan_installed() -> bool:
    """Whether TorchTitan and torch can be imported here, told without importing them."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "torchtitan"))


def resolve(request: Request, environ: Mapping[str, str], directory: Path) -> Job:
    """Ask TorchTitan, in a worker, or this host's memory of what it said; raises Usage, Unsupported."""
    if request.kind == TORCHTITAN and not titan_installed():
        raise Unsupported(
            f"what {request.config} means only TorchTitan can tell, and it is not installed here",
            hint="pip install 'neffcache[host]'; without it: neffcache check --by-ref, ls, show, verify",
        )
    if importlib.util.find_spec("torch") is None:
        raise Unsupported(
            f"what {request.config} means needs torch, and it is not installed here",
            hint="pip install 'neffcache[host]'; without it: neffcache check --by-ref, ls, show, verify",
        )
    world = request.placement.world_size
    tool = toolchain_of(request)
    if request.native:
        HostStore().check_environment(environ)
    environment, cleared = tool.environment(environ, world), tool.cleared()
    found = ask(
        "neffcache.flows.worker_resolve",
        {
            "kind": request.kind,
            "module": request.module,
            "said": dict(request.settings),
            "function": request.function,
            "settings": {**tool.settings(request.settings), **request.settings},
            "world_size": world,
            "cpu": tool.harness,
            "toolchain": request.toolchain,
            "native": request.native,
        },
        {**{name: value for name, value in environ.items() if name not in cleared}, **environment},
        directory,
    )
    mesh = resolve_mesh(Mesh(**found["mesh"]), world)
    identity = found["toolchain"]["value"]
    key = job_key(
        workload=workload_component(found["document"]),
        target=request.placement.target_component(),
        lnc=request.placement.lnc_component(),
        toolchain=identity,
        options=request.options.component(),
    )
    if key.components["toolchain"].sha256 != digest(identity):
        raise Usage("the toolchain's identity has no canonical form")
    return Job(
        request=request,
        key=key,
        arguments=tuple(found["arguments"]),
        mesh=mesh,
        replaced=tuple(found["replaced"]),
        warnings=(
            *(placement_warnings(mesh, request.placement) if found["kind"] == TORCHTITAN else ()),
            *unread(environ, installation.stack(), ours=KNOWN.values()),
        ),
        environment=environment,
        versions={**found["toolchain"]["versions"], **found["packages"]},
        option_values=found["options"],
        cleared=cleared,
        harness=tool.harness,
        remembered=found["remembered"],
        kind=found["kind"],
    )


def current_manifest(store: LocalStore, job: Job) -> Manifest | None:
    """The manifest that the store has for a job key, compared by the components' SHA-256; None when it has none."""
    pointer = store.pointer(job.key.cache_key)
    found = None if pointer is None else store.get_manifest(pointer.manifest)
    if found is None or is_collection(found):
        return None
    same = all(found.components.get(name, {}).get("sha256") == part.sha256 for name, part in job.key.components.items())
    return found if same else None
