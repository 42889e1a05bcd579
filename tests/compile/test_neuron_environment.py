"""The environment contract of Neuron processes: what is set, what is cleared, and which contradictions are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from neffcache.compile.neuron import shim
from neffcache.compile.neuron.environment import OFF_SWITCHES, Contract, Places, environment, known_variables, unread
from neffcache.errors import Usage
from neffcache.flows.settings import KNOWN
from neffcache.key.environment import graph_environment
from neffcache.key.options import Options

PLACES = Places(Path("/view"), Path("/run/private"))


def contract(environ: dict[str, str] | None = None, *, options: str = "", **given: Any) -> Contract:
    job = {"target": "trn2", "lnc": 2, "places": PLACES, **given}
    return environment(environ or {}, options=Options.parse([options]), **job)


def test_a_run_sees_all_of_it() -> None:
    made = contract(options="--enable-saturate-infinity -O1", ranks_per_node=64)
    assert made.variables == {
        "TORCH_NEURONX_NEFF_CACHE_DIR": "/view/neff",
        "TORCH_NEURONX_HLO_CACHE_DIR": "/view/hlo",
        "TORCH_NEURONX_HLO_COMPILE_CACHE": "1",
        "NKI_COMPILE_CACHE_URL": "/view/nki/compile",
        "NKI_TRACE_CACHE_URL": "/view/nki/trace",
        "TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR": "/run/private/neff-local",
        "TORCH_NEURONX_NEFF_CACHE_LOCK_TIMEOUT": "21600",
        "NEURON_LOGICAL_NC_CONFIG": "2",
        "NEURON_PLATFORM_TARGET_OVERRIDE": "trn2",
        "NEURON_COMPILER_OPT_LEVEL": "-O1",
        "NEURON_CC_FLAGS": "--optlevel=1 --enable-saturate-infinity",
        "NEURON_RT_NUM_CORES": "64",
        "TORCH_NEURONX_METRICS_ENABLED": "1",
        "TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION": "1",
    }
    assert set(OFF_SWITCHES) < set(made.cleared)


def test_it_changes_nothing_and_gives_the_same_again() -> None:
    environ = {"PATH": "/bin", "NEURON_CC_FLAGS": "-O1"}
    before = dict(environ)
    assert contract(environ) == contract(environ)
    assert environ == before


def test_both_spellings_of_the_off_switch_are_removed_not_emptied() -> None:
    applied = contract().applied(dict.fromkeys(OFF_SWITCHES, "1"))
    assert not set(OFF_SWITCHES) & set(applied)


def test_options_travel_as_their_canonical_string() -> None:
    one = contract(options="--optlevel 3   --enable-saturate-infinity")
    two = contract(options="--enable-saturate-infinity -O1 -O3")
    assert one.variables == two.variables
    assert one.variables["NEURON_COMPILER_OPT_LEVEL"] == "-O3"


def test_without_options_the_flags_are_unset_because_empty_is_another_key() -> None:
    made = contract({"NEURON_CC_FLAGS": ""})
    assert "NEURON_CC_FLAGS" not in made.applied({"NEURON_CC_FLAGS": ""})


@pytest.mark.parametrize(("mode", "level"), [("compile", "-O2"), ("eager", "-O1")])
def test_the_level_is_explicit_even_when_nobody_named_one(mode: str, level: str) -> None:
    assert contract(mode=mode).variables["NEURON_COMPILER_OPT_LEVEL"] == level


def test_a_level_in_the_environment_is_the_jobs() -> None:
    assert contract({"NEURON_COMPILER_OPT_LEVEL": "-O3"}).variables["NEURON_COMPILER_OPT_LEVEL"] == "-O3"


def test_a_compile_only_warm_says_so_and_takes_no_cores() -> None:
    made = contract(compile_only=True, ranks_per_node=64)
    assert made.variables["TORCH_NEURONX_COMPILE_ONLY"] == "1"
    assert "NEURON_RT_NUM_CORES" not in made.variables
    assert "TORCH_NEURONX_COMPILE_ONLY" in contract().cleared


def test_the_lock_outlasts_the_longest_known_compile() -> None:
    assert contract(longest_compile=36000).variables["TORCH_NEURONX_NEFF_CACHE_LOCK_TIMEOUT"] == "72060"
    assert contract(longest_compile=10).variables["TORCH_NEURONX_NEFF_CACHE_LOCK_TIMEOUT"] == "21600"


def test_the_older_stack_gets_its_own_directory_only() -> None:
    made = contract(stack="xla")
    assert made.variables["NEURON_COMPILE_CACHE_URL"] == "/view/xla"
    assert not any(name.startswith("TORCH_NEURONX_") for name in made.variables)


@pytest.mark.parametrize(
    ("name", "value", "ours"),
    [
        ("NEURON_LOGICAL_NC_CONFIG", "1", "2"),
        ("NEURON_RT_VIRTUAL_CORE_SIZE", "1", "2"),
        ("NEURON_PLATFORM_TARGET_OVERRIDE", "trn1", "trn2"),
        ("TORCH_NEURONX_METRICS_ENABLED", "0", "1"),
        ("TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION", "0", "1"),
        ("TORCH_NEURONX_HLO_COMPILE_CACHE", "0", "1"),
        ("TORCH_NEURONX_COMPILE_ONLY", "1", "0"),
        ("TORCH_NEURONX_NEFF_CACHE_DIR", "/tmp/neff_cache", "/view/neff"),
        ("TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR", "/tmp/local_cache", "/run/private/neff-local"),
        ("TORCH_NEURONX_HLO_CACHE_DIR", "/tmp/hlo", "/view/hlo"),
        ("NKI_COMPILE_CACHE_URL", "/tmp/nki", "/view/nki/compile"),
        ("NEURON_RT_NUM_CORES", "32", "64"),
    ],
)
def test_a_contradiction_is_refused_with_both_values(name: str, value: str, ours: str) -> None:
    with pytest.raises(Usage) as told:
        contract({name: value}, ranks_per_node=64)
    assert name in told.value.message
    assert ours in told.value.message
    assert value in told.value.message
    assert told.value.exit_code == 2


def test_two_levels_are_refused_with_both_values() -> None:
    with pytest.raises(Usage, match=r"-O1.*-O3"):
        contract({"NEURON_COMPILER_OPT_LEVEL": "-O3"}, options="-O1")


@pytest.mark.parametrize("value", ["4", "-O", "fast"])
def test_a_level_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(Usage, match="optimisation level"):
        contract({"NEURON_COMPILER_OPT_LEVEL": value})


def test_a_lock_time_out_below_a_known_compile_is_refused() -> None:
    with pytest.raises(Usage, match="900 s"):
        contract({"TORCH_NEURONX_NEFF_CACHE_LOCK_TIMEOUT": "900"}, longest_compile=1500)


def test_equal_settings_are_no_contradiction() -> None:
    made = contract({"NEURON_RT_VIRTUAL_CORE_SIZE": "2", "TORCH_NEURONX_METRICS_ENABLED": "true"})
    assert made.variables["TORCH_NEURONX_METRICS_ENABLED"] == "1"


def test_s3_is_refused_where_it_would_be_a_local_name() -> None:
    with pytest.raises(Usage, match="local directory"):
        contract({"TORCH_NEURONX_NEFF_CACHE_DIR": "s3://bucket/prefix"}, places=None)


def test_a_cpu_is_no_neuron_target() -> None:
    with pytest.raises(Usage, match="no target"):
        contract(target="cpu")


def test_where_things_are_kept_is_no_part_of_a_key() -> None:
    other = contract(places=Places(Path("/else"), Path("/where")), longest_compile=5000)
    assert graph_environment(contract().variables) == graph_environment(other.variables)
    assert graph_environment(contract().variables) == {"NEURON_COMPILER_OPT_LEVEL": "-O2"}


# --- variables that nothing reads ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "likely"),
    [
        ("NEURON_COMPILE_CACHE_URI", "NEURON_COMPILE_CACHE_URL"),
        ("TORCH_NEURONX_NEF_CACHE_DIR", "TORCH_NEURONX_NEFF_CACHE_DIR"),
        ("NEURON_LOGICAL_NC_CONFG", "NEURON_LOGICAL_NC_CONFIG"),
        ("NEFFCACHE_WARMER", "NEFFCACHE_WARMERS"),
        ("NEURON_RT_NUM_CORE", "NEURON_RT_NUM_CORES"),
    ],
)
def test_a_misspelled_variable_is_named_with_the_likely_one(name: str, likely: str) -> None:
    (warning,) = unread({name: "x"}, ours=KNOWN.values())
    assert name in warning
    assert f"did you mean {likely}?" in warning


def test_an_unknown_variable_that_counts_says_so() -> None:
    (warning,) = unread({"TORCH_NEURONX_SOMETHING_NEW": "1"})
    assert "counts in the job key" in warning
    (misspelled,) = unread({"NEURON_COMPILE_CACHE_URI": "s3://b"})
    assert "counts" not in misspelled


def test_the_other_stacks_directory_is_read_by_nobody() -> None:
    (warning,) = unread({"NEURON_COMPILE_CACHE_URL": "/cache"}, "native")
    assert "TORCH_NEURONX_NEFF_CACHE_DIR" in warning
    assert list(unread({"NEURON_COMPILE_CACHE_URL": "/cache"}, "xla")) == []


def test_known_variables_and_foreign_ones_give_no_warning() -> None:
    assert list(unread({**dict.fromkeys(known_variables(), "1"), "NEURON_RT_ANYTHING": "1", "HOME": "/"})) == []


# --- the refusing compiler ----------------------------------------------------------------------------------------


def test_the_shim_comes_first_and_can_be_passed_by(tmp_path: Path) -> None:
    environ = {"PATH": "/usr/bin"}
    path = shim.install(tmp_path, environ, Path("/usr/bin/true"), tmp_path / "mark")
    assert path["PATH"].split(":")[0] == str(tmp_path / shim.FOLDER)
    assert shim.without({**environ, **path}) == environ
