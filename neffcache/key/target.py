"""Target, LNC and world size of a job, and the mesh that has to fit them.

Numbers are those of the Neuron documentation (instance and LNC pages, 2026-08 to 2026-10).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neffcache.errors import Usage

TARGETS = ("trn1", "trn1n", "inf2", "trn2", "trn3", "cpu")
_ALIASES = {"trn2n": "trn2", "trn2u": "trn2", "trn3u": "trn3"}
_LNC_CHOICE = ("trn2", "trn3")  # every other target has LNC 1 and the compiler refuses 2
_REVISION = re.compile(r"(?P<base>[a-z0-9]+)-(?P<revision>rev[0-9]+)")


@dataclass(frozen=True)
class Instance:
    """One EC2 instance type. `hbm` is GiB per device; `devices` is None where no source gives it."""

    name: str
    target: str
    devices: int | None
    physical_cores_per_device: int
    hbm: int
    confirmed: bool
    source: str

    def logical_cores_per_device(self, lnc: int) -> int:
        return self.physical_cores_per_device // lnc

    def ranks_per_node(self, lnc: int) -> int | None:
        """Logical cores of the whole instance: one rank each."""
        return None if self.devices is None else self.devices * self.logical_cores_per_device(lnc)


_TRN1 = "Neuron documentation, Trn1 architecture"
_TRN2 = "Neuron documentation, Trn2 architecture"
_TRN3 = "Neuron documentation, Trainium3 architecture; the name is known to tools only, no number of devices is public"

INSTANCES: Mapping[str, Instance] = {
    row.name: row
    for row in (
        #        name             target  devices cores hbm  confirmed source
        Instance("trn1.2xlarge", "trn1", 1, 2, 32, True, _TRN1),
        Instance("trn1.32xlarge", "trn1", 16, 2, 32, True, _TRN1),
        Instance("trn1n.32xlarge", "trn1n", 16, 2, 32, True, _TRN1),
        Instance("trn2.3xlarge", "trn2", 1, 8, 96, True, _TRN2),
        Instance("trn2.48xlarge", "trn2", 16, 8, 96, True, _TRN2),
        Instance("trn2u.48xlarge", "trn2", 16, 8, 96, True, _TRN2 + " (one node of an UltraServer of 4)"),
        Instance("trn3.48xlarge", "trn3", None, 8, 144, False, _TRN3),
    )
}
# What a request means that names no instance: the largest confirmed one of its target.
DEFAULT_TARGET = "trn2"
DEFAULT_INSTANCE: Mapping[str, str] = {"trn1": "trn1.32xlarge", "trn1n": "trn1n.32xlarge", "trn2": "trn2.48xlarge"}

# Environment variables that this module reads, oldest name last.
LNC_VARIABLES = ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE")
TARGET_VARIABLE = "NEURON_PLATFORM_TARGET_OVERRIDE"


def _base(target: str) -> str:
    match = _REVISION.fullmatch(target)
    return match["base"] if match else target


def normal_target(name: str, *, origin: str = "--target") -> str:
    """The compiler's name of a target: trn2n and trn2u are trn2, trn3u is trn3, a revision (trn3-rev2) is kept.

    A revision stays in the key because the compiler sees it. Raises Usage for an unknown target.
    """
    match = _REVISION.fullmatch(name.strip().lower())
    base, suffix = (match["base"], f"-{match['revision']}") if match else (name.strip().lower(), "")
    base = _ALIASES.get(base, base)
    if base not in TARGETS:
        raise Usage(f"{origin} names the unknown target {name!r}.", hint="Known targets: " + ", ".join(TARGETS) + ".")
    return base + suffix


def default_lnc(target: str) -> int:
    """2 on Trn2 and Trn3, 1 everywhere else (Neuron documentation, logical NeuronCore configuration)."""
    return 2 if _base(normal_target(target)) in _LNC_CHOICE else 1


@dataclass(frozen=True)
class Placement:
    """Where a job runs. Only target, lnc and world_size are in the job key.

    `instance` and `nodes` only say how the world size came about; the same ranks on other nodes have the same graphs.
    `logical_cores_per_device` is None where ranks have no device (cpu) or the instance is not known.
    """

    target: str
    lnc: int
    instance: str | None
    nodes: int
    world_size: int
    ranks_per_node: int
    logical_cores_per_device: int | None

    def target_component(self) -> dict[str, Any]:
        return {"target": self.target}

    def lnc_component(self) -> dict[str, Any]:
        return {"lnc": self.lnc, "world_size": self.world_size}


def _refuse_contradiction(what: str, values: Mapping[str, object]) -> None:
    told = ", ".join(f"{origin} = {value}" for origin, value in values.items())
    raise Usage(
        f"The {what} is given more than once and the values contradict: {told}.",
        hint="Keep one of them, or make them equal.",
        details={origin: str(value) for origin, value in values.items()},
    )


def _positive(value: int | None, origin: str) -> None:
    if value is not None and value < 1:
        raise Usage(f"{origin} must be at least 1, not {value}.", hint="Give a positive number.")


def _resolve_target(values: Mapping[str, str]) -> str:
    names = {origin: normal_target(value, origin=origin) for origin, value in values.items()}
    if not names:
        return DEFAULT_TARGET
    if len({_base(name) for name in names.values()}) > 1:
        _refuse_contradiction("target", values)
    # trn3 and trn3-rev2 do not contradict: the second says more, and it is what the compiler gets.
    revisions = {name for name in names.values() if name != _base(name)}
    if len(revisions) > 1:
        _refuse_contradiction("target", values)
    return revisions.pop() if revisions else _base(next(iter(names.values())))


def _resolve_lnc(target: str, values: Mapping[str, str | int]) -> int:
    numbers: dict[str, int] = {}
    for origin, value in values.items():
        if str(value).strip() not in ("1", "2"):
            raise Usage(f"{origin} is {value!r}, but an LNC is 1 or 2.", hint=f"Set {origin} to 1 or 2, or remove it.")
        numbers[origin] = int(value)
    if len(set(numbers.values())) > 1:
        _refuse_contradiction("LNC", numbers)
    lnc = next(iter(numbers.values()), default_lnc(target))
    if lnc == 2 and _base(target) not in _LNC_CHOICE:
        raise Usage(
            f"LNC 2 ({', '.join(numbers)}) does not exist on {target}: only Trn2 and Trn3 join two physical cores, "
            "and the compiler refuses it with NCC_EARG001.",
            hint=f"Use --lnc 1 on {target}, or another --target.",
        )
    return lnc


def _find_instance(name: str) -> Instance:
    if name not in INSTANCES:
        raise Usage(
            f"The instance type {name!r} is not known.",
            hint="Known: " + ", ".join(INSTANCES) + "; or give --target and --world-size.",
        )
    return INSTANCES[name]


def _resolve_size(nodes: int | None, world_size: int | None, full: int | None, where: str) -> tuple[int, int]:
    """(nodes, world size); `full` is the number of ranks that a whole node of `where` holds."""
    if world_size is None:
        if full is None:
            raise Usage(
                f"The world size of {where} cannot be derived: its number of cores is not known.",
                hint="Give --world-size.",
            )
        return nodes or 1, (nodes or 1) * full
    if nodes is None:
        nodes = 1 if full is None else math.ceil(world_size / full)
    if world_size % nodes:
        raise Usage(f"{world_size} ranks cannot be spread evenly over {nodes} nodes.", hint="Change --nodes.")
    if full is not None and world_size // nodes > full:
        raise Usage(
            f"{world_size} ranks on {nodes} nodes are {world_size // nodes} a node; {where} has {full} logical cores.",
            hint=f"Use --nodes {math.ceil(world_size / full)} or a smaller --world-size.",
        )
    return nodes, world_size


def resolve_placement(
    *,
    target: str | None = None,
    lnc: int | None = None,
    instance: str | None = None,
    nodes: int | None = None,
    world_size: int | None = None,
    environ: Mapping[str, str] | None = None,
    option_lnc: int | None = None,
    option_target: str | None = None,
) -> Placement:
    """Where a job runs, from all that names it; whatever is None is derived.

    `option_lnc` and `option_target` are those found inside the compiler options. Nothing named at all means one
    trn2.48xlarge. An empty environment variable counts as unset. Raises Usage (exit 2) for a contradiction, naming
    every value and where it came from; for an LNC that the target lacks; and for a world that does not fit its nodes.
    """
    environ = environ or {}
    _positive(nodes, "--nodes")
    _positive(world_size, "--world-size")
    named = None if instance is None else _find_instance(instance)
    # The origins that may contradict, in the order in which the message names them.
    targets = {
        "--target": target,
        "--instance": None if named is None else named.target,
        TARGET_VARIABLE: environ.get(TARGET_VARIABLE, "").strip() or None,
        "--target in the compiler options": option_target,
    }
    resolved = _resolve_target({origin: value for origin, value in targets.items() if value is not None})
    lncs: dict[str, str | int | None] = {
        "--lnc": lnc,
        **{name: environ.get(name, "").strip() or None for name in LNC_VARIABLES},
        "the LNC in the compiler options": option_lnc,
    }
    resolved_lnc = _resolve_lnc(resolved, {origin: value for origin, value in lncs.items() if value is not None})
    if named is None and (default := DEFAULT_INSTANCE.get(_base(resolved))) is not None:
        named = INSTANCES[default]
    full = None if named is None else named.ranks_per_node(resolved_lnc)
    nodes, world_size = _resolve_size(nodes, world_size, full, resolved if named is None else named.name)
    return Placement(
        target=resolved,
        lnc=resolved_lnc,
        instance=None if named is None else named.name,
        nodes=nodes,
        world_size=world_size,
        ranks_per_node=world_size // nodes,
        logical_cores_per_device=None if named is None else named.logical_cores_per_device(resolved_lnc),
    )


@dataclass(frozen=True)
class Mesh:
    """Degrees of parallelism, outermost first as TorchTitan lays out ranks (tp is innermost); ep borrows its ranks."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    ep: int = 1


def resolve_mesh(mesh: Mesh, world_size: int) -> Mesh:
    """`mesh` with dp_shard -1 replaced by the rest of `world_size`.

    Raises Usage when the degrees do not multiply to the world size, or ep does not divide dp_shard * cp * tp
    (TorchTitan's `ParallelDims`).
    """
    for name in ("pp", "dp_replicate", "cp", "tp", "ep"):
        _positive(getattr(mesh, name), f"The degree {name}")
    fixed = mesh.pp * mesh.dp_replicate * mesh.cp * mesh.tp
    shard = mesh.dp_shard
    if shard == -1 and world_size % fixed == 0:
        shard = world_size // fixed
    if shard < 1 or fixed * shard != world_size:
        told = " x ".join(f"{name} {getattr(mesh, name)}" for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp"))
        raise Usage(
            f"The mesh {told} does not multiply to the world size {world_size}.",
            hint="Change a degree, --nodes or --world-size; dp_shard -1 takes the rest.",
        )
    if (shard * mesh.cp * mesh.tp) % mesh.ep:
        raise Usage(
            f"The expert degree ep {mesh.ep} does not divide dp_shard {shard} x cp {mesh.cp} x tp {mesh.tp}.",
            hint="Expert parallelism borrows its ranks from these three: make ep a divisor of their product.",
        )
    return Mesh(mesh.pp, mesh.dp_replicate, shard, mesh.cp, mesh.tp, mesh.ep)


def placement_warnings(mesh: Mesh, placement: Placement) -> list[str]:
    """What works but is slow: tensor-parallel groups that leave their device or their node.

    Rank r of a node sits on device r // (logical cores per device), and tp is the innermost degree of the mesh.
    """
    cores = placement.logical_cores_per_device
    if cores is None or mesh.tp == 1:
        return []
    if placement.ranks_per_node % mesh.tp and placement.nodes > 1:
        return [
            f"A tensor-parallel group of {mesh.tp} ranks crosses nodes of {placement.ranks_per_node} ranks: "
            "its collectives go over the network."
        ]
    if mesh.tp > cores or cores % mesh.tp:
        return [
            f"A tensor-parallel group of {mesh.tp} ranks leaves its device of {cores} logical cores "
            f"(LNC {placement.lnc}): its collectives go over the links between devices."
        ]
    return []
