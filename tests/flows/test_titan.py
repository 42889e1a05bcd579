"""check and explain against what TorchTitan itself says; a question to it takes seconds, so answers are shared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchtitan")

from neffcache.flows.check import check_job
from neffcache.flows.explain import nearest_manifest
from neffcache.flows.request import Request, make_request
from neffcache.flows.resolve import Job, resolve
from neffcache.store.local import LocalStore
from tests.cli.conftest import CONFIG, put_job

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What TorchTitan makes of a request, asked once for each."""
    known: dict[str, Job] = {}

    def job(request: Request, environ: Mapping[str, str] = os.environ) -> Job:
        name = json.dumps([request.to_json(), environ.get("OMP_NUM_THREADS")])
        if name not in known:
            known[name] = resolve(request, environ, tmp_path_factory.mktemp("ask"))
        return known[name]

    return job


def wanted(*sets: str) -> Request:
    return make_request(CONFIG, sets=sets, toolchain="host", environ={})


@pytest.fixture
def store(tmp_path: Path, ask: Any) -> LocalStore:
    """A store with a manifest of the debug model; its graphs are made up."""
    store = LocalStore.open(tmp_path / "store", writable=True, given=True)
    put_job(store, ask(wanted()), "one", "two")
    return store


def test_the_key_of_today_decides_whether_it_is_a_hit(store: LocalStore, ask: Any) -> None:
    assert check_job(ask(wanted()), store).state == "HIT"
    assert check_job(ask(wanted("training.seq_len=512")), store).state == "MISS"
    assert check_job(ask(wanted(), {**os.environ, "OMP_NUM_THREADS": "2"}), store).state == "MISS"


def test_doing_what_explain_says_makes_it_a_hit(store: LocalStore, ask: Any) -> None:
    sets = ("training.seq_len=512", "compile.components=model,loss")
    found = nearest_manifest(ask(wanted(*sets)), store.manifests())
    assert found is not None
    assert found.reachable
    assert {item.what for item in found.changes} == {
        "--set training.seq_len=256",
        "--set compile.components=model",
    }
    followed = [item.what.removeprefix("--set ") for item in found.changes]
    assert check_job(ask(wanted(*sets, *followed)), store).state == "HIT"


def test_the_command_line_traces_again_and_shows_the_first_other_line(store: LocalStore) -> None:
    """One real trace: the graphs of the store are made up, so all of the job's lack records."""
    command = [sys.executable, "-c", "from neffcache.cli.main import main; main()"]
    words = ["explain", CONFIG, "--set", "training.seq_len=512", "--trace", "--json", "--dir", str(store.root)]
    done = subprocess.run([*command, *words], capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    document = json.loads(done.stdout)
    assert document["state"] == "MISS"
    assert document["nearest"]["changes"][0]["change"] == "--set training.seq_len=256"
    trace = document["trace"]
    assert (trace["total"], trace["hit"]) == (2, 0)
    assert {graph["kind"] for graph in trace["unmet"]} == {"forward", "backward"}
    for graph in trace["unmet"]:
        near = graph["nearest"]
        assert near["here"] != near["there"]
        assert set(near["components"]) == {"text", "toolchain", "env"}
    assert not list((store.root / "tmp").iterdir())
