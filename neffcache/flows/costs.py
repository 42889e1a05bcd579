"""What a compile will take: measured for this very graph, else for one of about its size, else a stated default."""

from __future__ import annotations

import contextlib
import heapq
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from neffcache.store import layout
from neffcache.store.index import Cost, Index
from neffcache.store.local import LocalStore

log = logging.getLogger("neffcache.flows")

DEFAULT_SECONDS = 30.0
"""Wall clock of a host compile where nothing of its size was measured (a llama3 block on one idle core, roughly)."""

WORKER_BYTES = 1_200_000_000
"""Resident memory of a host compile where none was measured (about 0.75 GB for llama3 blocks, with room)."""

ROOM = 1.25
"""What a worker may need beyond a measured peak."""

ALIKE = 2.0
"""Graphs whose numbers of nodes differ by no more than this factor are taken for equally costly."""

Basis = Literal["measured", "similar", "default"]


@dataclass(frozen=True)
class Estimate:
    """Seconds of wall clock and peak resident bytes of one compile.

    `nodes` are those of the graph that was measured (None: default), so a reader can judge a similar one.
    """

    seconds: float
    peak_bytes: int
    basis: Basis
    nodes: int | None = None


class Costs:
    """Estimates from the index and, for sizes that it does not know, from the graph records of the store."""

    def __init__(self, store: LocalStore, index: Index | None) -> None:
        self._store = store
        self._index = index
        self._recorded: dict[int, Cost] | None = None

    def estimate(self, compile_key: str, nodes: int) -> Estimate:
        """What compiling that graph will take."""
        if self._index is not None and (cost := self._index.cost(compile_key)) is not None:
            return _estimate(cost, "measured")
        known = [] if self._index is None else [self._index.cost_of_nodes(nodes)]
        for cost in (*known, self._record_of(nodes)):
            if cost is not None and max(cost.nodes, nodes) <= ALIKE * min(cost.nodes, nodes):
                return _estimate(cost, "similar")
        return Estimate(DEFAULT_SECONDS, WORKER_BYTES, "default")

    def measured(self, compile_key: str, cost: Cost) -> None:
        """Remember what a compile took. Whatever is wrong with the index is logged and costs only the memory of it."""
        if self._index is None:
            return
        try:
            self._index.put_cost(compile_key, cost)
        except Exception as fault:
            log.warning("the cost of %s is not remembered: %s", compile_key, fault)

    def _record_of(self, nodes: int) -> Cost | None:
        """The cost in the graph record with the nearest number of nodes: the index may have been deleted."""
        if self._recorded is None:
            records = self._store.graphs()
            self._recorded = {item.nodes: Cost(item.seconds, item.peak_bytes, item.nodes) for item in records}
        nearest = min(self._recorded, key=lambda count: (abs(count - nodes), -count), default=None)
        return None if nearest is None else self._recorded[nearest]


@contextlib.contextmanager
def costs_of(store: LocalStore, *, remember: bool) -> Iterator[Costs]:
    """The costs that a store knows. `remember` makes an index where there is none; never in a store opened to read."""
    index: Index | None = None
    if store.writable and (remember or (store.root / layout.INDEX).is_dir()):
        try:
            index = Index.open(store)
        except Exception as fault:
            log.warning("the index cannot be opened: %s", fault)
    try:
        yield Costs(store, index)
    finally:
        if index is not None:
            index.close()


def worker_bytes(estimates: Iterable[Estimate]) -> int:
    """Memory to count for each worker: any of them may get the largest graph."""
    needed = [item.peak_bytes if item.basis == "default" else int(ROOM * item.peak_bytes) for item in estimates]
    return max(needed, default=WORKER_BYTES)


def makespan(seconds: Iterable[float], workers: int) -> float:
    """Seconds that `workers` need for these compiles, longest first, each on the first free worker."""
    free = [0.0] * max(1, workers)
    for each in sorted(seconds, reverse=True):
        heapq.heapreplace(free, free[0] + each)
    return max(free)


def _estimate(cost: Cost, basis: Basis) -> Estimate:
    return Estimate(cost.seconds, cost.peak_bytes or WORKER_BYTES, basis, cost.nodes)
