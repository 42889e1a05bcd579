"""What of a resolved configuration is in the key."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from neffcache.errors import Usage
from neffcache.key.canonical import digest
from neffcache.key.workload import NEUTRAL, neutral_reason, split, workload_component

CONFIG: dict[str, Any] = {
    "hf_assets_path": "assets",
    "dump_folder": "out",
    "training": {"steps": 10, "seq_len": 2048, "max_norm": 1.0, "disable_cuda_graphs": True, "gc_freq": 50},
    "optimizer": {"param_groups": [{"optimizer_kwargs": {"lr": 0.0008}}]},
    "lr_scheduler": {"warmup_steps": 2},
    "parallelism": {"tensor_parallel_degree": 2},
    "compile": {"enable": True, "components": ["model", "loss"]},
    "metrics": {"log_freq": 1},
    "comm": {"mode": "default", "trace_buf_size": 20000},
    "checkpoint": {"enable": False, "folder": "checkpoint", "export_dtype": "float32"},
    "dataloader": {"sources": [{"dataset": "c4", "infinite": True, "weight": 1.0}], "infinite": True},
    "validator": {"enable": False, "steps": 10, "dataloader": {"dataset": "c4_validation", "infinite": False}},
    "debug": {"seed": None, "deterministic": False},
}
NEUTRAL_HERE = {
    "hf_assets_path", "dump_folder", "training.steps", "training.gc_freq", "metrics.log_freq", "comm.mode",
    "comm.trace_buf_size", "checkpoint.folder", "dataloader.sources.0.dataset", "dataloader.sources.0.weight",
    "validator.steps", "validator.dataloader.dataset", "debug.seed",
}  # fmt: skip


def document(config: dict[str, Any]) -> dict[str, Any]:
    return {"config": config, "sources": {"a.py": "0" * 64}, "environment": {"XLA_A": "1"}, "torchtitan": "0.3.0"}


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from leaves(item, (*path, name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path


def changed(config: dict[str, Any], path: tuple[str | int, ...], value: Any = "another value") -> dict[str, Any]:
    config = copy.deepcopy(config)
    inner: Any = config
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return config


def key(config: dict[str, Any]) -> str:
    return digest(workload_component(document(config)))


@pytest.mark.fast
@pytest.mark.parametrize("path", list(leaves(CONFIG)), ids=lambda path: ".".join(map(str, path)))
def test_every_leaf_changes_the_key_unless_it_is_declared_neutral(path: tuple[str | int, ...]) -> None:
    name = ".".join(map(str, path))
    # A neutral field keeps the key for the values for which it is neutral; these stay within them.
    value = {"comm.mode": "fake_backend", "validator.steps": 20}.get(name, "another value")
    assert (key(changed(CONFIG, path, value)) == key(CONFIG)) == (name in NEUTRAL_HERE)


@pytest.mark.fast
@pytest.mark.parametrize("part", ["sources", "environment", "torchtitan"])
def test_sources_environment_and_version_count_as_a_whole(part: str) -> None:
    assert digest(workload_component({**document(CONFIG), part: {"training": {"steps": 1}}})) != key(CONFIG)


@pytest.mark.fast
def test_a_part_of_the_document_that_is_not_known_counts() -> None:
    assert digest(workload_component({**document(CONFIG), "more": 1})) != key(CONFIG)


@pytest.mark.fast
def test_a_new_field_next_to_neutral_ones_counts() -> None:
    for owner in ("metrics", "checkpoint", "comm", "dataloader", "training", "debug"):
        assert key(changed(CONFIG, (owner, "new_field"))) != key(CONFIG)
    assert key({**CONFIG, "new_field": 1}) != key(CONFIG)


@pytest.mark.fast
def test_a_neutral_name_in_another_place_counts() -> None:
    assert key(changed(CONFIG, ("lr_scheduler", "steps"))) != key(CONFIG)
    assert key({**CONFIG, "model": {"training": {"steps": 1}}}) != key(CONFIG)
    assert key({**CONFIG, "training.steps": 1}) != key(CONFIG)


@pytest.mark.fast
def test_communication_modes_that_replace_the_process_groups_count() -> None:
    keys = {key(changed(CONFIG, ("comm", "mode"), mode)) for mode in ("default", "torchcomms", "local_tensor")}
    assert len(keys) == 3


@pytest.mark.fast
def test_evaluation_to_the_end_of_its_data_counts() -> None:
    assert key(changed(CONFIG, ("validator", "steps"), -1)) != key(CONFIG)


@pytest.mark.fast
def test_the_number_of_sources_counts() -> None:
    sources = CONFIG["dataloader"]["sources"]
    assert key(changed(CONFIG, ("dataloader", "sources"), [*sources, *sources])) != key(CONFIG)


@pytest.mark.fast
def test_what_was_left_out_is_reported_with_its_value_and_its_reason() -> None:
    semantic, neutral = split(document(CONFIG))
    assert set(neutral) == NEUTRAL_HERE
    assert neutral["training.steps"] == 10
    assert "steps" not in semantic["config"]["training"]
    assert all(neutral_reason(path, value) for path, value in neutral.items())
    assert neutral_reason("training.seq_len", 1) is None


@pytest.mark.fast
def test_splitting_changes_nothing_in_the_document_that_it_was_given() -> None:
    given = document(copy.deepcopy(CONFIG))
    split(given)
    assert given == document(CONFIG)


@pytest.mark.fast
@pytest.mark.parametrize("bad", [{}, {"config": {}}, {**document(CONFIG), "config": "llama3"}])
def test_what_is_no_workload_document_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(Usage):
        split(bad)


@pytest.mark.fast
def test_every_entry_names_one_field_and_says_why() -> None:
    assert len({neutral.path for neutral in NEUTRAL}) == len(NEUTRAL)
    assert all(neutral.reason.endswith(".") for neutral in NEUTRAL)


def config_fields(*classes: Any) -> set[str]:
    return {field.name for owner in classes for field in dataclasses.fields(owner)}


def test_every_entry_names_a_field_that_torchtitan_has() -> None:
    pytest.importorskip("torchtitan")
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.validate import Validator
    from torchtitan.config.configs import CommConfig, DebugConfig, TrainingConfig
    from torchtitan.hf_datasets import text_datasets as text
    from torchtitan.tools.profiler import Profiler
    from torchtitan.trainer import Trainer

    loaders = config_fields(
        text.HuggingFaceTextDataLoader.Config,
        text.InterleavedHuggingFaceTextDataLoader.Config,
        text.ChatDataLoader.Config,
        text.ChatDataSource,
        text.HFDataSource,
    ) | {"dataset_subset", "video_dir"}  # MMDataLoader.Config, whose module needs packages that are not installed
    known = {
        "": config_fields(Trainer.Config),
        "training": config_fields(TrainingConfig),
        "metrics": config_fields(MetricsProcessor.Config),
        "profiler": config_fields(Profiler.Config),
        "debug": config_fields(DebugConfig),
        "checkpoint": config_fields(CheckpointManager.Config),
        "comm": config_fields(CommConfig),
        "validator": config_fields(Validator.Config),
        "dataloader": loaders,
        "dataloader.sources.*": loaders,
        "validator.dataloader": loaders,
        "validator.dataloader.sources.*": loaders,
    }
    for neutral in NEUTRAL:
        owner, _, name = neutral.path.rpartition(".")
        assert name in known[owner], neutral.path


def test_of_a_real_configuration_everything_that_shapes_a_step_counts() -> None:
    pytest.importorskip("torchtitan")
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel().to_dict()
    semantic, neutral = split(document(config))
    for whole in ("optimizer", "lr_scheduler", "parallelism", "compile", "activation_checkpoint", "loss", "override"):
        assert digest(semantic["config"][whole]) == digest(config[whole])
    assert {"steps", "gc_freq", "gc_debug"} == set(config["training"]) - set(semantic["config"]["training"])
    assert set(config["debug"]) - set(semantic["config"]["debug"]) == {
        "seed", "print_config", "save_config_file", "enable_structured_logging",
    }  # fmt: skip
    assert not set(config["profiler"]) - {path.removeprefix("profiler.") for path in neutral}
