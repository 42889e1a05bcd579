"""Configurations are found by their files: a new registry or a new function appears by itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from neffcache.trace.registries import functions, registered

pytestmark = pytest.mark.fast


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with the shape of TorchTitan."""
    root = tmp_path / "torchtitan"
    files = {
        "models/__init__.py": '_supported_models = frozenset(["llama9"])\n',
        "experiments/__init__.py": '_supported_experiments = frozenset(["graph.llama9", "sorting"])\n',
        "models/llama9/config_registry.py": "def llama9() -> Trainer.Config: ...\ndef _hidden(): ...\n",
        "experiments/graph/llama9/config_registry.py": "def graph_llama9() -> GraphTrainer.Config: ...\n",
        "experiments/rl/examples/sorting/config_registry.py": "def rl_sorting() -> Controller.Config: ...\n",
        "experiments/unlisted/config_registry.py": "def unlisted(size: int = 1): ...\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_every_registry_below_the_package_is_found_with_the_name_that_torchtitan_takes(package: Path) -> None:
    found = {entry.function: (entry.family, entry.module, entry.path, entry.gives) for entry in registered(package)}
    assert found == {
        "llama9": ("llama9", "llama9", "torchtitan.models.llama9", "Trainer.Config"),
        "graph_llama9": ("graph", "graph.llama9", "torchtitan.experiments.graph.llama9", "GraphTrainer.Config"),
        "rl_sorting": ("rl", "sorting", "torchtitan.experiments.rl.examples.sorting", "Controller.Config"),
        "unlisted": (
            "unlisted", "torchtitan.experiments.unlisted", "torchtitan.experiments.unlisted", ""
        ),
    }  # fmt: skip


def test_only_functions_that_can_be_called_with_nothing_are_configurations(tmp_path: Path) -> None:
    path = tmp_path / "config_registry.py"
    path.write_text(
        "def plain() -> Trainer.Config: ...\n"
        "def changes(config) -> None: ...\n"
        "def needs(config, more=1) -> Trainer.Config: ...\n"
        "def keyword(*, size) -> Trainer.Config: ...\n"
        "def quoted(*, size=1) -> 'Trainer.Config': ...\n"
        "def nothing() -> None: ...\n"
        "class Thing: ...\n"
    )
    assert dict(functions(path)) == {"plain": "Trainer.Config", "quoted": "Trainer.Config"}


def test_the_installed_torchtitan_is_read_without_importing_it() -> None:
    pytest.importorskip("torchtitan")
    code = (
        "import sys; from neffcache.trace.registries import registered; found = registered(); "
        "assert not {'torch', 'torchtitan'} & set(sys.modules); print(len(found), len({e.function for e in found}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    functions_, names = map(int, done.stdout.split())
    assert functions_ == names >= 100
