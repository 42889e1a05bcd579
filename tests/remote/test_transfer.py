"""push and pull: everything arrives, once, in order, and what fails is said."""

from __future__ import annotations

import http.client
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from neffcache.errors import StoreFault, Usage
from neffcache.flows.pull import Target, by_key, by_ref, everything, in_channel, pull
from neffcache.flows.push import push
from neffcache.flows.pushable import of_all, of_channel, of_key
from neffcache.key.canonical import sha256_hex, xxh3_128_hex
from neffcache.remote import errors, fetch, send
from neffcache.remote.packs import places
from neffcache.remote.tier import RemoteStore
from neffcache.store import layout
from neffcache.store.local import LocalStore
from neffcache.store.records import Manifest
from tests.remote.conftest import content, make_manifest, put_graph, put_job, tree
from tests.remote.proxy import Proxy, Rule, cuts, flips, resets, says

Connect = Callable[..., RemoteStore]

MB = 1 << 20


def sent(connect: Connect, store: LocalStore, **given: object) -> None:
    pushed = push(connect(), store, of_all(store), **given)  # type: ignore[arg-type]
    assert pushed.fault() is None
    assert pushed.tally.adds_up


def fails_for_ever(front: Proxy, part: str) -> Rule:
    """Twice an error that a retry could heal, then one that asks for more patience than there is."""
    passing = front.on(says(500, "InternalError"), "PUT", part, times=2)
    front.on(says(500, "InternalError", {"Retry-After": "3600"}), "PUT", part)
    return passing


def target(made: Manifest) -> list[Target]:
    return [Target("x", made.id, made.cache_key)]


def test_what_is_pushed_is_pulled_byte_for_byte(connect: Connect, store: LocalStore, other: LocalStore) -> None:
    put_job(store, "one", "two", large=2 * MB)
    put_job(store, "two", "three", job="next")
    pushed = push(connect(), store, of_all(store))
    assert pushed.fault() is None
    # graphs 3, blobs: a text, two small ones each, and two large ones; 2 manifests, keys, refs
    assert (pushed.tally.planned, pushed.tally.transferred) == (3 + 9 + 2 + 6, 3 + 9 + 2 + 6)
    remote = connect()
    pulled = pull(remote, other, everything(remote))
    assert pulled.complete
    assert pulled.tally.adds_up
    assert tree(other) == tree(store)


def test_small_files_travel_in_packs_and_cost_no_request_each(
    connect: Connect, store: LocalStore, other: LocalStore, front: Proxy
) -> None:
    for word in ("one", "two"):
        put_graph(store, word, small=100)
    made = put_job(store, "one", "two")
    sent(connect, store)
    assert front.count("PUT", "/blobs/") == 0
    assert front.count("PUT", "/packs/") == 2, "one of files, one of records"
    front.clear()
    assert pull(connect(), other, target(made)).complete
    assert len(front.seen) == 3, "the manifest, its records, their files"
    assert tree(other).keys() >= {layout.blob_name(sha256_hex(content("one 99")))}


def test_a_record_is_there_as_soon_as_all_that_it_names_is(
    connect: Connect, store: LocalStore, other: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"g{number}" for number in range(12)]
    for word in words:
        put_graph(store, word, large=2 * MB)
    made = put_job(store, *words)
    sent(connect, store)
    here: list[int] = []  # records, each time that blobs have become visible
    waiting: list[int] = []  # batches that are on their way or wait to become visible
    monkeypatch.setattr(fetch, "BATCH", MB)
    start, finish = fetch._Part.__init__, fetch._Part.finish
    begun = itertools.count(1)
    ended: list[object] = []

    def started(part: fetch._Part, *rest: Any) -> None:
        waiting.append(next(begun) - len(ended))
        start(part, *rest)

    def finished(part: fetch._Part, *rest: Any) -> None:
        finish(part, *rest)
        here.append(len(other.graph_keys()))
        ended.append(part)

    monkeypatch.setattr(fetch._Part, "__init__", started)
    monkeypatch.setattr(fetch._Part, "finish", finished)
    pulled = pull(connect(), other, target(made))
    assert pulled.complete
    assert pulled.tally.adds_up
    assert here == sorted(here)
    assert here[-1] == len(words)
    assert len(set(here)) > 3, "they came at once"
    assert max(waiting) <= fetch.ARRIVING + fetch.PUBLISHING + 1, "a killed pull would lose more"


def test_a_file_is_handed_to_the_socket_in_large_blocks(
    connect: Connect, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body that is read by 16 kB costs the sender more than its digest does."""
    sizes: list[int] = []
    send_one = http.client.HTTPConnection.send

    def noted(connection: http.client.HTTPConnection, data: bytes) -> None:
        sizes.append(len(data))
        send_one(connection, data)

    monkeypatch.setattr(http.client.HTTPConnection, "send", noted)
    monkeypatch.setattr(send, "MULTIPART", 6 * MB)
    put_job(store, "one", large=5 * MB)
    put_job(store, "two", large=7 * MB, job="next")
    sent(connect, store)
    bodies = [size for size in sizes if size > 1 << 15]
    assert sum(bodies) >= 12 * MB
    assert len(bodies) <= 12 + 4, "a block is a megabyte"


def test_a_pull_with_nothing_to_do_is_one_request_and_reads_no_blob(
    connect: Connect, store: LocalStore, front: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = put_job(store, "one", large=2 * MB)
    sent(connect, store)
    front.clear()
    monkeypatch.setattr("neffcache.store.blobs.hash_regular", lambda path: pytest.fail(f"{path} was read"))
    remote = connect()
    found = by_key(remote, made.cache_key, "x")
    assert found is not None
    pulled = pull(remote, store, [found])
    assert (pulled.complete, pulled.tally.planned) == (True, 0)
    assert [method for method, _, _ in front.seen] == ["GET"]


def test_a_second_push_sends_nothing(connect: Connect, store: LocalStore, front: Proxy) -> None:
    put_job(store, "one", "two", large=2 * MB)
    sent(connect, store)
    front.clear()
    again = push(connect(), store, of_all(store))
    assert (again.fault(), again.tally.transferred) == (None, 0)
    assert again.tally.present == again.tally.planned > 0
    assert front.count("PUT") == front.count("POST") == 0


def test_readers_write_nothing_and_never_list(
    connect: Connect, store: LocalStore, other: LocalStore, front: Proxy
) -> None:
    made = put_job(store, "one", "two", large=2 * MB)
    sent(connect, store)
    front.clear()
    remote = connect()
    config = "config_job"
    found = by_ref(remote, "current", config, {"config": config, "lnc": 2}, sha256_hex(config.encode()))
    assert found is not None
    assert pull(remote, other, [found]).complete
    assert {method for method, _, _ in front.seen} == {"GET"}
    assert not any("list-type" in path for _, path, _ in front.seen)
    assert made.id == found.manifest


def test_no_request_leaves_the_prefix(
    connect: Connect, store: LocalStore, other: LocalStore, front: Proxy, prefix: str
) -> None:
    put_job(store, "one", "two", large=2 * MB)
    sent(connect, store)
    remote = connect()
    pull(remote, other, everything(remote))
    outside = [
        path for _, path, _ in front.seen
        if not path.startswith(f"/cache/{prefix}/v1/") and f"prefix={prefix}/v1/" not in path
    ]  # fmt: skip
    assert outside == []
    assert not any("//" in path for _, path, _ in front.seen)


def test_nothing_is_named_before_it_is_there(connect: Connect, store: LocalStore, front: Proxy) -> None:
    put_job(store, "one", "two", large=2 * MB)
    sent(connect, store)
    order = ["/probe", "/blobs/", "/packs/", "/graphs/", "/manifests/", "/keys/", "/refs/"]
    wrote = [
        next(number for number, part in enumerate(order) if part in path)
        for method, path, _ in front.seen if method == "PUT"
    ]  # fmt: skip
    first = {part: wrote.index(order.index(part)) for part in order}
    last = {part: len(wrote) - 1 - wrote[::-1].index(order.index(part)) for part in order}
    assert max(last["/blobs/"], last["/graphs/"]) < first["/manifests/"]
    put = [path.partition("/v1/")[2].partition("?")[0] for method, path, _ in front.seen if method == "PUT"]
    for name in (name for name in put if name.startswith("graphs/")):
        record = connect().get_graph(name.removeprefix("graphs/").removesuffix(".json"))
        assert record is not None
        placed = places(record)
        blobs = [layout.blob_name(sha256) for sha256 in (record.text, *(item.sha256 for item in record.artifacts))]
        lies = {layout.pack_name(placed[blob].pack) if blob in placed else blob for blob in blobs}
        assert {place for place in lies if put.index(place) > put.index(name)} == set()
    assert last["/packs/"] < first["/manifests/"]
    assert last["/manifests/"] < first["/keys/"]
    assert last["/keys/"] < first["/refs/"]


def test_a_dry_run_moves_nothing_and_says_what_it_would(
    connect: Connect, store: LocalStore, other: LocalStore, front: Proxy
) -> None:
    made = put_job(store, "one", large=2 * MB)
    planned = push(connect(), store, of_all(store), dry_run=True)
    assert planned.tally.planned == 1 + 4 + 1 + 1 + 1
    assert {method for method, _, _ in front.seen} <= {"GET", "HEAD"}
    sent(connect, store)
    before = tree(other)
    assert pull(connect(), other, target(made), dry_run=True).tally.planned == 1 + 4 + 1
    assert tree(other) == before == {}


def test_one_upload_that_always_fails_leaves_the_others_and_the_next_push_sends_one(
    connect: Connect, store: LocalStore, front: Proxy
) -> None:
    words = [f"graph{number}" for number in range(20)]
    for word in words:
        put_graph(store, word, small=0, large=2 * MB)
    made = store.put_manifest(make_manifest(*words))
    store.set_pointer(made.cache_key, made.id)
    bad = layout.blob_name(sha256_hex(content("graph7 large", 2 * MB)))
    rule = fails_for_ever(front, bad)
    pushed = push(connect(), store, of_all(store))
    fault = pushed.fault()
    assert fault is not None
    assert fault.exit_code == 4
    assert rule.used == 2, "it was not tried again"
    # the blob, its record, the manifest, the pointer
    assert (pushed.tally.failed, pushed.tally.adds_up) == (4, True)
    remote = connect()
    assert sum(1 for name in remote.names("blob")) == 19
    assert remote.pointer(made.cache_key) is None
    assert remote.get_manifest(made.id) is None
    front.clear()
    sent(connect, store)
    again = {path.partition("/v1/")[2] for method, path, _ in front.seen if method == "PUT" and "/blobs/" in path}
    # and the few bytes of text of that graph: the pack that has them is named by no record yet
    assert again == {bad, layout.blob_name(sha256_hex(b"neffcache graph 1\ngraph7\n"))}


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_large_file_without_a_record_is_found_and_not_sent_again(
    connect: Connect, store: LocalStore, front: Proxy, dry_run: bool
) -> None:
    """What a push leaves that is killed before the first record."""
    put_job(store, "one", large=2 * MB)
    (sha256,) = [blob for blob in store.blobs() if (store.blob_size(blob) or 0) >= MB]
    assert send.send_blob(connect(), store, sha256, 2 * MB)
    front.clear()
    pushed = push(connect(), store, of_all(store), dry_run=dry_run)
    assert pushed.fault() is None
    assert pushed.tally.present_bytes == 2 * MB
    assert (front.count("HEAD", sha256), front.count("PUT", sha256)) == (1, 0)


@pytest.mark.parametrize(
    "action",
    [says(500, "InternalError"), says(503, "SlowDown", {"Retry-After": "0"}), resets, cuts, flips],
    ids=["500", "503", "reset", "short", "wrong bytes"],
)
def test_faults_that_pass_are_healed_and_counted(
    connect: Connect, store: LocalStore, other: LocalStore, front: Proxy, action: object
) -> None:
    put_job(store, "one", "two", large=2 * MB)
    sent(connect, store)
    for part in ("/keys/", "/manifests/", "/packs/", "/blobs/"):
        front.on(action, "GET", part, times=1)  # type: ignore[arg-type]
    remote = connect(timeout=60.0)
    found = by_key(remote, xxh3_128_hex(b"job"), "x")
    assert found is not None
    pulled = pull(remote, other, [found])
    assert pulled.fault() is None
    assert pulled.complete
    assert sum(remote.client.faults().values()) >= 4
    assert all(rule.used for rule in front.rules)
    mine = {name: data for name, data in tree(store).items() if not name.startswith("refs/")}
    assert tree(other) == mine


def test_faults_that_pass_are_healed_while_writing(
    connect: Connect, store: LocalStore, other: LocalStore, front: Proxy
) -> None:
    put_job(store, "one", "two", large=2 * MB)
    for part in ("/packs/", "/blobs/", "/graphs/", "/manifests/", "/keys/", "/refs/"):
        front.on(says(503, "SlowDown", {"Retry-After": "0"}), "PUT", part, times=1)
        front.on(resets, "PUT", part, times=1, skip=1)
    pushed = push(connect(timeout=60.0), store, of_all(store))
    assert pushed.fault() is None
    remote = connect()
    assert pull(remote, other, everything(remote)).complete
    assert tree(other) == tree(store)


def test_bytes_that_stay_wrong_are_corrupt_and_never_used(
    connect: Connect, store: LocalStore, other: LocalStore, front: Proxy
) -> None:
    made = put_job(store, "one", small := "two", large=2 * MB)
    sent(connect, store)
    front.on(flips, "GET", "/blobs/")
    pulled = pull(connect(), other, target(made))
    fault = pulled.fault()
    assert isinstance(fault, errors.Corrupt)
    assert (fault.exit_code, pulled.complete, pulled.tally.adds_up) == (7, False, True)
    assert other.manifest_ids() == []
    assert other.pointers() == []
    assert small


def test_damage_in_the_local_store_is_healed_from_the_remote(connect: Connect, store: LocalStore) -> None:
    made = put_job(store, "one", "two", large=2 * MB)
    sent(connect, store)
    before = tree(store)
    for sha256 in (content("one 0"), content("two large", 2 * MB)):
        path = store.blob_path(sha256_hex(sha256))
        path.chmod(0o600)
        path.write_bytes(b"x" * path.stat().st_size)
    fresh = LocalStore.open(store.root, writable=True, given=True)
    pulled = pull(connect(), fresh, target(made), verify=True)
    assert pulled.complete
    assert tree(fresh) == before
    assert len(fresh.quarantined()) == 2


def test_what_a_power_cut_leaves_of_a_pull_is_absent_and_pulled_again(
    connect: Connect, store: LocalStore, other: LocalStore
) -> None:
    """A pull flushes no blob: the name is on the disk and the content may not be."""
    made = put_job(store, "one", "two", large=2 * MB)
    sent(connect, store)
    assert pull(connect(), other, target(made)).complete
    before = tree(other)
    for sha256, left in ((content("one 0"), 0), (content("two large", 2 * MB), MB)):
        path = other.blob_path(sha256_hex(sha256))
        path.chmod(0o600)
        os.truncate(path, left)
    after = LocalStore.open(other.root, writable=True, given=True)
    assert len(after.missing(made)) == 2
    pulled = pull(connect(), after, target(made))
    assert pulled.complete
    assert len(after.quarantined()) == 2
    assert tree(after) == before


def test_a_blob_that_is_gone_makes_a_manifest_incomplete_and_a_push_heals_it(
    connect: Connect, store: LocalStore, other: LocalStore, front: Proxy
) -> None:
    made = put_job(store, "one", "two", large=2 * MB)
    sent(connect, store)
    remote = connect()
    packs = [item.name for item in remote.client.names("packs")]
    gone = layout.blob_name(sha256_hex(content("one large", 2 * MB)))
    for name in (gone, *packs):
        remote.client.delete(name)
    pulled = pull(connect(), other, target(made))
    fault = pulled.fault()
    assert isinstance(fault, errors.Incomplete)
    assert fault.exit_code == 4
    assert other.manifest_ids() == []
    pushed = push(connect(), store, of_all(store))
    assert pushed.fault() is None
    assert pushed.tally.transferred >= 1 + 6
    assert pull(connect(), other, target(made)).complete
    mine = {name: data for name, data in tree(store).items() if not name.startswith("refs/")}
    assert tree(other) == mine


def test_repair_rewrites_what_is_damaged(connect: Connect, store: LocalStore, other: LocalStore) -> None:
    made = put_job(store, "one", "two", large=2 * MB)
    sent(connect, store)
    remote = connect()
    names = [layout.blob_name(sha256_hex(content("one large", 2 * MB))), layout.graph_name(xxh3_128_hex(b"two"))]
    names += [item.name for item in remote.client.names("packs")]
    names += [layout.manifest_name(made.id), layout.pointer_name(made.cache_key)]
    for name in names:
        found = remote.client.read(name)
        assert found is not None
        wrong = bytes(byte ^ 1 for byte in found[0])
        remote.client.put(name, wrong, sha256_hex(wrong), size=len(wrong))
    assert not pull(connect(), other, target(made)).complete
    repaired = push(connect(), store, of_all(store), repair=True)
    assert repaired.fault() is None
    assert repaired.tally.adds_up
    remote = connect()
    assert pull(remote, other, everything(remote)).complete
    assert tree(other) == tree(store)
    again = push(connect(), store, of_all(store), repair=True)
    assert (again.fault(), again.tally.transferred) == (None, 0)


def test_the_first_record_of_a_graph_counts_and_the_second_is_adopted(
    connect: Connect, store: LocalStore, other: LocalStore, tmp_path: Path
) -> None:
    put_job(store, "one")
    sent(connect, store)
    put_graph(other, "one", by="another compile")
    made = put_job(other, "two", job="next")
    both = other.put_manifest(make_manifest("one", "two", job="next"))
    other.set_pointer(both.cache_key, both.id)
    sent(connect, other)
    third = LocalStore.open(tmp_path / "third", writable=True, given=True)
    assert pull(connect(), third, target(both)).complete
    record = third.get_graph(xxh3_128_hex(b"one"))
    assert record == store.get_graph(xxh3_128_hex(b"one"))
    assert made.id != both.id


def test_a_manifest_that_is_not_complete_brings_what_there_is(
    connect: Connect, store: LocalStore, other: LocalStore
) -> None:
    put_graph(store, "one")
    made = store.put_manifest(make_manifest("one", "never compiled", complete=False))
    store.set_pointer(made.cache_key, made.id)
    sent(connect, store)
    pulled = pull(connect(), other, target(made))
    assert (pulled.fault(), pulled.complete) == (None, False)
    assert other.graph_keys() == [xxh3_128_hex(b"one")]
    assert pulled.to_json()["targets"][0]["state"] == "PARTIAL"


def test_large_files_go_in_parts_and_nothing_is_seen_of_a_cut_upload(
    connect: Connect, store: LocalStore, other: LocalStore, front: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send, "MULTIPART", 8 * MB)
    monkeypatch.setattr(send, "PART", 5 * MB)
    made = put_job(store, "one", large=13 * MB + 7)
    rule = fails_for_ever(front, "partNumber=3")
    pushed = push(connect(), store, of_all(store))
    assert pushed.fault() is not None
    assert rule.used == 2
    assert front.count("DELETE", "uploadId") == 1, "the upload was not aborted"
    assert list(connect().names("blob")) == []
    front.clear()
    front.on(resets, "PUT", "partNumber=2", times=1)
    sent(connect, store)
    assert front.count("PUT", "partNumber=2") == 2
    assert pull(connect(), other, target(made)).complete
    assert other.read_blob(sha256_hex(content("one large", 13 * MB + 7)))


def test_a_disk_that_is_too_small_is_refused_before_the_first_byte(
    connect: Connect, store: LocalStore, other: LocalStore, front: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = put_job(store, "one", large=2 * MB)
    sent(connect, store)
    front.clear()
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(StoreFault, match=r"needs 2,1.* bytes and has 1,000"):
        pull(connect(), other, target(made))
    assert front.count("GET", "/blobs/") == 0
    assert tree(other) == {}


def test_a_path_of_this_machine_is_not_sent(
    connect: Connect, store: LocalStore, front: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    put_graph(store, "one")
    private = store.put_manifest(make_manifest("one", value={"dump": "/home/somebody/outputs"}))
    store.set_pointer(private.cache_key, private.id)
    with pytest.raises(Usage, match=r"components.workload.value.dump"):
        push(connect(), store, of_all(store))
    assert front.seen == []


def test_channels_are_pushed_and_pulled_as_a_whole(connect: Connect, store: LocalStore, other: LocalStore) -> None:
    put_job(store, "one")
    put_job(store, "two", job="next")
    ref = store.refs("current")[0][1]
    store.put_ref("release", ref.config, "ab" * 32, ref)
    pushed = push(connect(), store, of_channel(store, "release"))
    assert pushed.fault() is None
    remote = connect()
    assert [item.manifest for item in in_channel(remote, "release")] == [ref.manifest]
    assert in_channel(remote, "current") == []
    assert pull(remote, other, in_channel(remote, "release")).complete
    assert other.channels() == ["release"]


def test_several_configurations_that_share_graphs_send_them_once(
    connect: Connect, store: LocalStore, front: Proxy
) -> None:
    for job in ("a", "b", "c"):
        put_job(store, "one", "two", job=job, large=2 * MB)
    pushed = push(connect(), store, [s for j in "abc" if (s := of_key(store, xxh3_128_hex(j.encode()), j))])
    assert pushed.fault() is None
    assert front.count("PUT", "/blobs/") == 2
    assert front.count("PUT", "/graphs/") == 2
    assert front.count("PUT", "/manifests/") == 3
