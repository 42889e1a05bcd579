"""Which compile starts next, and what a whole list of them will take: one rule for the pool and for the plan.

Longest first, as many at once as there are slots, and never more memory at once than the budget. What does not fit
waits; a smaller one passes it only if the waiting one still fits when the largest running one ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


def next_to_start(waiting: Sequence[int], running: Sequence[int], budget: int | None) -> int | None:
    """The index in `waiting` of what may start now, or None. All numbers are peak memory in bytes."""
    if not waiting:
        return None
    if budget is None or not running:
        return 0
    used = sum(running)
    if used + waiting[0] <= budget:
        return 0
    without_largest = used - max(running)
    for index, needed in enumerate(waiting[1:], start=1):
        if used + needed <= budget and without_largest + needed + waiting[0] <= budget:
            return index
    return None


@dataclass(frozen=True)
class Forecast:
    """What compiling a list will take: seconds, the most memory at once in bytes, the most compiles at once."""

    seconds: float
    peak_bytes: int
    at_once: int


def forecast(units: Sequence[tuple[float, int]], slots: int, budget: int | None) -> Forecast:
    """`units` are (seconds, peak bytes) in the order in which they are started."""
    waiting = list(units)
    running: list[tuple[float, int]] = []
    now, peak, at_once = 0.0, 0, 0
    while waiting or running:
        while len(running) < max(1, slots):
            index = next_to_start([size for _, size in waiting], [size for _, size in running], budget)
            if index is None:
                break
            seconds, size = waiting.pop(index)
            heapq.heappush(running, (now + seconds, size))
            peak, at_once = max(peak, sum(size for _, size in running)), max(at_once, len(running))
        now, _ = heapq.heappop(running)
    return Forecast(now, peak, at_once)
