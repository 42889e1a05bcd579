"""`neffcache compile` and the options on how to compile, where there is no compiler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Answer

pytestmark = pytest.mark.fast


@pytest.fixture
def ir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "graph.mlir").write_text("module {}\n")
    return tmp_path / "graph.mlir"


def test_without_a_compiler_it_says_so(neffcache: Callable[..., Answer], ir: Path) -> None:
    answer = neffcache("compile", ir, "--json")
    assert answer.code == 8
    assert "no neuronx-cc on PATH" in answer.json["message"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give a FILE"),
        (["nowhere.mlir"], "does not exist"),
        (["--executor", "ftp://host:1"], "dask://host:port"),
        (["--shard", "4/4"], "count from 0"),
        (["--time-limit", "0"], "time-limit"),
        (["--target", "cpu"], "nothing for a CPU"),
        (["--target", "trn1", "--lnc", "2"], "LNC 2"),
    ],
)
def test_bad_input_is_one_clear_sentence(
    neffcache: Callable[..., Answer], ir: Path, words: list[str], said: str
) -> None:
    files = [] if words in ([], ["nowhere.mlir"]) else [ir]
    answer = neffcache("compile", *files, *words, "--json")
    assert answer.code in (2, 8), answer.err
    assert said in answer.json["message"] + answer.json["hint"]


def test_files_that_are_none_are_refused_before_anything_starts(
    neffcache: Callable[..., Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "neuronx-cc"
    program.write_text("#!/bin/sh\necho NeuronX Compiler version 2.1.0\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    empty = tmp_path / "empty.mlir"
    empty.write_text(" \n")
    answer = neffcache("compile", empty, "--json")
    assert (answer.code, "is empty" in answer.json["message"]) == (2, True)
    (tmp_path / "folder").mkdir()
    answer = neffcache("compile", tmp_path / "folder", "--json")
    assert (answer.code, "no files" in answer.json["message"]) == (2, True)
