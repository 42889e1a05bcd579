"""--native as commands show it; a warm's manifest is put there by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from neffcache.errors import Unsupported
from neffcache.flows.native import native_manifest
from neffcache.flows.resolve import Job
from neffcache.key.job import Component
from neffcache.store.local import LocalStore
from neffcache.store.native import EXTRA
from neffcache.store.records import Artifact, Manifest, RankClass, Ref
from tests.cli.conftest import CONFIG, Answer, job_of, request_of

pytestmark = pytest.mark.fast

Run = Callable[..., Answer]


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    made = job_of(request_of(native=True))
    host = made.key.components["toolchain"]
    native = Component(host.name, "c" * 64, {**host.value, "native_store": "inductor"})
    made = replace(made, key=replace(made.key, components={**made.key.components, "toolchain": native}))
    monkeypatch.setattr("neffcache.flows.resolve.titan_installed", lambda: True)
    for flow in ("plan", "explain", "check"):
        monkeypatch.setattr(
            f"neffcache.flows.{flow}.resolve",
            lambda request, environ, place: made if request.native else job_of(request),
        )
    return made


def put(store: LocalStore, job: Job) -> Manifest:
    sha256 = store.put_blob(b"library")
    artifact = Artifact("inductor", "aa/library.so", sha256, 7, 0o444)
    ranks = RankClass("0-3", {}, {EXTRA: {"phases": {"first_step": ["k1", "k2"], "steady_step": []}, "misses": 0}})
    made = store.put_manifest(native_manifest(job, [artifact], [ranks], complete=True))
    store.set_pointer(made.cache_key, made.id)
    ref = Ref(job.request.to_json(), made.cache_key, made.id, CONFIG)
    store.put_ref("current", CONFIG, job.request.digest, ref)
    return made


def test_native_is_part_of_the_request_and_only_when_asked_for(neffcache: Run, store: LocalStore, job: Job) -> None:
    put(store, job)
    assert "native" not in request_of().to_json()
    assert request_of(native=True).digest != request_of().digest
    assert neffcache("check", CONFIG, "--native", "--dir", store.root, "--json").json[0]["state"] == "HIT"
    assert neffcache("check", CONFIG, "--dir", store.root, "--json").json[0]["state"] == "MISS"


def test_ls_show_and_plan_count_the_compiler_s_graphs(neffcache: Run, store: LocalStore, job: Job) -> None:
    made = put(store, job)
    assert neffcache("ls", "--dir", store.root, "--json").json["manifests"][0]["graphs"] == 2
    shown = neffcache("show", made.id[:12], "--dir", store.root).out
    assert "ranks 0-3: first_step 2 graphs, steady_step 0 graphs" in shown
    assert "native inductor/aa/library.so" in shown
    planned = neffcache("plan", CONFIG, "--native", "--dir", store.root, "--json").json
    assert (planned["known_by"], planned["graphs"]["total"]) == ("manifest", 2)
    assert planned["rank_classes"] == [{"ranks": "0-3", "graphs": 2}]


def test_plan_does_not_guess_what_a_compiler_keeps(neffcache: Run, store: LocalStore, job: Job) -> None:
    done = neffcache("plan", CONFIG, "--native", "--dir", store.root)
    assert done.code == Unsupported.exit_code
    assert "warm llama3_debugmodel --native" in done.err


def test_explain_looks_for_no_graph_records(neffcache: Run, store: LocalStore, job: Job) -> None:
    done = neffcache("explain", CONFIG, "--native", "--trace", "--dir", store.root, "--json")
    assert done.code == 3
    assert done.json["trace"] is None
    assert "nothing to trace for" in done.err
