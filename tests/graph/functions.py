"""Functions of several kinds, as a user's module would hold them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from tests.graph import building

SCALE = 2.0


def plain(x: float) -> float:
    return x + 1


def other(x: float) -> float:
    return x + 2


def with_default(x: float, y: float = 1.0, *, z: float = 2.0) -> float:
    return x + y + z


def adder(amount: Any) -> Callable[[float], Any]:
    def add(x: float) -> Any:
        return x + amount

    return add


def lambdas(kind: str) -> Callable[[float], float]:
    return (lambda x: x + 1) if kind == "one" else (lambda x: x + 2)


def counting(limit: int) -> Callable[[int], int]:
    def count(x: int) -> int:
        return x if x > limit else count(x + 1)

    return count


def scaled(x: float) -> float:
    return x * SCALE


def calling(x: float) -> float:
    return plain(math.sqrt(x))


def reaching_out(x: Any) -> Any:
    return building.with_argument(x)


def importing(x: Any) -> Any:
    from tests.graph.building import with_argument

    return with_argument(x)


def evaluating(x: str) -> Any:
    return eval(x)


@functools.lru_cache
def remembered(x: float) -> float:
    return x + 1


class Callee:
    def __call__(self, x: float) -> float:
        return x

    def method(self, x: float) -> float:
        return x
