"""configs, and warm of all: what is said of each, and that one that fails stops none."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from neffcache.errors import Unsupported
from neffcache.flows.everything import Named
from neffcache.flows.verdicts import Verdict
from neffcache.store.local import LocalStore
from tests.cli.conftest import CONFIG, Answer

pytestmark = pytest.mark.fast

Run = Callable[..., Answer]

VERDICTS = [
    Verdict(family="llama3", module="llama3", config="small", verdict="trains", mode="per-block", ranks=4, graphs=2),
    Verdict(
        family="qwen3",
        module="qwen3",
        config="moe",
        verdict="traces",
        ranks=64,
        neuron=[{"rule": "grouped-mm", "effect": "stops"}, {"rule": "wide-type", "effect": "changes"}],
    ),
    Verdict(family="rl", module="sorting", config="rl", verdict="unsupported", reason="needs monarch"),
]


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neffcache.flows.verdicts.known", lambda version=None: VERDICTS)


@pytest.mark.usefixtures("known")
def test_configs_prints_a_row_each_and_counts(neffcache: Run) -> None:
    done = neffcache("configs")
    assert done.code == 0
    lines = done.out.splitlines()
    assert len(lines) == 4
    assert lines[2].split() == ["qwen3", "moe", "traces", "64", "grouped-mm"]
    assert "3 configurations: 1 trains, 1 traces, 1 unsupported" in done.err
    rows = neffcache("configs", "--json").json
    assert [row["verdict"] for row in rows] == ["trains", "traces", "unsupported"]
    assert rows[2]["reason"] == "needs monarch"


@pytest.mark.usefixtures("known")
def test_configs_can_be_chosen(neffcache: Run) -> None:
    assert [row["config"] for row in neffcache("configs", "--family", "qwen3", "--json").json] == ["moe"]
    assert [row["config"] for row in neffcache("configs", "--verdict", "unsupported", "--json").json] == ["rl"]
    assert [row["config"] for row in neffcache("configs", "small", "--json").json] == ["small"]
    assert neffcache("configs", "smal").code == 2


def test_warm_of_all_goes_on_leaves_out_what_is_unsupported_and_ends_with_a_table(
    neffcache: Run, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [Named("broken", None), Named("rl", VERDICTS[2]), Named(CONFIG, None)]
    monkeypatch.setattr("neffcache.flows.everything.everything", lambda _: entries)

    def warm(request: Any, *_: Any, **__: Any) -> Any:
        if request.config == "broken":
            raise Unsupported("it cannot be traced")
        graphs = {"total": 2, "hit": 1, "compiled": 1, "failed": 0, "skipped": 0}
        job = SimpleNamespace(world_size=4, key=SimpleNamespace(cache_key="k"))
        times = dict.fromkeys(("trace_seconds", "compile_seconds", "total_seconds"), 1.0)
        document = {"config": request.config, "graphs": graphs}
        told = {"complete": True, "failures": [], "failed": 0, "total": 2, "native": None, "ref": None, "fault": None}
        return SimpleNamespace(to_json=lambda: document, job=job, **told, **times)

    monkeypatch.setattr("neffcache.flows.warm.warm", warm)
    done = neffcache("warm", "--all", "--dir", store.root)
    assert done.code == 8, "the first fault's exit code"
    rows = [line.split()[:2] for line in done.out.splitlines()]
    assert rows == [["config", "state"], ["broken", "FAILED"], ["rl", "unsupported"], [CONFIG, "complete"]]
    document = neffcache("warm", "--all", "--dir", store.root, "--json").json
    assert [row.get("state", "warm") for row in document] == ["failed", "unsupported", "warm"]
    monkeypatch.setattr("neffcache.flows.everything.everything", lambda _: entries[1:])
    assert neffcache("warm", "--all", "--dir", store.root).code == 0
