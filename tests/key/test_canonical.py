"""Canonical JSON: the short way gives the bytes of the library."""

from typing import Any

import pytest
import rfc8785
from hypothesis import example, given
from hypothesis import strategies as st

from neffcache.key import canonical

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=4)
NAMES = st.text() | st.sampled_from(sorted(canonical.TAGS))
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner) | st.dictionaries(NAMES, inner) | st.lists(inner).map(tuple), max_leaves=20
)


@given(VALUES)
@example('\x7f\x00\x1f\n\t\b\f\r"\\/')
@example({"\u20ac": 1, "\U0001f600": 2, "\ufb33": 3, "a": [1.0, 1, 2**53, -0.0]})
@example({"b": {"$int": "1"}, "a": True, "": None})
@example("\ud800")
@example({1: "a"})
@example([1, True, 2**53 - 1, -(2**53) + 1])
def test_the_text_is_that_of_the_library(value: Any) -> None:
    try:
        expected = rfc8785.dumps(canonical._tagged(value))
    except Exception as error:
        expected = error
    if isinstance(expected, Exception):
        with pytest.raises(type(expected)):
            canonical.canonical_json(value)
    else:
        assert canonical.canonical_json(value) == expected


@given(
    st.recursive(
        st.text('abc\x7f\n"', max_size=5) | st.integers(-9, 9), lambda inner: st.dictionaries(st.text("xyz"), inner)
    )
)
def test_plain_values_take_the_short_way(value: Any) -> None:
    assert canonical._plain(value, canonical.TAGS)
    assert canonical.canonical_json(value) == rfc8785.dumps(canonical._tagged(value))
