"""`warm --lint`: planted numbers are named, and the debug models of TorchTitan hold none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import neffcache as package
from tests.integration.conftest import Answer, neffcache

pytestmark = pytest.mark.integration

SMALL = {
    "compile.enable": "true",
    "compile.components": "model",
    "training.seq_len": "64",
    "training.local_batch_size": "1",
}
ALONE = ("--target", "cpu", "--world-size", "1")


def linted(config: str, store: Path, *more: str) -> Answer:
    root = str(Path(package.__file__).parents[1])
    path = os.pathsep.join([root, str(Path(__file__).parents[2])])
    return neffcache(store, "warm", config, "--lint", *more, environ={"PYTHONPATH": path})


def test_planted_numbers_are_found_with_field_graph_line_and_value(tmp_path: Path) -> None:
    """A model that multiplies by the learning rate and by the number of steps.

    The steps are left out of the key, so nothing is warmed; a learning rate in a graph costs a compile for each value.
    """
    answer = linted("tests.trace.toy_lr:toy", tmp_path / "store", *ALONE, *(f"--set={k}={v}" for k, v in SMALL.items()))
    assert answer.code == 5, answer.stderr
    assert "training.steps" in answer.document["message"]
    report = answer.document["details"]
    assert {entry["field"] for entry in report["moved"]} == {"training.steps"}
    forward = [entry for entry in report["moved"] if "forward" in entry["where"]]
    assert forward
    assert all("mul" in entry["before"] and "11.0" in entry["before"] and "12.0" in entry["after"] for entry in forward)
    assert all(entry["line"] > 0 for entry in report["moved"])
    assert {entry["field"] for entry in report["baked"]} == {"optimizer.param_groups[0].optimizer_kwargs.lr"}
    assert any("1.0008" in entry["before"] and "1.001" in entry["after"] for entry in report["baked"])
    assert not list((tmp_path / "store").glob("graphs/*"))
    assert "lint: optimizer.param_groups[0].optimizer_kwargs.lr moves" in answer.stderr


@pytest.mark.soak
@pytest.mark.parametrize("config", ["llama3_debugmodel", "qwen3_debugmodel", "deepseek_v3_debugmodel"])
def test_a_debug_model_holds_no_field_that_the_key_leaves_out(config: str, tmp_path: Path) -> None:
    lint_is_empty(config, tmp_path)


def lint_is_empty(config: str, tmp_path: Path) -> None:
    from neffcache.flows.lint import lint
    from neffcache.flows.request import make_request

    sets = [f"{name}={value}" for name, value in SMALL.items()]
    report = lint(make_request(config, sets=sets, environ=os.environ), os.environ, lambda _: None)
    assert report.to_json()["moved"] == []
    assert report.to_json()["baked"] == []
    assert report.varied >= 40
    assert report.traces == 3
    assert report.uncacheable == {}
