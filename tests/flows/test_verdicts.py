"""Verdicts as data: what is shipped, what is merged, and what is said where something is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from neffcache.errors import StoreFault, Usage
from neffcache.flows import verdicts
from neffcache.flows.probe import _fixed_world, kind_of
from neffcache.flows.verdicts import Sweep, Verdict, here, known, load, merged, save
from neffcache.trace.registries import Registered, installed_version, registered

pytestmark = pytest.mark.fast

TRACES = Verdict(
    family="llama3",
    module="llama3",
    config="small",
    verdict="traces",
    ranks=64,
    graphs=2,
    nodes=10,
    graphs_digest="abc",
    neuron=[{"rule": "complex", "effect": "stops"}],
)


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of verdicts for TorchTitan 9.0, which is installed and has the configurations `small` and `new`."""
    monkeypatch.setattr(verdicts, "folder", lambda: tmp_path)
    monkeypatch.setattr(verdicts, "installed_version", lambda: "9.0")
    entries = [Registered("llama3", "llama3", "torchtitan.models.llama3", name, "") for name in ("small", "new")]
    monkeypatch.setattr(verdicts, "registered", lambda: entries)
    save(tmp_path / "9.0.json", Sweep(torchtitan="9.0", packages={"torch": "2"}, configs=[TRACES]))
    return tmp_path


def test_a_sweep_is_one_line_a_configuration_and_reads_back(shipped: Path) -> None:
    path = shipped / "9.0.json"
    assert load(path).configs == [TRACES]
    assert len(path.read_text().splitlines()) == 3
    (shipped / "broken.json").write_text("{")
    with pytest.raises(StoreFault):
        load(shipped / "broken.json")


def test_a_configuration_that_nobody_looked_at_is_unknown(shipped: Path) -> None:
    found = {entry.config: entry.verdict for entry in known()}
    assert found == {"small": "traces", "new": "unknown"}


def test_another_version_is_answered_from_its_data_or_refused(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "installed_version", lambda: "")
    assert [entry.config for entry in known()] == ["small"], "without TorchTitan the newest data answers"
    with pytest.raises(Usage) as caught:
        known("8.0")
    assert "9.0" in caught.value.hint


def test_a_package_that_is_absent_here_makes_it_unsupported_here() -> None:
    needing = msgspec.structs.replace(TRACES, needs=["no_such_package_at_all"])
    found = here(needing)
    assert (found.verdict, found.missing) == ("unsupported", "no_such_package_at_all")
    assert "with it: traces" in found.reason
    assert here(msgspec.structs.replace(TRACES, needs=["msgspec"])).verdict == "traces"


def test_a_proof_stays_while_the_graphs_are_the_same() -> None:
    proved = msgspec.structs.replace(TRACES, verdict="trains")
    assert merged(proved, TRACES).verdict == "trains"
    assert merged(proved, msgspec.structs.replace(TRACES, graphs_digest="other")).verdict == "traces"
    lost: Any = msgspec.structs.replace(TRACES, verdict="unsupported", reason="gone")
    assert merged(proved, lost).verdict == "unsupported"
    assert merged(None, TRACES) == TRACES


def test_the_json_of_a_verdict_has_the_fields_of_the_contract() -> None:
    document = json.loads(json.dumps(TRACES.to_json()))
    assert {"family", "config", "verdict", "reason", "neuron", "ranks"} <= document.keys()
    assert document["neuron"][0]["rule"] == "complex"


@pytest.mark.parametrize(
    ("refused", "kind"),
    [
        ({"message": "this configuration needs the package fla", "details": {"package": "fla"}}, "package"),
        ({"message": "worker_probe takes longer than 240 s", "details": {"class": "limit"}}, "limit"),
        ({"message": "cannot be traced: ValueError: DistMuon requires one CUDA device per process"}, "hardware"),
        ({"message": "cannot be traced: RuntimeError: 0 active drivers ([])"}, "hardware"),
        ({"message": "cannot be traced: OSError: We couldn't connect to 'https://huggingface.co'"}, "files"),
        ({"message": "TorchTitan refuses this configuration: seq_len must be divisible"}, "titan"),
        ({"message": "this configuration is a Controller.Config, not one of a Trainer: ..."}, "trainer"),
        ({"message": "cannot be traced: KeyError: 'x'"}, "trace"),
    ],
)
def test_a_reason_has_a_kind(refused: dict[str, Any], kind: str) -> None:
    assert kind_of(refused) == kind


def test_a_mesh_that_fits_one_world_is_probed_in_that_one() -> None:
    fixed = {"pp": 2, "dp_replicate": 1, "dp_shard": 3, "cp": 1, "tp": 4, "ep": 1}
    assert _fixed_world({"mesh": fixed, "refused": {}}) == 24
    assert _fixed_world({"mesh": fixed}) is None, "it was traced as it was"
    assert _fixed_world({"mesh": {**fixed, "dp_shard": -1}, "refused": {}}) is None, "the rest is any number of ranks"
    assert _fixed_world({"refused": {}}) is None, "nothing is known of it"


SHIPPED = verdicts.folder() / f"{installed_version()}.json"


@pytest.mark.skipif(not installed_version(), reason="TorchTitan is not installed")
def test_what_is_shipped_is_of_the_installed_torchtitan_and_gives_reasons() -> None:
    found = {(entry.module, entry.config): entry for entry in load(SHIPPED).configs}
    there = {(entry.module, entry.function) for entry in registered()}
    assert set(found) == there
    assert {entry.verdict for entry in found.values()} <= {"traces", "compiles", "trains", "unsupported"}
    assert sum(entry.verdict != "unsupported" for entry in found.values()) >= 50
    for entry in found.values():
        if entry.verdict == "unsupported":
            assert entry.kind, entry.config
            assert len(entry.reason) > 20, f"{entry.config} has no reason that somebody could act on"
        else:
            assert entry.graphs_digest, entry.config
