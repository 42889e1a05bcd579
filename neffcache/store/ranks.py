"""Sets of ranks as compact strings: "0-63,128". They are never expanded unless asked: a job may have many thousands."""

from __future__ import annotations

import re
from collections.abc import Iterable

from neffcache.errors import StoreFault

# A job of more ranks than this is a damaged or hostile record, not a cluster.
MAX_RANKS = 1 << 20

_RANGE = re.compile(r"(0|[1-9][0-9]{0,8})(?:-(0|[1-9][0-9]{0,8}))?", re.ASCII)


def expand_ranks(ranks: str) -> tuple[int, ...]:
    """The ranks of "0-2,5": (0, 1, 2, 5).

    Raises StoreFault unless `ranks` ascends without overlap and stays below `MAX_RANKS`.
    """
    return tuple(rank for low, high in ranges(ranks) for rank in range(low, high + 1))


def fold_ranks(ranks: Iterable[int]) -> str:
    """(5, 0, 1, 2) -> "0-2,5". Raises StoreFault for a negative rank."""
    parts: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if rank < 0 or rank >= MAX_RANKS:
            raise StoreFault(f"a rank must be between 0 and {MAX_RANKS - 1}, not {rank}")
        if parts and parts[-1][1] == rank - 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def has_rank(ranks: str, rank: int) -> bool:
    """Whether `rank` is in the compact string, without expanding it."""
    return any(low <= rank <= high for low, high in ranges(ranks))


def ranges(ranks: str) -> list[tuple[int, int]]:
    """The (first, last) pairs of the compact string. Raises StoreFault when it is malformed."""
    parsed: list[tuple[int, int]] = []
    last = -1
    for part in ranks.split(",") if ranks else ():
        match = _RANGE.fullmatch(part)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if low <= last or high < low or high >= MAX_RANKS:
            raise StoreFault(f'ranks must look like "0-63,128", ascending and below {MAX_RANKS}: {ranks[:80]!r}')
        parsed.append((low, high))
        last = high
    return parsed
