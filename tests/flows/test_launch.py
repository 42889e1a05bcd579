"""How a job is started: TorchTitan's command line with our own options in it."""

from __future__ import annotations

import pytest

from neffcache.flows.resolve import with_own

CHOSEN = ["--module", "llama3", "--config", "llama3_debugmodel"]


def test_our_options_come_before_a_choice_that_would_take_them_for_its_own() -> None:
    given = [*CHOSEN, "--training.seq_len", "256", "activation-checkpoint:none"]
    words = with_own(given, {"--dump_folder": "/out", "--training.steps": "3"})
    assert words == [*CHOSEN, "--dump_folder", "/out", "--training.steps", "3", *given[4:]]


def test_our_options_replace_those_of_the_job() -> None:
    words = with_own([*CHOSEN, "--training.steps", "100", "--compile.enable"], {"--training.steps": "3"})
    assert words == [*CHOSEN, "--training.steps", "3", "--compile.enable"]


def test_torchtitan_takes_them_with_every_policy() -> None:
    pytest.importorskip("torchtitan")
    from neffcache.trace import titan

    base = titan.load_config(CHOSEN)
    for policy in titan.POLICIES:
        settings = {titan.CHECKPOINTING: policy, "compile.enable": True, "training.seq_len": 256}
        given = [*CHOSEN, *titan.setting_arguments(base, settings)]
        config = titan.load_config(with_own(given, {"--training.steps": "3", "--comm.mode": "fake_backend"}))
        assert (config.training.steps, config.training.seq_len) == (3, 256)
