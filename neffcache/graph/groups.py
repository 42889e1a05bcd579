"""Process groups and meshes by who is in them, relative to the lowest rank. Names and world sizes do not appear.

A group is a sequence of distinct ranks. Sequences that are a lattice (every group that a mesh makes) have a short form:
`4:1` is 0,1,2,3; `16:4` is 0,4,...,60; `2:16*4:1` is 0,1,2,3,16,17,18,19. The outermost dimension comes first, each as
count:stride; everything else is listed, `[0,1,3]`. Two sequences never share a form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch.distributed.device_mesh import DeviceMesh

from neffcache.graph.torch_internals import modes_off
from neffcache.graph.uncacheable import Uncacheable


def group_text(ranks: Sequence[int]) -> str:
    """Membership relative to the lowest rank, order kept. ValueError for an empty group or a rank named twice."""
    if not ranks:
        raise ValueError("a process group has at least one rank")
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"a rank appears twice in {list(ranks)}")
    lowest = min(ranks)
    offsets = [rank - lowest for rank in ranks]
    dimensions = _lattice(offsets)
    if dimensions is None:
        return "[" + ",".join(map(str, offsets)) + "]"
    return "*".join(f"{count}:{stride}" for count, stride in dimensions)


def _lattice(offsets: list[int]) -> list[tuple[int, int]] | None:
    """(count, stride) per dimension, outermost first; None when the offsets are no lattice that starts at 0."""
    if offsets[0] != 0:
        return None
    if len(offsets) == 1:
        return [(1, 0)]
    dimensions: list[tuple[int, int]] = []
    rest = offsets
    while len(rest) > 1:
        stride = rest[1] - rest[0]
        count = 2
        while count < len(rest) and rest[count] - rest[count - 1] == stride:
            count += 1
        starts = rest[::count]
        if rest != [start + step * stride for start in starts for step in range(count)]:
            return None
        dimensions.insert(0, (count, stride))
        rest = starts
    return dimensions


def mesh_text(mesh: DeviceMesh) -> str:
    """Device type, dimension names, shape and rank array of a mesh; the array relative to its lowest rank."""
    return _mesh_form(mesh)[0]


def _mesh_form(mesh: DeviceMesh) -> tuple[str, int]:
    """The text of a mesh and its lowest rank, which the text does not show."""
    with modes_off():
        array = mesh.mesh
        ranks = [int(rank) for rank in array.flatten().tolist()]
        sizes = "*".join(str(int(size)) for size in array.shape)
    names = mesh.mesh_dim_names
    named = "unnamed" if names is None else json.dumps(list(names), separators=(",", ":"))
    return f"mesh({json.dumps(mesh.device_type)},{named},{sizes},{group_text(ranks)})", min(ranks)


@dataclass(frozen=True)
class GroupUse:
    """A process group that a graph names: its name here, its membership, and which of the graph's groups it is.

    Two names of one membership share a slot. Two memberships of one shape ([0,1] and [1,2]) have two slots, because
    swapping them is another program.
    """

    name: str
    ranks: tuple[int, ...]  # relative to the lowest, in group order
    slot: int

    @property
    def text(self) -> str:
        return f"pg{self.slot}({group_text(self.ranks)})"


@dataclass
class GroupTable:
    """Numbers the memberships and the meshes of one graph in order of first use."""

    resolve: Callable[[str], tuple[int, ...]]
    uses: dict[str, GroupUse] = field(default_factory=dict)
    _slots: dict[tuple[int, ...], int] = field(default_factory=dict)
    _meshes: dict[tuple[str, int], int] = field(default_factory=dict)

    def knows(self, name: str) -> bool:
        try:
            self.resolve(name)
        except LookupError:
            return False
        return True

    def group(self, name: str) -> str:
        """`pg0(4:1)` for the group registered as `name`; Uncacheable when nobody knows it."""
        use = self.uses.get(name)
        if use is None:
            try:
                ranks = tuple(self.resolve(name))
                group_text(ranks)
            except (LookupError, ValueError) as error:
                raise Uncacheable(f"process group {name!r} has no known ranks ({error})") from error
            slot = self._slots.setdefault(ranks, len(self._slots))
            use = self.uses[name] = GroupUse(name, tuple(rank - min(ranks) for rank in ranks), slot)
        return use.text

    def mesh(self, mesh: DeviceMesh) -> str:
        """`mesh0(...)`: meshes of one form that lie on different ranks get different numbers."""
        form, lowest = _mesh_form(mesh)
        slot = self._meshes.setdefault((form, lowest), len(self._meshes))
        return f"mesh{slot}{form.removeprefix('mesh')}"
