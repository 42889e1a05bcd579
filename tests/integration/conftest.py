"""One warm store for all integration tests: it takes a minute to build, so each test works on a copy of hard links.

Where tests run two at a time, the first process that asks builds it and the other waits.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import pytest

pytest.importorskip("torch")
pytest.importorskip("torchtitan")

CONFIG = "llama3_debugmodel"


@dataclass(frozen=True)
class Answer:
    """What a command did: exit code, the JSON document on stdout, everything on stderr."""

    code: int
    document: Any
    stderr: str


def neffcache(
    store: Path, *arguments: str, environ: Mapping[str, str] | None = None, python: str = sys.executable
) -> Answer:
    """Run a command in a process of its own with --json, before a `--` if there is one."""
    words = list(arguments)
    words.insert(words.index("--") if "--" in words else len(words), "--json")
    done = subprocess.run(
        [python, "-m", "neffcache.cli.main", *words],
        env={**os.environ, "NEFFCACHE_DIR": str(store), **(environ or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    try:
        document = json.loads(done.stdout)
    except ValueError:
        document = None
    return Answer(done.returncode, document, done.stderr)


@dataclass(frozen=True)
class Warmed:
    """The shared store and what warming it said."""

    root: Path
    answer: Answer

    def copy(self, to: Path) -> Path:
        """A store of its own for one test, made of hard links; views are left out."""
        shutil.copytree(self.root, to, copy_function=os.link, ignore=shutil.ignore_patterns("views", "tmp", "index"))
        return to


@pytest.fixture(scope="session")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> Warmed:
    place = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        place = place.parent
    root, said = place / "shared" / "store", place / "shared" / "said.json"
    with filelock.FileLock(place / "shared.lock"):
        if not said.is_file():
            answer = neffcache(root, "warm", CONFIG)
            assert answer.code == 0, answer.stderr
            said.write_text(json.dumps(vars(answer)))
    return Warmed(root, Answer(**json.loads(said.read_text())))


@pytest.fixture(scope="session")
def warmed_8b(warmed: Warmed, tmp_path_factory: pytest.TempPathFactory) -> Warmed:
    """The same store with a job for hardware that is not there."""
    root = warmed.copy(tmp_path_factory.mktemp("8b") / "store")
    return Warmed(root, neffcache(root, "warm", "llama3_8b", "--lnc", "2"))


@pytest.fixture
def store(warmed: Warmed, tmp_path: Path) -> Path:
    return warmed.copy(tmp_path / "store")


@pytest.fixture(scope="session")
def command_line(warmed: Warmed) -> Callable[..., list[str]]:
    """TorchTitan's own command for the shared job, as a user would type it behind `--`."""
    answer = neffcache(warmed.root, "env", CONFIG)
    assert answer.code == 0, answer.stderr
    command: list[str] = answer.document["command"]

    def changed(*more: str) -> list[str]:
        return [*command, "--training.steps", "2", *more]

    return changed
