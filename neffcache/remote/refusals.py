"""What a compiler refused for good, told to other machines: `failures/<compile key>.json`.

The key holds the compiler's content, the options and the graph, so a refusal is true everywhere. It carries the code
and no word of the log, which may name places of the machine that wrote it. A record of the graph, where there is one,
counts more; a refusal is never deleted, and whoever does not believe it (`--retry-failed`) compiles.
"""

from __future__ import annotations

import json
import re

import msgspec

from neffcache.key.canonical import sha256_hex
from neffcache.remote.tier import RemoteStore
from neffcache.store import layout

_CODE = re.compile(r"NCC_[A-Z]+[0-9]+")


class Refusal(msgspec.Struct, frozen=True):
    """That a compiler refuses a graph: with which code, since when (seconds since 1970)."""

    schema: int
    compile_key: str
    toolchain: str
    code: str
    at: int


def put(remote: RemoteStore, refusal: Refusal) -> bool:
    """Tell a refusal; whether nobody had told of that key before. Raises Fault."""
    data = msgspec.json.encode(refusal)
    name = layout.failure_name(refusal.compile_key)
    return remote.client.put(name, data, sha256_hex(data), size=len(data), if_absent=True) is not None


def get(remote: RemoteStore, compile_key: str) -> Refusal | None:
    """What is told of a key; None when nothing is, or when it is no refusal of that key. Raises Fault."""
    found = remote.client.read(layout.failure_name(compile_key))
    if found is None:
        return None
    try:
        refusal = msgspec.convert(json.loads(found[0]), Refusal)
    except (ValueError, msgspec.ValidationError):
        return None
    good = refusal.schema == 1 and refusal.compile_key == compile_key and _CODE.fullmatch(refusal.code)
    return refusal if good else None
