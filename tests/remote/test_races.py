"""Many at once: writers on one manifest and pointer, processes of one node, and writers that are killed."""

from __future__ import annotations

import multiprocessing
import random
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from neffcache.flows.pull import Target, everything, pull
from neffcache.flows.push import push
from neffcache.flows.pushable import of_all
from neffcache.key.canonical import sha256_hex, xxh3_128_hex
from neffcache.remote import pointers
from neffcache.remote.client import Access
from neffcache.remote.tier import RemoteStore
from neffcache.store import layout
from neffcache.store.local import LocalStore
from neffcache.store.records import encode
from tests.remote.conftest import make_manifest, put_job, tree
from tests.remote.proxy import Proxy, loses_answer, says

Connect = Callable[..., RemoteStore]
MB = 1 << 20

FORKS = multiprocessing.get_context("forkserver")
"""Processes that are forked from one that has imported everything and has no threads."""


def work(what: str, url: str, root: str, pipe: Any) -> None:
    """A pull or push in a process of its own, which may be killed at any point; it waits for a word to begin."""
    store = LocalStore.open(root, writable=True, given=True)
    remote = RemoteStore.open(url, Access(timeout=60))
    pipe.send("ready")
    pipe.recv()
    if what == "pull":
        done = pull(remote, store, everything(remote))
        pipe.send((done.complete, done.tally.transferred))
    else:
        fault = push(remote, store, of_all(store)).fault()
        pipe.send((fault is None, 0))


class Worker:
    """One such process."""

    def __init__(self, what: str, url: str, root: Path) -> None:
        self.pipe, theirs = FORKS.Pipe()
        self.process = FORKS.Process(target=work, args=(what, url, str(root), theirs))
        self.process.start()

    def wait_until_ready(self) -> None:
        assert self.pipe.poll(120)
        assert self.pipe.recv() == "ready"

    def go(self) -> None:
        self.pipe.send("go")

    def result(self) -> tuple[bool, int]:
        assert self.pipe.poll(300)
        found: tuple[bool, int] = self.pipe.recv()
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@pytest.fixture
def worker(url: str) -> Iterator[Callable[[str, Path], Worker]]:
    FORKS.set_forkserver_preload([__name__])
    started: list[Worker] = []

    def start(what: str, root: Path) -> Worker:
        started.append(Worker(what, url, root))
        return started[-1]

    yield start
    for item in started:
        item.kill()


def race(connect: Connect, writers: int, rounds: int) -> None:
    """Every writer puts one same manifest and its own one under one pointer, all at the same moment."""
    remotes = [connect(timeout=60.0) for _ in range(writers)]
    with ThreadPoolExecutor(writers) as pool:
        for number in range(rounds):
            job = f"race {number}"
            same = make_manifest("same", job=job)
            name = layout.manifest_name(same.id)
            won = list(pool.map(RemoteStore.put_if_absent, remotes, [name] * writers, [encode(same)] * writers))
            assert won.count(True) == 1, "two writers of one manifest, or none"
            own = [make_manifest("same", f"of {writer}", job=job) for writer in range(writers)]

            def point(pair: tuple[RemoteStore, object]) -> None:
                remote, made = pair
                remote.put_if_absent(layout.manifest_name(made.id), encode(made))  # type: ignore[attr-defined, arg-type]
                pointers.point(remote, made)  # type: ignore[arg-type]

            list(pool.map(point, zip(remotes, own, strict=True)))
            pointer = remotes[0].pointer(same.cache_key)
            assert pointer is not None
            current = remotes[0].get_manifest(pointer.manifest)
            assert current is not None
            words = ("same", *(f"of {writer}" for writer in range(writers)))
            assert set(current.compile_keys()) == {xxh3_128_hex(word.encode()) for word in words}, "a writer was lost"


def test_writers_race_on_one_manifest_and_one_pointer_and_nothing_is_lost(connect: Connect) -> None:
    race(connect, writers=6, rounds=2)


@pytest.mark.soak
def test_12_writers_race_in_30_rounds(connect: Connect) -> None:
    race(connect, writers=12, rounds=30)


def test_a_lost_answer_does_not_lose_a_writer(connect: Connect, front: Proxy) -> None:
    made = make_manifest("one")
    remote = connect(timeout=60.0)
    remote.put_if_absent(layout.manifest_name(made.id), encode(made))
    front.on(loses_answer, "PUT", "/keys/", times=1)
    assert pointers.point(remote, made)[0].id == made.id
    found = remote.pointer(made.cache_key)
    assert found is not None
    assert found.manifest == made.id


def test_16_processes_of_one_node_fetch_each_thing_once(
    connect: Connect, store: LocalStore, other: LocalStore, front: Proxy, worker: Callable[[str, Path], Worker]
) -> None:
    put_job(store, *(f"graph {number}" for number in range(4)), large=2 * MB)
    assert push(connect(), store, of_all(store)).fault() is None
    front.clear()
    workers = [worker("pull", other.root) for _ in range(16)]
    for item in workers:
        item.wait_until_ready()
    for item in workers:
        item.go()
    results = [item.result() for item in workers]
    assert all(complete for complete, _ in results)
    assert sum(transferred != 0 for _, transferred in results) == 1
    assert front.count("GET", "/blobs/") == 4
    assert front.count("GET", "/packs/") == 2
    assert front.count("GET", "/manifests/") == 1
    assert tree(other) == tree(store)


@pytest.mark.parametrize("clients", [8, pytest.param(64, marks=pytest.mark.soak)])
def test_clients_that_start_at_once_end_well_when_half_of_the_answers_are_503(
    connect: Connect, store: LocalStore, front: Proxy, tmp_path: Path, clients: int
) -> None:
    made = put_job(store, "one", "two")
    assert push(connect(), store, of_all(store)).fault() is None
    dice = random.Random(1)

    def half(handler: object, path: str, body: bytes) -> None:
        with front.lock:
            refuse = dice.random() < 0.5
        says(503, "SlowDown")(handler, path, body) if refuse else handler.forward(body)  # type: ignore[arg-type, attr-defined]

    front.on(half, "GET")
    remotes = [connect(timeout=60.0, transfers=2) for _ in range(clients)]

    def one(number: int) -> bool:
        own = LocalStore.open(tmp_path / f"node{number}", writable=True, given=True)
        return pull(remotes[number], own, [Target("x", made.id, made.cache_key)]).complete

    with ThreadPoolExecutor(clients) as pool:
        assert all(pool.map(one, range(clients)))
    assert sum(remote.client.faults().get("throttled", 0) for remote in remotes) > clients // 2


def kill_at_random_points(
    connect: Connect, store: LocalStore, worker: Callable[[str, Path], Worker], tmp_path: Path, times: int
) -> None:
    """A push and then pulls are killed; whoever reads meanwhile gets whole things, and a rerun finishes."""
    put_job(store, *(f"graph {number}" for number in range(6)), large=2 * MB)
    wanted = tree(store)
    dice = random.Random(7)

    def remote_is_whole() -> None:
        remote = connect(timeout=30.0)
        for kind in ("blob", "graph", "manifest", "key", "ref"):
            for name in remote.names(kind):  # type: ignore[arg-type]
                assert remote.get(name) is not None  # raises Damaged for a wrong byte
        reader = LocalStore.open(tmp_path / "reader", writable=True, given=True)
        targets = everything(remote)
        assert pull(remote, reader, targets).complete, "a pointer names what is not there"
        assert {name: wanted[name] for name in tree(reader)} == tree(reader)
        shutil.rmtree(reader.root)

    place = tmp_path / "node"
    for number in range(times):
        pushing = number < times // 2
        item = worker("push" if pushing else "pull", store.root if pushing else place)
        item.wait_until_ready()
        if not pushing and number == times // 2:
            assert push(connect(), store, of_all(store)).fault() is None
        item.go()
        time.sleep(dice.uniform(0, 0.6))
        item.kill()
        if pushing:
            remote_is_whole()
        elif place.exists():
            found = LocalStore.open(place, writable=False, given=True)
            assert {name: wanted[name] for name in tree(found)} == tree(found), "a wrong byte is visible"
    assert push(connect(), store, of_all(store)).fault() is None
    remote_is_whole()
    remote = connect()
    last = LocalStore.open(place, writable=True, given=True)
    assert pull(remote, last, everything(remote)).complete
    assert tree(last) == wanted


def test_a_killed_writer_leaves_nothing_wrong(
    connect: Connect, store: LocalStore, worker: Callable[[str, Path], Worker], tmp_path: Path
) -> None:
    kill_at_random_points(connect, store, worker, tmp_path, 4)


@pytest.mark.soak
def test_50_killed_writers_leave_nothing_wrong(
    connect: Connect, store: LocalStore, worker: Callable[[str, Path], Worker], tmp_path: Path
) -> None:
    kill_at_random_points(connect, store, worker, tmp_path, 50)


def test_2501_manifests_are_listed_and_compared_completely(
    connect: Connect, store: LocalStore, server: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    from neffcache.flows.remote_check import listing

    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)  # type: ignore[attr-defined]  # not through the proxy
    remote = connect(timeout=60.0, transfers=16)
    made = [make_manifest(f"{number}", job=f"job {number}", complete=False) for number in range(2_501)]

    def put(item: object) -> None:
        data = encode(item)  # type: ignore[arg-type]
        remote.client.put(layout.manifest_name(item.id), data, sha256_hex(data), size=len(data))  # type: ignore[attr-defined]

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(put, made))
    for item in made[1:]:
        store.put_manifest(item)
    store.put_manifest(make_manifest("only here", complete=False))
    requests = remote.client.counts["list"]
    found = listing(remote, store)
    assert remote.client.counts["list"] - requests == 3
    assert found["compared"] == {"both": 2_500, "remote_only": 1, "local_only": 1}
    assert {row["id"] for row in found["manifests"] if "remote" in row["tiers"]} == {item.id for item in made}


def test_a_page_that_fails_ends_a_listing_instead_of_shortening_it(connect: Connect, front: Proxy) -> None:
    remote = connect()
    for number in range(3):
        made = make_manifest(str(number))
        remote.put_if_absent(layout.manifest_name(made.id), encode(made))
    real = remote.client._s3.list_objects_v2
    remote.client._s3.list_objects_v2 = lambda **given: real(**{**given, "MaxKeys": 2})
    assert len(list(remote.names("manifest"))) == 3
    front.on(says(500, "InternalError", {"Retry-After": "3600"}), "GET", "continuation-token")
    from neffcache.remote.errors import Unreachable

    with pytest.raises(Unreachable):
        list(remote.names("manifest"))
