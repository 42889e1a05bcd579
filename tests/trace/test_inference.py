"""Inference workloads: what a callable may be, what is said of one that may not, and which code counts."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from neffcache.errors import NeffcacheError, Unsupported, Usage
from neffcache.inference import Workload, World, call, workload
from neffcache.key.canonical import digest
from neffcache.key.workload import workload_component
from neffcache.trace import inference
from neffcache.trace.document import inference_document

pytestmark = pytest.mark.fast


@workload
def example(
    world: World,
    *,
    layers: int = 2,
    scale: float = 1.0,
    mode: str = "plain",
    bias: bool = False,
    sizes: tuple[int, ...] = (1, 2),
    limit: int | None = None,
    kind: Literal["a", "b"] = "a",
) -> Any:
    return nn.Linear(layers, layers), {"only": torch.zeros(layers)}


DEFAULTS = example.resolve({})


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ({"layers": "4"}, 4),
        ({"layers": 4}, 4),
        ({"scale": "2"}, 2.0),
        ({"mode": "4"}, "4"),
        ({"bias": "true"}, True),
        ({"sizes": "3,4"}, (3, 4)),
        ({"sizes": [3, 4]}, (3, 4)),
        ({"limit": "7"}, 7),
        ({"limit": "null"}, None),
        ({"kind": "b"}, "b"),
    ],
    ids=str,
)
def test_an_argument_gets_the_type_that_is_annotated(given: dict[str, Any], value: Any) -> None:
    [name] = given
    found = example.resolve(given)[name]
    assert (found, type(found)) == (value, type(value))
    assert {**example.resolve(given), name: DEFAULTS[name]} == DEFAULTS


@pytest.mark.parametrize("given", [{}, {"layers": 4, "mode": "4"}, {"sizes": (5,), "bias": True}, {"mode": 'a "b"=c'}])
def test_the_words_of_a_command_mean_the_same_arguments(given: dict[str, Any]) -> None:
    words = example.words(given)
    assert words[0] == f"{__name__}:example"
    assert len(words) == 1 + 2 * len(given)
    said = {word.partition("=")[0]: word.partition("=")[2] for word in words[2::2]}
    assert example.resolve(inference.decoded(said)) == example.resolve(given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"layrs": 1}, "has no argument layrs"),
        ({"layers": "two"}, "the argument layers of"),
        ({"layers": "2.5"}, "takes int, not '2.5'"),
        ({"kind": "c"}, "not 'c'"),
    ],
    ids=str,
)
def test_an_argument_that_is_not_one_is_a_sentence(given: dict[str, Any], words: str) -> None:
    with pytest.raises(Usage) as caught:
        example.resolve(given)
    assert words in caught.value.message


def test_an_argument_without_a_default_must_be_given_and_one_without_a_form_is_refused() -> None:
    @workload
    def needs(world: World, depth: int, dtype: torch.dtype = torch.float32) -> Any: ...

    with pytest.raises(Usage, match="needs the argument depth"):
        needs.resolve({})
    with pytest.raises(Usage, match=r"the argument dtype of .* is a dtype"):
        needs.resolve({"depth": 1})


def takes_nothing() -> Any: ...


def takes_anything(world: World, **more: int) -> Any: ...


@pytest.mark.parametrize("function", [takes_nothing, takes_anything])
def test_a_function_whose_arguments_cannot_be_named_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(Unsupported):
        workload(function).resolve({})


@pytest.mark.parametrize(
    ("built", "words"),
    [
        (None, "returned a NoneType"),
        (nn.Linear(1, 1), "returned a Linear"),
        ((torch.zeros(1), {"a": 1}), "a tuple of Tensor, dict"),
        ((nn.Linear(1, 1), [torch.zeros(1)]), "no inputs by phase"),
        ((nn.Linear(1, 1), {}), "no inputs by phase"),
        ((nn.Linear(1, 1), {"a b": 1}), "a phase 'a b'"),
        ((nn.Linear(1, 1), {"steady_step": 1}), "a phase 'steady_step'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_workload_returns_is_checked(built: Any, words: str) -> None:
    with pytest.raises(Unsupported) as caught:
        workload(lambda world: built)(World())
    assert words in caught.value.message


def test_inputs_are_given_by_position_by_name_or_alone() -> None:
    def seen(*args: Any, **named: Any) -> Any:
        return args, named

    assert call(seen, (1, 2)) == ((1, 2), {})
    assert call(seen, {"x": 1}) == ((), {"x": 1})
    assert call(seen, 1) == ((1,), {})


@pytest.mark.parametrize("degrees", [{}, {"tp": 3}, {"dp": 2, "tp": 4}, {"dp": -2, "tp": -2}])
def test_a_mesh_that_does_not_fit_the_world_is_refused(degrees: dict[str, int]) -> None:
    with pytest.raises(Usage, match="does not multiply to the world size 4"):
        World(size=4).mesh(**degrees)


# --- found by name ------------------------------------------------------------------------------------------------

CODE = """
from neffcache.inference import World, workload
import {imports}

@workload
def tiny(world: World, *, layers: int = 2):
    import tomllib

def plain(world: World): ...

def config(): ...
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that a user starts in, with a workload of its own package and one of a single file."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "nc_own" / "deep").mkdir(parents=True)
    for name in ("nc_own/__init__.py", "nc_own/deep/__init__.py"):
        (tmp_path / name).touch()
    (tmp_path / "nc_own/deep/run.py").write_text(CODE.format(imports="nc_helper") + "\nfrom ..more import x\n")
    (tmp_path / "nc_own/more.py").write_text("x = 1\ndef late():\n    import click\n")
    (tmp_path / "nc_own/unused.py").write_text("import boto3\n")
    (tmp_path / "nc_helper.py").write_text("import psutil\n")
    (tmp_path / "nc_broken.py").write_text(CODE.format(imports="nc_not_there_at_all"))
    for name in [name for name in sys.modules if name.startswith("nc_")]:
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()
    return tmp_path


def test_a_workload_is_told_from_a_configuration_without_importing_it(folder: Path) -> None:
    assert inference.kind_of("nc_own.deep.run", "tiny") == "callable"
    assert inference.kind_of("nc_own.deep.run", "config") == "torchtitan"
    assert inference.kind_of("nc_broken", "tiny") == "callable"
    assert inference.kind_of("", "llama3_8b") == "torchtitan"
    assert "nc_own.deep.run" not in sys.modules


@pytest.mark.parametrize("name", ["llama3:llama3_8b", "torchtitan.models.llama3:anything"])
def test_a_configuration_of_torchtitan_stays_one(name: str, folder: Path) -> None:
    pytest.importorskip("torchtitan")
    (folder / "llama3.py").write_text(CODE.format(imports="os"))
    module, _, function = name.partition(":")
    assert inference.kind_of(module, function) == "torchtitan"


@pytest.mark.parametrize(
    ("module", "function", "kind", "words"),
    [
        ("nc_nowhere", "tiny", Usage, "there is no module nc_nowhere"),
        ("nc_nowhere.at_all", "tiny", Usage, "there is no module nc_nowhere.at_all"),
        ("nc_own.deep.run", "tini", Usage, "has no workload tini"),
        ("nc_own.deep.run", "plain", Usage, "is not marked as a workload"),
        ("nc_broken", "tiny", Unsupported, "cannot be imported: ModuleNotFoundError: No module named 'nc_not_there"),
    ],
)
def test_a_workload_that_is_not_there_is_a_sentence(
    folder: Path, module: str, function: str, kind: type[NeffcacheError], words: str
) -> None:
    with pytest.raises(kind) as caught:
        inference.find(module, function)
    assert words in caught.value.message
    assert caught.value.hint


def test_a_function_with_a_world_but_no_mark_is_named_before_anything_is_imported(folder: Path) -> None:
    with pytest.raises(Usage, match="plain is not marked"):
        inference.kind_of("nc_own.deep.run", "plain")


# --- the code that counts -----------------------------------------------------------------------------------------


def test_own_code_is_followed_and_what_is_installed_is_named(folder: Path) -> None:
    own, others = inference.imports("nc_own.deep.run")
    assert own == {"nc_own", "nc_helper"}
    # click is imported late and in another file, psutil by the helper; boto3 by a file that nothing imports.
    assert {"click", "psutil", "neffcache"} <= others
    assert not others & {"boto3", "nc_not_there_at_all"}


def key(arguments: dict[str, Any], environ: dict[str, str] | None = None) -> str:
    made = inference.find("nc_own.deep.run", "tiny")
    return digest(workload_component(inference_document(made, made.resolve(arguments), environ or {})))


def test_arguments_own_code_and_the_stack_s_variables_count(folder: Path) -> None:
    first = key({})
    assert key({"layers": 2}) == first
    assert key({"layers": 3}) != first
    assert key({}, {"NEURON_CC_FLAGS_OF_TOMORROW": "1"}) != first
    (folder / "nc_helper.py").write_text("import psutil  # \n")
    assert key({}) != first


def test_a_byte_of_an_imported_package_counts_and_its_files_are_not_listed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = folder / "site-packages"
    (installed / "nc_installed").mkdir(parents=True)
    (installed / "nc_installed/__init__.py").write_text("x = 1\n")
    (folder / "nc_helper.py").write_text("import nc_installed\n")
    monkeypatch.syspath_prepend(str(installed))
    first = key({})
    made = inference.find("nc_own.deep.run", "tiny")
    found = inference_document(made, made.resolve({}), {})
    assert found["kind"] == "callable"
    assert found["config"] == {"callable": "nc_own.deep.run:tiny", "arguments": {"layers": 2}}
    assert set(found["sources"]["nc_own"]) == {"sha256", "files"}
    assert set(found["sources"]["nc_installed"]) == {"sha256"}
    (installed / "nc_installed/__init__.py").write_text("x = 2\n")
    assert key({}) != first


def test_no_field_of_a_callable_is_neutral() -> None:
    document = {
        "kind": "callable",
        "config": {"callable": "a:b", "arguments": {}, "dump_folder": "x"},
        "sources": {},
        "environment": {},
    }
    assert workload_component(document) == document


def test_a_workload_keeps_the_name_of_its_function() -> None:
    assert (example.__name__, example.name) == ("example", f"{__name__}:example")
    assert isinstance(example, Workload)
