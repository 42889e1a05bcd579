from __future__ import annotations

import os

import pytest

from neffcache.store import layout
from neffcache.store.local import LocalStore
from neffcache.store.records import Ref, Signatures
from neffcache.store.verify import Report, verify

pytestmark = pytest.mark.fast


@pytest.fixture
def full(store: LocalStore, made) -> LocalStore:
    manifest = made.job(store, "one", "two")
    store.set_pointer(manifest.cache_key, manifest.id)
    store.put_ref("current", "a:b", "e" * 64, Ref({}, manifest.cache_key, manifest.id, "a:b"))
    store.put_signatures(Signatures(manifest.id, "f" * 32, ({"serial": 1},)))
    return store


def totals(report: Report) -> dict[str, tuple[int, int, int, int, int]]:
    for tally in report.tallies.values():
        assert tally.total == tally.good + tally.damaged + tally.unreadable + tally.gone
    return {kind: (t.total, t.good, t.damaged, t.unreadable, t.gone) for kind, t in report.tallies.items()}


def test_a_good_store_is_good(full: LocalStore) -> None:
    report = verify(full)
    assert report.good
    assert totals(report) == {
        "blobs": (4, 4, 0, 0, 0),
        "graphs": (2, 2, 0, 0, 0),
        "manifests": (1, 1, 0, 0, 0),
        "keys": (1, 1, 0, 0, 0),
        "refs": (1, 1, 0, 0, 0),
        "signatures": (1, 1, 0, 0, 0),
    }
    assert report.bytes == 8_000
    assert report.to_json()["blobs"] == {"total": 4, "good": 4, "damaged": 0, "unreadable": 0, "gone": 0}
    assert totals(verify(LocalStore.open(full.root / "absent", writable=False)))["blobs"] == (0, 0, 0, 0, 0)


def test_every_damaged_thing_is_found_and_moved(full: LocalStore, made, flip) -> None:
    manifest = full.manifests()[0]
    blob = made.record("one").artifacts[0].sha256
    flip(full.blob_path(blob))
    for name in (
        layout.graph_name(made.key("two")),
        layout.manifest_name(manifest.id),
        layout.pointer_name(manifest.cache_key),
        layout.ref_name("current", "a:b", "e" * 64),
        layout.signature_name(manifest.id, "f" * 32),
    ):
        (full.root / name).chmod(0o600)
        (full.root / name).write_bytes(b"")
    report = verify(full)
    assert {kind: counts[2] for kind, counts in totals(report).items()} == dict.fromkeys(report.tallies, 1)
    assert [item.kind for item in report.findings if item.state == "damaged" and item.quarantined] == [*report.tallies]
    assert ("absent", made.key("one"), f"blob {blob}") in [(i.state, i.name, i.message) for i in report.findings]
    assert len(full.quarantined()) == 6
    assert report.bytes == 6_000


def test_damage_that_keeps_size_and_time_is_found_although_the_blob_was_verified_before(full: LocalStore, flip) -> None:
    path = full.blob_path(next(full.blobs()))
    status = path.stat()
    flip(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert totals(verify(full))["blobs"] == (4, 3, 1, 0, 0)


def test_a_reader_verifies_without_moving_anything(full: LocalStore, flip, state_of) -> None:
    flip(full.blob_path(next(full.blobs())))
    before = state_of(full.root)
    report = verify(LocalStore.open(full.root, writable=False))
    assert [(item.state, item.kind, item.quarantined) for item in report.findings] == [("damaged", "blobs", False)]
    assert state_of(full.root) == before


def test_what_is_named_and_absent_is_found(full: LocalStore, made) -> None:
    manifest = full.manifests()[0]
    (full.root / layout.graph_name(made.key("one"))).unlink()
    full.blob_path(made.record("two").text).unlink()
    report = verify(full)
    assert {(item.state, item.kind, item.message) for item in report.findings} == {
        ("absent", "graphs", f"blob {made.record('two').text}"),
        ("absent", "manifests", f"graph {made.key('one')}"),
    }
    (full.root / layout.manifest_name(manifest.id)).unlink()
    absent = {(item.kind, item.message) for item in verify(full).findings if item.kind in ("keys", "refs")}
    assert absent == {("keys", f"manifest {manifest.id}"), ("refs", f"manifest {manifest.id}")}


def test_what_cannot_be_read_is_counted_and_the_rest_is_read(full: LocalStore, made, as_ordinary_user) -> None:
    path = full.blob_path(made.record("one").text)
    path.chmod(0o000)
    with as_ordinary_user():
        report = verify(LocalStore.open(full.root, writable=True))
    assert totals(report)["blobs"] == (4, 3, 0, 1, 0)
    assert [(item.state, item.name) for item in report.findings] == [("unreadable", path.name)]
    assert path.exists()
