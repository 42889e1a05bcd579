"""DTensor's answer for a list operator is the same when it is asked about the elements that differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard  # noqa: E402

from neffcache.trace import torch_internals  # noqa: E402

aten = torch.ops.aten


@pytest.fixture
def mesh() -> Iterator[Any]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    finally:
        torch.distributed.destroy_process_group()


class Asked:
    """Every schema that DTensor's propagation is asked about, with its answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from torch.distributed.tensor._sharding_prop import ShardingPropagator

        self.calls: list[tuple[Any, Any]] = []
        propagate = ShardingPropagator.propagate_op_sharding_non_cached

        def seen(propagator: Any, schema: Any) -> Any:
            self.calls.append((schema, propagate(propagator, schema)))
            return self.calls[-1][1]

        monkeypatch.setattr(ShardingPropagator, "propagate_op_sharding_non_cached", seen)

    def lengths(self, op: Any) -> list[int]:
        return [len(schema.args_schema[0]) for schema, _ in self.calls if schema.op == op]


def layers(mesh: Any, count: int, *, partial: bool = False) -> list[Any]:
    """The parameters of `count` equal layers: [8, 2] twice, by different placements, and [6]."""
    second = ((4, 2), [Shard(0), Partial()]) if partial else ((4, 1), [Shard(0), Shard(1)])
    kinds = [((4, 2), [Shard(0), Replicate()]), second, ((3,), [Shard(0), Replicate()])]
    return [DTensor.from_local(torch.ones(shape), mesh, places) for _ in range(count) for shape, places in kinds]


def told(answer: Any) -> tuple[Any, ...]:
    wanted = answer.redistribute_schema
    return (answer.output_spec, answer.needs_redistribute, None if wanted is None else wanted.args_schema)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize(
    "op",
    [
        lambda own, other: aten._foreach_norm.Scalar(own),
        lambda own, other: aten._foreach_mul.Tensor(own, torch.tensor(2.0)),
        lambda own, other: aten._foreach_add.List(own, other),
        lambda own, other: aten._foreach_mul.Scalar(own, 2.0),
    ],
)
def test_the_answer_is_that_of_all_elements(mesh: Any, monkeypatch: pytest.MonkeyPatch, op: Any, partial: bool) -> None:
    asked = Asked(monkeypatch)
    op(layers(mesh, 5, partial=partial), layers(mesh, 5))
    schema, whole = next(call for call in asked.calls if isinstance(call[0].args_schema[0], (list, tuple)))
    assert len(schema.args_schema[0]) == 15
    asked.calls.clear()
    with torch_internals.equal_elements_propagated_once():
        found = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding_non_cached(schema)
    assert told(found) == told(whole)
    assert asked.lengths(schema.op) == [3]


def test_an_optimizer_over_equal_layers_asks_about_one(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    parameters = [torch.nn.Parameter(value) for value in layers(mesh, 6)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(parameters, fused=True)
    with torch_internals.equal_elements_propagated_once():
        optimizer.step()
    assert asked.lengths(aten._fused_adamw_.default) == [3]
    assert all(float(parameter.detach().to_local().flatten()[0]) < 1 for parameter in parameters)


def test_lists_of_numbers_are_left_alone(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    with torch_internals.equal_elements_propagated_once():
        found = aten._foreach_mul.ScalarList(layers(mesh, 2), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert [float(value.to_local().flatten()[0]) for value in found] == [1, 2, 3, 4, 5, 6]
    assert asked.lengths(aten._foreach_mul.ScalarList) == [6]
