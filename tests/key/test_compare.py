"""Differences between JSON values and job keys."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neffcache.key.canonical import canonical_json
from neffcache.key.compare import MISSING, Difference, compare_components, differences
from neffcache.key.job import Component, job_key

pytestmark = pytest.mark.fast

JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def test_a_changed_field_is_named_by_its_path() -> None:
    left = {"a": {"b": [1, {"c": 2}]}, "same": 1}
    right = {"a": {"b": [1, {"c": 3}]}, "same": 1}
    assert differences(left, right) == [Difference("a.b[1].c", 2, 3)]


def test_a_missing_field_and_a_shorter_list_are_shown_as_missing() -> None:
    found = differences({"a": 1, "l": [1, 2]}, {"b": None, "l": [1]})
    assert found == [Difference("a", 1, MISSING), Difference("b", MISSING, None), Difference("l[1]", 2, MISSING)]
    assert str(found[0]) == "a: 1 -> (missing)"
    assert found[1].to_json() == {"path": "b", "right": None}


def test_a_name_that_reads_like_a_path_is_quoted() -> None:
    assert differences({"a.b": 1}, {"a.b": 2})[0].path == '["a.b"]'
    assert differences({"": 1}, {"": 2})[0].path == '[""]'


def test_one_and_one_point_zero_and_true_differ() -> None:
    assert len(differences([1, 1, 1.0], [1.0, True, True])) == 3
    assert differences(float("nan"), float("nan")) == []


def test_no_more_than_the_limit_is_reported() -> None:
    assert len(differences(list(range(9)), list(range(1, 10)), limit=4)) == 4


@given(JSON, JSON)
def test_values_differ_exactly_when_their_canonical_json_does(left: Any, right: Any) -> None:
    found = differences(left, right)
    assert bool(found) == (canonical_json(left) != canonical_json(right))
    assert len({difference.path for difference in found}) == len(found)
    json.dumps([difference.to_json() for difference in found], allow_nan=False)


def test_components_are_compared_in_the_order_of_the_recipe() -> None:
    one = job_key(workload={"b": 1}, target=1, lnc=1, toolchain={"x": 1}, options=[])
    two = job_key(workload={"b": 2}, target=1, lnc=2, toolchain={"x": 1}, options=[])
    paths = [difference.path for difference in compare_components(one.components, two.components)]
    assert paths == ["workload.b", "lnc"]


def test_other_digests_with_equal_values_are_still_a_difference() -> None:
    one, two = Component("workload", "a" * 64, {"cut": 1}), Component("workload", "b" * 64, {"cut": 1})
    found = compare_components({"workload": one}, {"workload": two})
    assert found == [Difference("workload.sha256", "a" * 64, "b" * 64)]


def test_a_component_that_one_key_lacks_is_missing() -> None:
    one = Component.of("lnc", {"lnc": 2})
    assert compare_components({"lnc": one}, {}) == [Difference("lnc", {"lnc": 2}, MISSING)]
