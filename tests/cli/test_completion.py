"""Completion, as a shell asks for it: real bash, the installed script, and nothing heavy imported on the way."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from neffcache.cli.completion import SHELLS
from neffcache.cli.main import VERBS
from neffcache.store.local import LocalStore
from neffcache.store.records import Manifest
from tests.cli.conftest import CONFIG, Answer

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., Answer]
HEAVY = {"torch", "torchtitan", "numpy", "boto3", "botocore", "rich", "jinja2"}

PROGRAM = f"""\
#!{sys.executable}
import atexit, os, sys
sys.path.insert(0, {str(ROOT)!r})
atexit.register(lambda: open(os.environ["LOADED"], "a").write(" ".join(sys.modules) + "\\n"))
from neffcache.cli.main import main
main()
"""
"""What pip would put on PATH, and what it had imported at the end."""

ASK = """\
eval "$(neffcache completion bash)"
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_neffcache_completion neffcache
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def shell(tmp_path: Path, store: LocalStore) -> dict[str, str]:
    """An environment with `neffcache` on PATH."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "neffcache"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "NEFFCACHE_DIR": str(store.root), "LOADED": str(tmp_path / "loaded")}


def bash(*words: str, environ: dict[str, str]) -> list[str]:
    done = subprocess.run(
        ["bash", "--norc", "-c", ASK, "bash", "neffcache", *words],
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_completes_what_a_line_can_hold(shell: dict[str, str], store: LocalStore, warmed: Manifest) -> None:
    asked: list[tuple[Sequence[str], set[str]]] = [
        (["ex"], {"explain", "export"}),
        (["warm", "--toolchain", ""], {"host", "neuron", "auto"}),
        (["warm", "--on"], set()),
        (["check", "llama3_debugm"], {CONFIG}),
        (["show", warmed.id[:7]], {warmed.id}),
        (["init", CONFIG, "--version-of", "torchtitan"], {"torchtitan=0.3.0"}),
        (["pull", "--channel", "cur"], {"current"}),
    ]
    for words, wanted in asked:
        assert set(bash(*words, environ=shell)) >= wanted, words
    assert bash("warm", "--on", environ=shell) == [], "nothing of the store is offered for an option"
    loaded = {name for line in Path(shell["LOADED"]).read_text().splitlines() for name in line.split()}
    assert "click" in loaded
    assert not loaded & HEAVY


def test_a_store_that_is_broken_or_absent_completes_to_silence(shell: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    assert bash("show", "", environ={**shell, "NEFFCACHE_DIR": str(tmp_path / "file")}) == []
    assert bash("show", "--dir", str(tmp_path / "none"), "a", environ=shell) == []


def test_a_tab_in_an_interactive_bash(shell: dict[str, str], warmed: Manifest) -> None:
    """Through a terminal: readline takes the answer and puts it into the line."""
    terminal, inner = pty.openpty()
    child = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        env={**shell, "TERM": "dumb", "PS1": "ready> "},
        stdin=inner,
        stdout=inner,
        stderr=inner,
        start_new_session=True,
    )
    os.close(inner)
    try:
        typed(terminal, b'eval "$(neffcache completion bash)"; echo done""so\n', rb"doneso")
        typed(terminal, b"neffcache comple\t", rb"neffcache completion ")
        end = warmed.id[-30:].encode()  # a long line scrolls
        typed(terminal, b"\x15neffcache show " + warmed.id[:8].encode() + b"\t", end)
        os.write(terminal, b"\x15exit\n")
    finally:
        os.close(terminal)
        child.kill()
        child.wait()


def typed(terminal: int, keys: bytes, wanted: bytes) -> None:
    """Type, and read until the terminal shows what is wanted."""
    os.write(terminal, keys)
    seen, deadline = b"", time.monotonic() + 60
    while not re.search(wanted, seen):
        assert time.monotonic() < deadline, seen
        if select.select([terminal], [], [], 1)[0]:
            seen += os.read(terminal, 65536)


@pytest.mark.parametrize("shell_name", SHELLS)
def test_each_shell_has_a_script_that_it_takes(neffcache: Run, shell_name: str) -> None:
    done = neffcache("completion", shell_name)
    assert done.code == 0
    assert f"_NEFFCACHE_COMPLETE={shell_name}_complete" in done.out
    assert neffcache("completion", shell_name, "--json").json["script"].strip() == done.out.strip()
    program = shutil.which(shell_name)
    if program is not None:
        subprocess.run([program, "-n"], input=done.out, text=True, check=True, capture_output=True)


def test_a_shell_without_a_script_is_a_usage_error(neffcache: Run) -> None:
    assert neffcache("completion", "tcsh").code == 2


def test_every_verb_is_offered(neffcache: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_NEFFCACHE_COMPLETE", "fish_complete")
    monkeypatch.setenv("COMP_WORDS", "neffcache ")
    monkeypatch.setenv("COMP_CWORD", "")
    offered = {line.partition(",")[2].partition("\t")[0] for line in neffcache().out.splitlines()}
    assert offered >= set(VERBS)
