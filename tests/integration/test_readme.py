"""Every `neffcache` command that README shows runs as written, one after the other, in one store."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import Warmed

pytestmark = pytest.mark.integration

README = Path(__file__).resolve().parents[2] / "README.md"
COMPARES = ("key --diff", "explain")
"""Commands that answer a question with exit code 3 when the answer is "they differ" or "no hit"."""


def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", README.read_text(), flags=re.DOTALL)
    lines = [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("neffcache ")]


def test_readme_shows_the_verbs_that_it_should() -> None:
    verbs = {line.split()[1] for line in commands()}
    assert {
        "plan",
        "warm",
        "check",
        "run",
        "key",
        "explain",
        "ls",
        "show",
        "verify",
        "env",
        "sign",
        "export",
        "import",
    } <= verbs


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the shell: one line makes what the next one reads."""
    return tmp_path_factory.mktemp("shell")


@pytest.mark.parametrize("line", commands())
def test_runs_as_written(line: str, warmed_8b: Warmed, place: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "neffcache.cli.main", *shlex.split(line)[1:]],
        env={**os.environ, "NEFFCACHE_DIR": str(warmed_8b.root), "PYTHONPATH": str(README.parent)},
        cwd=place,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    wanted = 3 if line.removeprefix("neffcache ").startswith(COMPARES) else 0
    assert done.returncode == wanted, done.stderr
    assert done.stdout.strip(), "a command without an answer"
    assert "Traceback" not in done.stderr
