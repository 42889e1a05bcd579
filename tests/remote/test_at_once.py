"""What is done as soon as what it needs is done."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neffcache.remote.transfer import at_once_then


@given(
    st.integers(1, 4),
    st.dictionaries(st.text("abc", min_size=1, max_size=2), st.lists(st.integers(0, 5), max_size=4), max_size=6),
)
def test_each_key_comes_once_and_after_what_it_needs(threads: int, needs: dict[str, list[int]]) -> None:
    done: list[int | str] = []
    at_once_then(threads, done.append, range(6), done.append, needs)
    assert sorted(map(str, done)) == sorted([*map(str, range(6)), *needs])
    for key, needed in needs.items():
        assert all(done.index(item) < done.index(key) for item in needed)


def test_a_key_does_not_wait_for_what_it_does_not_need() -> None:
    came = threading.Event()

    def work(item: int) -> None:
        if item == 1:
            assert came.wait(20), "the key waits for an item of another one"

    at_once_then(2, work, range(2), lambda _: came.set(), {"key": [0]})


@pytest.mark.parametrize("bad", [0, "key"])
def test_an_exception_ends_it(bad: int | str) -> None:
    seen: list[int | str] = []

    def work(item: int | str) -> None:
        if item == bad:
            raise ValueError(item)
        seen.append(item)

    with pytest.raises(ValueError, match=str(bad)):
        at_once_then(1, work, range(2), work, {"key": [0], "free": []})
    assert "free" not in seen
