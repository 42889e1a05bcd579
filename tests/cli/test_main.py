"""What all commands share: usage errors, JSON errors, light imports, help."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from neffcache.cli.main import VERBS
from tests.cli.conftest import Answer

pytestmark = pytest.mark.fast

Run = Callable[..., Answer]

READING = ("check", "plan", "env", "ls", "show", "verify", "explain")

# Runs the command line, then names the modules that it has loaded.
LOADED = """
import sys
from neffcache.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as done:
    print(done.code or 0, *sys.modules, file=sys.stderr)
"""


def loaded_by(*words: str) -> tuple[int, set[str]]:
    done = subprocess.run([sys.executable, "-c", LOADED, *words], capture_output=True, text=True, check=True)
    code, *modules = done.stderr.splitlines()[-1].split()
    return int(code), set(modules)


@pytest.mark.parametrize("words", [["--help"], ["--version"], *([verb, "--help"] for verb in READING)])
def test_help_and_version_import_nothing_heavy(words: list[str]) -> None:
    code, modules = loaded_by(*words)
    assert code == 0
    assert "click" in modules
    assert not modules & {"torch", "torchtitan", "botocore", "rich", "diskcache", "numpy"}


@pytest.mark.parametrize("words", [["ls"], ["verify"], ["show", "abcdef"], ["check", "llama3_8b", "--by-ref"]])
def test_reading_a_store_needs_no_torch(words: list[str], tmp_path: Path) -> None:
    code, modules = loaded_by(*words, "--dir", str(tmp_path))
    assert code in (0, 3)
    assert "neffcache.store.local" in modules
    assert not modules & {"torch", "torchtitan", "botocore", "rich"}


@pytest.mark.parametrize("verb", READING)
def test_each_verb_is_listed_and_its_help_shows_an_example(neffcache: Run, verb: str) -> None:
    assert verb in VERBS
    assert verb in neffcache("--help").out
    done = neffcache(verb, "--help")
    assert done.code == 0
    assert f"neffcache {verb}" in done.out.partition("Example:")[2]


@pytest.mark.parametrize(
    "words",
    [
        ["check"],
        ["check", "llama3_8b", "--lnc", "3"],
        ["check", "llama3_8b", "--by-ref", "--set", "novalue"],
        ["check", "llama3_8b", "--by-ref", "--lnc", "2", "--target", "trn1"],
        ["check", "llama 3", "--by-ref"],
        ["plan"],
        ["plan", "llama3_8b", "--jobs", "0"],
        ["env"],
        ["env", "llama3_8b", "--on-miss", "hope"],
        ["explain"],
        ["ls", "--everything"],
        ["show"],
        ["verify", "surplus"],
        ["nosuchverb"],
    ],
)
def test_bad_options_exit_with_two_and_json_says_why(neffcache: Run, words: list[str]) -> None:
    plain = neffcache(*words)
    assert (plain.code, plain.out) == (2, "")
    assert "Traceback" not in plain.err
    done = neffcache(*words, "--json")
    assert done.code == 2
    assert (done.json["error"], done.json["exit_code"]) == ("Usage", 2)
    assert done.json["message"]


@pytest.mark.parametrize("verb", ["plan", "env", "explain"])
def test_what_only_torchtitan_can_tell_is_unsupported_without_it(
    neffcache: Run, verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neffcache.flows.resolve.titan_installed", lambda: False)
    done = neffcache(verb, "llama3_8b", "--dir", tmp_path, "--json")
    assert (done.code, done.json["error"]) == (8, "Unsupported")
    assert "check --by-ref" in done.json["hint"]
