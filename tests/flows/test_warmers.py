"""Warmers: the schema, the folders of users, and packages that bring their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from neffcache.errors import Usage
from neffcache.flows.request import make_request
from neffcache.flows.warmers import find, known, load, shipped
from neffcache.trace.registries import registered

pytestmark = pytest.mark.fast


def warmer(folder: Path, text: str, name: str = "own.toml") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder


HEAD = 'family = "own"\nmodule = "own.models"\n'


def test_a_run_for_each_of_a_list_of_configurations(tmp_path: Path) -> None:
    text = HEAD + '[[run]]\nconfigs = ["small", "large"]\nnodes = 2\n[run.set]\n"training.seq_len" = 64\n'
    runs = load([warmer(tmp_path, text)])
    assert list(runs) == ["small", "large"]
    assert (runs["large"].config, runs["large"].module) == ("large", "own.models")
    assert runs["large"].placement == {"nodes": 2}
    assert runs["large"].settings == {"training.seq_len": 64}


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ("[[run]]\n", "run 1 of the warmer own.toml takes a name or a list of configs"),
        ('[[run]]\nname = "a"\nconfigs = ["b"]\n', "takes a name or a list of configs, one of them"),
        ('[[run]]\nconfigs = ["a"]\nconfig = "b"\n', "configs and config"),
        ('[[run]]\nname = "a b"\n', "the name 'a b'"),
        ('[[run]]\nname = "a"\n[[run]]\nname = "a"\n', "run 2 of the warmer own.toml has the name a for the second"),
        ('[[run]]\nname = "a"\nlnc = "2"\n', "Expected `int | null`, got `str` - at `$.run[0].lnc`"),
        ('[[run]]\nname = "a"\ninstances = "b"\n', "unknown field `instances` - at `$.run[0]`"),
        ('kind = "script"\n', "Invalid enum value 'script' - at `$.kind`"),
        ("[[run]\n", "own.toml is not understood"),
    ],
)
def test_a_wrong_warmer_is_named_with_the_place(tmp_path: Path, run: str, words: str) -> None:
    with pytest.raises(Usage) as caught:
        load([warmer(tmp_path, HEAD + run)])
    assert words in caught.value.message


def test_runs_of_a_callable_say_their_kind_and_a_module_with_a_name_may_be_either(tmp_path: Path) -> None:
    folder = warmer(tmp_path, HEAD + 'kind = "callable"\n[[run]]\nname = "a"\nset = {layers = 4}\n')
    environ = {"NEFFCACHE_WARMERS": str(folder)}
    assert (find("a", environ).kind, find("a", environ).settings) == ("callable", {"layers": 4})
    assert find("own.models:a", environ).kind == ""
    assert find("llama3_8b", environ).kind == "torchtitan"
    made = make_request("a", target="cpu", world_size=2, environ=environ)
    assert made.kind == "callable"
    assert "kind" not in made.to_json()


def test_a_folder_of_a_user_wins_over_the_shipped_one(tmp_path: Path) -> None:
    folder = warmer(tmp_path, HEAD + '[[run]]\nname = "llama3_8b"\ntarget = "cpu"\nworld_size = 2\n')
    environ = {"NEFFCACHE_WARMERS": str(folder)}
    assert find("llama3_8b", environ).module == "own.models"
    assert find("llama3_8b", {}).module == "llama3"
    assert make_request("llama3_8b", environ=environ).placement.world_size == 2


def plugin(site: Path, value: str) -> None:
    """An installed package that brings warmers: its files and its metadata, as pip writes them."""
    warmer(site / "fleet_warmers", HEAD + '[[run]]\nname = "qwen3_8b_tp4_fsdp16_sac"\ninstance = "trn2.48xlarge"\n')
    (site / "fleet_warmers" / "__init__.py").write_text("raise SystemExit('its code is not run')\n")
    info = site / "fleet-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fleet\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[neffcache.warmers]\nfleet = {value}\n")


def in_site(site: Path, code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(Path(__file__).parents[2])])}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def test_a_package_brings_runs_by_its_entry_point(tmp_path: Path) -> None:
    plugin(tmp_path, "fleet_warmers")
    code = (
        "from neffcache.flows.request import make_request as make; "
        "r = make('qwen3_8b_tp4_fsdp16_sac', environ={}); print(r.module, r.function, r.placement.world_size)"
    )
    done = in_site(tmp_path, code)
    assert done.stdout.split() == ["own.models", "qwen3_8b_tp4_fsdp16_sac", "64"], done.stderr


def test_an_entry_point_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    plugin(tmp_path, "no_such_package")
    done = in_site(tmp_path, "from neffcache.cli.main import main; main(['plan', '--all', '--dir', '/nonexistent'])")
    assert done.returncode == 2, done.stderr
    assert "the entry point fleet of neffcache.warmers names no_such_package" in done.stderr


def test_a_configuration_outside_of_torchtitan_is_named_by_its_module() -> None:
    name = "torchtitan_neuron.models.qwen3:qwen3_8b_tp4_fsdp16_sac"
    run = find(name, {})
    assert (run.module, run.config, run.family) == (
        "torchtitan_neuron.models.qwen3",
        "qwen3_8b_tp4_fsdp16_sac",
        "qwen3",
    )


def test_the_shipped_warmers_name_what_exists_and_leave_nothing_out() -> None:
    """All of TorchTitan's trainers have a run; llama3_405b as TorchTitan has it builds on GPUs only."""
    pytest.importorskip("torchtitan")
    runs = known({})
    there = {(entry.module, entry.function) for entry in registered() if entry.family != "rl"}
    named = {(run.module, run.config) for run in runs.values()}
    assert named - there == {("neffcache.trace.registry", "llama3_405b_bf16")}
    assert there - named == {("llama3", "llama3_405b")}
    assert {"llama3_8b", "llama3_8b_eager", "llama3_8b_simple_fsdp", "qwen3_32b", "gpt_oss_20b"} <= runs.keys()
    assert "deepseek_v3_16b_simple_fsdp" in runs
    assert len(list(shipped().glob("*.toml"))) >= 10
