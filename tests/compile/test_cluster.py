"""A Dask cluster as the executor: by value, through the store, a lost worker, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from neffcache.compile.cluster import Address
from neffcache.errors import Usage
from tests.compile.test_driver import alive, classes
from tests.stubs.dask_cluster import DaskCluster, dask_cluster
from tests.stubs.stub import Stub


@pytest.fixture
def cluster(stub: Stub, tmp_path: Path) -> Iterator[DaskCluster]:
    pytest.importorskip("distributed")
    with dask_cluster(tmp_path / "dask", stub.environ) as running:
        yield running


@pytest.mark.integration
def test_units_run_on_a_cluster_and_a_lost_worker_costs_nothing(stub: Stub, cluster: DaskCluster) -> None:
    files = stub.ir(first="sleep 0.1 big", h1="sleep 4", a="good", r="refuse NCC_EVRF004", k="killed", h="hang")
    command = stub.start(*files, "--executor", cluster.address, "--time-limit", "6", "--report", stub.place / "r.html")
    assert command.stderr is not None
    for line in command.stderr:
        if "compiling" in line and "h1.mlir" in line:
            break
    while "h1" not in stub.calls():
        assert command.poll() is None
    compiler = psutil.Process(stub.pids("h1")[0])
    [victim] = [worker for worker in cluster.workers if compiler in psutil.Process(worker.pid).children(True)]
    victim.kill()
    victim.wait()
    _, said = command.communicate(timeout=120)
    assert command.returncode == 6, said
    assert said.count("FAILED") == 3
    calls = stub.calls()
    assert calls["h1"] == 2, "the other worker took it over"
    assert not psutil.pid_exists(compiler.pid), "and nothing of the first try is left"
    assert calls["k"] == 2
    # A result that the lost worker still held is computed again, and arrives once.
    assert set(calls) == {"first", "h1", "a", "r", "k", "h"}
    assert "127.0.0.1" in (stub.place / "r.html").read_text(), "the timeline names the workers"

    # What is there is found, through the store what lacks; only names travel.
    stub.ir(k="good", h="good", r="refuse NCC_EVRF004")
    answer = stub.run(*files, "--executor", f"{cluster.address}?through=store")
    assert answer.document["graphs"] == {"total": 6, "hit": 3, "compiled": 2, "failed": 1, "skipped": 0}
    assert classes(answer.document) == {"r.mlir": "refused"}
    assert answer.document["remembered"] == 1
    for worker in cluster.workers:
        worker.kill()
    assert alive(stub) == [] or all("dask_scheduler" in each for each in alive(stub))


@pytest.mark.integration
def test_a_cluster_that_is_not_there_is_said(stub: Stub) -> None:
    pytest.importorskip("distributed")
    answer = stub.run(*stub.ir(a="good"), "--executor", "dask://127.0.0.1:9", "--time-limit", "5", environ={
        "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "1s",
    })  # fmt: skip
    assert answer.code == 6
    assert "no Dask scheduler answers at dask://127.0.0.1:9" in answer.document["message"]


@pytest.mark.fast
def test_addresses() -> None:
    assert Address.parse("dask://host:8786") == Address("host", 8786, False)
    assert Address.parse("dask://[::1]:8786?through=store") == Address("::1", 8786, True)
    assert str(Address("host", 1, True)) == "dask://host:1"
    for wrong in (
        "dask://host",
        "tcp://host:1",
        "dask://host:x",
        "dask://host:1/path",
        "dask://h:1?through=air",
        "dask://:1",
    ):
        with pytest.raises(Usage):
            Address.parse(wrong)
