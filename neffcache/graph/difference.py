"""Where two graph texts differ, and which text is nearest to another. Texts only: nothing here needs torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import zip_longest


def first_difference(text_a: str, text_b: str) -> tuple[int, str, str] | None:
    """Number (from 1) and contents of the first line that differs, "" for a line that one text lacks; None if equal."""
    for number, (a, b) in enumerate(zip_longest(text_a.splitlines(), text_b.splitlines()), start=1):
        if a != b:
            return number, a or "", b or ""
    return None


def nearest(text: str, others: Iterable[tuple[str, str]]) -> str | None:
    """The name of the (name, text) that shares the most lines with `text`, and of equals the one that agrees longest.

    Lines count as often as they stand, wherever they stand; None when there are no others.
    """
    lines = Counter(text.splitlines())
    best: tuple[int, int, str] | None = None
    for name, other in others:
        theirs = Counter(other.splitlines())
        unlike = (lines - theirs).total() + (theirs - lines).total()
        found = first_difference(text, other)
        distance = (unlike, -found[0] if found else -len(text) - 1, name)
        if best is None or distance < best:
            best = distance
    return None if best is None else best[2]
