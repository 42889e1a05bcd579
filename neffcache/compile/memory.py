"""What this process tree may still use: memory and CPUs, from its control group where there is one.

A container's limit is its control group's (v1 or v2, and that of every group above), not the machine's total. Page
cache that the kernel can drop at once (`inactive_file`) counts as free, as it does in Kubernetes' working set.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

UNLIMITED = 1 << 60
"""Control groups v1 write no limit as a number near 2**63."""


@dataclass(frozen=True)
class Amount:
    """How much is free, in bytes or CPUs, and who says so."""

    value: int
    source: str


@dataclass(frozen=True)
class _Group:
    """One control group directory and the names of its files."""

    path: Path
    limit: str
    used: str
    version: int


def available(root: Path = Path("/")) -> Amount:
    """Bytes of memory that are free: the least of the machine's and of each control group's. `root` is for tests."""
    found = Amount(_meminfo(root), "the machine's free memory")
    for group in _groups(
        root, "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")
    ):
        with contextlib.suppress(OSError, ValueError):
            limit = int((group.path / group.limit).read_text())
            if limit >= UNLIMITED:
                continue
            used = int((group.path / group.used).read_text())
            free = max(0, limit - max(0, used - _droppable(group)))
            if free < found.value:
                found = Amount(free, f"the limit of the control group (v{group.version})")
    return found


def cpus(root: Path = Path("/")) -> Amount:
    """CPUs that this process may use: its affinity, or less where a control group has a quota; at least one."""
    found = Amount(len(os.sched_getaffinity(0)), "the CPU affinity")
    for group in _groups(root, "cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us"), ("cpu.max", "cpu.max")):
        with contextlib.suppress(OSError, ValueError):
            if group.version == 2:
                quota, period = (group.path / group.limit).read_text().split()
            else:
                quota, period = ((group.path / name).read_text() for name in (group.limit, group.used))
            allowed = math.ceil(int(quota) / int(period))
            if 0 < allowed < found.value:
                found = Amount(allowed, f"the quota of the control group (v{group.version})")
    return found


def killed_count(root: Path = Path("/")) -> int:
    """How many processes the kernel has killed for want of memory in this control group, as far as it says."""
    total = 0
    for group in _groups(root, "memory", ("memory.oom_control", ""), ("memory.events", "")):
        with contextlib.suppress(OSError, ValueError):
            for line in (group.path / group.limit).read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    total = max(total, int(value))
    return total


def _groups(root: Path, controller: str, first: tuple[str, str], second: tuple[str, str]) -> Iterator[_Group]:
    """The group of this process and all above it, v1 and v2, as seen from inside or outside a container."""
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, names, place = [*line.split(":", 2), "", ""][:3]
        # A container may see the path that its group has on the host: the mount is then the group itself.
        parents = [place.strip("/"), *(str(parent) for parent in Path(place.strip("/")).parents), ""]
        if names == "":
            for base in (mount, mount / "unified"):
                yield from (_Group(base / each, *second, 2) for each in dict.fromkeys(parents))
        elif controller in names.split(","):
            for base in dict.fromkeys((mount / controller, mount / names)):
                yield from (_Group(base / each, *first, 1) for each in dict.fromkeys(parents))


def _droppable(group: _Group) -> int:
    name = "inactive_file" if group.version == 2 else "total_inactive_file"
    with contextlib.suppress(OSError, ValueError):
        for line in (group.path / "memory.stat").read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0


def _meminfo(root: Path) -> int:
    with contextlib.suppress(OSError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key == "MemAvailable":
                return int(value.split()[0]) * 1024
    return 1 << 34
