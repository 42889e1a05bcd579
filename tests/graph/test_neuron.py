"""What Trainium cannot take is found in a graph, by node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import library as operators
from torch.fx.experimental.proxy_tensor import make_fx

from neffcache.graph.neuron import LARGEST_K, LONGEST_SORT, findings

pytestmark = pytest.mark.fast


def rules(work: Callable[..., Any], *inputs: torch.Tensor) -> dict[str, Any]:
    return {found.rule: found for found in findings(make_fx(work, tracing_mode="fake")(*inputs))}


def test_a_plain_graph_meets_no_rule() -> None:
    assert rules(lambda x: torch.nn.functional.softmax(x @ x, -1), torch.ones(4, 4)) == {}


def test_a_sort_is_too_long_from_16385_on() -> None:
    def work(x: torch.Tensor) -> torch.Tensor:
        return torch.sort(x, dim=1).values

    assert "sort" not in rules(work, torch.empty(2, LONGEST_SORT))
    found = rules(work, torch.empty(2, LONGEST_SORT + 1))["sort"]
    assert (found.node, found.detail) == ("sort", f"aten.sort.default over {LONGEST_SORT + 1} elements")
    assert "sort" not in rules(lambda x: torch.sort(x, dim=0).values, torch.empty(2, LONGEST_SORT + 1))
    assert "sort" in rules(lambda x: torch.argsort(x, stable=True, dim=-1), torch.empty(LONGEST_SORT + 1))


def test_topk_with_a_large_k() -> None:
    x = torch.empty(2 * LARGEST_K)
    assert "topk" not in rules(lambda x: torch.topk(x, LARGEST_K - 1).values, x)
    assert rules(lambda x: torch.topk(x, LARGEST_K).values, x)["topk"].detail.endswith(f"k = {LARGEST_K}")


def test_wide_types_are_counted() -> None:
    def work(x: torch.Tensor) -> torch.Tensor:
        return x.double().sin().cos().float()

    found = rules(work, torch.ones(2))["wide-type"]
    assert found.count == 3
    assert found.to_json("block")["effect"] == "changes"


def test_complex_numbers_and_float8() -> None:
    assert rules(torch.view_as_complex, torch.ones(2, 2))["complex"].node == "view_as_complex"
    found = rules(lambda x: x.to(torch.float8_e4m3fn).float(), torch.ones(2))["float8"]
    assert "float8_e4m3fn" in found.detail


def test_grouped_mm_is_named_by_its_node() -> None:
    def work(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(x, w, offs=offsets)

    shapes = torch.empty(16, 16, dtype=torch.bfloat16), torch.empty(2, 16, 16, dtype=torch.bfloat16)
    found = rules(work, *shapes, torch.tensor([8, 16], dtype=torch.int32))["grouped-mm"]
    assert found.node == "_grouped_mm"
    assert found.to_json("block")["effect"] == "stops"


def test_a_symbolic_size_is_dynamic() -> None:
    gm = make_fx(lambda x: x + 1, tracing_mode="symbolic")(torch.ones(5, 3))
    assert {found.rule for found in findings(gm)} == {"dynamic-shape"}


def test_an_operator_of_somebody_else_needs_a_kernel_of_its_own() -> None:
    library = operators.Library("neffcache_test_neuron", "FRAGMENT")
    try:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        library.impl("twice", lambda x: torch.empty_like(x), "Meta")
        found = rules(lambda x: torch.ops.neffcache_test_neuron.twice(x), torch.ones(2))
    finally:
        library._destroy()
    assert found["custom-kernel"].detail == "neffcache_test_neuron.twice.default"
