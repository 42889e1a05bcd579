"""Real graphs on a real Dask cluster: a worker is killed in the middle, every graph arrives once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from neffcache.store.local import LocalStore
from tests.integration.conftest import CONFIG, Warmed
from tests.stubs.dask_cluster import dask_cluster

pytest.importorskip("distributed")
ROOT = Path(__file__).resolve().parent.parent.parent


def warm_on_a_cluster(root: Path, place: Path, config: str) -> dict[str, object]:
    """`neffcache warm` on two workers, one of which is killed when the first two graphs have begun; its document."""
    environ = {
        **os.environ,
        "NEFFCACHE_DIR": str(root),
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
    }
    with dask_cluster(place, environ) as cluster:
        command = subprocess.Popen(
            [sys.executable, "-m", "neffcache.cli.main", "warm", config, "--executor", cluster.address, "--json"],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert command.stderr is not None
        begun = 0
        for line in command.stderr:
            begun += line.startswith("  compiling")
            if begun == 2:
                break
        victim = psutil.Process(cluster.workers[0].pid)
        units = victim.children(recursive=True)
        victim.kill()
        out, said = command.communicate(timeout=1200)
        assert command.returncode == 0, said
        _, left = psutil.wait_procs(units, timeout=20)
        assert not [each for each in left if each.status() != psutil.STATUS_ZOMBIE]
        assert said.count("  compiling") >= 1, "what the killed worker had begun was begun again"
        document: dict[str, object] = json.loads(out)
        return document


def assert_every_graph_arrived_once(document: dict[str, object], root: Path) -> None:
    graphs = document["graphs"]
    assert isinstance(graphs, dict)
    assert graphs["compiled"] == graphs["total"]
    assert document["complete"] is True
    assert document["workers"] == 2
    assert len(LocalStore.open(root, writable=False, given=True).graph_keys()) == graphs["total"]


@pytest.mark.soak
def test_the_debug_model_s_graphs(warmed: Warmed, tmp_path: Path) -> None:
    document = warm_on_a_cluster(tmp_path / "store", tmp_path / "dask", CONFIG)
    assert_every_graph_arrived_once(document, tmp_path / "store")
    assert document["manifest"] == warmed.answer.document["manifest"], "the same as compiled here"


@pytest.mark.soak
def test_llama3_8b_s_graphs(tmp_path: Path) -> None:
    document = warm_on_a_cluster(tmp_path / "store", tmp_path / "dask", "llama3_8b")
    assert_every_graph_arrived_once(document, tmp_path / "store")
