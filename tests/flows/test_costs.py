from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from neffcache.compile import memory
from neffcache.compile.memory import Amount
from neffcache.compile.pool import Event
from neffcache.compile.toolchain import Compiled, CompileRequest, Product
from neffcache.flows import warm as flow
from neffcache.flows.compiling import How
from neffcache.flows.costs import (
    DEFAULT_BYTES,
    DEFAULT_SECONDS,
    WORKER_BYTES,
    Costs,
    Estimate,
    capacity,
    costs_of,
)
from neffcache.flows.tracing import TracedGraph
from neffcache.flows.warm import Progress, WarmResult
from neffcache.key.canonical import sha256_hex, xxh3_128_hex
from neffcache.key.job import CompileComponents
from neffcache.store.index import Cost, Index
from neffcache.store.local import LocalStore
from tests.cli.conftest import job_of, put_graph, request_of

pytestmark = pytest.mark.fast

KEY = xxh3_128_hex(b"a graph")


@pytest.fixture(autouse=True)
def no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore.open(tmp_path / "store", writable=True, given=True)


def test_the_same_graph_s_measurement_comes_first_then_a_similar_one_then_the_default(store: LocalStore) -> None:
    other = xxh3_128_hex(b"another graph")
    with costs_of(store, remember=True) as costs:
        assert costs.estimate(KEY, 100) == Estimate(DEFAULT_SECONDS["host"], WORKER_BYTES, "default")
        costs.measured(KEY, Cost(7.0, 500_000_000, 100))
        assert costs.estimate(KEY, 100) == Estimate(7.0, 500_000_000, "measured", 100)
        assert costs.estimate(other, 199) == Estimate(7.0, 500_000_000, "similar", 100)
        assert costs.estimate(other, 201).basis == "default"
        assert costs.estimate(other, 49).basis == "default"


def test_the_store_s_own_records_tell_when_the_index_is_gone_or_cannot_be_opened(
    store: LocalStore, caplog: pytest.LogCaptureFixture
) -> None:
    put_graph(store, "one", seconds=12.0, nodes=100)
    assert not (store.root / "index").exists()
    for reader in (store, LocalStore.open(store.root, writable=False)):
        with costs_of(reader, remember=False) as costs:
            assert costs.estimate(KEY, 110) == Estimate(12.0, 700_000_000, "similar", 100)
    with costs_of(LocalStore.open(store.root, writable=False), remember=True):
        assert not caplog.records, "a reader tried to open the index"
    assert not (store.root / "index").exists(), "whoever only asks made an index"


def test_a_compile_gets_room_beyond_a_measured_peak_and_the_default_is_as_stated() -> None:
    assert Estimate(1.0, 800, "measured").room_bytes == 1000
    assert Estimate(1.0, 1200, "default").room_bytes == 1200


def test_what_one_kind_of_compiler_takes_says_nothing_about_another(store: LocalStore) -> None:
    with costs_of(store, remember=True) as costs:
        costs.measured(KEY, Cost(7.0, 500_000_000, 100))
    put_graph(store, "one", seconds=12.0, nodes=100)
    with costs_of(store, remember=True, family="neuron") as costs:
        other = costs.estimate(xxh3_128_hex(b"ir"), 100)
        assert other == Estimate(DEFAULT_SECONDS["neuron"], DEFAULT_BYTES["neuron"], "default")
        costs.measured(xxh3_128_hex(b"other ir"), Cost(900.0, 20_000_000_000, 110))
        assert costs.estimate(xxh3_128_hex(b"ir"), 100).seconds == 900.0


def test_the_room_is_what_the_machine_has_unless_somebody_says_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: Amount(5_000, "a test"))
    monkeypatch.setattr(memory, "cpus", lambda: Amount(3, "a test"))
    assert capacity(None).to_json() == {
        "slots": 3,
        "cpus": {"count": 3, "source": "a test"},
        "memory": {"bytes": 5_000, "source": "a test"},
    }
    assert (capacity(None).budget, capacity(7).slots, capacity(7).budget) == (5_000, 7, None)


def graph(tmp_path: Path) -> TracedGraph:
    (tmp_path / "text").write_text("neffcache graph 1\n")
    (tmp_path / "payload").write_bytes(b"payload")
    return TracedGraph(
        compile_key=KEY,
        components=CompileComponents(text=sha256_hex(b"neffcache graph 1\n"), toolchain="a" * 64, env="b" * 64),
        kind="forward",
        name="block",
        nodes=100,
        inputs=1,
        settings={},
        text_file=tmp_path / "text",
        payload=tmp_path / "payload",
    )


def compile_one(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[WarmResult, dict[str, Any]]:
    """The compiling part of a warm with a pool that is done at once; the result and what the pool was asked."""
    asked: dict[str, Any] = {}
    (tmp_path / "code").write_bytes(b"code")
    product = Product("host", "graphs/code", tmp_path / "code")

    def run(requests: list[CompileRequest], **given: Any) -> Iterator[Event]:
        asked.update(given, requests=requests)
        for request in requests:
            yield Event(request.compile_key, "done", 9.0, Compiled(request.compile_key, [product], 9.0, 600_000_000))

    monkeypatch.setattr("neffcache.compile.pool.run", run)
    monkeypatch.setattr(memory, "available", lambda: Amount(1_000_000_000, "a test"))
    monkeypatch.setattr(memory, "cpus", lambda: Amount(8, "a test"))
    result = WarmResult(job_of(request_of()))
    flow._compile(result.job, [graph(tmp_path)], store, tmp_path, How(), Progress(), result)
    return result, asked


def test_a_warm_remembers_what_each_compile_took(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, _ = compile_one(store, tmp_path, monkeypatch)
    assert result.compiled == 1
    with Index.open(store) as index:
        assert index.cost(KEY) == Cost(9.0, 600_000_000, 100)


def test_a_warm_tells_the_pool_how_much_memory_each_compile_needs_and_how_much_there_is(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Index.open(store) as index:
        index.put_cost(KEY, Cost(9.0, 200_000_000, 100))
    _, asked = compile_one(store, tmp_path, monkeypatch)
    assert (asked["jobs"], asked["budget"]) == (8, 1_000_000_000)
    assert [request.peak_bytes for request in asked["requests"]] == [250_000_000]  # 1.25 x 0.2 GB


@pytest.mark.parametrize("broken", ["open", "put_cost", "failure", "file"])
def test_a_broken_index_never_fails_a_warm(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    if broken == "file":
        (store.root / "index").mkdir()
        (store.root / "index" / "cache.db").write_bytes(b"no database" * 100)
    else:
        monkeypatch.setattr(Index, broken, fail)
    result, _ = compile_one(store, tmp_path, monkeypatch)
    assert (result.compiled, result.failed) == (1, 0)
    assert store.get_graph(KEY) is not None


def test_costs_without_an_index_are_forgotten_without_a_word(store: LocalStore) -> None:
    Costs(store, None).measured(KEY, Cost(1.0, 1, 1))
    assert not (store.root / "index").exists()
