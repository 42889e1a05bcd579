"""A rank with a compiler-owned cache: whose directories it uses."""

from __future__ import annotations

import json
import types
from typing import Any

import pytest

pytest.importorskip("torch")

from neffcache import variables
from neffcache.compile.neuron.native import TorchNeuronStore
from neffcache.errors import Mismatch, Usage
from neffcache.runtime.native import NativeRank

VIEW = {"TORCH_NEURONX_NEFF_CACHE_DIR": "/view/neff"}


def prepare(environ: dict[str, str]) -> None:
    rank: Any = types.SimpleNamespace(store=TorchNeuronStore(), environ=environ, _watch=lambda: None)
    NativeRank.prepare(rank)


def test_a_rank_that_uses_the_runs_own_directories_is_ready() -> None:
    prepare({**VIEW, variables.EXPECTED: json.dumps(VIEW)})


@pytest.mark.parametrize("here", [{}, {"TORCH_NEURONX_NEFF_CACHE_DIR": "/tmp/neff_cache"}])
def test_a_rank_that_would_use_another_directory_refuses_with_both(here: dict[str, str]) -> None:
    with pytest.raises(Mismatch) as told:
        prepare({**here, variables.EXPECTED: json.dumps(VIEW)})
    assert "TORCH_NEURONX_NEFF_CACHE_DIR" in told.value.message
    assert "/view/neff" in told.value.message
    assert told.value.exit_code == 5


def test_an_off_switch_that_the_command_sets_itself_is_refused() -> None:
    with pytest.raises(Usage, match="switches the cache off"):
        prepare({**VIEW, "TORCH_NEURONX_NEFF_DISABLE_CACHE": "1", variables.EXPECTED: json.dumps(VIEW)})
