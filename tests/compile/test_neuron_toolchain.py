"""Which toolchain a request gets, what it needs of TorchTitan, and what the answers of probes mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from neffcache.compile import toolchains
from neffcache.compile.neuron import probes, shim
from neffcache.compile.neuron.native import TorchNeuronStore
from neffcache.compile.neuron.probes import PROBES, Answers
from neffcache.compile.neuron.toolchain import NeuronToolchain
from neffcache.compile.toolchain import Identity
from neffcache.errors import Unsupported, Usage
from neffcache.key.options import Options
from tests.compile.neuron_stubs import environ, installed

IDENTITY = Identity("neuron", {"name": "neuron", "native_store": "torchneuron"})
DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)


def neuron(**settings: Any) -> NeuronToolchain:
    return NeuronToolchain(Options.parse([]), "trn2", 2, 64, settings)


def test_auto_takes_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert toolchains.choose("auto") == "host"
    installed(monkeypatch)
    assert toolchains.choose("auto") == "neuron"
    assert toolchains.choose("host") == "host"


def test_neuron_that_is_not_there_is_exit_8() -> None:
    with pytest.raises(Unsupported, match="no package torch_neuronx") as told:
        toolchains.choose("neuron")
    assert told.value.exit_code == 8


def test_graphs_go_through_backend_neuron_and_the_profiler_is_off(stubs: None) -> None:
    assert neuron().settings({}) == {
        "compile.enable": True,
        "compile.backend": "neuron",
        "profiler.enable_profiling": False,
    }
    assert neuron().environment({}, 64)["NEURON_COMPILER_OPT_LEVEL"] == "-O2"


def test_an_eager_job_stays_eager(stubs: None) -> None:
    eager = neuron(**{"compile.enable": "false"})
    assert "compile.backend" not in eager.settings({"compile.enable": "false"})
    assert eager.environment({}, 64)["NEURON_COMPILER_OPT_LEVEL"] == "-O1"


@pytest.mark.parametrize(
    ("name", "value"),
    [("compile.backend", "inductor"), ("profiler.enable_profiling", "true"), ("compile.mode", "max-autotune")],
)
def test_contradicting_titan_options_are_refused_with_both_values(stubs: None, name: str, value: str) -> None:
    with pytest.raises(Usage) as told:
        neuron().settings({name: value})
    assert value in told.value.message
    assert name in told.value.message


def test_equal_titan_options_are_no_contradiction(stubs: None) -> None:
    assert neuron().settings({"compile.backend": "neuron", "compile.enable": "True"}) == {
        "profiler.enable_profiling": False
    }


def test_the_first_line_claims_nothing(stubs: None) -> None:
    assert neuron().first_line.endswith("not run on a device")


def test_the_same_request_with_and_without_native_is_one(stubs: None) -> None:
    from neffcache.flows.request import make_request

    one, two = (make_request("llama3_8b", toolchain="neuron", native=native, environ={}) for native in (False, True))
    assert one.digest == two.digest


# --- probes -------------------------------------------------------------------------------------------------------

GOOD = {
    "neffs": ["ab/cd/x.neff"],
    "graph_neffs": ["ab/cd/x.neff"],
    "counted": {"total_compilations": 1},
    "graph": {"neff_bytes": 10, "recipe": True},
}
OTHER = {**GOOD, "graph_neffs": ["ab/ce/y.neff"]}


def asked(
    monkeypatch: pytest.MonkeyPatch, place: Path, *trials: dict[str, Any], devices: int = 0, refused: int = 1
) -> dict[str, str]:
    answers = dict(zip(("one", "deeper", "three"), trials, strict=False))  # by the folder that each runs in
    monkeypatch.setattr(probes, "_trial", lambda folder, *_, **__: answers[folder.name])
    monkeypatch.setattr(shim, "refused", lambda private: ["compile x"] * refused)
    return dict(probes._asked(place, {}, "trn2", 2, devices).outcomes)


def test_a_version_that_does_all_as_hoped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert asked(monkeypatch, tmp_path, GOOD, GOOD, {"neffs": []}) == {
        "compile_only": "yes",
        "counters": "yes",
        "compile_graph": "yes",
        "version_in_key": "no",
        "locations_in_key": "no",
        "shim_honoured": "yes",
    }


def test_a_version_that_does_nothing_as_hoped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bad = {**GOOD, "counted": None, "graph": {"error": "no StableHLO was preserved"}}
    assert asked(monkeypatch, tmp_path, bad, OTHER, GOOD, refused=0) == {
        "compile_only": "yes",
        "counters": "no",
        "compile_graph": "no",
        "version_in_key": "unknown",
        "locations_in_key": "yes",
        "shim_honoured": "no",
    }


def test_beside_a_device_nothing_is_known_about_a_host_without_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert asked(monkeypatch, tmp_path, GOOD, GOOD, {"neffs": []}, devices=16)["compile_only"] == "with_device"


def test_a_shim_that_was_asked_and_passed_by_is_not_honoured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert asked(monkeypatch, tmp_path, GOOD, GOOD, GOOD)["shim_honoured"] == "no"


def test_a_trial_that_cannot_start_leaves_all_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outcomes = asked(monkeypatch, tmp_path, {"error": "no device"})
    assert outcomes.pop("compile_only") == "no"
    assert set(outcomes.values()) == {"unknown"}


def test_answers_are_asked_once_and_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    user = environ(tmp_path / "user")
    calls: list[int] = []

    def answer(*_: Any) -> Answers:
        calls.append(1)
        return Answers({"compile_only": "yes"}, {"compile_only": "1 NEFFs"})

    monkeypatch.setattr(probes, "_asked", answer)
    for _ in range(3):
        found = probes.ask(IDENTITY, user, target="trn2", lnc=2, root=tmp_path)
        assert found.is_("compile_only", "yes")
    assert len(calls) == 1
    other = Identity("neuron", {**IDENTITY.value, "other": 1})
    probes.ask(other, user, target="trn2", lnc=2, root=tmp_path)
    assert len(calls) == 2


def test_an_outcome_that_is_unknown_means_its_worst() -> None:
    for entry, probe in zip(probes.UNASKED.to_json(), PROBES, strict=True):
        assert entry["outcome"] == "unknown"
        assert entry["means"] == probe.outcomes[probe.worst]


def test_every_probe_and_outcome_is_documented() -> None:
    text = (DOCS / "reference/probes.md").read_text()
    for probe in PROBES:
        assert f"| `{probe.name}` |" in text
        section = text.partition(f"| `{probe.name}` |")[2]
        for outcome in probe.outcomes:
            assert f"| `{outcome}` |" in section


def store(monkeypatch: pytest.MonkeyPatch, **outcomes: str) -> TorchNeuronStore:
    monkeypatch.setattr(probes, "known", lambda *_, **__: Answers(outcomes, {}) if outcomes else None)
    monkeypatch.setattr(probes, "ask", lambda *_, **__: Answers(outcomes, {}))
    return TorchNeuronStore(IDENTITY.value)


def test_the_report_says_when_a_compile_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "before a compile begins" in store(monkeypatch, shim_honoured="yes").says({})
    assert "one compile may begin" in store(monkeypatch, shim_honoured="no").says({})
    assert "one compile may begin" in store(monkeypatch).says({})


def test_compile_only_is_used_only_where_the_probe_says_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    def note(text: str) -> None: ...

    assert store(monkeypatch, compile_only="yes").apart({}, "trn2", 2, note) == {"TORCH_NEURONX_COMPILE_ONLY": "1"}
    with pytest.raises(Unsupported, match="no Neuron device here"):
        store(monkeypatch, compile_only="no").apart({}, "trn2", 2, note)
