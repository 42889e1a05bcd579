"""Job keys through the command line: what makes another one, what does not, and when TorchTitan is asked again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import neffcache as package
from neffcache.flows.provenance import RACY
from neffcache.key.canonical import sha256_hex
from tests.integration.conftest import CONFIG, Warmed, neffcache

pytestmark = pytest.mark.integration

RENAMED = "import os, socket, sys; socket.sethostname('elsewhere'); os.execvp(sys.argv[1], sys.argv[1:])"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the installed TorchTitan in `code`, and an empty `home`."""
    import torchtitan

    assert torchtitan.__file__ is not None
    installed = Path(torchtitan.__file__).parent
    shutil.copytree(installed, tmp_path / "code" / "torchtitan", ignore=shutil.ignore_patterns("__pycache__"))
    for info in installed.parent.glob("torchtitan-*.dist-info"):
        shutil.copytree(info, tmp_path / "code" / info.name)
    (tmp_path / "home").mkdir()
    return tmp_path


def key(environ: Mapping[str, str], command: tuple[str, ...] = (), cwd: Path | None = None) -> Any:
    done = subprocess.run(
        [*command, sys.executable, "-m", "neffcache.cli.main", "key", CONFIG, "--json"],
        env={**os.environ, **environ},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def at(checkout: Path) -> dict[str, str]:
    root = Path(package.__file__).parents[1]
    return {"PYTHONPATH": os.pathsep.join([str(checkout / "code"), str(root)])}


def stranger() -> tuple[str, ...]:
    """A prefix for a command: another host name and another user id, as far as this machine has namespaces for us."""
    prefix: tuple[str, ...] = ()
    for flag, renamed in (("--uts", (sys.executable, "-c", RENAMED)), ("--user", ())):
        words = ("unshare", flag, *renamed)
        if shutil.which("unshare") and subprocess.run([*words, "true"], capture_output=True).returncode == 0:
            prefix += words
    return prefix


def test_a_moved_checkout_another_user_host_home_directory_and_port_are_the_same_job(
    warmed: Warmed, checkout: Path
) -> None:
    """K1. Its README and byte code are others too."""
    (checkout / "code" / "torchtitan" / "README.md").write_text("edited")
    home = str(checkout / "home")
    environ = {
        **at(checkout),
        **dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "NEFFCACHE_DIR"), home),
        "USER": "somebody",
        "LOGNAME": "somebody",
        "MASTER_PORT": "29999",
        "HOSTNAME": "elsewhere",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    found = key(environ, stranger(), checkout / "home")
    assert found["cache_key"] == warmed.answer.document["cache_key"]


def test_one_byte_of_code_in_a_model_file_is_another_job(warmed: Warmed, checkout: Path) -> None:
    model = checkout / "code" / "torchtitan" / "models" / "llama3" / "model.py"
    before = model.read_bytes()
    after = before.replace(b"head_dims=2 *", b"head_dims=4 *", 1)
    assert sum(old != new for old, new in zip(before, after, strict=True)) == 1
    model.write_bytes(after)
    found = key(at(checkout))
    assert found["cache_key"] != warmed.answer.document["cache_key"]
    files = found["components"]["workload"]["value"]["sources"]["torchtitan"]["files"]
    assert files["models/llama3/model.py"] == sha256_hex(after)


WATCH = """
import os, sys
def heard(event, arguments):
    if event == "import" and arguments[0] == "torch":
        with open(os.environ["TORCH_IMPORTS"], "a") as log:
            log.write("torch\\n")
sys.addaudithook(heard)
"""


def test_when_nothing_has_changed_no_process_imports_torch(warmed: Warmed, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "sitecustomize.py").write_text(WATCH)
    time.sleep(RACY / 1e9)  # what was written just before it was read is not trusted
    log = tmp_path / "imports"
    log.touch()
    root = Path(package.__file__).parents[1]
    environ = {"PYTHONPATH": f"{tmp_path / 'code'}{os.pathsep}{root}", "TORCH_IMPORTS": str(log)}

    def imports_of(**more: str) -> int:
        before = len(log.read_text().splitlines())
        assert key({**environ, **more})["cache_key"] == warmed.answer.document["cache_key"]
        return len(log.read_text().splitlines()) - before

    assert imports_of() == 1
    assert imports_of() == 0
    assert imports_of(NEFFCACHE_RESOLVE_CACHE="0") == 1
    (tmp_path / "code" / "torchvision.py").write_text("")
    assert imports_of() == 1, "a new module on the path may hide another"


def test_a_trace_hint_of_explain_is_an_answer(warmed: Warmed, store: Path) -> None:
    """explain --trace of a job without manifest, all of whose graphs have records: everything asked for is there."""
    shutil.rmtree(store / "manifests")
    shutil.rmtree(store / "keys")
    found = neffcache(store, "explain", CONFIG, "--trace")
    assert found.code == 0, found.stderr
    assert found.document["state"] == "MISS"
    assert found.document["trace"]["hit"] == found.document["trace"]["total"] > 0
