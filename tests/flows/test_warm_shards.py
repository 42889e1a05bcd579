"""A warm in parts: each shard compiles its own, none but the last is complete, and a last warm finds all hits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from neffcache.compile.pool import Event
from neffcache.compile.toolchain import Compiled, CompileRequest, Product
from neffcache.errors import CompileFailed, StoreFault
from neffcache.flows import warm as flow
from neffcache.flows.shards import Shard
from neffcache.flows.tracing import TracedGraph, TracedJob
from neffcache.flows.warm import WarmResult
from neffcache.key.canonical import sha256_hex, xxh3_128_hex
from neffcache.key.job import CompileComponents
from neffcache.store.local import LocalStore
from neffcache.store.records import RankClass
from tests.cli.conftest import job_of, request_of

pytestmark = pytest.mark.fast


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TracedJob:
    """Five graphs; tracing, compiling and replaying are put aside: what is tested is who does what."""
    graphs = {}
    payload = tmp_path / "payload"
    for number in range(5):
        text = f"neffcache graph {number}\n"
        (tmp_path / f"text{number}").write_text(text)
        key = xxh3_128_hex(text.encode())
        components = CompileComponents(text=sha256_hex(text.encode()), toolchain="a" * 64, env="b" * 64)
        graphs[key] = TracedGraph(
            key,
            components,
            "forward",
            f"g{number}",
            10 + number,
            1,
            {},
            tmp_path / f"text{number}",
            payload,
        )
    job = TracedJob(
        graphs=graphs,
        classes=(RankClass("0-3", {"first_step": tuple(graphs)}),),
        representatives=(0,),
        edges=(None,),
        phases=("first_step",),
        uncacheable={},
        eager={},
        seconds=1.0,
        peak_bytes=1,
    )
    monkeypatch.setattr(flow, "trace_job", lambda *_, **__: job)
    monkeypatch.setattr(flow, "replay", lambda *_: None)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    return job


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore.open(tmp_path / "store", writable=True, given=True)


def pooled(place: Path, fail: Any = None) -> Any:
    """A pool that is done at once, but for the graph named by `fail`: (name, fault)."""

    def run(requests: list[CompileRequest], **_: Any) -> Iterator[Event]:
        for request in requests:
            if fail is not None and request.name == fail[0]:
                yield Event(request.compile_key, fail[1], fault=fail[2])
                continue
            (place / request.name).write_text(request.name)
            product = Product("host", f"graphs/{request.compile_key}/code", place / request.name)
            yield Event(request.compile_key, "done", 1.0, Compiled(request.compile_key, [product], 1.0, 1))

    return run


def warm(store: LocalStore, shard: Shard | None = None) -> WarmResult:
    return flow.warm(request_of(), store, {}, job=job_of(request_of()), shard=shard)


def test_shards_leave_the_job_incomplete_and_the_last_warm_finds_all_hits(
    traced: TracedJob, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neffcache.compile.pool.run", pooled(tmp_path))
    first = warm(store, Shard(0, 2, "a test"))
    assert not first.complete
    assert first.fault is None, "its own part is done"
    assert first.compiled in (2, 3)
    assert (first.hit, first.compiled + first.skipped) == (0, 5)
    assert first.to_json()["shard"] == "0/2"
    assert first.manifest is not None
    other = LocalStore.open(tmp_path / "other", writable=True, given=True)
    elsewhere = warm(other, Shard(1, 2, "a test"))
    assert elsewhere.compiled == 5 - first.compiled, "what a store knows does not decide who compiles what"
    second = warm(store, Shard(1, 2, "a test"))
    assert (second.hit, second.compiled, second.skipped) == (first.compiled, 5 - first.compiled, 0)
    last = warm(store)
    assert last.complete
    assert (last.total, last.hit, last.compiled, last.skipped) == (5, 5, 0, 0)


def test_totals_add_up_and_the_first_error_is_the_command_s(
    traced: TracedJob, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = CompileFailed("g3 is bad", details={"class": "failed"})
    monkeypatch.setattr("neffcache.compile.pool.run", pooled(tmp_path, ("g3", "failed", fault)))
    result = warm(store)
    assert (result.total, result.compiled, result.failed, result.skipped) == (5, 4, 1, 0)
    assert not result.complete
    assert result.fault is not None
    assert (result.fault.exit_code, "g3 is bad" in result.fault.message) == (6, True)


def test_what_stops_everything_is_the_command_s_error_and_nobody_s_failure(
    traced: TracedJob, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = StoreFault("the disk is full", details={"class": "io"})
    monkeypatch.setattr("neffcache.compile.pool.run", pooled(tmp_path, ("g3", "skipped", full)))
    result = warm(store)
    assert (result.total, result.compiled, result.failed, result.skipped) == (5, 4, 0, 1)
    assert result.fault is full
    assert result.to_json()["stopped"]["exit_code"] == 7
