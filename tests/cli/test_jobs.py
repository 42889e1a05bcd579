"""plan, env and explain as commands; what TorchTitan would say is given by hand."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from neffcache.errors import StoreFault, Unsupported, Usage
from neffcache.flows.everything import Named
from neffcache.flows.launch import default_command, run_environment
from neffcache.flows.resolve import Job
from neffcache.flows.tracing import TracedGraph, TracedJob
from neffcache.flows.verdicts import Verdict
from neffcache.key.canonical import sha256_hex, xxh3_128_hex
from neffcache.key.job import CompileComponents
from neffcache.store.index import Cost, Index
from neffcache.store.local import LocalStore
from neffcache.store.records import Manifest, RankClass
from tests.cli.conftest import CONFIG, Answer, job_of, put_graph, put_job, request_of

pytestmark = pytest.mark.fast

Run = Callable[..., Answer]


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> dict[str, Job]:
    """TorchTitan's answers by configuration."""
    jobs = {CONFIG: job_of(request_of())}
    for flow in ("plan", "env", "explain"):
        monkeypatch.setattr(f"neffcache.flows.{flow}.resolve", lambda request, environ, place: jobs[request.config])
    return jobs


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[TracedGraph]:
    """What a trace would find: graphs `one` (100 nodes) and `two` (150 nodes). Empty it to forbid tracing."""
    graphs = []
    for word, nodes in (("one", 100), ("two", 150)):
        path = tmp_path / f"{word}.txt"
        path.write_text(f"neffcache graph 1\ninputs 1\n%0 = input {word}\n")
        components = CompileComponents(text=sha256_hex(path.read_bytes()), toolchain="a" * 64, env="b" * 64)
        graphs.append(
            TracedGraph(xxh3_128_hex(word.encode()), components, "forward", word, nodes, 1, {}, path, payload=path)
        )

    def trace(*_: object, **__: object) -> TracedJob:
        assert graphs, "it traced although the manifest knows"
        keys = tuple(graph.compile_key for graph in graphs)
        return TracedJob(
            graphs={graph.compile_key: graph for graph in graphs},
            classes=(RankClass("0-3", {"first_step": keys}),),
            representatives=(0,),
            edges=(None,),
            phases=("first_step",),
            uncacheable={},
            eager={},
            seconds=1.0,
            peak_bytes=1,
        )

    for flow in ("plan", "explain"):
        monkeypatch.setattr(f"neffcache.flows.{flow}.trace_job", trace)
    return graphs


def test_a_plan_of_a_warm_job_is_answered_by_its_manifest(
    neffcache: Run, store: LocalStore, warmed: Manifest, resolved: dict[str, Job], traced: list[TracedGraph]
) -> None:
    traced.clear()
    done = neffcache("plan", CONFIG, "--dir", store.root, "--json")
    assert done.code == 0
    assert done.json["known_by"] == "manifest"
    assert done.json["graphs"] == {"total": 2, "hit": 2, "compile": 0, "refused": 0}
    assert (done.json["minutes"], done.json["workers"], done.json["memory_bytes"]) == (0, 0, 0)
    assert done.json["rank_classes"] == [{"ranks": "0-3", "graphs": 2}]
    assert done.json["mesh"] == {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2, "ep": 1}
    assert (done.json["target"], done.json["lnc"], done.json["ranks"]) == ("cpu", 1, 4)
    assert "known by the manifest" in neffcache("plan", CONFIG, "--dir", store.root).out


def test_a_plan_counts_what_is_there_and_what_must_be_compiled_and_says_how_it_knows(
    neffcache: Run, store: LocalStore, resolved: dict[str, Job], traced: list[TracedGraph]
) -> None:
    put_graph(store, "one", seconds=30.0, nodes=100)
    cold = neffcache("plan", CONFIG, "--dir", store.root, "--jobs", "2", "--json").json
    assert cold["known_by"] == "trace"
    assert cold["graphs"] == {"total": 2, "hit": 1, "compile": 1, "refused": 0}
    [graph] = cold["compile"]
    assert (graph["name"], graph["seconds"], graph["basis"], graph["measured_nodes"]) == ("two", 30.0, "similar", 100)
    assert cold["basis"] == {"measured": 0, "similar": 1, "default": 0}
    assert (cold["minutes"], cold["workers"], cold["memory_bytes"]) == (0.5, 1, 875_000_000)
    with Index.open(store) as index:
        index.put_cost(xxh3_128_hex(b"two"), Cost(60.0, 800_000_000, 150))
    known = neffcache("plan", CONFIG, "--dir", store.root, "--json").json
    assert (known["minutes"], known["memory_bytes"]) == (1.0, 1_000_000_000)
    assert known["basis"] == {"measured": 1, "similar": 0, "default": 0}
    table = neffcache("plan", CONFIG, "--dir", store.root).out
    assert "2 graphs = 1 in the store + 1 to compile" in table
    assert "1 measured" in table
    assert "replaced: tokenizer by none" in table


def test_a_plan_names_what_this_toolchain_cannot_compile(
    neffcache: Run, store: LocalStore, resolved: dict[str, Job], traced: list[TracedGraph]
) -> None:
    first = traced.pop(0)
    traced.append(
        TracedGraph(**{**{f: getattr(first, f) for f in first.__dataclass_fields__}, "payload": None, "reason": "why"})
    )
    plan = neffcache("plan", CONFIG, "--dir", store.root, "--json").json
    assert plan["graphs"] == {"total": 2, "hit": 0, "compile": 1, "refused": 1}
    assert plan["refused"] == [{"compile_key": first.compile_key, "name": "one", "reason": "why"}]


def test_a_plan_writes_nothing(
    neffcache: Run, store: LocalStore, resolved: dict[str, Job], traced: list[TracedGraph]
) -> None:
    before = sorted(store.root.rglob("*"))
    assert neffcache("plan", CONFIG, "--dir", store.root).code == 0
    assert sorted(store.root.rglob("*")) == before
    absent = store.root / "absent"
    assert neffcache("plan", CONFIG, "--dir", absent).code == 0
    assert not absent.exists()


def test_a_plan_of_all_is_told_by_refs_and_verdicts_without_resolving(
    neffcache: Run, store: LocalStore, warmed: Manifest, traced: list[TracedGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    traced.clear()
    monkeypatch.setattr("neffcache.flows.plan.resolve", lambda *_: pytest.fail("it resolved"))
    verdict = Verdict(family="own", module="own", config="big", verdict="traces", ranks=64, graphs=3, nodes=300)
    refused = Verdict(family="own", module="own", config="gpu", verdict="unsupported", reason="needs a GPU")
    entries = [Named(CONFIG, None), Named("big", verdict), Named("gpu", refused), Named("not a name", None)]
    monkeypatch.setattr("neffcache.flows.everything.everything", lambda _: entries)
    done = neffcache("plan", "--all", "--dir", store.root, "--json")
    assert done.code == 0
    rows = {row["config"]: row for row in done.json}
    assert (rows[CONFIG]["state"], rows[CONFIG]["known_by"]) == ("warm", "ref")
    assert rows[CONFIG]["graphs"] == {"total": 2, "hit": 2, "compile": 0}
    assert (rows["big"]["state"], rows["big"]["known_by"], rows["big"]["traced_ranks"]) == ("cold", "verdict", 64)
    assert rows["big"]["graphs"] == {"total": 3, "hit": 0, "compile": 3}
    assert rows["big"]["seconds"]["compile"] > 0
    assert (rows["gpu"]["state"], rows["gpu"]["reason"]) == ("unsupported", "needs a GPU")
    assert rows["not a name"]["state"] == "unsupported"
    shown = neffcache("plan", "--all", "--dir", store.root)
    assert "4 runs: 2 can be warmed, 2 cannot" in shown.out


def test_a_plan_of_all_goes_on_after_a_failure_and_exits_with_the_first(
    neffcache: Run,
    store: LocalStore,
    warmed: Manifest,
    traced: list[TracedGraph],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def resolve(request: Any, environ: object, place: object) -> Job:
        if request.config == "llama3_8b":
            raise Unsupported("no such thing here")
        if request.config == "llama3_70b":
            raise Usage("nor this")
        return job_of(request_of())

    monkeypatch.setattr("neffcache.flows.plan.resolve", resolve)
    done = neffcache("plan", "--all", "--trace", "--dir", store.root, "--json")
    rows = {row["config"]: row for row in done.json}
    assert set(rows) >= {CONFIG, "llama3_8b", "llama3_70b"}
    assert rows["llama3_8b"]["exit_code"] == 8
    assert rows["llama3_70b"]["exit_code"] == 2
    assert rows[CONFIG]["graphs"]["total"] == 2
    assert done.code == 8
    single = neffcache("plan", "llama3_70b", "--dir", store.root)
    assert (single.code, single.out) == (2, "")


def test_env_gives_exactly_what_run_would_set_and_makes_what_it_names(
    neffcache: Run, store: LocalStore, warmed: Manifest, resolved: dict[str, Job]
) -> None:
    done = neffcache("env", CONFIG, "--dir", store.root, "--json")
    assert done.code == 0
    own, view = Path(done.json["directory"]), Path(done.json["view"])
    assert own.parent == store.root / "runs"
    assert own.name.startswith(f"{warmed.id[:12]}-")
    assert str(own) in done.err
    assert done.json["manifest"] == warmed.id
    assert done.json["environment"] == run_environment(resolved[CONFIG], view, own, on_miss="fail")
    assert done.json["command"] == list(default_command(resolved[CONFIG], own / "outputs", None))
    assert (view / "ready.json").exists()
    assert Path(done.json["environment"]["NEFFCACHE_MANIFEST"]).is_file()
    assert Path(done.json["environment"]["NEFFCACHE_REPORTS"]).is_dir()
    assert {path.stem for path in (own / "reports" / "texts").iterdir()} == set(warmed.compile_keys())


def test_env_prints_lines_that_a_shell_takes_and_nothing_else(
    neffcache: Run, tmp_path: Path, resolved: dict[str, Job]
) -> None:
    spaced = LocalStore.open(tmp_path / "a store with 'quotes'", writable=True, given=True)
    put_job(spaced, resolved[CONFIG], "one")
    done = neffcache("env", CONFIG, "--dir", spaced.root)
    asked = f"{done.out}\nexec env"
    clean = {"PATH": os.environ["PATH"]}
    seen = subprocess.run(["sh", "-eu", "-c", asked], env=clean, capture_output=True, text=True, check=True).stdout
    variables = dict(line.partition("=")[::2] for line in seen.splitlines())
    assert variables["NEFFCACHE_MANIFEST"].startswith(str(spaced.root))
    assert variables["OMP_NUM_THREADS"] == "1"
    assert all(line.startswith("export ") and len(shlex.split(line)) == 2 for line in done.out.splitlines())


def test_each_env_gets_directories_of_its_own(
    neffcache: Run, store: LocalStore, warmed: Manifest, resolved: dict[str, Job]
) -> None:
    first, second = (neffcache("env", CONFIG, "--dir", store.root, "--json").json for _ in range(2))
    assert first["directory"] != second["directory"]
    assert first["view"] == second["view"]
    missing = neffcache("env", CONFIG, "--on-miss", "compile", "--dir", store.root, "--json").json
    assert missing["environment"]["NEFFCACHE_ON_MISS"] == "compile"
    assert missing["environment"]["NEFFCACHE_REPORTS"].startswith(missing["directory"])


def test_env_of_what_is_not_there_is_a_miss_and_makes_nothing(
    neffcache: Run, store: LocalStore, warmed: Manifest, resolved: dict[str, Job]
) -> None:
    record = store.get_graph(xxh3_128_hex(b"one"))
    assert record is not None
    store.blob_path(record.artifacts[0].sha256).unlink()
    done = neffcache("env", CONFIG, "--dir", store.root)
    assert (done.code, done.out) == (3, "")
    assert done.err.splitlines()[-1] == f"hint: neffcache warm {CONFIG}"
    assert not (store.root / "runs").exists()


def test_env_leaves_no_directory_behind_when_it_fails_late(
    neffcache: Run, store: LocalStore, warmed: Manifest, resolved: dict[str, Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(job: object, manifest: object, store: object, place: Path, **_: object) -> None:
        assert place.is_dir()
        raise StoreFault("no space is left")

    monkeypatch.setattr("neffcache.flows.env.prepare", fail)
    assert neffcache("env", CONFIG, "--dir", store.root).code == 7
    assert list((store.root / "runs").iterdir()) == []


def test_env_refuses_an_environment_in_which_nothing_could_be_proved(
    neffcache: Run, store: LocalStore, warmed: Manifest, resolved: dict[str, Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert neffcache("env", CONFIG, "--dir", store.root).code == 2


def test_explain_of_a_hit_says_so(
    neffcache: Run, store: LocalStore, warmed: Manifest, resolved: dict[str, Job]
) -> None:
    done = neffcache("explain", CONFIG, "--dir", store.root, "--json")
    assert done.code == 0
    assert (done.json["state"], done.json["nearest"], done.json["trace"]) == ("HIT", None, None)
    assert "HIT" in neffcache("explain", CONFIG, "--dir", store.root).out


def test_explain_of_a_miss_says_what_differs_and_what_to_change(
    neffcache: Run, store: LocalStore, warmed: Manifest, resolved: dict[str, Job]
) -> None:
    resolved[CONFIG] = job_of(request_of(), {"training": {"seq_len": 512}, "compile": {"components": ["model"]}})
    done = neffcache("explain", CONFIG, "--dir", store.root, "--json")
    assert (done.code, done.json["state"]) == (3, "MISS")
    near = done.json["nearest"]
    assert (near["manifest"], near["config"], near["components"]) == (warmed.id, CONFIG, ["workload"])
    path = "workload.config.training.seq_len"
    assert near["differences"] == [{"path": path, "left": 512, "right": 256}]
    assert near["changes"] == [{"path": path, "kind": "option", "change": "--set training.seq_len=256"}]
    assert near["reachable"] is True
    shown = neffcache("explain", CONFIG, "--dir", store.root).out
    assert f"{path}: here 512, there 256" in shown
    assert "to hit it: --set training.seq_len=256" in shown


def test_explain_of_a_partial_lists_what_lacks(
    neffcache: Run, store: LocalStore, warmed: Manifest, resolved: dict[str, Job]
) -> None:
    record = store.get_graph(xxh3_128_hex(b"one"))
    assert record is not None
    store.blob_path(record.artifacts[0].sha256).unlink()
    done = neffcache("explain", CONFIG, "--dir", store.root, "--json")
    assert (done.code, done.json["state"], done.json["nearest"]) == (3, "PARTIAL", None)
    assert [item["what"] for item in done.json["missing"]] == [record.artifacts[0].sha256]


def test_explain_with_a_trace_says_which_graphs_lack_records_and_where_they_differ(
    neffcache: Run, store: LocalStore, resolved: dict[str, Job], traced: list[TracedGraph]
) -> None:
    put_graph(store, "one")
    done = neffcache("explain", CONFIG, "--trace", "--dir", store.root, "--json")
    trace = done.json["trace"]
    assert (done.code, trace["total"], trace["hit"]) == (3, 2, 1)
    [unmet] = trace["unmet"]
    assert unmet["compile_key"] == xxh3_128_hex(b"two")
    assert unmet["nearest"] == {
        "compile_key": xxh3_128_hex(b"one"),
        "components": ["text"],
        "line": 3,
        "here": "%0 = input two",
        "there": "%0 = input one",
    }
    put_graph(store, "two")
    healed = neffcache("explain", CONFIG, "--trace", "--dir", store.root)
    assert healed.code == 0, "everything that was asked for is there"
    assert "neffcache run goes on from here without compiling" in healed.out
