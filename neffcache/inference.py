"""The interface of an inference workload: a callable that builds a module and the inputs that it will be given.

    from neffcache.inference import World, workload

    @workload
    def tiny(world: World, *, layers: int = 2):
        mesh = world.mesh(tp=world.size)
        model = ...                                     # on world.device, parallelized over the mesh
        model.compile(backend=world.backend, dynamic=False)
        return model, {"prefill": (tokens,), "decode": (token,)}

`neffcache warm module:tiny` calls it with fake tensors, a training process with real ones. Importing this module costs
nothing and imports no torch.
"""

from __future__ import annotations

import contextlib
import contextvars
import difflib
import functools
import inspect
import math
import os
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from neffcache import variables
from neffcache.errors import Unsupported, Usage

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

Inputs = Any
"""What one call of the module is given: a tuple or list (positional), a mapping (by name), or one tensor."""

Built = tuple["torch.nn.Module", Mapping[str, Inputs]]
"""What a workload returns: the module, and its inputs by phase, in the order in which a step runs them."""

RESERVED = ("first_step", "steady_step", "last_short_batch")
"""Beginnings of phase names that mean something of their own in a manifest."""


@dataclass(frozen=True)
class World:
    """The process that a workload is called in.

    `device` is a device type (`cpu`, `neuron`), `backend` what `torch.compile` takes there (`inductor`, `neuron`).
    `tracing`: tensors have no values, so a checkpoint need not be read.
    """

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    device: str = "cpu"
    backend: str = "inductor"
    tracing: bool = False

    @classmethod
    def here(cls, *, fake: bool = False) -> World:
        """The world of this process by its launcher's variables; its process group is made when there is none.

        With `fake` the process group carries nothing: one process stands for a rank of any world.
        """
        import torch

        dist: Any = torch.distributed
        environ = os.environ
        rank, size = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
        device = "cpu" if environ.get(variables.HARNESS) == "1" else _accelerator()
        if not dist.is_initialized():
            if fake:
                dist.init_process_group("fake", rank=rank, world_size=size)
            else:
                # A process that no launcher started is alone.
                own: Any = {} if "RANK" in environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
                dist.init_process_group("gloo" if device == "cpu" else None, **own)
        local = int(environ.get("LOCAL_RANK", "0"))
        if device != "cpu":
            torch.accelerator.set_device_index(local)
        return cls(rank, local, size, device, "inductor" if device == "cpu" else device)

    def mesh(self, **degrees: int) -> DeviceMesh:
        """A DeviceMesh over all ranks, outermost degree first: `mesh(dp=2, tp=4)`. Raises Usage unless they fit."""
        if not degrees or math.prod(degrees.values()) != self.size or min(degrees.values()) < 1:
            told = " x ".join(f"{name} {degree}" for name, degree in degrees.items()) or "without a degree"
            raise Usage(
                f"the mesh {told} does not multiply to the world size {self.size}",
                hint="change a degree with --set, or --world-size",
            )
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(self.device, tuple(degrees.values()), mesh_dim_names=tuple(degrees))


def _accelerator() -> str:
    """`neuron` where TorchNeuron is loaded, else `cpu`: no other device is one of a job here."""
    import torch

    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found is not None and found.type == "neuron" else "cpu"


class Observer(Protocol):
    """Who wants to know when a workload is called: the rank that has to prove what it is."""

    def before_call(self, workload: Workload, arguments: Mapping[str, Any]) -> None: ...

    def after_call(self) -> None: ...

    def step(self) -> None: ...


_observer: Observer | None = None
_calling = contextvars.ContextVar("neffcache_calling", default=False)


def observe(observer: Observer | None) -> None:
    """Tell `observer` of every call of a workload and every step of this process, and nobody else."""
    global _observer
    _observer = observer


def step() -> None:
    """Say that every phase has run once: `neffcache run` takes the time. Elsewhere it does nothing."""
    if _observer is not None:
        _observer.step()


class Workload:
    """A callable that builds a module and its inputs; `name` is its `module:function`."""

    def __init__(self, function: Callable[..., Built]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.module: str = function.__module__
        self.name = f"{function.__module__}:{function.__qualname__}"

    def __call__(self, world: World, **arguments: Any) -> Built:
        """Build it. Raises Usage for arguments that it does not take, Unsupported when it returns something else."""
        resolved = self.resolve(arguments)
        # A workload that is called by another one is part of it.
        observer = _observer if not _calling.get() else None
        if observer is not None:
            observer.before_call(self, resolved)
        token = _calling.set(True)
        try:
            built = self._checked(self.function(world, **resolved))
        finally:
            _calling.reset(token)
        if observer is not None:
            observer.after_call()
        return built

    def resolve(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Every argument's value: what is given, as the type that is annotated, else the default. Raises Usage."""
        parameters = self._parameters()
        for name in settings:
            if name not in parameters:
                near = difflib.get_close_matches(name, parameters, n=1)
                takes = f"it takes {', '.join(parameters)}" if parameters else "it takes none"
                raise Usage(f"{self.name} has no argument {name}", hint=f"did you mean {near[0]}?" if near else takes)
        types = self._types()
        resolved: dict[str, Any] = {}
        for name, parameter in parameters.items():
            if name in settings:
                resolved[name] = self._converted(name, settings[name], types.get(name, Any))
            elif parameter.default is not inspect.Parameter.empty:
                resolved[name] = parameter.default
            else:
                raise Usage(f"{self.name} needs the argument {name}", hint=f"--set {name}=...")
            if not _is_json(resolved[name]):
                raise Usage(
                    f"the argument {name} of {self.name} is a {type(resolved[name]).__qualname__}, which has no place "
                    "in a key",
                    hint="arguments are numbers, text, true and false, None, and lists of them",
                )
        return resolved

    def words(self, settings: Mapping[str, Any]) -> list[str]:
        """The arguments with which `neffcache.runtime.infer` calls it so: those that differ from their defaults."""
        parameters = self._parameters()
        words = [self.name]
        for name, value in self.resolve(settings).items():
            if parameters[name].default != value or type(parameters[name].default) is not type(value):
                words += ["--set", f"{name}={msgspec.json.encode(value).decode()}"]
        return words

    def _parameters(self) -> dict[str, inspect.Parameter]:
        """The arguments after the world. Raises Unsupported for a callable that cannot be one."""
        found = list(inspect.signature(self.function).parameters.values())
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        if not found or found[0].kind not in (inspect.Parameter.POSITIONAL_ONLY, named[0]):
            raise Unsupported(f"{self.name} takes no world", hint="def function(world: World, *, name: int = 1)")
        for parameter in found[1:]:
            if parameter.kind not in named:
                raise Unsupported(
                    f"{self.name} takes {parameter}, so its arguments have no names", hint="name each argument"
                )
        return {parameter.name: parameter for parameter in found[1:]}

    def _types(self) -> dict[str, Any]:
        try:
            return typing.get_type_hints(self.function)
        except Exception:  # a name that only a type checker knows
            return {}

    def _converted(self, name: str, value: Any, kind: Any) -> Any:
        if kind is Any and (default := self._parameters()[name].default) is not inspect.Parameter.empty:
            kind = type(default) if default is not None else Any
        if isinstance(value, str) and kind is not str:
            several = typing.get_origin(kind) in (list, tuple, Sequence) and not value.startswith("[")
            with contextlib.suppress(msgspec.MsgspecError):
                return msgspec.convert(msgspec.json.decode(f"[{value}]" if several else value), kind)
        try:
            return msgspec.convert(value, kind, strict=False)
        except (msgspec.MsgspecError, TypeError, ValueError):
            told = getattr(kind, "__name__", str(kind))
            raise Usage(f"the argument {name} of {self.name} takes {told}, not {value!r}") from None

    def _checked(self, built: Any) -> Built:
        """`built` when it is what a workload returns. Raises Unsupported."""
        from torch import nn

        wants = "return module, {'phase': inputs}"
        if not (isinstance(built, (tuple, list)) and len(built) == 2 and isinstance(built[0], nn.Module)):
            what = type(built).__qualname__
            if isinstance(built, (tuple, list)):
                what += f" of {', '.join(type(item).__qualname__ for item in built) or 'nothing'}"
            raise Unsupported(f"{self.name} returned a {what}, not a module and its inputs by phase", hint=wants)
        module, phases = built
        if not isinstance(phases, Mapping) or not phases:
            raise Unsupported(f"{self.name} returned no inputs by phase beside its module", hint=wants)
        for name in phases:
            if not (isinstance(name, str) and name.isidentifier()) or name.startswith(RESERVED):
                raise Unsupported(
                    f"{self.name} has a phase {name!r}, which cannot be a phase's name",
                    hint=f"one word of letters, digits and underscores that does not begin with {', '.join(RESERVED)}",
                )
        return module, phases


def workload(function: Callable[..., Built]) -> Workload:
    """Mark a function as an inference workload."""
    return Workload(function)


def call(module: Callable[..., Any], inputs: Inputs) -> Any:
    """The module called with the inputs of a phase."""
    if isinstance(inputs, Mapping):
        return module(**inputs)
    if isinstance(inputs, (tuple, list)):
        return module(*inputs)
    return module(inputs)


def _is_json(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_json(item) for item in value)
    return value is None or type(value) in (bool, int, float, str)
