"""init, push and pull with signatures, against a real S3 server and an identity that may only read below the prefix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from neffcache.errors import Mismatch
from neffcache.flows import init as flow
from neffcache.flows.fetching import Wanted, pull_wanted
from neffcache.flows.pull import Target, pull
from neffcache.flows.push import push
from neffcache.flows.pushable import of_channel, of_request
from neffcache.flows.remote import RemoteOptions, RemoteSettings
from neffcache.flows.sources import Remote
from neffcache.flows.trust import Trust, sign
from neffcache.key.canonical import xxh3_128_hex
from neffcache.remote.client import Access
from neffcache.remote.tier import RemoteStore
from neffcache.store import layout
from neffcache.store.local import LocalStore
from neffcache.store.records import Manifest
from neffcache.store.signing import make_key, private_key
from neffcache.store.view import has_view
from scripts.seaweedfs import Server
from tests.cli.conftest import VERSIONS, job_of, put_job, request_of
from tests.remote.conftest import READER
from tests.remote.proxy import Proxy
from tests.store.conftest import Child

REQUEST = replace(request_of(), versions=VERSIONS)
NAME = REQUEST.digest


@pytest.fixture
def warmed(store: LocalStore) -> Manifest:
    return put_job(store, job_of(request_of()), "one", "two")


@pytest.fixture
def trust(tmp_path: Path) -> Trust:
    return Trust((make_key(tmp_path / "fleet.key"),))


def sign_all(store: LocalStore, tmp_path: Path) -> None:
    for _, ref in store.refs("current"):
        sign(store, private_key(tmp_path / "fleet.key"), "current", ref)


def send(remote: RemoteStore, store: LocalStore) -> None:
    done = push(remote, store, of_channel(store, "current"))
    assert done.fault() is None
    assert done.tally.adds_up


@pytest.fixture
def reader(
    warmed: Manifest, remote: RemoteStore, store: LocalStore, server: Server, monkeypatch: pytest.MonkeyPatch, url: str
) -> Callable[[], Remote]:
    """The remote with the job in it, as an identity sees it that may read below the prefix, and no more."""
    send(remote, store)

    def opened() -> Remote:
        for name, value in server.environment(READER).items():
            if name != "AWS_ENDPOINT_URL":  # the proxy's stays
                monkeypatch.setenv(name, value)
        return Remote(RemoteStore.open(url, Access(timeout=20.0)))

    return opened


def test_a_reader_makes_the_view_with_gets_below_the_prefix_only(
    reader: Callable[[], Remote], other: LocalStore, warmed: Manifest, front: Proxy, prefix: str
) -> None:
    source = reader()
    front.clear()
    document = flow.init(REQUEST, other, source)
    assert (document["state"], document["manifest"], document["exit_code"]) == ("HIT", warmed.id, 0), document["reason"]
    assert has_view(other, warmed)
    assert other.damaged(warmed) == []
    assert document["bytes"] > 0
    assert document["requests"] == front.count("GET") > 0
    assert front.count("GET", f"/{prefix}/v1/") == front.count("GET"), "outside of the prefix"
    assert sum(front.count(verb) for verb in ("PUT", "POST", "DELETE", "HEAD")) == 0
    assert front.count("GET", "list-type") == 0


def test_again_it_costs_one_request(reader: Callable[[], Remote], other: LocalStore, warmed: Manifest) -> None:
    assert flow.init(REQUEST, other, reader())["exit_code"] == 0
    document = flow.init(REQUEST, other, reader())
    assert (document["state"], document["bytes"], document["requests"]) == ("HIT", 0, 1)


def test_another_request_is_unknown_after_one_request(reader: Callable[[], Remote], other: LocalStore) -> None:
    source = reader()
    document = flow.init(replace(REQUEST, versions={**VERSIONS, "torchtitan": "0.3.1"}), other, source)
    assert (document["state"], document["exit_code"], document["requests"]) == ("UNKNOWN", 3, 1)
    document = flow.init(replace(REQUEST, versions={}), other, source)
    assert (document["state"], document["requests"]) == ("UNKNOWN", 0)


def test_sixteen_containers_of_a_node_fetch_each_blob_once(
    reader: Callable[[], Remote],
    tmp_path: Path,
    warmed: Manifest,
    front: Proxy,
    child: Callable[[Callable[[], object]], Child],
) -> None:
    reader()
    front.clear()

    def one() -> None:
        target = LocalStore.open(tmp_path / "node", writable=True, given=True, mode=0o755)
        document = flow.init(REQUEST, target, reader())
        assert document["exit_code"] == 0, document

    assert [item.wait() for item in [child(one) for _ in range(16)]] == [0] * 16
    assert front.count("GET", "/refs/") == 16
    for once in ("/manifests/", "/packs/"):
        assert front.count("GET", once) <= 2, once  # a pack of blobs, and one of records
    assert front.count("GET", "/blobs/") <= 4
    made = LocalStore.open(tmp_path / "node", writable=False, given=True)
    assert made.damaged(warmed) == made.missing(warmed) == []


def test_a_store_that_holds_everything_needs_no_remote(
    reader: Callable[[], Remote], other: LocalStore, warmed: Manifest, front: Proxy, server: Server,
    monkeypatch: pytest.MonkeyPatch, url: str, tmp_path: Path,
) -> None:  # fmt: skip
    assert flow.init(REQUEST, other, reader())["exit_code"] == 0
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    gone = Remote(RemoteStore.open(url, Access(timeout=0.3)))
    document = flow.init(REQUEST, other, gone)
    assert (document["state"], document["stale"], document["exit_code"]) == ("HIT", True, 0)
    cold = LocalStore.open(tmp_path / "cold", writable=True, given=True)
    assert flow.init(REQUEST, cold, gone)["exit_code"] == 4
    assert flow.init(REQUEST, other, gone, on_remote_error="fail")["exit_code"] == 4
    assert flow.init(REQUEST, cold, gone, on_remote_error="compile")["exit_code"] == 3


def test_signatures_travel_with_push_and_init_demands_them(
    remote: RemoteStore, store: LocalStore, other: LocalStore, warmed: Manifest, trust: Trust, tmp_path: Path,
    front: Proxy,
) -> None:  # fmt: skip
    send(remote, store)
    document = flow.init(REQUEST, other, Remote(remote), trust=trust)
    assert (document["exit_code"], document["error"]["error"]) == (5, "Mismatch")
    assert list(other.blobs()) == other.graph_keys() == other.manifest_ids() == []
    sign_all(store, tmp_path)
    send(remote, store)
    front.clear()
    send(remote, store)
    assert front.count("PUT") == 0, "pushed again, nothing is written"
    document = flow.init(REQUEST, other, Remote(remote), trust=trust)
    assert (document["state"], document["exit_code"]) == ("HIT", 0), document
    assert flow.init(REQUEST, other, Remote(remote), trust=trust)["requests"] == 1


def test_a_record_that_was_replaced_in_the_remote_is_refused_before_a_blob_is_fetched(
    remote: RemoteStore, store: LocalStore, other: LocalStore, warmed: Manifest, trust: Trust, tmp_path: Path
) -> None:
    sign_all(store, tmp_path)
    send(remote, store)
    evil = LocalStore.open(tmp_path / "evil", writable=True, given=True)
    key = xxh3_128_hex(b"one")
    record = remote.get_graph(key)
    assert record is not None
    sha256 = evil.put_blob(b"another program")
    remote.put_if_absent(layout.blob_name(sha256), b"another program")
    changed = replace(record, artifacts=(replace(record.artifacts[0], sha256=sha256, size=15),))
    # The record lies in a pack too: without packs in the manifest readers look under its own name.
    name, manifest_name = layout.graph_name(key), layout.manifest_name(warmed.id)
    for item, where in ((changed, name), (warmed, manifest_name)):
        found = remote.versioned(type(item), where)
        assert found is not None
        assert not isinstance(found, str)
        assert remote.replace(where, item, found.etag)
    assert flow.init(REQUEST, LocalStore.open(tmp_path / "naive", writable=True), Remote(remote))["exit_code"] == 0
    document = flow.init(REQUEST, other, Remote(remote), trust=trust)
    assert document["exit_code"] == 5
    assert key in document["reason"]
    assert list(other.blobs()) == other.graph_keys() == other.manifest_ids() == []


def test_an_older_ref_that_is_put_back_is_refused(
    remote: RemoteStore, store: LocalStore, other: LocalStore, warmed: Manifest, trust: Trust, tmp_path: Path
) -> None:
    sign_all(store, tmp_path)
    send(remote, store)
    name = layout.ref_name("current", REQUEST.config, NAME)
    old = remote.ref("current", REQUEST.config, NAME)
    assert old is not None
    put_job(store, job_of(request_of()), "one", "two", "three", serial=8)
    sign_all(store, tmp_path)
    send(remote, store)
    assert flow.init(REQUEST, other, Remote(remote), trust=trust)["serial"] == 8
    found = remote.versioned(type(old), name)
    assert found is not None
    assert not isinstance(found, str)
    assert remote.replace(name, old, found.etag)
    document = flow.init(REQUEST, other, Remote(remote), trust=trust)
    assert document["exit_code"] == 5
    assert "older state" in document["reason"]


def test_a_push_does_not_put_an_older_ref_over_a_newer_one(
    remote: RemoteStore, store: LocalStore, other: LocalStore, warmed: Manifest
) -> None:
    newer = put_job(other, job_of(request_of()), "one", "two", "three", serial=9)
    send(remote, other)
    send(remote, store)
    ref = remote.ref("current", REQUEST.config, NAME)
    assert ref is not None
    assert (ref.manifest, ref.serial) == (newer.id, 9)


def test_pull_demands_signatures_too_and_keeps_them(
    remote: RemoteStore, store: LocalStore, other: LocalStore, warmed: Manifest, trust: Trust, tmp_path: Path, url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("neffcache.flows.resolve.titan_installed", lambda: False)
    settings = RemoteSettings.read(RemoteOptions(remote=url), {})
    wanted = Wanted(requests=(REQUEST,))
    environ: Mapping[str, str] = {"TMPDIR": str(tmp_path)}
    send(remote, store)
    with pytest.raises(Mismatch, match="not signed"):
        pull_wanted(settings, other, environ, wanted, trust=trust)
    assert other.manifest_ids() == []
    sign_all(store, tmp_path)
    send(remote, store)
    assert pull_wanted(settings, other, environ, wanted, trust=trust).exit_code == 0
    assert other.signatures(warmed.id, trust.keys[0].signer) is not None
    unsaid = Wanted(requests=(request_of(),))
    assert pull_wanted(settings, other, environ, unsaid).exit_code == 3


def test_what_is_not_approved_is_not_fetched(
    remote: RemoteStore, store: LocalStore, other: LocalStore, warmed: Manifest, front: Proxy
) -> None:
    send(remote, store)
    front.clear()

    def refuse(manifest: Manifest, graph: object) -> None:
        raise Mismatch("no")

    with pytest.raises(Mismatch):
        pull(remote, other, [Target("x", warmed.id, warmed.cache_key)], approve=refuse)
    assert front.count("GET", "/blobs/") == 0
    assert list(other.blobs()) == other.graph_keys() == other.manifest_ids() == []


def test_push_finds_a_request_of_any_versions_unless_they_are_said(store: LocalStore, warmed: Manifest) -> None:
    other = job_of(request_of(), threads=2)
    made = put_job(store, replace(other, versions={**VERSIONS, "torchtitan": "0.3.1"}), "three")
    assert {item.manifest.id for item in of_request(store, "current", request_of())} == {warmed.id, made.id}
    assert [item.manifest.id for item in of_request(store, "current", REQUEST)] == [warmed.id]
    assert of_request(store, "current", request_of(sets=["training.seq_len=512"])) == []
