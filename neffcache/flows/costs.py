"""What a compile will take: measured for this very graph, else for one of about its size, else a stated default."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from neffcache.compile import memory
from neffcache.compile.memory import Amount
from neffcache.store import layout
from neffcache.store.index import Cost, Index
from neffcache.store.local import LocalStore

log = logging.getLogger("neffcache.flows")

Family = Literal["host", "neuron"]

DEFAULT_SECONDS: Mapping[Family, float] = {"host": 30.0, "neuron": 300.0}
"""Wall clock where nothing of its size was measured. host: about a llama3 block on one idle core; neuron: a guess."""

WORKER_BYTES = 1_200_000_000
"""Resident memory of a host compile where none was measured (about 0.75 GB for llama3 blocks, with room)."""

DEFAULT_BYTES: Mapping[Family, int] = {"host": WORKER_BYTES, "neuron": 8_000_000_000}
"""The same for each family; neuron: a guess."""

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

    @property
    def room_bytes(self) -> int:
        """What to keep free for it: a default has its room already."""
        return self.peak_bytes if self.basis == "default" else int(ROOM * self.peak_bytes)


@dataclass(frozen=True)
class Capacity:
    """How many compiles at once, and how much memory for all of them (None: whoever said --jobs answers for it)."""

    slots: int
    budget: int | None
    cpus: Amount
    memory: Amount

    def to_json(self) -> dict[str, object]:
        return {
            "slots": self.slots,
            "cpus": {"count": self.cpus.value, "source": self.cpus.source},
            "memory": {"bytes": self.memory.value, "source": self.memory.source},
        }


def capacity(jobs: int | None) -> Capacity:
    """What this machine has room for; `jobs` is what the user said."""
    cpus, free = memory.cpus(), memory.available()
    if jobs is not None:
        return Capacity(max(1, jobs), None, cpus, free)
    return Capacity(cpus.value, free.value, cpus, free)


class Costs:
    """Estimates from the index and, for sizes that it does not know, from the graph records of the store."""

    def __init__(self, store: LocalStore, index: Index | None, family: Family = "host") -> None:
        self._store = store
        self.index = index
        self._family: Family = family
        self._recorded: dict[int, Cost] | None = None

    def estimate(self, compile_key: str, nodes: int) -> Estimate:
        """What compiling that graph will take."""
        if self.index is not None and (cost := self.index.cost(compile_key)) is not None:
            return self._estimate(cost, "measured")
        known = [] if self.index is None else [self.index.cost_of_nodes(nodes, self._family)]
        for cost in (*known, self._record_of(nodes)):
            if cost is not None and max(cost.nodes, nodes) <= ALIKE * min(cost.nodes, nodes):
                return self._estimate(cost, "similar")
        return Estimate(DEFAULT_SECONDS[self._family], DEFAULT_BYTES[self._family], "default")

    def measured(self, compile_key: str, cost: Cost) -> None:
        """Remember what a compile took. Whatever is wrong with the index is logged and costs only the memory of it."""
        if self.index is None:
            return
        try:
            self.index.put_cost(compile_key, cost, self._family)
        except Exception as fault:
            log.warning("the cost of %s is not remembered: %s", compile_key, fault)

    def _estimate(self, cost: Cost, basis: Basis) -> Estimate:
        return Estimate(cost.seconds, cost.peak_bytes or DEFAULT_BYTES[self._family], basis, cost.nodes)

    def _record_of(self, nodes: int) -> Cost | None:
        """The cost in the graph record with the nearest number of nodes: the index may have been deleted."""
        if self._recorded is None:
            # Only a Neuron compiler sees a target.
            ours = self._family == "neuron"
            records = (item for item in self._store.graphs() if (item.components.get("target") is not None) == ours)
            self._recorded = {item.nodes: Cost(item.seconds, item.peak_bytes, item.nodes) for item in records}
        nearest = min(self._recorded, key=lambda count: (abs(count - nodes), -count), default=None)
        return None if nearest is None else self._recorded[nearest]


@contextlib.contextmanager
def costs_of(store: LocalStore, *, remember: bool, family: Family = "host") -> Iterator[Costs]:
    """The costs that a store knows. `remember` makes an index where there is none; never in a store opened to read."""
    index: Index | None = None
    if store.writable and (remember or (store.root / layout.INDEX).is_dir()):
        try:
            index = Index.open(store)
        except Exception as fault:
            log.warning("the index cannot be opened: %s", fault)
    try:
        yield Costs(store, index, family)
    finally:
        if index is not None:
            index.close()
