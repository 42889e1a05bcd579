"""What an identity may do below a prefix, found out by doing it. For `doctor`; writes and removes one probe."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from neffcache.key.canonical import sha256_hex
from neffcache.remote import errors
from neffcache.remote.tier import PROBE, RemoteStore

RIGHTS = ("get", "list", "put", "delete")


def rights(remote: RemoteStore) -> dict[str, Any]:
    """`{"principal", "get", "list", "put", "delete", "conditional_writes"}`: the rights are True or False.

    Raises Fault when the remote cannot be asked at all (unreachable, no bucket, expired...).
    """
    client = remote.client
    own = f"{PROBE}-{secrets.token_hex(8)}"
    data = b"neffcache\n"

    def first(items: Any) -> None:
        next(iter(items), None)

    found: dict[str, Any] = {"principal": client.principal()}
    found["get"] = _may(lambda: client.read(PROBE))
    found["list"] = _may(lambda: first(client.names(PROBE)))
    found["put"] = _may(lambda: client.put(own, data, sha256_hex(data), size=len(data)))
    # Without the right to put there is nothing of ours to remove: removing nothing shows the right as well.
    found["delete"] = _may(lambda: client.delete(own))
    found["conditional_writes"] = remote.conditional() if found["put"] else None
    return found


def _may(call: Callable[[], object]) -> bool:
    try:
        call()
        return True
    except errors.Denied:
        return False
