"""A cache of 100,000 files: its import stays within its memory, goes on after a kill, and copies nothing twice."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from neffcache.compile.neuron import neff
from neffcache.store.local import LocalStore
from tests.flows.caches import VERSION

pytestmark = [pytest.mark.integration, pytest.mark.soak]

ENTRIES = 25_000
FILES = 4 * ENTRIES
LIMIT = 2 << 30
"""Bytes of memory that an import may take."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "cache"
    for number in range(ENTRIES):
        folder = root / f"neuronxcc-{VERSION}" / f"MODULE_{number:020d}+d41d8cd9"
        folder.mkdir(parents=True)
        (folder / "model.neff").write_bytes(neff.header(16) + b"%016d" % number)
        (folder / "model.hlo_module.pb").write_bytes(b"hlo %d" % number)
        (folder / "compile_flags.json").write_bytes(b'["--lnc=2"]')
        (folder / "model.done").write_bytes(b"")
    return root


PROGRAM = """
import sys
from neffcache.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as done:
    code = done.code
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM:"))
print(peak.split()[1], file=sys.stderr)
sys.exit(code)
"""
"""The command line; at its end it says the peak of its own resident memory, in kB (that of getrusage is its parent's,
where that was larger)."""


def start(source: Path, root: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", PROGRAM, "import", str(source), "--dir", str(root), "--json", "-q"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def ended(process: subprocess.Popen[bytes]) -> tuple[Any, int]:
    """The document of an import, and the peak of its resident memory in bytes."""
    out, err = process.communicate()
    assert process.returncode == 0, err.decode()
    return json.loads(out), int(err.split()[-1]) * 1024


def test_a_hundred_thousand_files_within_two_gigabytes_resumably(source: Path, tmp_path: Path) -> None:
    root = tmp_path / "store"
    process = start(source, root)
    blobs = root / "blobs" / "sha256"
    while sum(1 for _ in blobs.glob("*/*")) < 5_000:
        assert process.poll() is None
        time.sleep(0.5)
    process.kill()
    process.communicate()
    store = LocalStore.open(root, writable=False)
    there = sum(1 for _ in store.blobs())
    assert (store.manifest_ids(), store.channels()) == ([], [])

    done, peak = ended(start(source, root))
    assert done["files"] == {"found": FILES, "imported": FILES, "present": 0, "left_out": 0}
    assert there + done["copied"]["blobs"] == 2 * ENTRIES + 2, "NEFFs and HLOs, one flags file, one mark"
    assert peak < LIMIT
    print(f"peak of the import: {peak / 1e6:.0f} MB in {done['seconds']:.0f} s")

    again, peak = ended(start(source, root))
    assert again["files"] == {"found": FILES, "imported": 0, "present": FILES, "left_out": 0}
    assert (again["copied"]["blobs"], again["manifests"][0]["new"]) == (0, 0)
    assert peak < LIMIT
    print(f"peak of the second import: {peak / 1e6:.0f} MB in {again['seconds']:.0f} s")
