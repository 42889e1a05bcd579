"""Eager operators by the NEFFs that they left: one per operator and shape, so that shapes that vary fill a cache.

TorchNeuron's in-memory key begins with its `<base>`: the SHA-256 of the StableHLO for a compiled graph, a text that
starts with the operator's name for an eager one. The name is read for people; nothing is decided by it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

STORM = 200
"""NEFFs of eager operators in one job beyond which a warm says so."""

GRAPH = "(compiled graph)"
_TAIL = re.compile(r"_(?:trn|inf)[0-9][a-z0-9-]*_[12]_O?[0-9].*\Z", re.DOTALL)
_HASH = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"(?:aten(?:::|\.|_))?([A-Za-z_][A-Za-z0-9_]*?)(?=[^A-Za-z0-9_]|_[0-9]|_?[0-9a-f]{16,}|\Z)")


def base_of(memory_key: str) -> str:
    """The `<base>` of an in-memory key: what stands before target, LNC and level."""
    return _TAIL.sub("", memory_key)


def operator_of(memory_key: str) -> str:
    """The operator's name, `GRAPH` for a compiled graph, `(unknown)` when the key does not begin with a name."""
    base = base_of(memory_key)
    if _HASH.fullmatch(base):
        return GRAPH
    match = _NAME.match(base)
    return match[1].rstrip("_") or "(unknown)" if match else "(unknown)"


@dataclass(frozen=True)
class Operators:
    """How many NEFFs each operator has, most first; `graphs` are compiled ones."""

    by_name: Mapping[str, int]
    graphs: int

    @property
    def eager(self) -> int:
        return sum(self.by_name.values())

    def to_json(self) -> dict[str, object]:
        return {"graphs": self.graphs, "eager": self.eager, "by_name": dict(self.by_name), "storm": self.storm()}

    def storm(self) -> str | None:
        """A sentence when eager operators fill the cache, with the first of them; None when they do not."""
        if self.eager <= STORM:
            return None
        top = ", ".join(f"{name} {count}" for name, count in list(self.by_name.items())[:5])
        return (
            f"{self.eager} eager operators were compiled one by one ({top}): each shape of each is another NEFF; "
            "compile the region with torch.compile, or keep its shapes fixed"
        )


def group(names: Iterable[str]) -> Operators:
    """Names as `operator_of` gives them, one a NEFF."""
    counted = Counter(names)
    graphs = counted.pop(GRAPH, 0)
    return Operators(dict(sorted(counted.items(), key=lambda item: (-item[1], item[0]))), graphs)
