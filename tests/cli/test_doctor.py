"""The doctor: what is here, where settings come from, what will go wrong. It changes nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from neffcache.flows import examine as flow
from neffcache.flows.doctor import parse_neuron_ls
from neffcache.flows.examine import file_system
from neffcache.store.local import LocalStore
from neffcache.store.records import Manifest
from tests.cli.conftest import Answer

STUBS = Path(__file__).resolve().parent.parent / "stubs"
Run = Callable[..., Answer]


def findings(answer: Answer, area: str) -> list[dict[str, Any]]:
    return [finding for finding in answer.json["findings"] if finding["area"] == area]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A working directory without a settings file."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_says_what_is_here_and_exits_with_0(neffcache: Run, store: LocalStore, warmed: Manifest, here: Path) -> None:
    done = neffcache("doctor", "--dir", store.root, "--json")
    assert done.code == 0
    where, content = findings(done, "store")
    assert where["state"] == content["state"] == "ok"
    assert content["said"] == "1 manifests, 1 complete"
    assert {finding["area"] for finding in done.json["findings"]} >= {"toolchain", "device", "LNC", "space", "clock"}
    assert done.json["toolchain"]["neuron"] == "absent"
    assert done.json["toolchain"]["auto"] == "host"
    assert done.json["probes"] == []


def test_without_json_it_is_lines_for_people(neffcache: Run, store: LocalStore, here: Path) -> None:
    done = neffcache("doctor", "--dir", store.root)
    assert done.code == 0
    assert "no Neuron device on this host" in done.out
    assert str(store.root) in done.out
    assert done.err == ""


def test_each_setting_has_its_origin(
    neffcache: Run, store: LocalStore, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "neffcache.toml").write_text("jobs = 3\n")
    monkeypatch.setenv("NEFFCACHE_WARMERS", "/somewhere")
    done = neffcache("doctor", "--dir", store.root, "--json")
    origins = {entry["name"]: (entry["value"], entry["origin"]) for entry in done.json["settings"]}
    assert origins["dir"] == (str(store.root), "--dir")
    assert origins["jobs"] == ("3", "neffcache.toml")
    assert origins["warmers"] == ("/somewhere", "NEFFCACHE_WARMERS")


def test_it_writes_nothing(neffcache: Run, here: Path) -> None:
    root = here / "none"
    assert neffcache("doctor", "--dir", root).code == 0
    assert not root.exists()


def test_a_store_that_cannot_be_read_is_an_error_with_its_code(neffcache: Run, here: Path) -> None:
    (here / "file").write_text("not a directory")
    done = neffcache("doctor", "--dir", here / "file", "--json")
    assert done.code == 7
    assert findings(done, "store")[-1]["state"] == "error"


def test_a_misspelled_variable_is_named(
    neffcache: Run, store: LocalStore, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URI", "s3://bucket")
    done = neffcache("doctor", "--dir", store.root, "--json")
    (warning,) = findings(done, "variables")
    assert done.code == 0
    assert "did you mean NEURON_COMPILE_CACHE_URL?" in warning["said"]


def test_two_lncs_are_an_error_with_both(
    neffcache: Run, store: LocalStore, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    monkeypatch.setenv("NEURON_RT_VIRTUAL_CORE_SIZE", "2")
    done = neffcache("doctor", "--dir", store.root, "--json")
    assert done.code == 2
    (found,) = findings(done, "LNC")
    assert "NEURON_LOGICAL_NC_CONFIG = 1" in found["said"]
    assert "NEURON_RT_VIRTUAL_CORE_SIZE = 2" in found["said"]


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs"])
def test_a_root_in_memory_is_said_to_be_lost(
    neffcache: Run, store: LocalStore, here: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(flow, "file_system", lambda path: ("/tmp", kind))
    done = neffcache("doctor", "--dir", store.root, "--json")
    assert done.code == 0
    assert findings(done, "store")[0]["state"] == "warning"
    assert "gone with the next reboot or pod" in findings(done, "store")[0]["said"]


def test_a_root_in_a_containers_own_layer_is_said_to_be_lost(
    neffcache: Run, store: LocalStore, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow, "file_system", lambda path: ("/", "overlay"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    done = neffcache("doctor", "--dir", store.root, "--json")
    assert "gone with the pod" in findings(done, "store")[0]["said"]


def test_a_file_system_is_that_of_the_longest_mount_and_the_last_on_it(tmp_path: Path) -> None:
    mounts = [("/", "overlay"), (str(tmp_path), "ext4"), (f"{tmp_path}/a", "ext4"), (f"{tmp_path}/a", "tmpfs")]
    assert file_system(tmp_path / "a" / "b", mounts) == (f"{tmp_path}/a", "tmpfs")
    assert file_system(tmp_path / "ab", mounts) == (str(tmp_path), "ext4")
    assert file_system(tmp_path, []) == ("?", "")


def test_neuron_ls_tells_instance_target_and_lnc() -> None:
    text = "instance-type: trn2n.48xlarge\ninstance-id: i-0\nlogical-neuroncore-config: 2\n+---+\n"
    assert parse_neuron_ls(text) == {"instance": "trn2n.48xlarge", "target": "trn2", "lnc": 2}
    assert parse_neuron_ls("instance-type: trn1.32xlarge\n") == {"instance": "trn1.32xlarge", "target": "trn1"}
    assert parse_neuron_ls("something else") == {}


# --- with the stubs -----------------------------------------------------------------------------------------------


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    site = tmp_path / "site"
    shutil.copytree(STUBS / "site", site)
    (site / "torch").mkdir()  # a core install has none; its content is part of a toolchain's identity
    (site / "torch" / "part.py").write_text("x = 1\n")
    (site / "torch-2.14.0.dist-info").mkdir()
    (site / "torch-2.14.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.14.0\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PATH", f"{STUBS / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))
    return site


def test_an_installation_is_shown_with_its_versions_and_unasked_probes(
    neffcache: Run, store: LocalStore, here: Path, stubs: Path
) -> None:
    done = neffcache("doctor", "--dir", store.root, "--json")
    assert done.code == 0, done.out
    assert done.json["toolchain"]["auto"] == "neuron"
    assert done.json["toolchain"]["versions"]["neuronx-cc"] == "2.33.1.0+5f1ab000"
    assert len(done.json["toolchain"]["id"]) == 64
    assert {probe["outcome"] for probe in done.json["probes"]} == {"unknown"}
    assert findings(done, "probes")[0]["said"] == "this installation was never asked"


def test_a_toolchain_that_cannot_be_told_is_exit_8_with_the_reason(
    neffcache: Run, store: LocalStore, here: Path, stubs: Path
) -> None:
    shutil.rmtree(next(stubs.glob("neuronx_cc-*.dist-info")))
    done = neffcache("doctor", "--dir", store.root, "--json")
    assert done.code == 8
    assert "the version of neuronx-cc cannot be told" in findings(done, "toolchain")[0]["said"]
