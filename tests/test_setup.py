"""scripts/environment.py: when an environment may be reused, and what the lock may hold."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PLACE = Path("/checkout/.venv")
PINS = {"click": "8.5.1", "torch": "2.14.1"}


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("environment", ROOT / "scripts" / "environment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["environment"] = module
    spec.loader.exec_module(module)
    return module


environment = load()
pytestmark = pytest.mark.fast


def found(**changes: Any) -> dict[str, Any]:
    needed = {"neffcache": "0.1.0", "click": "8.5.1", "torch": "2.14.1+cpu"}
    return {"python": "3.11.7", "prefix": str(PLACE), "needed": needed, "missing": [], **changes}


def stamp(**changes: Any) -> dict[str, Any]:
    return {"inputs": "i", "path": str(PLACE), "python": "3.11.7", "packages": found()["needed"], **changes}


def reasons(found: dict[str, Any], stamp: dict[str, Any] | None) -> list[str]:
    answer: list[str] = environment.differences(found, stamp, inputs="i", path=PLACE, pins=PINS)
    return answer


def test_an_environment_that_is_as_setup_left_it_matches_and_a_build_suffix_does_not_count() -> None:
    assert reasons(found(), stamp()) == []


@pytest.mark.parametrize(
    ("changed", "left", "said"),
    [
        ({}, None, "no finished setup"),
        ({}, {"inputs": "j"}, "the lock or the version changed"),
        ({}, {"path": "/elsewhere/.venv"}, "another place"),
        ({"prefix": "/elsewhere/.venv"}, {}, "another place"),
        ({"python": "3.12.1"}, {}, "3.12.1"),
        ({"needed": {**found()["needed"], "click": "8.4.0"}}, {}, "click is 8.4.0"),
        ({"needed": {"neffcache": "0.1.0", "torch": "2.14.1"}, "missing": ["click"]}, {}, "click is not installed"),
        ({"missing": ["einops"]}, {}, "einops is not installed"),
    ],
)
def test_anything_else_is_named(changed: dict[str, Any], left: dict[str, Any] | None, said: str) -> None:
    answer = reasons(found(**changed), None if left is None else stamp(**left))
    assert said in " ".join(answer)


def test_a_stamp_that_agrees_with_what_is_installed_does_not_excuse_a_package_off_the_lock() -> None:
    packages = {**found()["needed"], "click": "8.4.0"}
    answer = reasons(found(needed=packages), stamp(packages=packages))
    assert answer == ["click is 8.4.0, the lock says 8.5.1"]


@pytest.mark.parametrize("name", environment.INPUTS)
def test_every_input_counts_in_the_digest(tmp_path: Path, name: str) -> None:
    before = environment.inputs_digest(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("x")
    assert environment.inputs_digest(tmp_path) != before


def test_a_written_lock_has_no_build_suffix_and_nothing_of_one_build_of_torch() -> None:
    of_one_build = {"nvidia-nccl-cu13": "1", "cuda-toolkit": "1", "triton": "1"}
    text = environment.write_lock({"torch": "2.14.1+cpu", "click": "8.5.1", "neffcache": "0", **of_one_build})
    assert environment.read_lock(text) == PINS


@pytest.mark.parametrize("line", ["torch>=2.14", "torch==2.14.1+cpu", "-r other.txt", "torch @ file:///x"])
def test_a_lock_holds_pins_only(line: str) -> None:
    with pytest.raises(environment.Failed, match="name==version"):
        environment.read_lock(line)


def test_the_lock_pins_every_direct_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pins = environment.read_lock((ROOT / "scripts" / "lock.txt").read_text())
    assert extras["neuron"] == []
    for text in [*project["dependencies"], *extras["host"], *extras["test"], *extras["docs"]]:
        requirement = Requirement(text)
        assert pins[requirement.name.lower()] in requirement.specifier, f"{text}: the lock has another version"
