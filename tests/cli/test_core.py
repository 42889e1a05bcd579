"""A core install: what neffcache itself requires is enough for a slim image, it is small, and it has no torch."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from neffcache.store.local import LocalStore
from neffcache.store.records import Manifest, Signatures
from neffcache.store.signing import public_key
from tests.cli.conftest import BY_REF, CONFIG

pytestmark = pytest.mark.fast

ROOT = Path(__file__).resolve().parents[2]

# Runs the command line of argv where nothing can be imported but the standard library and the modules of argv[1].
ALONE = """
import json, sys

class Only:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        known = top in sys.stdlib_module_names or top in allowed
        return self.finder.find_spec(name, path, target) if known else None

allowed = {"neffcache", *json.loads(sys.argv.pop(1))}
sys.meta_path[:] = [Only(finder) for finder in sys.meta_path]
from neffcache.cli.main import main
main()
"""


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def core() -> dict[str, importlib.metadata.Distribution]:
    """neffcache's requirements without any extra, and theirs, as they are installed here."""
    found: dict[str, importlib.metadata.Distribution] = {}
    todo = ["neffcache"]
    while todo:
        name = plain(todo.pop())
        if name in found:
            continue
        found[name] = importlib.metadata.distribution(name)
        for text in found[name].requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.append(requirement.name)
    del found["neffcache"]
    return found


def modules() -> list[str]:
    mine = set(core())
    tops = importlib.metadata.packages_distributions()
    return sorted(top for top, names in tops.items() if mine & {plain(name) for name in names})


def alone(*words: str, **changed: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", ALONE, json.dumps(modules()), *words],
        cwd=ROOT,
        env={**os.environ, **changed},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def test_it_requires_no_torch_and_no_cryptography_and_is_small() -> None:
    names = set(core())
    assert {"botocore", "click", "msgspec"} <= names
    assert not names & {"torch", "torchtitan", "numpy", "cryptography", "cffi"}
    size = sum(
        os.path.getsize(path)
        for item in core().values()
        for file in item.files or ()
        if (path := str(item.locate_file(file))) and os.path.exists(path)
    )
    [said] = re.findall(r"takes about (\d+) MB", (ROOT / "README.md").read_text())
    assert 0.6 * int(said) < size / 1e6 < 1.2 * int(said), "README says another size"


@pytest.mark.parametrize("words", [["--help"], ["init", "--help"], ["pull", "--help"], ["check", "--help"]])
def test_the_command_line_starts_with_nothing_else(words: list[str]) -> None:
    done = alone(*words)
    if words[0] == "pull" and done.returncode == 2:
        pytest.skip("there is no such verb")
    assert done.returncode == 0, done.stderr
    assert "Usage:" in done.stdout


def test_init_check_and_verify_work_with_nothing_else(store: LocalStore, warmed: Manifest, tmp_path: Path) -> None:
    place = {"NEFFCACHE_DIR": str(tmp_path / "volume"), "HOME": "/nonexistent", "TMPDIR": "/nonexistent"}
    done = alone("init", CONFIG, *BY_REF, "--remote", str(store.root), **place)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["manifest"] == warmed.id
    done = alone("check", CONFIG, *BY_REF, "--json", **place)
    assert (done.returncode, json.loads(done.stdout)[0]["state"]) == (0, "HIT"), done.stderr
    assert alone("verify", **place).returncode == 0


def test_a_signature_that_is_demanded_where_it_cannot_be_checked_is_refused(
    store: LocalStore, warmed: Manifest, tmp_path: Path
) -> None:
    key = "ed25519:" + "A" * 43 + "="
    done = alone(
        "init", CONFIG, *BY_REF, "--remote", str(store.root), "--require-signature", key, "--dir", str(tmp_path / "v")
    )
    assert done.returncode == 5, "nobody signed it, so no key had to be used"
    statement = {"graphs": {}, "signature": "AAAA"}
    store.put_signatures(Signatures(warmed.id, public_key(key).signer, (statement,)))
    done = alone(
        "init", CONFIG, *BY_REF, "--remote", str(store.root), "--require-signature", key, "--dir", str(tmp_path / "v")
    )
    assert done.returncode == 8
    assert "neffcache[sign]" in done.stderr
