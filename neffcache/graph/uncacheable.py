"""The one refusal of this room: a graph that cannot be written down completely gets no key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neffcache.errors import Unsupported


class Uncacheable(Unsupported):
    """A value is outside the closed list, so no text could tell it from another one.

    `node` is the name of the graph node that holds it (empty where no graph is involved), `reason` says what was found.
    """

    def __init__(self, reason: str, *, node: str = "", details: Mapping[str, Any] | None = None) -> None:
        where = f"graph node {node} " if node else ""
        super().__init__(
            f"{where}cannot be keyed: {reason}",
            hint="it is compiled on every start and never stored",
            details={"node": node, "reason": reason, **(details or {})},
        )
        self.node = node
        self.reason = reason

    def at(self, node: str) -> Uncacheable:
        """The same refusal with the node's name, unless an inner graph's node has been named already."""
        return self if self.node else Uncacheable(self.reason, node=node, details={**self.details, "node": node})
