"""A host on which the stubs of tests/stubs are installed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

STUBS = Path(__file__).resolve().parent.parent / "stubs"
ROOT = STUBS.parent.parent
SITE, BIN = STUBS / "site", STUBS / "bin"


def environ(home: Path, **more: str) -> dict[str, str]:
    """The environment of a fresh user on a host with the stubs and without a device."""
    for folder in ("cache", "tmp"):
        (home / folder).mkdir(parents=True, exist_ok=True)
    return {
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "TMPDIR": str(home / "tmp"),
        "PATH": os.pathsep.join([str(BIN), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(SITE), str(ROOT)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        **more,
    }


def installed(monkeypatch: pytest.MonkeyPatch, site: Path = SITE) -> None:
    """The stubs as packages of this process; none of them is imported."""
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PATH", f"{BIN}{os.pathsep}{os.environ['PATH']}")


def python(code: str, environ: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=dict(environ),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
