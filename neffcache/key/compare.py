"""What differs between two JSON values or two job keys, field by field."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Any

from neffcache.key.canonical import canonical_json, to_plain
from neffcache.key.job import COMPONENTS, Component

_PLAIN_NAME = re.compile(r"[^.\[\]\"\s]+")


class Missing(Enum):
    """The left or right side of a difference has no such field."""

    MISSING = "(missing)"

    def __str__(self) -> str:
        return self.value


MISSING = Missing.MISSING


@dataclass(frozen=True)
class Difference:
    """One field that differs; `path` is dotted, with [i] for list items, and empty for the whole value."""

    path: str
    left: Any
    right: Any

    def __str__(self) -> str:
        return f"{self.path or '(value)'}: {_shown(self.left)} -> {_shown(self.right)}"

    def to_json(self) -> dict[str, Any]:
        """A side that has no such field has no entry."""
        sides = {"left": self.left, "right": self.right}
        return {"path": self.path, **{name: to_plain(value) for name, value in sides.items() if value is not MISSING}}


def _shown(value: Any) -> str:
    return str(value) if value is MISSING else repr(value)


def _child(path: str, name: str) -> str:
    if not _PLAIN_NAME.fullmatch(name):
        return f"{path}[{canonical_json(name).decode()}]"
    return f"{path}.{name}" if path else name


def _same(left: Any, right: Any) -> bool:
    # Python's == takes 1, 1.0 and True for one value; their keys differ, so the comparison has to say so.
    return canonical_json(left) == canonical_json(right)


def _walk(left: Any, right: Any, path: str) -> Iterator[Difference]:
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for name in sorted({*left, *right}):
            yield from _walk_pair(left.get(name, MISSING), right.get(name, MISSING), _child(path, name))
    elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        for index in range(max(len(left), len(right))):
            yield from _walk_pair(_item(left, index), _item(right, index), f"{path}[{index}]")
    elif not _same(left, right):
        yield Difference(path, left, right)


def _walk_pair(left: Any, right: Any, path: str) -> Iterator[Difference]:
    if left is MISSING or right is MISSING:
        yield Difference(path, left, right)
    else:
        yield from _walk(left, right, path)


def _item(values: Sequence[Any], index: int) -> Any:
    return values[index] if index < len(values) else MISSING


def differences(left: Any, right: Any, *, limit: int | None = None, path: str = "") -> list[Difference]:
    """The fields in which two JSON values differ, in the order of their names; at most `limit` of them."""
    return list(islice(_walk(left, right, path), limit))


def compare_components(
    left: Mapping[str, Component], right: Mapping[str, Component], *, limit: int | None = None
) -> list[Difference]:
    """The fields in which two job keys differ, in the order of the recipe.

    The SHA-256 decide; values are only read to say where. Two digests whose values do not differ are a difference
    of their own (`NAME.sha256`), so nothing is ever called equal because its readable form was cut.
    """
    found: list[Difference] = []
    for name in (*COMPONENTS, *sorted({*left, *right} - set(COMPONENTS))):
        mine, theirs = left.get(name), right.get(name)
        if mine is None or theirs is None:
            if mine is not theirs:
                sides = (MISSING if part is None else part.value for part in (mine, theirs))
                found.append(Difference(name, *sides))
        elif mine.sha256 != theirs.sha256:
            inside = differences(mine.value, theirs.value, limit=limit, path=name)
            found.extend(inside or [Difference(f"{name}.sha256", mine.sha256, theirs.sha256)])
    return found[:limit]
