"""Job keys and compile keys."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import neffcache
from neffcache.errors import Mismatch, Usage
from neffcache.key.canonical import canonical_json, digest, sha256_hex, xxh3_128_hex
from neffcache.key.job import COMPONENTS, CompileComponents, JobKey, compile_key, job_key

pytestmark = pytest.mark.fast

VALUES: dict[str, Any] = {
    "workload": {"config": {"training": {"seq_len": 4096, "max_norm": 1.0}}},
    "target": {"target": "trn2"},
    "lnc": {"lnc": 2, "world_size": 64},
    "toolchain": {"name": "host", "torch": "2.14.1"},
    "options": {"options": ["--optlevel=1"]},
}
A, B = "a" * 64, "b" * 64


def test_the_key_is_the_hash_of_the_digests_of_the_five_components() -> None:
    key = job_key(**VALUES)
    digests = {name: sha256_hex(canonical_json(VALUES[name])) for name in COMPONENTS}
    assert key.cache_key == xxh3_128_hex(canonical_json(digests))
    assert {name: part.sha256 for name, part in key.components.items()} == digests


def test_the_key_of_a_fixed_job_never_moves() -> None:
    # Whoever changes this number makes every cache of every user cold.
    assert job_key(**VALUES).cache_key == "ff5a8c93190cc2ab865aba1524cf1940"


@pytest.mark.parametrize("name", COMPONENTS)
def test_each_component_alone_changes_the_key(name: str) -> None:
    other = job_key(**{**VALUES, name: {**VALUES[name], "more": 1}})
    assert other.cache_key != job_key(**VALUES).cache_key


def test_equal_values_in_two_components_do_not_cancel_when_they_are_swapped() -> None:
    one = job_key(**{**VALUES, "target": 1, "lnc": 2})
    two = job_key(**{**VALUES, "target": 2, "lnc": 1})
    assert one.cache_key != two.cache_key


def test_shared_and_copied_objects_and_the_order_of_names_give_one_key() -> None:
    shared = {"heads": 8}
    copied = {"b": {"heads": 8}, "a": {"heads": 8}}
    assert (
        job_key(**{**VALUES, "workload": {"a": shared, "b": shared}}).cache_key
        == job_key(**{**VALUES, "workload": copied}).cache_key
    )


@pytest.mark.parametrize("value", [1, 1.0, True, "1", [1], {"1": 1}, None, float("inf"), 2**60, b"1"])
def test_a_document_reads_back_through_json_with_its_key(value: object) -> None:
    key = job_key(**{**VALUES, "workload": {"x": value, "tagged": {"$float": "inf"}}})
    assert JobKey.from_json(json.loads(json.dumps(key.to_json(), allow_nan=False))).cache_key == key.cache_key


def test_values_that_python_calls_equal_are_different_keys() -> None:
    keys = {job_key(**{**VALUES, "workload": value}).cache_key for value in (1, 1.0, True, "1")}
    assert len(keys) == 4


def test_a_changed_value_or_key_in_a_document_is_noticed() -> None:
    document = job_key(**VALUES).to_json()
    document["components"]["lnc"]["value"]["lnc"] = 1
    with pytest.raises(Mismatch, match="lnc"):
        JobKey.from_json(document)
    with pytest.raises(Mismatch, match="not that of its components"):
        JobKey.from_json({**job_key(**VALUES).to_json(), "cache_key": "0" * 32})


@pytest.mark.parametrize("document", [{}, {"components": {}}, {"components": {name: {} for name in COMPONENTS}}])
def test_a_document_that_is_no_key_is_refused_as_usage(document: dict[str, object]) -> None:
    with pytest.raises(Usage):
        JobKey.from_json(document)


def test_a_compile_key_changes_with_each_component_and_with_its_absence() -> None:
    whole = CompileComponents(text=A, toolchain=A, env=A, target=A, lnc=A, options=A)
    others = [dataclasses.replace(whole, **{name: B}) for name in whole.to_json()]
    others += [
        dataclasses.replace(whole, target=None),
        dataclasses.replace(whole, lnc=None),
        dataclasses.replace(whole, options=None),
    ]
    assert len({compile_key(part) for part in [whole, *others]}) == 10
    assert compile_key(whole) == "48841fc28062228d3f70031a82e7dd08"


@pytest.mark.parametrize("bad", ["", "a" * 63, "A" * 64, "g" * 64])
def test_a_compile_key_is_never_made_of_an_undetected_digest(bad: str) -> None:
    with pytest.raises(ValueError, match="toolchain"):
        CompileComponents(text=A, toolchain=bad, env=A)
    with pytest.raises(ValueError, match="options"):
        CompileComponents(text=A, toolchain=A, env=A, options=bad)


def test_fresh_processes_with_other_hash_seeds_and_directories_make_the_same_key(tmp_path: Path) -> None:
    root = str(Path(neffcache.__file__).parents[1])
    program = (
        f"import sys; sys.path.insert(0, {root!r})\n"
        "from neffcache.key import canonical, compare, environment, job, native, options, target, workload\n"
        "assert not {'torch', 'torchtitan', 'numpy'} & set(sys.modules)\n"
        f"print(job.job_key(**{VALUES!r}).cache_key)"
    )
    found = set()
    for seed in ("0", "1", "random"):
        home = tmp_path / seed
        home.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "HOME": str(home)},
            cwd=home,
            capture_output=True,
            text=True,
            check=True,
        )
        found.add(done.stdout.strip())
    assert found == {job_key(**VALUES).cache_key}


def test_the_digest_of_a_component_is_that_of_its_canonical_json() -> None:
    assert digest({"b": 1, "a": 2}) == sha256_hex(b'{"a":2,"b":1}')
