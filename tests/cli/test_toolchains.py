"""K9: a full store and another compiler. Nothing of the old one is taken, touched or lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from neffcache.flows.check import check_job
from neffcache.flows.explain import nearest_manifest
from neffcache.flows.resolve import Job
from neffcache.key.job import CompileComponents, compile_key, job_key
from neffcache.store.local import LocalStore
from tests.cli.conftest import job_of, put_job, request_of

pytestmark = pytest.mark.fast


def built_with(compiler: dict[str, Any]) -> Job:
    """The same job under another compiler."""
    job = job_of(request_of())
    values = {name: part.value for name, part in job.key.components.items()}
    toolchain = {**values.pop("toolchain"), "compiler": compiler}
    return dataclasses.replace(job, key=job_key(**values, toolchain=toolchain), versions={"compiler": "g++"})


ONE = {"version": "g++ 12.2", "programs": {"cc1plus": "1" * 64}}
TWO = {"version": "g++ 13.1", "programs": {"cc1plus": "2" * 64}}
PATCHED = {"version": "g++ 12.2", "programs": {"cc1plus": "3" * 64}}


def content(store: LocalStore) -> dict[str, tuple[int, int, bytes]]:
    return {
        str(path.relative_to(store.root)): (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(store.root.rglob("*"))
        # A ref names the newest warm of its request, whatever compiled it.
        if path.is_file() and not {"locks", "refs"} & set(path.parts)
    }


def check(store: LocalStore, compiler: dict[str, Any]) -> str:
    return check_job(built_with(compiler), store).state


@pytest.mark.parametrize("other", [TWO, PATCHED], ids=["another version", "the same version, another program"])
def test_another_compiler_misses_reports_what_is_there_and_leaves_it_for_the_way_back(
    store: LocalStore, other: dict[str, Any]
) -> None:
    put_job(store, built_with(ONE), "one", "two")
    before = content(store)
    assert check(store, ONE) == "HIT"
    assert check(store, other) == "MISS"
    near = nearest_manifest(built_with(other), store.manifests())
    assert near is not None
    assert near.components == ("toolchain",)
    assert near.manifest.cache_key == built_with(ONE).key.cache_key
    assert [item.path.split(".")[1] for item in near.differences] == ["compiler"] * len(near.differences)
    assert content(store) == before
    put_job(store, built_with(other), "three", "four")
    assert (check(store, other), check(store, ONE)) == ("HIT", "HIT")
    after = content(store)
    assert {name: after[name] for name in before} == before


def test_a_graph_of_one_compiler_is_no_graph_of_another() -> None:
    parts = {"text": "a" * 64, "env": "b" * 64}
    keys = {compile_key(CompileComponents(toolchain=built_with(c).toolchain_id, **parts)) for c in (ONE, TWO, PATCHED)}
    assert len(keys) == 3


def leaves(value: Any, put: Callable[[Any], Any]) -> list[tuple[Any, Callable[[Any], Any]]]:
    """Every plain value of a JSON document, and a function that gives the document with another one there."""
    if isinstance(value, dict) and value:
        return [
            leaf
            for name, item in value.items()
            for leaf in leaves(item, lambda new, name=name: put({**value, name: new}))
        ]
    if isinstance(value, list) and value:
        return [
            leaf
            for index, item in enumerate(value)
            for leaf in leaves(item, lambda new, index=index: put([*value[:index], new, *value[index + 1 :]]))
        ]
    return [(value, put)]


def test_every_leaf_of_the_five_components_alone_makes_another_key() -> None:
    job = built_with(ONE)
    values = {name: part.value for name, part in job.key.components.items()}
    seen = {job.key.cache_key}
    found = leaves(values, lambda whole: whole)
    assert len(found) >= 12
    for _, put in found:
        seen.add(job_key(**put("another value")).cache_key)
    assert len(seen) == len(found) + 1


def test_everything_that_a_request_says_about_the_job_is_in_its_key() -> None:
    """Each option that chooses a job, alone; what only finds it (its name, nodes, instance) is in no key."""
    plain: dict[str, Any] = {"target": "trn2", "lnc": 2, "world_size": 64}
    keys = [
        job_of(request_of(**given)).key.cache_key
        for given in (
            plain,
            {**plain, "target": "trn3"},
            {**plain, "lnc": 1},
            {**plain, "world_size": 128},
            {**plain, "options": ["-O1"]},
            {**plain, "options": ["--enable-something-new"]},
        )
    ]
    assert len(set(keys)) == len(keys)
    same = job_of(request_of("llama3_8b", instance="trn2.48xlarge", nodes=1)).key.cache_key
    assert same == keys[0]
