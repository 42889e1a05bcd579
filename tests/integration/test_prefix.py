"""Artifacts built under one install prefix serve a run under another, with no compiler process."""

from __future__ import annotations

import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import CONFIG, Warmed, neffcache

pytestmark = pytest.mark.integration


@pytest.fixture
def other_python() -> Iterator[str]:
    """A second environment with the same packages under another path: hard links, so it must lie on the same disk."""
    packages = Path(sysconfig.get_paths()["purelib"])
    place = Path(tempfile.mkdtemp(prefix=".prefix-", dir=packages.parents[3]))
    try:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place / "other")], check=True)
        python = place / "other" / "bin" / "python"
        (target,) = (place / "other").glob("lib/python*/site-packages")
        target.rmdir()
        subprocess.run(["cp", "-al", str(packages), str(target)], check=True)
        yield str(python)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def test_another_install_prefix_is_the_same_job_and_compiles_nothing(
    warmed: Warmed, store: Path, other_python: str
) -> None:
    where = subprocess.run(
        [other_python, "-c", "import torch; print(torch.__file__)"], capture_output=True, text=True, check=True
    ).stdout
    assert not any(where.startswith(path) for path in site.getsitepackages())
    answer = neffcache(store, "run", CONFIG, "--steps", "1", python=other_python)
    assert answer.code == 0, answer.stderr
    assert answer.document["cache_key"] == warmed.answer.document["cache_key"]
    graphs = warmed.answer.document["graphs"]["total"]
    for rank in answer.document["ranks"]:
        assert (rank["hits"], rank["misses"], rank["compiles"]) == (graphs, 0, 0)
        assert rank["compiler_processes"] == []
