from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from neffcache.flows.changes import Change, Other, changes, steps
from neffcache.flows.explain import nearest_manifest, unmet_graph
from neffcache.flows.resolve import Job
from neffcache.flows.tracing import TracedGraph
from neffcache.graph.difference import first_difference, nearest
from neffcache.key.canonical import sha256_hex, xxh3_128_hex
from neffcache.key.compare import MISSING, Difference
from neffcache.key.job import CompileComponents, Component
from neffcache.store.local import LocalStore
from neffcache.store.records import Manifest
from tests.cli.conftest import job_of, put_graph, put_job, request_of

pytestmark = pytest.mark.fast


@pytest.fixture(autouse=True)
def no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore.open(tmp_path / "store", writable=True, given=True)


def trained_with(seq_len: int, *, config: str = "llama3_debugmodel", **more: Any) -> Job:
    return job_of(request_of(config, target="cpu", world_size=4), {"training": {"seq_len": seq_len}, **more})


def made(store: LocalStore, *jobs: Job) -> list[Manifest]:
    return [put_job(store, job, f"graph {number}") for number, job in enumerate(jobs)]


def test_the_nearest_manifest_differs_in_the_fewest_components_then_fields(store: LocalStore) -> None:
    two_components = job_of(request_of(), {"training": {"seq_len": 257}}, threads=2)
    many_fields = trained_with(1, a=1, b=2)
    one_field = trained_with(512)
    manifests = made(store, two_components, many_fields, one_field)
    fewer_components = nearest_manifest(trained_with(256), manifests[:2])
    assert fewer_components is not None
    assert fewer_components.manifest.id == manifests[1].id, "three fields of one component are nearer than two of two"
    found = nearest_manifest(trained_with(256), manifests)
    assert found is not None
    assert found.manifest.id == manifests[2].id
    assert found.components == ("workload",)
    assert [(item.path, item.left, item.right) for item in found.differences] == [
        ("workload.config.training.seq_len", 256, 512)
    ]
    assert [(item.kind, item.what) for item in found.changes] == [("option", "--set training.seq_len=512")]
    assert found.reachable


def test_of_two_as_near_the_one_of_the_same_configuration_is_taken(store: LocalStore) -> None:
    manifests = made(store, trained_with(512, config="llama3_8b"), trained_with(512))
    for order in (manifests, manifests[::-1]):
        for config, manifest in (("llama3_8b", manifests[0]), ("llama3_debugmodel", manifests[1])):
            found = nearest_manifest(trained_with(256, config=config), order)
            assert found is not None
            assert found.manifest.id == manifest.id


def test_an_incomplete_manifest_is_near_and_not_within_reach(store: LocalStore) -> None:
    put_job(store, trained_with(512), "one", complete=False)
    found = nearest_manifest(trained_with(256), store.manifests())
    assert found is not None
    assert not found.reachable
    assert nearest_manifest(trained_with(256), []) is None


OTHER = Other(
    components={
        "workload": Component.of(
            "workload",
            {
                "config": {
                    "training": {"seq_len": 512, "mixed": None},
                    "compile": {"enable": True, "components": ["model", "loss"]},
                    "override": {"imports": [["a", {"b": 1}]]},
                }
            },
        ),
        "options": Component.of("options", {"options": ["--optlevel=1", "--x"]}),
    },
    versions={"torch": "2.14.0", "compiler": "g++ 12.2"},
    options=dict.fromkeys(
        ["training.seq_len", "training.mixed", "compile.enable", "compile.components", "override.imports"], ""
    ),
)


@pytest.mark.parametrize(
    ("path", "right", "kind", "what"),
    [
        ("workload.config.training.seq_len", 512, "option", "--set training.seq_len=512"),
        ("workload.config.compile.enable", True, "option", "--set compile.enable=true"),
        ("workload.config.compile.components[1]", "loss", "option", "--set compile.components=model,loss"),
        ("workload.config.training.mixed", None, "none", "training.mixed cannot be given"),
        ("workload.config.override.imports[0][1].b", 1, "none", "override.imports cannot be given"),
        ("workload.config.model_spec.model.dim", 256, "none", "model_spec is set by the code"),
        ("workload.environment.NEURON_X", "1", "environment", "export NEURON_X=1"),
        ("workload.environment.NEURON_X", MISSING, "environment", "unset NEURON_X"),
        ("workload.torchtitan", "0.3.1", "install", "TorchTitan 0.3.1"),
        ("workload.packages.torchao", "0.9", "install", "torchao 0.9"),
        ("workload.packages.torchao", MISSING, "install", "no torchao"),
        ('workload.sources["my.models"].files["a.py"]', "ab", "code", "the same code of my.models"),
        ("target.target", "trn1", "option", "--target trn1"),
        ("lnc.lnc", 1, "option", "--lnc 1"),
        ("lnc.world_size", 128, "option", "--world-size 128"),
        ("options.options[0]", MISSING, "option", "--option=--optlevel=1 --option=--x"),
        ("toolchain.threads", 4, "environment", "export OMP_NUM_THREADS=4"),
        ("toolchain.torch.git", "abc", "install", "torch 2.14.0"),
        ("toolchain.compiler.programs.ld", "ab", "install", "the very same compiler, g++ 12.2"),
        ("toolchain.instruction_set[3]", "avx", "machine", "a machine with the same instruction set"),
        ("toolchain.settings.inductor.max_autotune", True, "code", "PyTorch's setting inductor.max_autotune = True"),
        ("toolchain.name", "neuron", "option", "--toolchain neuron"),
        ("toolchain.new", 1, "none", "new of the toolchain cannot be chosen"),
        ("lnc", MISSING, "none", "the component lnc is missing"),
    ],
)
def test_each_kind_of_difference_says_what_to_change(path: str, right: Any, kind: str, what: str) -> None:
    [change] = changes([Difference(path, "left", right)], OTHER)
    assert (change.path, change.kind) == (path, kind)
    assert change.what.startswith(what)


def test_one_thing_to_do_is_said_once() -> None:
    found = changes(
        [Difference(f"workload.config.compile.components[{number}]", None, None) for number in range(3)], OTHER
    )
    assert found == [Change("workload.config.compile.components[0]", "option", "--set compile.components=model,loss")]


def test_no_options_there_means_none_here() -> None:
    other = Other({"options": Component.of("options", {"options": []})}, {}, {})
    assert changes([Difference("options.options[0]", "--x", MISSING)], other)[0].what.startswith("no compiler option")


def test_paths_are_read_as_they_are_written() -> None:
    assert steps('a.b[0]["c.d"].e[12]') == ["a", "b", "0", "c.d", "e", "12"]


def test_the_nearest_text_shares_most_lines_and_of_equals_agrees_longest() -> None:
    assert nearest("a\nb\nc\n", []) is None
    assert nearest("a\nb\nc\n", [("far", "x\ny\nz\n"), ("near", "a\nb\nd\n")]) == "near"
    assert nearest("a\nb\nc\n", [("early", "x\nb\nc\n"), ("late", "a\nb\nx\n")]) == "late"
    assert nearest("a\na\n", [("once", "a\nb\n"), ("twice", "a\na\n")]) == "twice"
    assert first_difference("a\nb\n", "a\nc\n") == (2, "b", "c")


def traced(tmp_path: Path, text: str, *, env: str = "b" * 64) -> TracedGraph:
    (tmp_path / "text").write_text(text)
    components = CompileComponents(text=sha256_hex(text.encode()), toolchain="a" * 64, env=env)
    return TracedGraph(xxh3_128_hex(text.encode()), components, "forward", "g", 100, 1, {}, tmp_path / "text", None)


def test_a_graph_without_record_names_the_nearest_and_the_first_other_line(store: LocalStore, tmp_path: Path) -> None:
    near = put_graph(store, "near", text="1\n2\n3\n")
    put_graph(store, "far", text="x\ny\nz\n")
    found = unmet_graph(traced(tmp_path, "1\n2\n4\n"), store.graphs(), store)
    assert (found.record, found.components) == (near.compile_key, ("text",))
    assert (found.line, found.here, found.there) == (3, "4", "3")


def test_a_graph_with_the_same_text_differs_in_what_else_reaches_the_compiler(
    store: LocalStore, tmp_path: Path
) -> None:
    put_graph(store, "one", text="1\n2\n")
    found = unmet_graph(traced(tmp_path, "1\n2\n", env="c" * 64), store.graphs(), store)
    assert (found.components, found.line) == (("env",), None)
    assert unmet_graph(traced(tmp_path, "1\n"), [], store).to_json()["nearest"] is None
