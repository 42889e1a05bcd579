"""Every family and parallelism for real: a warm by fake traces, then a run of CPU ranks that hits all of it.

Minutes each, so these are soak tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Answer, neffcache

pytestmark = [pytest.mark.integration, pytest.mark.soak]

PARALLELISM = "parallelism"


def sets(**settings: Any) -> list[str]:
    """--set options; `tensor_parallel_degree` and its like stand for parallelism.tensor_parallel_degree."""
    words: list[str] = []
    for name, value in settings.items():
        path = name.replace("__", ".") if "__" in name else f"{PARALLELISM}.{name}"
        words += ["--set", f"{path}={value}"]
    return words


HSDP = sets(data_parallel_replicate_degree=2, data_parallel_shard_degree=2, tensor_parallel_degree=1)
DDP = sets(data_parallel_replicate_degree=4, data_parallel_shard_degree=1, tensor_parallel_degree=1)
ONE_F_ONE_B = sets(pipeline_parallel_degree=2, tensor_parallel_degree=1, pipeline_parallel_schedule="1F1B")
INTERLEAVED = sets(pipeline_parallel_degree=2, tensor_parallel_degree=1, pipeline_parallel_schedule="Interleaved1F1B")
NO_SEQUENCE = sets(enable_sequence_parallel="false")
FULL_AC = ["--set", "activation_checkpoint=full"]
NO_AC = ["--set", "activation_checkpoint=none"]
BUDGET_AC = ["--set", "activation_checkpoint=memory-budget"]
LOSS = ["--set", "compile.components=model,loss"]
ONE_SEQUENCE = ["--set", "training.local_batch_size=1"]
PHASES = ["--set", "validator.enable=true", "--set", "training.global_batch_size=8"]

RUNS = {
    "hsdp": ("llama3_debugmodel", HSDP),
    "ddp": ("llama3_debugmodel", DDP),
    "pp-1f1b": ("llama3_debugmodel", ONE_F_ONE_B),
    "pp-interleaved": ("llama3_debugmodel", INTERLEAVED),
    "tp-without-sp": ("llama3_debugmodel", NO_SEQUENCE),
    "full-ac": ("llama3_debugmodel", FULL_AC),
    "no-ac": ("llama3_debugmodel", NO_AC),
    "memory-budget-ac": ("llama3_debugmodel", BUDGET_AC),
    "one-sequence": ("llama3_debugmodel", ONE_SEQUENCE),
    "compiled-loss": ("llama3_debugmodel", LOSS),
    "accumulation-and-validation": ("llama3_debugmodel", PHASES),
    "qwen3": ("qwen3_debugmodel", []),
    "qwen3-moe": ("qwen3_moe_debug", []),
    "deepseek-v3": ("deepseek_v3_debugmodel", []),
    "gpt-oss": ("gpt_oss_debugmodel", []),
    "muse-glimmer": ("muse_glimmer_debugmodel", []),
    "simple-fsdp-jit": ("graph_trainer_llama3_debugmodel_jit", []),
    "simple-fsdp-aot": ("graph_trainer_llama3_debugmodel", []),
}


def assert_hits_and_compiles_nothing(answer: Answer) -> None:
    assert answer.code == 0, answer.stderr[-3000:]
    document = answer.document
    assert document["identity"] == "proved"
    assert document["step_one"]["compiles"] == document["step_one"]["misses"] == 0
    assert len(document["ranks"]) == 4
    for rank in document["ranks"]:
        assert (rank["misses"], rank["compiles"]) == (0, 0)
        assert rank["hits"] == rank["graphs"] > 0


STEPS = {"qwen3-moe": "1", "deepseek-v3": "2", "gpt-oss": "2"}
"""Fewer than three where experts make a step of four ranks on one CPU take minutes."""


@pytest.mark.parametrize("name", RUNS)
def test_real_ranks_hit_what_fake_ones_traced(name: str, tmp_path: Path) -> None:
    config, options = RUNS[name]
    warm = neffcache(tmp_path / "store", "warm", config, *options)
    assert warm.code == 0, warm.stderr[-3000:]
    assert_hits_and_compiles_nothing(
        neffcache(tmp_path / "store", "run", config, "--steps", STEPS.get(name, "3"), *options)
    )


def test_a_planted_short_batch_is_in_the_manifest(tmp_path: Path) -> None:
    """A loader of three batches and one of a single sequence: five steps would end after four."""
    loader = 'neffcache.trace.harness.dataloader={"vocab":2048,"batches":3,"last":1}'
    imports = f"{loader} neffcache.trace.harness.tokenizer neffcache.trace.harness.flex_to_sdpa"
    options = ["--set", f"override.imports={imports}"]
    warm = neffcache(tmp_path / "store", "warm", "llama3_debugmodel", *options)
    assert warm.code == 0, warm.stderr[-3000:]
    shown = neffcache(tmp_path / "store", "show", warm.document["manifest"])
    assert "last_short_batch" in shown.document["document"]["phases"]
    phases = shown.document["document"]["rank_classes"][0]["graphs"]
    answer = neffcache(tmp_path / "store", "run", "llama3_debugmodel", "--steps", "5", *options)
    assert answer.code == 0, answer.stderr[-3000:]
    assert (answer.document["identity"], len(answer.document["losses"])) == ("proved", 4)
    for rank in answer.document["ranks"]:
        assert (rank["misses"], rank["compiles"]) == (0, 0)
        # Also the single sequence, whose stride FakeTensorMode would make up.
        assert len(phases["first_step"]) < rank["hits"] == rank["graphs"]
