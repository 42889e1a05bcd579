"""`neffcache compile` over a stub compiler: what becomes of each graph, what is kept, what is remembered, what ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from neffcache.store.local import LocalStore
from tests.stubs.stub import Stub

pytestmark = pytest.mark.integration


def classes(document: dict) -> dict[str, str]:  # type: ignore[type-arg]
    return {fault["details"]["name"]: fault["details"]["class"] for fault in document["failures"]}


def test_64_compiles_of_which_five_go_wrong(stub: Stub) -> None:
    good = {f"good{number:02}": f"good {number}" for number in range(59)}
    bad = {
        "refused": "refuse NCC_EVRF007",
        "hanging": "hang",
        "killed": "killed",
        "empty": "empty",
    }
    files = stub.ir(**good, flaky="flaky", **bad)
    answer = stub.run(*files, "--jobs", "2", "--time-limit", "4")
    assert answer.code == 6, answer.stderr
    assert answer.document["graphs"] == {"total": 64, "hit": 0, "compiled": 60, "failed": 4, "skipped": 0}
    assert classes(answer.document) == {
        "refused.mlir": "refused",
        "hanging.mlir": "time-out",
        "killed.mlir": "killed",
        "empty.mlir": "no-artifact",
    }
    calls = stub.calls()
    assert {name: calls[name] for name in ("flaky", *bad)} == {
        "flaky": 2, "refused": 1, "hanging": 1, "killed": 2, "empty": 2,
    }  # fmt: skip
    assert all(calls[name] == 1 for name in good)
    refused = next(f for f in answer.document["failures"] if f["details"]["class"] == "refused")
    assert "[NCC_EVRF007] the stub does not like this graph" in refused["message"], "not the follow-up error"
    assert "parallelism" in refused["hint"]
    said = Path(refused["details"]["log_file"]).read_text()
    assert "stub compiler 2.99.0.0+stub: refuse NCC_EVRF007" in said
    store = LocalStore.open(stub.place / "store", writable=True, given=True)
    published = {item["compile_key"] for item in answer.document["files"] if item["state"] == "compiled"}
    assert set(store.graph_keys()) == published
    assert len(published) == 60
    for key in published:
        record = store.get_graph(key)
        assert record is not None
        assert store.check_blob(record.artifacts[0].sha256, fresh=True)
        assert b"stub compiler" in store.read_blob(record.extra["log"])
    assert alive(stub) == []

    # What comes and goes now comes; the refusal is told, with its age and its log, and not compiled again.
    stub.ir(hanging="good")
    again = stub.run(*files, "--jobs", "2", "--time-limit", "4")
    assert again.code == 6
    assert again.document["graphs"] == {"total": 64, "hit": 60, "compiled": 1, "failed": 3, "skipped": 0}
    assert again.document["remembered"] == 1
    replayed = again.document["failures"][0]
    assert replayed["details"]["replayed"] is True
    assert "ago and is not tried again" in replayed["message"]
    assert replayed["details"]["log_file"] == refused["details"]["log_file"]
    assert "--retry-failed" in replayed["hint"]
    assert stub.calls()["refused"] == 1
    assert all(stub.calls()[name] == 1 for name in good)

    (stub.place / "count" / "calls").unlink()
    assert stub.run(files[-4], "--retry-failed").code == 6
    assert stub.calls() == {"refused": 1}


def test_a_refusal_is_of_one_compiler_and_one_set_of_options(stub: Stub) -> None:
    files = stub.ir(a="refuse NCC_EUOC002")
    assert stub.run(*files).document["remembered"] == 0
    assert stub.run(*files).document["remembered"] == 1
    assert stub.run(*files, environ={"STUB_VERSION": "2.100.1"}).document["remembered"] == 0
    assert stub.run(*files, "--option=-O1").document["remembered"] == 0
    assert stub.run(*files, "--option=-O2").document["remembered"] == 1, "what the level is anyway"
    assert stub.calls()["a"] == 3


@pytest.mark.parametrize(
    ("wish", "kind", "exit_code"),
    [
        ("say OSError: [Errno 28] No space left on device", "io", 7),
        ("say neuronx-cc: error while loading shared libraries: libfoo.so.1", "io", 6),
    ],
)
def test_a_fault_of_the_machine_is_told_once_and_blamed_on_no_graph(
    stub: Stub, wish: str, kind: str, exit_code: int
) -> None:
    answer = stub.run(*stub.ir(**{f"g{number}": wish for number in range(6)}), "--jobs", "1")
    assert answer.code == exit_code, answer.stderr
    assert answer.document["graphs"] == {"total": 6, "hit": 0, "compiled": 0, "failed": 0, "skipped": 6}
    assert answer.document["failures"] == []
    assert answer.document["stopped"]["details"]["class"] == kind
    assert sum(stub.calls().values()) == 1
    assert answer.stderr.count("error: compiling stopped at") == 1


def test_a_compiler_that_cannot_be_identified_is_never_used(stub: Stub) -> None:
    files = stub.ir(a="good")
    answer = stub.run(*files, environ={"STUB_VERSION": "unknown"})
    assert answer.code == 8
    assert "told no version" in answer.document["message"]
    absent = stub.run(*files, environ={"PATH": "/usr/bin:/bin"})
    assert absent.code == 8
    assert "no neuronx-cc on PATH" in absent.document["message"]
    assert stub.calls() == {}


def test_the_neffs_can_be_had_as_files_and_other_options_are_another_graph(stub: Stub) -> None:
    files = stub.ir(a="good", b="good")
    out = stub.place / "neffs"
    first = stub.run(stub.place / "ir", "--out", out, "--target", "trn1")
    assert first.code == 0, first.stderr
    assert sorted(path.name for path in out.iterdir()) == ["a.neff", "b.neff"]
    stored = {item["neff"]["bytes"] for item in first.document["files"]}
    assert {path.stat().st_size for path in out.iterdir()} == stored
    again = stub.run(*files, "--target", "trn1", "--option=--verbose=debug", "--report", "/dev/null/x.html")
    assert again.document["graphs"]["hit"] == 2, "how much it logs changes no NEFF"
    assert (again.code, "cannot be written" in again.stderr) == (2, True), "and the result is told all the same"
    other = stub.run(*files, "--target", "trn1", "--option=--auto-cast=all")
    assert other.document["graphs"]["compiled"] == 2
    keys = [{item["compile_key"] for item in answer.document["files"]} for answer in (first, other)]
    assert not keys[0] & keys[1]
    words = (stub.place / "count" / "calls").read_text().splitlines()
    assert any("--framework XLA --target trn1 --lnc 1 --optlevel=2 --auto-cast=all --output" in word for word in words)


def test_shards_share_the_work_out_and_a_last_run_finds_all(stub: Stub) -> None:
    files = stub.ir(**{f"g{number}": "good" for number in range(7)})
    counts = [
        stub.run(*files, environ=environ).document["graphs"]["compiled"]
        for environ in (
            {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_MIN": "4", "SLURM_ARRAY_TASK_COUNT": "3"},
            {"JOB_COMPLETION_INDEX": "0", "NEFFCACHE_SHARDS": "3"},
            {"AWS_BATCH_JOB_ARRAY_INDEX": "2", "AWS_BATCH_JOB_ARRAY_SIZE": "3"},
        )
    ]
    assert sum(counts) == 7
    assert sorted(counts) == [2, 2, 3]
    last = stub.run(*files)
    assert last.document["graphs"] == {"total": 7, "hit": 7, "compiled": 0, "failed": 0, "skipped": 0}
    assert sum(stub.calls().values()) == 7


# How it ends


def alive(stub: Stub) -> list[str]:
    """Processes of this test that are still there, after some time to go."""
    place = str(stub.place)

    def ours() -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("STUB_DIR", "").startswith(place):
                    yield process

    deadline = time.monotonic() + 20
    while (found := list(ours())) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [" ".join(process.cmdline()) for process in found]


def when_both_hang(stub: Stub, command: subprocess.Popen[str]) -> list[int]:
    """Waits until one graph is kept and two compilers hang; their process ids."""
    assert command.stderr is not None
    done = False
    deadline = time.monotonic() + 60
    for line in command.stderr:
        done = done or line.strip().startswith("done")
        if done:
            break
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError, psutil.NoSuchProcess):  # a good one may end just now
            calls = stub.calls()
            children = [p for p in stub.pids() if psutil.pid_exists(p) and psutil.Process(p).children()]
            if calls["h1"] and calls["h2"] and len(children) == 2:
                return children
        time.sleep(0.02)
    raise AssertionError("the compilers did not start")


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGHUP, 143), (signal.SIGTERM, 143), (signal.SIGKILL, -9)],
    ids=["SIGINT", "SIGHUP", "SIGTERM", "SIGKILL"],
)
def test_a_signal_ends_every_process_and_a_rerun_does_the_rest(stub: Stub, number: signal.Signals, code: int) -> None:
    files = stub.ir(a="good big", h1="hang", h2="hang")
    command = stub.start(*files, "--jobs", "2")
    when_both_hang(stub, command)
    command.send_signal(number)
    assert command.wait(30) == code
    assert alive(stub) == []
    stub.ir(h1="good", h2="good")
    again = stub.run(*files)
    assert again.code == 0, again.stderr
    assert again.document["graphs"] == {"total": 3, "hit": 1, "compiled": 2, "failed": 0, "skipped": 0}
    assert again.document["remembered"] == 0
    assert stub.calls()["a"] == 1


def test_a_killed_compiler_is_tried_again_alone_and_not_remembered(stub: Stub) -> None:
    files = stub.ir(**{f"g{number}": "sleep 0.3" for number in range(4)}, k="killed-once")
    answer = stub.run(*files, "--jobs", "2")
    assert answer.code == 0, answer.stderr
    assert answer.document["graphs"]["compiled"] == 5
    assert answer.document["retries"] == 1
    assert stub.calls()["k"] == 2
    last = (stub.place / "count" / "calls").read_text().splitlines()[-1]
    assert int(last.split()[1]) == stub.pids()[-1]
    assert stub.calls() == {"g0": 1, "g1": 1, "g2": 1, "g3": 1, "k": 2}


def test_a_killed_worker_costs_only_its_own_graph(stub: Stub) -> None:
    files = stub.ir(a="good big", h1="hang", h2="hang", b="good big")
    command = stub.start(*files, "--jobs", "2")
    compilers = when_both_hang(stub, command)
    stub.ir(h1="good", h2="good")  # what a rerun of the command will see
    worker = psutil.Process(compilers[0]).parent()
    assert worker is not None
    worker.kill()
    deadline = time.monotonic() + 20
    while psutil.pid_exists(compilers[0]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not psutil.pid_exists(compilers[0]), "the guard ends the compiler that the worker left"
    assert psutil.pid_exists(compilers[1]), "and no other"
    os.kill(compilers[1], signal.SIGKILL)
    # Both are tried once more, alone; they hang again and are killed again: a failure, and never a wait for ever.
    for _ in range(2):
        one = next_hanging(stub, compilers)
        compilers.append(one)
        os.kill(one, signal.SIGKILL)
    _, said = command.communicate(timeout=60)
    assert command.returncode == 6
    assert said.count("FAILED") == 2
    assert alive(stub) == []
    assert stub.calls()["b"] == 1
    again = stub.run(*files)
    assert again.code == 0
    assert again.document["graphs"] == {"total": 4, "hit": 2, "compiled": 2, "failed": 0, "skipped": 0}


def next_hanging(stub: Stub, known: list[int]) -> int:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for pid in set(stub.pids()) - set(known):
            with contextlib.suppress(psutil.Error):
                if psutil.Process(pid).children():
                    return pid
        time.sleep(0.02)
    raise AssertionError("it was not tried again")
