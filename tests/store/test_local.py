from __future__ import annotations

import errno
import json
import os
from dataclasses import replace

import pytest

from neffcache.errors import Bug, Miss, StoreFault, Usage
from neffcache.store import documents, files, layout
from neffcache.store.local import LocalStore, Missing
from neffcache.store.records import Damaged, GraphRecord, KeyPointer, Ref, encode
from neffcache.store.tier import Tier

pytestmark = pytest.mark.fast


def as_tier(store: LocalStore) -> Tier:
    return store  # mypy and this line: a local store is a tier


@pytest.mark.usefixtures("real_flush")
def test_a_job_is_stored_and_found(store: LocalStore, made) -> None:
    manifest = made.job(store, "one", "two")
    store.set_pointer(manifest.cache_key, manifest.id)
    request = {"config": "models.mine:tiny", "lnc": 2}
    ref = Ref(request, manifest.cache_key, manifest.id, "models.mine:tiny")
    store.put_ref("current", "models.mine:tiny", "e" * 64, ref)

    reader = LocalStore.open(store.root, writable=False)
    assert reader.pointer(manifest.cache_key) == KeyPointer(manifest.cache_key, manifest.id)
    assert reader.get_manifest(manifest.id) == manifest
    assert reader.ref("current", "models.mine:tiny", "e" * 64) == ref
    assert reader.refs("current") == [("e" * 64, ref)]
    assert reader.channels() == ["current"]
    assert reader.missing(manifest) == reader.damaged(manifest) == []
    assert {record.name for record in reader.graphs()} == {"one", "two"}
    assert reader.graph_keys() == sorted([made.key("one"), made.key("two")])
    assert reader.manifests() == [manifest]
    assert reader.pointers() == [KeyPointer(manifest.cache_key, manifest.id)]


def test_what_is_absent_is_none(store: LocalStore) -> None:
    assert store.get_graph("a" * 32) is None
    assert store.get_manifest("a" * 64) is None
    assert store.pointer("a" * 32) is None
    assert store.ref("current", "x", "a" * 64) is None
    assert store.refs("nightly") == store.graphs() == store.manifests() == store.channels() == []


def test_the_first_writer_of_a_graph_wins_and_the_second_adopts(store: LocalStore, made) -> None:
    first = made.graph(store, "one", by="me", seconds=1.0)
    second = made.graph(store, "one", by="you", seconds=9.0)
    assert second == first
    assert store.get_graph(made.key("one")) == first


def test_a_record_whose_blob_is_gone_is_replaced_by_the_next_compile(store: LocalStore, made) -> None:
    first = made.graph(store, "one", by="me")
    store.blob_path(first.artifacts[0].sha256).unlink()
    second = made.graph(store, "one", by="you")
    assert second.artifacts != first.artifacts
    assert store.get_graph(made.key("one")) == second


def test_a_damaged_record_is_quarantined_and_healed_by_the_next_compile(store: LocalStore, made, flip) -> None:
    record = made.graph(store, "one")
    path = store.root / layout.graph_name(record.compile_key)
    flip(path)
    with pytest.raises(Damaged) as caught:
        store.get_graph(record.compile_key)
    assert caught.value.exit_code == 7
    assert str(path) in caught.value.message
    assert os.path.exists(caught.value.details["quarantined"])
    assert store.get_graph(record.compile_key) is None
    assert made.graph(store, "one") == record


@pytest.mark.parametrize("content", [b"", b"{", b"\x80\x04K\x01.", None])
def test_writing_over_a_damaged_file_heals_it(store: LocalStore, made, content: bytes | None) -> None:
    manifest = made.job(store, "one")
    store.set_pointer(manifest.cache_key, manifest.id)
    for name in (
        layout.graph_name(made.key("one")),
        layout.manifest_name(manifest.id),
        layout.pointer_name(manifest.cache_key),
    ):
        path = store.root / name
        path.unlink()
        path.write_bytes(content) if content is not None else path.symlink_to("/dev/null")
    assert made.job(store, "one") == manifest
    store.set_pointer(manifest.cache_key, manifest.id)
    assert store.missing(manifest) == []
    assert store.pointer(manifest.cache_key) == KeyPointer(manifest.cache_key, manifest.id)


def test_a_record_under_another_name_is_damage(store: LocalStore, made) -> None:
    one, two = made.graph(store, "one"), made.graph(store, "two")
    path = store.root / layout.graph_name(one.compile_key)
    path.unlink()
    path.write_bytes(encode(two))
    with pytest.raises(Damaged, match="belongs to"):
        store.get_graph(one.compile_key)


def test_a_record_of_a_newer_schema_is_left_alone(store: LocalStore, made) -> None:
    made.graph(store, "two")
    newer = {**made.record("one").to_json(), "schema": 2}
    path = store.root / layout.graph_name(made.key("one"))
    path.write_text(json.dumps(newer))
    with pytest.raises(StoreFault, match="schema 2"):
        store.get_graph(made.key("one"))
    assert [record.name for record in store.graphs()] == ["two"]
    assert json.loads(path.read_text()) == newer
    assert store.quarantined() == []


def test_nothing_is_recorded_before_what_it_names(store: LocalStore, made) -> None:
    with pytest.raises(StoreFault, match="cannot be recorded") as caught:
        store.put_graph(made.record("one"))
    assert len(caught.value.details["missing"]) == 2
    with pytest.raises(StoreFault, match="cannot be recorded"):
        store.put_manifest(made.manifest("one", complete=True))
    partial = store.put_manifest(made.manifest("one", complete=False))
    with pytest.raises(StoreFault, match="nothing may point to it"):
        store.set_pointer(partial.cache_key, "f" * 64)
    with pytest.raises(StoreFault, match="nothing may point to it"):
        store.put_ref("current", "x", "e" * 64, Ref({}, partial.cache_key, "f" * 64, "x"))
    store.set_pointer(partial.cache_key, partial.id)


def test_what_cannot_be_read_back_is_never_written(store: LocalStore, made) -> None:
    good = made.graph(store, "one")
    for wrong in ({"compile_key": "short"}, {"seconds": float("nan")}, {"components": {"text": "x"}}):
        fields = {name: getattr(good, name) for name in GraphRecord.__slots__} | {"compile_key": "c" * 32} | wrong
        with pytest.raises((StoreFault, Usage)):
            store.put_graph(GraphRecord(**fields))
    assert store.graph_keys() == [good.compile_key]
    assert list((store.root / "tmp").iterdir()) == []


def test_the_same_manifest_again_is_the_stored_one(store: LocalStore, made) -> None:
    first = made.job(store, "one")
    again = store.put_manifest(made.manifest("one", created="2031-01-01T00:00:00Z"))
    assert again == first
    assert len(store.manifest_ids()) == 1


def test_missing_says_what_and_where_without_reading(store: LocalStore, made, monkeypatch) -> None:
    manifest = made.job(store, "one", "two", "three", "four")
    gone, other, cut = (made.record(word).artifacts[0].sha256 for word in ("one", "two", "three"))
    store.blob_path(gone).unlink()
    store.blob_path(cut).unlink()
    (store.root / layout.blob_name(cut)).write_bytes(b"cut")
    (store.root / layout.graph_name(made.key("four"))).unlink()
    monkeypatch.setattr(os, "read", lambda *_: pytest.fail("a blob was read"))
    found = {item.what: item for item in store.missing(manifest)}
    assert found == {
        made.key("four"): Missing("graph", made.key("four"), str(store.root / layout.graph_name(made.key("four")))),
        gone: Missing("artifact", gone, str(store.root / layout.blob_name(gone))),
        cut: Missing("damaged", cut, str(store.root / layout.blob_name(cut))),
    }
    assert other not in found


def test_missing_remembers_what_was_quarantined(store: LocalStore, made, flip) -> None:
    manifest = made.job(store, "one", "two")
    sha256 = made.record("one").artifacts[0].sha256
    flip(store.blob_path(sha256))
    assert store.missing(manifest) == []  # the size is right
    assert [(i.kind, i.what, i.quarantined) for i in store.damaged(manifest)] == [("damaged", sha256, True)]
    assert store.damaged(manifest) == []
    assert [(i.kind, i.what, i.quarantined) for i in store.missing(manifest)] == [("artifact", sha256, True)]
    flip(store.root / layout.graph_name(made.key("two")))
    assert ("damaged", made.key("two"), True) in [(i.kind, i.what, i.quarantined) for i in store.missing(manifest)]
    assert ("graph", made.key("two"), True) in [(i.kind, i.what, i.quarantined) for i in store.missing(manifest)]


def test_artifacts_are_those_of_all_graphs(store: LocalStore, made) -> None:
    manifest = made.job(store, "one", "two")
    assert store.artifacts(manifest) == [*made.record("one").artifacts, *made.record("two").artifacts]
    (store.root / layout.graph_name(made.key("two"))).unlink()
    with pytest.raises(Miss, match=made.key("two")):
        store.artifacts(manifest)


def test_a_pointer_is_swapped_only_from_what_was_expected(store: LocalStore, made) -> None:
    one, two = made.job(store, "one"), made.job(store, "two")
    assert store.swap_pointer(one.cache_key, two.id, one.id) is False
    assert store.swap_pointer(one.cache_key, None, one.id) is True
    assert store.swap_pointer(one.cache_key, None, two.id) is False
    assert store.swap_pointer(one.cache_key, one.id, two.id) is True
    assert store.pointer(one.cache_key) == KeyPointer(one.cache_key, two.id)


def test_a_damaged_pointer_and_ref_are_no_miss(store: LocalStore, made, flip) -> None:
    manifest = made.job(store, "one")
    store.set_pointer(manifest.cache_key, manifest.id)
    store.put_ref("current", "x", "e" * 64, Ref({}, manifest.cache_key, manifest.id, "x"))
    for name, read in (
        (layout.pointer_name(manifest.cache_key), lambda: store.pointer(manifest.cache_key)),
        (layout.ref_name("current", "x", "e" * 64), lambda: store.ref("current", "x", "e" * 64)),
    ):
        flip(store.root / name)
        with pytest.raises(Damaged):
            read()
        assert read() is None


def test_names_of_channels_and_configs_cannot_leave_their_directory(store: LocalStore, made) -> None:
    manifest = made.job(store, "one")
    ref = Ref({}, manifest.cache_key, manifest.id, "../../x")
    store.put_ref("current", "../../x", "e" * 64, ref)
    assert store.refs("current") == [("e" * 64, ref)]
    assert [path.parent.name for path in store.root.rglob("*%2Fx*")] == ["current"]
    for channel in ("", "..", "a/b", ".hidden", "a b", "x" * 65):
        with pytest.raises(Usage):
            store.refs(channel)
    for config, digest in (("", "e" * 64), ("x" * 200, "e" * 64), ("x", "E" * 64), ("x", "../" + "e" * 61)):
        with pytest.raises(Usage):
            store.ref("current", config, digest)
    with pytest.raises(Bug):
        store.put_ref("current", "y", "e" * 64, ref)


def test_orphans_are_not_listed(store: LocalStore, made) -> None:
    manifest = made.job(store, "one")
    for folder in ("graphs", "manifests", "keys", "refs", "locks", "quarantine"):
        (store.root / folder / "notes.txt").write_text("x")
    (store.root / "graphs" / f"{'a' * 32}.json.tmp").write_text("x")
    (store.root / "refs" / "current").mkdir()
    (store.root / "refs" / "current" / "x").write_text("x")
    assert store.manifests() == [manifest]
    assert store.graph_keys() == [made.key("one")]
    assert store.pointers() == store.refs("current") == store.names("ref") == []
    assert store.channels() == ["current"]


def test_a_store_is_a_tier(root, tmp_path, made) -> None:
    source = LocalStore.open(tmp_path / "source", writable=True)
    manifest = made.job(source, "one")
    source.set_pointer(manifest.cache_key, manifest.id)
    source.put_ref("current", "a:b", "e" * 64, Ref({}, manifest.cache_key, manifest.id, "a:b"))
    target = LocalStore.open(root, writable=True)
    for kind in ("blob", "graph", "manifest"):
        for name in source.names(kind):
            data = as_tier(source).get(name)
            assert data is not None
            assert (target.exists(name), target.get(name)) == (False, None)
            assert as_tier(target).put_if_absent(name, data) is True
            assert target.put_if_absent(name, data) is False
            assert (target.exists(name), target.get(name)) == (True, data)
    assert target.missing(manifest) == []
    for name in (*source.names("key"), *source.names("ref")):
        data = source.get(name)
        assert data is not None
        with pytest.raises(Bug):
            target.put_if_absent(name, data)
    for name in ("", "../x", "/etc/passwd", "tmp/x", "blobs/sha256/aa/" + "b" * 64, "refs/../x-" + "e" * 64 + ".json"):
        for use in (target.get, target.exists, lambda name: target.put_if_absent(name, b"")):
            with pytest.raises(Usage):
                use(name)


def test_a_tier_refuses_bytes_that_do_not_belong_there(store: LocalStore, made) -> None:
    made.graph(store, "one")
    with pytest.raises(Damaged):
        store.put_if_absent(layout.blob_name("a" * 64), b"other")
    with pytest.raises(Damaged):
        store.put_if_absent(layout.graph_name("a" * 32), encode(made.record("one")))
    with pytest.raises(Damaged):
        store.put_if_absent(layout.manifest_name("a" * 64), encode(made.manifest("one")))
    assert not store.exists(layout.blob_name("a" * 64))


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_an_error_of_the_file_system_is_never_an_absent_record(store: LocalStore, made, monkeypatch, code: int) -> None:
    manifest = made.job(store, "one")
    store.set_pointer(manifest.cache_key, manifest.id)
    store = LocalStore.open(store.root, writable=True, given=True)  # one that has not written them itself
    monkeypatch.setattr(files, "RETRY_DELAYS", (0.0,))

    def failing(path, *rest, **named):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "open", failing)
    monkeypatch.setattr(os, "listdir", failing)
    for use in (
        lambda: store.get_graph(made.key("one")),
        lambda: store.get_manifest(manifest.id),
        lambda: store.pointer(manifest.cache_key),
        lambda: store.missing(manifest),
        lambda: store.refs("current"),
        store.graphs,
        store.manifests,
        store.blobs().__next__,
    ):
        with pytest.raises(StoreFault) as caught:
            use()
        assert caught.value.details["errno"] == errno.errorcode[code]
        assert not isinstance(caught.value, Damaged)


def test_what_this_process_has_written_is_read_again_only_when_it_is_another_file(store, made, monkeypatch) -> None:
    record = made.graph(store, "one")
    reads: list[str] = []
    read_regular = documents.read_regular
    monkeypatch.setattr(documents, "read_regular", lambda path: reads.append(path.name) or read_regular(path))
    assert store.get_graph(record.compile_key) == record
    assert reads == []
    path = store.root / layout.graph_name(record.compile_key)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    with pytest.raises(Damaged):
        store.get_graph(record.compile_key)
    assert reads == [path.name]
    assert store.get_graph(record.compile_key) is None


def test_a_record_that_reads_as_another_one_is_read(store, made) -> None:
    made.graph(store, "one")  # its blobs
    record = replace(made.record("one"), compile_key="b" * 32, extra={"later": (1, 2)})
    store.put_graph(record)
    assert store.get_graph(record.compile_key).extra == {"later": [1, 2]}


def test_a_directory_that_is_a_file_is_a_fault_and_not_an_empty_store(store: LocalStore) -> None:
    (store.root / "graphs").rmdir()
    (store.root / "graphs").write_text("x")
    with pytest.raises(StoreFault):
        store.get_graph("a" * 32)
    with pytest.raises(StoreFault):
        store.graph_keys()


def test_every_name_is_parsed_back() -> None:
    names = {
        layout.blob_name("a" * 64): ("blob", "a" * 64),
        layout.graph_name("a" * 32): ("graph", "a" * 32),
        layout.manifest_name("a" * 64): ("manifest", "a" * 64),
        layout.pointer_name("a" * 32): ("key", "a" * 32),
        layout.ref_name("current", "a:b-c", "e" * 64): ("ref", f"current/a%3Ab-c-{'e' * 64}"),
    }
    assert {name: layout.parse(name) for name in names} == names
    assert layout.split_ref(f"a%3Ab-c-{'e' * 64}.json") == ("a:b-c", "e" * 64)
