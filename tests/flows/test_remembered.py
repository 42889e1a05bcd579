"""A remembered answer is used only while nothing that it was made of has changed; a small worker stands for TorchTitan.

The worker imports a package (one module of it only when it works), lists it, reads a data file and a distribution's
version, and looks for a file that is not there. Each change below must be noticed, whatever else stays the same.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from neffcache.errors import Usage
from neffcache.flows import remembered
from neffcache.flows.remembered import ask
from neffcache.flows.settings import host_cache

pytestmark = pytest.mark.fast

ROOT = Path(__file__).resolve().parents[2]

WORKER = """
import importlib.metadata, os, subprocess, sys
from pathlib import Path
from neffcache.flows import provenance
from neffcache.flows.workers import answer

def work(given):
    import toy.model, spread.part
    here = Path(toy.model.__file__).parent
    found = [toy.model.late(), (here / "data.json").read_text(), importlib.metadata.version("toy"), spread.part.NUMBER]
    found += sorted(str(path.relative_to(here)) for path in here.rglob("*.py"))
    try:
        found.append((here / "absent.json").read_text())
    except FileNotFoundError:
        pass
    found += [place for place in ("flag", "folder") if (here.parent / place).exists()]
    exec(given.get("also", ""))
    return {"found": found}

provenance.RACY = int(os.environ.get("TOY_RACY", "0"))
recorder = provenance.Recorder(programs={"true": [os.environ["RUNS"] + ".by"]}, ignore=frozenset(sys.argv[1:]))
with open(os.environ["RUNS"], "a") as runs:
    runs.write("run\\n")
status = answer(lambda given: {**work(given), "seen": recorder.provenance().to_json()})
sys.exit(status)
"""


@dataclass
class Toy:
    """A worker and its code below `root`, and how to ask it."""

    root: Path
    environ: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        code, package = self.root / "code", self.root / "code" / "toy"
        (self.root / "scratch").mkdir()
        package.mkdir(parents=True)
        (code / "toy_worker.py").write_text(WORKER)
        (package / "__init__.py").write_text("")
        (package / "model.py").write_text("def late():\n    from toy import late\n    return late.NUMBER\n")
        (package / "late.py").write_text("NUMBER = 1\n")
        (package / "data.json").write_text("1")
        for place in ("front", "code", "back"):
            (self.root / place / "spread").mkdir(parents=True)
        (code / "spread" / "part.py").write_text("NUMBER = 1\n")
        (code / "toy-1.dist-info").mkdir()
        (code / "toy-1.dist-info" / "METADATA").write_text("Name: toy\nVersion: 1\n")
        path = [self.root / "missing", self.root / "front", code, self.root / "back", ROOT]
        self.environ = {
            "PATH": os.environ["PATH"],
            # Python itself takes byte code for current when source of one size changes within a second.
            "PYTHONDONTWRITEBYTECODE": "1",
            "HOME": str(self.root),
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "RUNS": str(self.root / "scratch" / "runs"),
        }

    def ask(self, question: dict[str, Any] | None = None, **variables: str) -> bool:
        """Whether the answer was remembered; it must be the one that asking anew gives."""
        before = self.runs()
        answer = ask("toy_worker", question or {}, {**self.environ, **variables}, self.root / "scratch")
        assert self.runs() - before == (0 if answer["remembered"] else 1)
        self.found = answer["found"]
        return bool(answer["remembered"])

    def runs(self) -> int:
        path = self.root / "scratch" / "runs"
        return len(path.read_text().splitlines()) if path.exists() else 0

    @property
    def package(self) -> Path:
        return self.root / "code" / "toy"


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toy:
    monkeypatch.chdir(tmp_path)
    return Toy(tmp_path)


def rewrite(path: Path, text: str) -> None:
    """Other bytes, and the times of before: what an archive or rsync does."""
    status = path.stat()
    path.write_text(text)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def replace(path: Path, text: str) -> None:
    path.with_suffix(".new").write_text(text)
    os.replace(path.with_suffix(".new"), path)


CHANGES: dict[str, Callable[[Toy], Any]] = {
    "touched": lambda toy: os.utime(toy.package / "model.py"),
    "edited, same size": lambda toy: (toy.package / "late.py").write_text("NUMBER = 2\n"),
    "edited, times put back": lambda toy: rewrite(toy.package / "late.py", "NUMBER = 3\n"),
    "replaced by a rename": lambda toy: replace(toy.package / "late.py", "NUMBER = 4\n"),
    "data edited": lambda toy: (toy.package / "data.json").write_text("2"),
    "a file more in the package": lambda toy: (toy.package / "new.py").write_text(""),
    "a file less in the package": lambda toy: (toy.package / "new.py").unlink(),
    "what was looked for appears": lambda toy: (toy.package / "absent.json").write_text("3"),
    "what was only asked about appears": lambda toy: (toy.root / "code" / "flag").write_text(""),
    "what was only asked about appears as a directory": lambda toy: (toy.root / "code" / "folder").mkdir(),
    "another version is installed": lambda toy: (toy.root / "code/toy-1.dist-info/METADATA").write_text(
        "Name: toy\nVersion: 2\n"
    ),
    "a portion of a namespace package hides another": lambda toy: (toy.root / "front/spread/part.py").write_text(
        "NUMBER = 5\n"
    ),
    "a directory of the path appears": lambda toy: (toy.root / "missing").mkdir(),
    "a module hides another": lambda toy: shutil.copytree(toy.package, toy.root / "front" / "toy"),
    "a link leads elsewhere": lambda toy: (
        (toy.root / "front" / "toy" / "data.json").unlink(),
        (toy.root / "front" / "toy" / "data.json").symlink_to(toy.package / "late.py"),
    ),
    "the worker itself is edited": lambda toy: (toy.root / "code" / "toy_worker.py").write_text(WORKER + "# more\n"),
    "a startup file of Python appears": lambda toy: (toy.root / "front" / "sitecustomize.py").write_text(""),
}


def test_nothing_changed_starts_no_worker_and_every_change_does(toy: Toy) -> None:
    assert not toy.ask()
    for change, make in CHANGES.items():
        assert toy.ask(), f"nothing changed before: {change}"
        make(toy)
        assert not toy.ask(), change
    found = toy.found
    assert toy.ask()
    assert toy.found == found == [4, "NUMBER = 4\n", "2", 5, "__init__.py", "late.py", "model.py", "3"]


def test_byte_code_and_notes_outside_of_what_was_read_change_nothing(toy: Toy) -> None:
    (toy.package / "__pycache__").mkdir()
    toy.ask()
    (toy.package / "__pycache__" / "other.cpython-311.pyc").write_bytes(b"x")
    (toy.package / "__pycache__" / "other.cpython-311.pyc.140123").write_bytes(b"x")
    assert toy.ask()
    (toy.root / "README.md").write_text("more")
    (toy.root / "code" / "spread" / "__pycache__").mkdir(exist_ok=True)
    assert toy.ask()


def test_moved_code_is_asked_anew(toy: Toy) -> None:
    toy.ask()
    shutil.copytree(toy.root / "code", toy.root / "moved")
    shutil.rmtree(toy.root / "code")
    path = toy.environ["PYTHONPATH"].replace(str(toy.root / "code"), str(toy.root / "moved"))
    assert not toy.ask(PYTHONPATH=path)


@pytest.mark.parametrize("name", ["TORCH_ANYTHING", "XLA_FLAGS", "PYTHONHASHSEED", "CXX", "MY_SETTING"])
def test_another_variable_is_another_circumstance(toy: Toy, name: str) -> None:
    toy.ask()
    assert not toy.ask(**{name: "1"})
    assert toy.ask()
    assert toy.ask(**{name: "1"})


@pytest.mark.parametrize("name", ["TERM", "SSH_CLIENT", "NEFFCACHE_DIR", "AWS_SESSION_TOKEN", "SLURM_JOB_ID", "RANK"])
def test_variables_that_no_worker_reads_do_not_count(toy: Toy, name: str) -> None:
    toy.ask()
    assert toy.ask(**{name: "another"})


def test_another_question_interpreter_directory_cpu_or_boot_is_asked_anew(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    around = remembered.circumstances(toy.environ)
    assert around is not None
    assert around["boot"]
    assert around["cpu"]["flags" if "flags" in around["cpu"] else "Features"]
    toy.ask()
    assert not toy.ask({"another": 1})
    for name, value in {"boot": "2", "cpu": {}, "cpus": 0, "python": [], "devices": ["neuron0"], "user": -1}.items():
        with monkeypatch.context() as patch:
            patch.setattr(remembered, "circumstances", lambda _, n=name, v=value: {**around, n: v})
            assert not toy.ask(), name
    with monkeypatch.context() as patch:
        patch.setattr(remembered, "circumstances", lambda _: None)
        assert not toy.ask()
        assert not toy.ask(), "where the circumstances cannot be told nothing is remembered"
    assert toy.ask()
    (toy.root / "elsewhere").mkdir()
    monkeypatch.chdir(toy.root / "elsewhere")
    assert not toy.ask()


@pytest.mark.parametrize(
    "also",
    [
        "import subprocess; subprocess.run(['false'])",
        "import os; os.system('true')",
        "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(('127.0.0.1', 9))",
        "import sqlite3; sqlite3.connect(':memory:')",
        "open('/proc/uptime').read()",
        "os.listdir('/proc')",
        "here.joinpath('late.py').write_text('NUMBER = 7')",
        "here.joinpath(f'new{len(os.listdir(here))}.py').touch()",
    ],
)
def test_what_nobody_can_vouch_for_is_not_remembered(toy: Toy, also: str) -> None:
    for _ in range(2):
        assert not toy.ask({"also": also})
    assert not list((host_cache(toy.environ) / "resolved").iterdir())


def test_a_program_that_counts_is_stamped(toy: Toy) -> None:
    (toy.root / "bin").mkdir()
    shutil.copy(str(shutil.which("true")), toy.root / "bin" / "true")
    question, path = {"also": "subprocess.run(['true'], check=True)"}, {"PATH": f"{toy.root}/bin:{os.environ['PATH']}"}
    assert not toy.ask(question, **path)
    assert toy.ask(question, **path)
    replace(toy.root / "bin" / "true", "#!/bin/sh\n")
    (toy.root / "bin" / "true").chmod(0o755)
    assert not toy.ask(question, **path)
    assert toy.ask(question, **path)
    (toy.root / "scratch" / "runs.by").write_text("what it goes by")
    assert not toy.ask(question, **path)


def test_a_file_that_was_written_a_moment_ago_may_be_written_again_unseen(toy: Toy) -> None:
    assert not toy.ask(TOY_RACY=str(10**12))
    assert not toy.ask(TOY_RACY=str(10**12))


def test_it_can_be_switched_off(toy: Toy) -> None:
    for _ in range(2):
        assert not toy.ask(NEFFCACHE_RESOLVE_CACHE="0")
    assert not host_cache(toy.environ).exists()
    with pytest.raises(Usage, match="NEFFCACHE_RESOLVE_CACHE is 'no'"):
        toy.ask(NEFFCACHE_RESOLVE_CACHE="no")


def test_a_place_that_others_can_write_to_is_not_used(toy: Toy) -> None:
    toy.ask()
    folder = host_cache(toy.environ)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    assert not toy.ask()
    folder.chmod(0o700)
    assert toy.ask()
    shutil.move(folder, toy.root / "real")
    folder.symlink_to(toy.root / "real")
    assert not toy.ask()


def test_no_value_of_a_variable_is_written_down(toy: Toy) -> None:
    toy.ask(MY_TOKEN="a-secret-value")
    for path in (host_cache(toy.environ) / "resolved").iterdir():
        assert b"a-secret-value" not in path.read_bytes()
        assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "bad",
    ["", "{}", "[]", '{"seen": {"files": {}}}', '{"seen": {"files": 1}, "answer": {}}', '{"seen": [], "answer": {}}'],
)
def test_what_is_not_understood_is_asked_anew_and_replaced(toy: Toy, bad: str) -> None:
    toy.ask()
    [path] = (host_cache(toy.environ) / "resolved").iterdir()
    path.write_text(bad)
    assert not toy.ask()
    assert json.loads(path.read_bytes())["answer"]["found"] == toy.found
    assert toy.ask()


def test_the_ones_used_longest_ago_go_first(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "KEPT", 2)
    toy.ask({"n": 1})
    toy.ask({"n": 2})
    assert toy.ask({"n": 1})
    toy.ask({"n": 3})
    assert toy.ask({"n": 1})
    assert not toy.ask({"n": 2})


def test_this_python_reads_nothing_that_the_recorder_misses() -> None:
    """Events that it listens for exist: their names are Python's, and a renamed one would be a hole."""
    heard: set[str] = set()
    done = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if not done:
            heard.add(event)

    sys.addaudithook(hook)
    os.listdir("/")
    list(os.scandir("/"))
    Path(__file__).read_bytes()
    os.close(os.open(__file__, os.O_RDONLY))
    done.append(True)
    assert {"open", "os.listdir", "os.scandir"} <= heard
