"""Names of the variables that `run` hands to the training processes; all of them are set before Python starts."""

from __future__ import annotations

from collections.abc import Mapping

MANIFEST = "NEFFCACHE_MANIFEST"
"""Path of the view's manifest.json. Without it nothing of neffcache happens in a training process."""

REPORTS = "NEFFCACHE_REPORTS"
"""Directory for one report per rank."""

ON_MISS = "NEFFCACHE_ON_MISS"
"""fail, compile or warn; in the first run of a native warm, record."""

HARNESS = "NEFFCACHE_HOST_HARNESS"
"""1: make the CPU TorchTitan's device (host toolchain)."""

RANK_PROCESS = "NEFFCACHE_RANK_PROCESS"
"""Process id of the rank; its children (data loaders, compile workers) see it and stay untouched."""

EXPECTED = "NEFFCACHE_EXPECTED"
"""JSON {variable: value} of what leads a compiler to the run's own directories; a rank that sees others refuses."""

OF_A_RANK = (
    *(MANIFEST, REPORTS, ON_MISS, HARNESS, RANK_PROCESS, EXPECTED),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "NGPU"),
    *("LOG_RANK", "TORCHELASTIC_RUN_ID"),
)
"""What makes a process a rank of a job; a worker that one of our commands starts must have none of it."""


def without_rank(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment for a process that is no rank."""
    return {name: value for name, value in environ.items() if name not in OF_A_RANK}
