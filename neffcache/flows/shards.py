"""One job's compiles over several machines that some other engine started: Kubernetes, Slurm, AWS Batch.

Every shard traces the same job and finds the same graphs, so all agree on who compiles what without talking: largest
first, each to the shard that has least so far. Only what is the same everywhere decides, never what this store knows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from neffcache.errors import Usage

OWN = "NEFFCACHE_SHARDS"
"""How many shards there are, for engines that tell a task only its index."""


@dataclass(frozen=True)
class Shard:
    """Part `index` (from 0) of `count`; `origin` says who said so."""

    index: int
    count: int
    origin: str

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def mine(self, sizes: Mapping[str, int]) -> set[str]:
        """The keys of this shard. `sizes`: key -> number of nodes."""
        load = [0] * self.count
        mine: set[str] = set()
        for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
            least = load.index(min(load))
            load[least] += max(1, sizes[key])
            if least == self.index:
                mine.add(key)
        return mine


def choose(option: str | None, environ: Mapping[str, str]) -> Shard | None:
    """The shard of `--shard i/n`, else of the engine that started this process; `--shard none` asks no engine.

    Raises Usage for what is no shard.
    """
    if option == "none":
        return None
    if option is not None:
        match = re.fullmatch(r"(\d+)/(\d+)", option)
        if match is None:
            raise Usage(
                f"--shard takes i/n, counted from 0, or none; not {option!r}", hint="--shard 0/4 to --shard 3/4"
            )
        return _checked(int(match[1]), int(match[2]), "--shard")
    return _slurm(environ) or _batch(environ) or _kubernetes(environ)


def unsaid(environ: Mapping[str, str]) -> str | None:
    """What to tell when an engine gives an index and nobody says how many there are."""
    if "JOB_COMPLETION_INDEX" in environ and not environ.get(OWN):
        return f"JOB_COMPLETION_INDEX is set but {OWN} is not: everything is compiled here, nothing is shared out"
    return None


def _kubernetes(environ: Mapping[str, str]) -> Shard | None:
    """An Indexed Job: it sets JOB_COMPLETION_INDEX, from 0, and says nowhere how many completions there are."""
    if "JOB_COMPLETION_INDEX" not in environ or not environ.get(OWN):
        return None
    index = _number(environ, "JOB_COMPLETION_INDEX")
    return _checked(index, _number(environ, OWN), "JOB_COMPLETION_INDEX")


def _slurm(environ: Mapping[str, str]) -> Shard | None:
    """A job array `--array=A-B` or `A-B:STEP`."""
    if "SLURM_ARRAY_TASK_ID" not in environ or not environ.get("SLURM_ARRAY_TASK_COUNT"):
        return None
    step = _number(environ, "SLURM_ARRAY_TASK_STEP") if environ.get("SLURM_ARRAY_TASK_STEP") else 1
    first = _number(environ, "SLURM_ARRAY_TASK_MIN") if environ.get("SLURM_ARRAY_TASK_MIN") else 0
    index, rest = divmod(_number(environ, "SLURM_ARRAY_TASK_ID") - first, max(1, step))
    count = _number(environ, "SLURM_ARRAY_TASK_COUNT")
    if rest or index >= count:
        raise Usage(
            "the task ids of this Slurm array have gaps, so they cannot be counted",
            hint="use --array=0-N, or say --shard i/n (--shard none to compile everything here)",
        )
    return _checked(index, count, "SLURM_ARRAY_TASK_ID")


def _batch(environ: Mapping[str, str]) -> Shard | None:
    """An AWS Batch array job."""
    if "AWS_BATCH_JOB_ARRAY_INDEX" not in environ:
        return None
    size = next((name for name in ("AWS_BATCH_JOB_ARRAY_SIZE", OWN) if environ.get(name)), None)
    if size is None:
        return None
    return _checked(_number(environ, "AWS_BATCH_JOB_ARRAY_INDEX"), _number(environ, size), "AWS_BATCH_JOB_ARRAY_INDEX")


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name].strip()
    if not re.fullmatch(r"\d+", text):
        raise Usage(f"{name} is not a number: {text!r}", hint="--shard none ignores it")
    return int(text)


def _checked(index: int, count: int, origin: str) -> Shard:
    if not 0 <= index < count:
        raise Usage(
            f"there is no shard {index} of {count} ({origin})",
            hint=f"shards count from 0: 0/{count} to {count - 1}/{count}",
        )
    return Shard(index, count, origin)
