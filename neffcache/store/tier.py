"""The small interface that every tier of the cache offers, so that a tier is a tier."""

from __future__ import annotations

from typing import Protocol


class Tier(Protocol):
    """Immutable things by name (`layout.blob_name`, `graph_name`, `manifest_name`); the same names locally and in S3.

    A fault of the tier (StoreFault, RemoteFault) is never reported as absence.
    """

    def get(self, key: str) -> bytes | None:
        """The checked bytes, or None when nothing has that name. Raises Damaged when it is not what was put."""
        ...

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Store `data`; True when this call did it, False when the name was taken. Raises Damaged for unfit `data`."""
        ...

    def exists(self, key: str) -> bool:
        """Whether something has that name; the content is not read."""
        ...
