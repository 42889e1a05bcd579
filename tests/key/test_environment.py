"""Which environment variables are in the key."""

from __future__ import annotations

import pytest

from neffcache.key.environment import (
    ELSEWHERE,
    NEUTRAL,
    PREFIXES,
    SEMANTIC,
    Variable,
    graph_environment,
    neutral_reason,
)

pytestmark = pytest.mark.fast


def example(variable: Variable) -> tuple[str, str]:
    return variable.name.replace("*", "LOG_LEVEL"), variable.only[0] if variable.only else "some value"


@pytest.mark.parametrize("variable", SEMANTIC, ids=lambda variable: variable.name)
def test_each_semantic_variable_counts_with_its_value(variable: Variable) -> None:
    assert graph_environment({variable.name: "1"}) == {variable.name: "1"}
    assert graph_environment({variable.name: "1"}) != graph_environment({variable.name: "2"})


@pytest.mark.parametrize("variable", NEUTRAL, ids=lambda variable: variable.name)
def test_each_neutral_variable_does_not_count_and_says_why(variable: Variable) -> None:
    name, value = example(variable)
    assert graph_environment({name: value}) == {}
    assert neutral_reason(name, value)


@pytest.mark.parametrize("variable", ELSEWHERE, ids=lambda variable: variable.name)
def test_what_has_a_component_of_its_own_is_not_counted_twice(variable: Variable) -> None:
    assert graph_environment({variable.name: "2"}) == {}
    assert "component" in (neutral_reason(variable.name, "2") or "")


@pytest.mark.parametrize("prefix", PREFIXES)
def test_an_unknown_variable_of_the_stack_counts(prefix: str) -> None:
    assert graph_environment({f"{prefix}BRAND_NEW": ""}) == {f"{prefix}BRAND_NEW": ""}
    assert neutral_reason(f"{prefix}BRAND_NEW", "") is None


def test_runtime_variables_are_neutral_as_a_class() -> None:
    assert graph_environment({"NEURON_RT_NUM_CORES": "64", "NEURON_RT_BRAND_NEW": "1"}) == {}


def test_variables_of_others_do_not_count() -> None:
    others = {"HOME": "/h", "PATH": "/p", "MASTER_PORT": "1", "RANK": "3", "MY_NEURON_X": "1", "neuron_x": "1"}
    assert graph_environment(others) == {}


def test_only_the_value_that_an_import_sets_by_itself_is_neutral() -> None:
    assert graph_environment({"NKI_ENABLE_TRACE_CACHE": "1"}) == graph_environment({})
    assert graph_environment({"NKI_ENABLE_TRACE_CACHE": "0"}) == {"NKI_ENABLE_TRACE_CACHE": "0"}


def test_the_order_of_the_environment_does_not_matter() -> None:
    one = graph_environment({"XLA_B": "1", "XLA_A": "2"})
    assert list(one) == list(graph_environment({"XLA_A": "2", "XLA_B": "1"})) == ["XLA_A", "XLA_B"]


def test_no_variable_has_two_places() -> None:
    names = [variable.name for variable in (*SEMANTIC, *ELSEWHERE, *NEUTRAL)]
    assert len(set(names)) == len(names)
