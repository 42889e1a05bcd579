"""The workload document: what changes it, and what must not."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from neffcache.key.canonical import digest
from neffcache.key.workload import neutral_reason, workload_component

pytest.importorskip("torch")
pytest.importorskip("torchtitan")

import torch

from neffcache.errors import Unsupported, Usage
from neffcache.trace import document as documents
from neffcache.trace import titan

ARGUMENTS = ["--module", "llama3", "--config", "llama3_debugmodel"]


@pytest.fixture(scope="module")
def config() -> Any:
    titan.use_cpu()
    return titan.load_config(ARGUMENTS)


@pytest.fixture(autouse=True)
def sources_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashing every source file again for every leaf would be all that these tests do."""
    cached = functools.cache(lambda modules: documents_sources(set(modules)))
    monkeypatch.setattr(documents, "sources", lambda modules: cached(frozenset(modules)))


documents_sources = documents.sources


def key(config: Any, environ: dict[str, str] | None = None) -> str:
    return digest(workload_component(documents.workload_document(config, environ or {})))


Put = Callable[[Any], None]


def leaves(node: Any, path: str, put: Put) -> Iterator[tuple[str, Any, Put]]:
    """(path, value, how to put another one there) of every value in a tree of data classes and containers."""
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        inner: Any = [(f".{f.name}", getattr(node, f.name), functools.partial(object.__setattr__, node, f.name))
                      for f in dataclasses.fields(node)]  # fmt: skip
    elif isinstance(node, dict):
        inner = [(f".{name}", item, functools.partial(node.__setitem__, name)) for name, item in node.items()]
    elif isinstance(node, list):
        inner = [(f".{index}", item, functools.partial(node.__setitem__, index)) for index, item in enumerate(node)]
    elif isinstance(node, tuple):
        inner = [(f".{index}", item, lambda value, index=index: put((*node[:index], value, *node[index + 1 :])))
                 for index, item in enumerate(node)]  # fmt: skip
    elif isinstance(node, functools.partial):
        func, args, given = node.func, node.args, node.keywords
        inner = [
            ("()", func, lambda value: put(functools.partial(value, *args, **given))),
            ("()", args, lambda value: put(functools.partial(func, *value, **given))),
        ]
        for name, item in given.items():
            change = lambda value, name=name: put(functools.partial(func, *args, **{**given, name: value}))  # noqa: E731
            inner.append((f"().{name}", item, change))
    else:
        yield path, node, put
        return
    for name, value, put_inside in inner:
        yield from leaves(value, path + name, put_inside)


def another(value: Any) -> Any:
    """A value of the same kind that is not this one; a kind that nobody thought of fails."""
    if isinstance(value, enum.Enum):
        return next(member for member in type(value) if member is not value)
    if isinstance(value, bool):
        return not value
    if value is None:
        return "something"
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, type):
        return int if value is not int else float
    if isinstance(value, torch.dtype):
        return torch.float64 if value is not torch.float64 else torch.float32
    if callable(value):
        return os.path.join if value is not os.path.join else os.path.split
    raise AssertionError(f"no other value is known for {value!r}")


def test_every_leaf_counts_unless_it_is_declared_neutral(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Which packages count, without their hundreds of digests; and versions looked up once.
    monkeypatch.setattr(documents, "sources", sorted)
    monkeypatch.setattr(documents, "_version", functools.cache(documents._version))
    before = key(config)
    counted = neutral = 0
    # Layers are alike: the first and the last stand for all of them.
    found = [leaf for leaf in leaves(config, "", lambda _: None) if not re.search(r"\.layers\.[1-4]\b", leaf[0])]
    for path, value, put in found:
        changed = another(value)
        put(changed)
        try:
            after = key(config)
        finally:
            put(value)
        if neutral_reason(path.removeprefix("."), changed) is not None:
            assert after == before, f"{path} is neutral and the key changed"
            neutral += 1
        else:
            assert after != before, f"{path} changed and the key did not"
            counted += 1
    assert key(config) == before
    assert counted > 250
    assert neutral > 30
    assert {kind for kind in (bool, int, float, str) if any(type(value) is kind for _, value, _ in found)} == {
        bool, int, float, str,
    }  # fmt: skip
    assert any(callable(value) for _, value, _ in found), "callables of a configuration count too"


def test_an_integer_and_a_float_of_the_same_size_differ(config: Any) -> None:
    assert config.training.max_norm == 1.0
    before = key(config)
    config.training.max_norm = 1
    try:
        assert key(config) != before
    finally:
        config.training.max_norm = 1.0


def test_shared_and_copied_objects_are_one_key(config: Any) -> None:
    shared = copy.copy(config)
    assert shared.training is config.training
    assert key(shared) == key(copy.deepcopy(config)) == key(config)


def test_bound_arguments_of_initialisers_count() -> None:
    def described(std: float) -> Any:
        packages: set[str] = set()
        return documents.encode(functools.partial(os.path.join, std), packages, "x")

    assert digest(described(0.02)) == digest(described(0.02))
    assert digest(described(0.02)) != digest(described(0.03))


def test_what_has_no_canonical_form_is_named() -> None:
    with socket.socket() as thing, pytest.raises(Unsupported, match=r"config\.thing holds a .*socket"):
        documents.encode(thing, set(), "config.thing")


@pytest.mark.parametrize(
    ("variable", "counts"),
    [("NEURON_SCRATCHPAD_PAGE_SIZE", True), ("XLA_SOMETHING_NEW", True), ("NEURON_RT_LOG_LEVEL", False)],
)
def test_variables(config: Any, variable: str, counts: bool) -> None:
    assert (key(config, {variable: "1"}) != key(config)) is counts


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes a small package at a place and lets only that place be imported from; forgets the others."""

    def make(place: str) -> Path:
        root = tmp_path / place / "neffcache_toy"
        if not root.exists():
            (root / "inner").mkdir(parents=True)
            (root / "__init__.py").write_text("")
            (root / "model.py").write_text("WIDTH = 1\n")
            (root / "inner" / "__init__.py").write_text("")
        monkeypatch.setattr(sys, "path", [str(root.parent), *[p for p in sys.path if str(tmp_path) not in p]])
        sys.modules.pop("neffcache_toy", None)
        return root

    return make


def found() -> str:
    return str(documents_sources({"neffcache_toy.model"})["neffcache_toy"]["sha256"])


def test_sources_count_by_content_and_relative_path(package: Callable[[str], Path], tmp_path: Path) -> None:
    first = package("here")
    before = found()
    shutil.copytree(first, tmp_path / "there" / "neffcache_toy")
    second = package("there")
    assert found() == before, "moving a checkout is no change"
    (second / "README.md").write_text("more")
    (second / "model.pyc").write_bytes(b"x")
    (second / "__pycache__").mkdir()
    (second / "__pycache__" / "model.cpython-311.pyc").write_bytes(b"x")
    os.utime(second / "model.py", (1, 1))
    assert found() == before, "neither notes nor byte code nor times are sources"
    (second / "model.py").write_text("WIDTH = 2\n")
    assert found() != before
    (second / "model.py").write_text("WIDTH = 1\n")
    assert found() == before
    (second / "model.py").rename(second / "inner" / "model.py")
    assert found() != before, "the path inside the package counts"


def test_a_first_line_that_an_installer_rewrites_does_not_count(package: Callable[[str], Path]) -> None:
    root = package("here")
    (root / "model.py").write_text("#!/usr/bin/python3\nWIDTH = 1\n")
    before = found()
    (root / "model.py").write_text("#!/opt/other/python3.12\nWIDTH = 1\n")
    assert found() == before


def test_settings_become_arguments_of_torchtitan(config: Any) -> None:
    arguments = titan.setting_arguments(
        config,
        {
            "compile.enable": "true",
            "training.disable_cuda_graphs": False,
            "training.seq_len": 256,
            "compile.components": ["model"],
        },
    )
    assert arguments == [
        *("--compile.enable", "--training.no-disable_cuda_graphs"),
        *("--training.seq_len", "256", "--compile.components", "model"),
    ]
    made = titan.load_config([*ARGUMENTS, *arguments])
    assert made.compile.enable
    assert made.compile.components == ["model"]
    assert made.training.seq_len == 256


def test_an_unknown_option_is_refused_with_the_likely_one(config: Any) -> None:
    with pytest.raises(Usage) as caught:
        titan.setting_arguments(config, {"training.seqlen": 1})
    assert "training.seqlen" in caught.value.message
    assert "training.seq_len" in caught.value.hint


def test_what_torchtitan_refuses_is_said_in_its_words() -> None:
    with pytest.raises(Usage, match=r"Error parsing --training.seq-len: invalid literal for int.*'many'") as caught:
        titan.load_config([*ARGUMENTS, "--training.seq_len", "many"])
    assert "helptext" not in caught.value.message


def test_a_configuration_that_needs_a_missing_package_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="needs the package torchao") as caught:
        titan.load_config(["--module", "llama3", "--config", "llama3_405b"])
    assert caught.value.details["package"] == "torchao"


def test_our_own_405b_is_torchtitan_s_without_float8() -> None:
    made = titan.load_config(["--module", "neffcache.trace.registry", "--config", "llama3_405b_bf16"])
    assert made.model_spec.flavor == "405B"
    assert len(made.model_spec.model.layers) == 126
    assert "Float8" not in str(documents.encode(made, set(), "config"))


def test_an_unknown_configuration_is_refused_with_the_likely_one() -> None:
    with pytest.raises(Usage) as caught:
        titan.find_module("llama3_9b")
    assert "llama3_8b" in caught.value.hint


def test_the_harness_says_what_it_replaces(config: Any) -> None:
    replaced = {entry.what: entry for entry in titan.host_replacements(config)}
    assert {"data loader", "tokenizer", "FlexAttention"} <= set(replaced)
    assert replaced["FlexAttention"].changes_meaning
    assert not replaced["data loader"].changes_meaning
    settings = titan.replacement_settings(config, list(replaced.values()))
    assert any("flex_to_sdpa" in entry for entry in settings["override.imports"])
    assert "FlexAttention" not in {entry.what for entry in titan.host_replacements(config, cp=2)}


@pytest.mark.parametrize(("settings", "flex"), [({}, True), ({"parallelism.context_parallel_degree": "2"}, False)])
def test_context_parallel_keeps_its_attention(settings: dict[str, str], flex: bool) -> None:
    _, arguments, replaced = titan.command_line("llama3", "llama3_debugmodel", settings, cpu=True)
    assert any(entry.what == "FlexAttention" for entry in replaced) == flex
    assert any("flex_to_sdpa" in word for word in arguments) == flex


def test_a_lint_varies_what_the_key_leaves_out_and_nothing_that_counts(config: Any) -> None:
    from neffcache.trace import variation

    changed = copy.deepcopy(config)
    neutral, watched = variation.variations(changed)
    assert {"training.steps", "dump_folder", "validator.freq"} <= set(neutral)
    assert any(path.endswith(".lr") for path in watched)
    before = key(changed)
    variation.apply(changed, neutral)
    assert key(changed) == before
    assert changed.training.steps != config.training.steps
    variation.apply(changed, dict(list(watched.items())[:1]))
    assert key(changed) != before
