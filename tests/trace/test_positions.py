"""Rotary embeddings of equal layers share the work of their caches in a trace, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
rope = pytest.importorskip("torchtitan.models.common.rope")

from neffcache.trace import titan  # noqa: E402

KINDS = ("ComplexRoPE", "CosSinRoPE")


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds whose cache was really computed, in order."""
    seen: list[str] = []

    def counted(kind: Any) -> Any:
        whole = kind._precompute_cache

        def precompute(self: Any) -> Any:
            seen.append(kind.__name__)
            return whole(self)

        return precompute

    for name in KINDS:
        monkeypatch.setattr(getattr(rope, name), "_precompute_cache", counted(getattr(rope, name)))
    return seen


def made(name: str, device: str, **options: Any) -> Any:
    kind = getattr(rope, name)
    with torch.device(device):
        return kind(kind.Config(**{"dim": 8, "max_seq_len": 16, **options})).cache


def told(tensor: Any) -> Any:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


@pytest.mark.parametrize("name", KINDS)
def test_equal_ones_without_values_are_computed_once(name: str, computed: list[str]) -> None:
    expected = told(made(name, "meta"))
    computed.clear()
    with titan.positions_computed_once():
        first, second = made(name, "meta"), made(name, "meta")
    assert computed == [name]
    assert told(first) == told(second) == expected
    assert first is not second


@pytest.mark.parametrize("name", KINDS)
def test_others_are_computed_for_themselves(name: str, computed: list[str]) -> None:
    with titan.positions_computed_once():
        caches = [made(name, "meta"), made(name, "meta", max_seq_len=32), made(name, "meta", theta=5e5)]
        real = [made(name, "cpu"), made(name, "cpu")]
    assert computed == [name] * 5
    assert caches[1].shape[0] == 32
    assert torch.equal(real[0], real[1])
    assert real[0].abs().sum() > 0


def test_afterwards_each_is_computed_again(computed: list[str]) -> None:
    before = [vars(getattr(rope, name))["_precompute_cache"] for name in KINDS]
    with titan.positions_computed_once():
        assert vars(rope.ComplexRoPE)["_precompute_cache"] is not before[0]
    assert [vars(getattr(rope, name))["_precompute_cache"] for name in KINDS] == before
    made("ComplexRoPE", "meta")
    made("ComplexRoPE", "meta")
    assert computed == ["ComplexRoPE"] * 2
