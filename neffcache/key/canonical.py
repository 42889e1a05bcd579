"""Canonical JSON (RFC 8785) and the digests made of it.

RFC 8785 prints 1.0 as 1, has no nan and no integers beyond 2**53: two different values could share one text.
Such values are tagged before printing, so that the text is injective over every value that it accepts.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import rfc8785
import xxhash

_EXACT_INT = 2**53 - 1
TAGS = frozenset({"$float", "$int", "$bytes", "$map"})
_encode = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode


def _tagged(value: Any) -> Any:
    if type(value) is str or value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return value if abs(value) <= _EXACT_INT else {"$int": str(value)}
    if isinstance(value, float):
        if not math.isfinite(value) or value.is_integer():
            return {"$float": repr(value)}
        return value
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if isinstance(value, Mapping):
        plain: dict[str, Any] = {}
        for name, item in value.items():
            if not isinstance(name, str):
                raise TypeError(f"a key of canonical JSON must be a string, not {type(name).__name__}")
            plain[name] = item if type(item) is str else _tagged(item)
        # A user's own one-entry map named like a tag must not read as the tag.
        return {"$map": plain} if len(plain) == 1 and next(iter(plain)) in TAGS else plain
    if isinstance(value, (list, tuple)):
        return [_tagged(item) for item in value]
    raise TypeError(f"canonical JSON takes no {type(value).__module__}.{type(value).__qualname__}")


def canonical_json(value: Any) -> bytes:
    """The RFC 8785 text of `value`; raises TypeError for anything that is not JSON (or bytes)."""
    plain = _plain(value, TAGS)
    if not plain:
        value = _tagged(value)
        plain = _plain(value, frozenset())
    if plain:
        text = _encode(value)
        if text.isascii():
            return text.encode()
    return rfc8785.dumps(value)


def _plain(value: Any, tags: frozenset[str]) -> bool:
    """Whether a value needs no tag (`tags`: the names that would read as one), and `json` writes it byte for byte as
    RFC 8785 does, as long as all of it is ASCII: so with small integers, and fractions that neither writes with an
    exponent."""
    kind = type(value)
    if kind is str or value is None or kind is bool:
        return True
    if kind is dict:
        if len(value) == 1 and next(iter(value)) in tags:
            return False
        for name, item in value.items():
            if type(name) is not str or not (type(item) is str or _plain(item, tags)):
                return False
        return True
    if kind is list or kind is tuple:
        return all(type(item) is str or _plain(item, tags) for item in value)
    if kind is int:
        return bool(-_EXACT_INT <= value <= _EXACT_INT)
    return kind is float and 1e-4 <= abs(value) < 1e16 and not value.is_integer()


def sha256_hex(data: bytes | bytearray) -> str:
    return hashlib.sha256(data).hexdigest()


def digest(value: Any) -> str:
    """SHA-256 of the canonical JSON of `value`, as 64 hex digits."""
    return sha256_hex(canonical_json(value))


def xxh3_128_hex(data: bytes) -> str:
    """XXH3-128 with seed 0 as 32 hex digits, high half first, as TorchNeuron writes its disk keys."""
    return xxhash.xxh3_128_hexdigest(data)


def to_plain(value: Any) -> Any:
    """`value` as JSON that any reader keeps: nan, inf, bytes and integers beyond 2**53 are tagged, the rest stays.

    `from_plain` gives a value with the same canonical JSON back; Python's `json` keeps 1 and 1.0 apart by itself.
    """
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, Mapping):
        plain = {name: to_plain(item) for name, item in value.items()}
        return {"$map": plain} if len(plain) == 1 and next(iter(plain)) in TAGS else plain
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return _tagged(value)


def from_plain(value: Any) -> Any:
    """The inverse of `to_plain`; also reads the fully tagged form of `canonical_json`."""
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        tag, inner = next(iter(value.items()))
        if tag == "$float" and isinstance(inner, str):
            return float(inner)
        if tag == "$int" and isinstance(inner, str):
            return int(inner)
        if tag == "$bytes" and isinstance(inner, str):
            return bytes.fromhex(inner)
        if tag == "$map" and isinstance(inner, dict):
            return {name: from_plain(item) for name, item in inner.items()}
    return {name: from_plain(item) for name, item in value.items()}
