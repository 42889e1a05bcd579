"""Warming a job for hardware that is not there, and stopping in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from neffcache.store.local import LocalStore
from tests.integration.conftest import CONFIG, Warmed, neffcache

pytestmark = pytest.mark.integration


def test_llama3_8b_at_both_lncs(warmed_8b: Warmed) -> None:
    store, two = warmed_8b.root, warmed_8b.answer
    assert two.code == 0, two.stderr
    assert two.stderr.splitlines()[0] == "toolchain host: Inductor on this CPU; its artifacts are no NEFFs"
    assert two.document["ranks"] == 64
    assert two.document["graphs"] == {"total": 2, "hit": 0, "compiled": 2, "failed": 0, "skipped": 0}
    assert two.document["peak_rss_bytes"] < 3e9
    again = neffcache(store, "warm", "llama3_8b", "--lnc", "2")
    assert again.document["graphs"] == {"total": 2, "hit": 2, "compiled": 0, "failed": 0, "skipped": 0}
    one = neffcache(store, "warm", "llama3_8b", "--lnc", "1")
    assert one.code == 0, one.stderr
    assert one.document["ranks"] == 128
    assert one.document["cache_key"] != two.document["cache_key"]
    # The blocks' graphs hold no world size: 64 and 128 ranks share them.
    assert one.document["graphs"]["hit"] == one.document["graphs"]["total"] == 2


def test_ctrl_c_ends_all_workers_and_a_rerun_does_the_rest(warmed: Warmed, tmp_path: Path) -> None:
    root = tmp_path / "store"
    process = subprocess.Popen(
        [sys.executable, "-m", "neffcache.cli.main", "warm", CONFIG, "--jobs", "1"],
        env={**os.environ, "NEFFCACHE_DIR": str(root)},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Whoever runs the tests in the background may have left this signal ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    children: list[psutil.Process] = []
    for line in process.stderr:
        # One is done and recorded; with one worker the other is compiling.
        if line.strip().startswith("done"):
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGINT)
            break
    assert process.wait(60) == 130
    assert children
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]
    local = LocalStore.open(root, writable=True, given=True)
    assert len(local.graph_keys()) == 1
    assert not local.pointers()
    again = neffcache(root, "warm", CONFIG)
    total = warmed.answer.document["graphs"]["total"]
    assert again.document["graphs"] == {"total": total, "hit": 1, "compiled": total - 1, "failed": 0, "skipped": 0}
    assert again.document["manifest"] == warmed.answer.document["manifest"]
