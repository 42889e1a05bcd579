"""ls, show and verify: stores as people and scripts read them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from neffcache.key.canonical import xxh3_128_hex
from neffcache.store import layout
from neffcache.store.local import LocalStore
from neffcache.store.records import Manifest
from tests.cli.conftest import CONFIG, Answer, damage, job_of, put_graph, put_job, request_of

pytestmark = pytest.mark.fast

Run = Callable[..., Answer]


def test_ls_lists_manifests_and_totals_that_add_up(neffcache: Run, store: LocalStore, warmed: Manifest) -> None:
    done = neffcache("ls", "--dir", store.root, "--json")
    assert done.code == 0
    [row] = done.json["manifests"]
    assert (row["id"], row["config"], row["complete"], row["current"]) == (warmed.id, CONFIG, True, True)
    assert (row["ranks"], row["graphs"], row["bytes"]) == (4, 2, 2 * 64 * 30)
    totals = done.json["totals"]
    assert {name: totals[name] for name in ("manifests", "graphs", "refs", "blobs", "quarantined")} == {
        "manifests": 1,
        "graphs": 2,
        "refs": 1,
        "blobs": 4,
        "quarantined": 0,
    }
    assert totals["bytes"] == sum(path.stat().st_size for path in (store.root / layout.BLOBS).rglob("*/*"))
    table = neffcache("ls", "--dir", store.root).out
    assert warmed.id[:12] in table
    assert "1 manifests, 2 graphs, 1 refs, 4 blobs" in table


def test_ls_gives_the_kinds_that_are_asked_for(neffcache: Run, store: LocalStore, warmed: Manifest) -> None:
    done = neffcache("ls", "--graphs", "--refs", "--blobs", "--dir", store.root, "--json")
    assert set(done.json) == {"store", "graphs", "refs", "blobs"}
    assert [row["name"] for row in done.json["graphs"]] == ["one", "two"]
    assert [(row["channel"], row["config"], row["manifest"]) for row in done.json["refs"]] == [
        ("current", CONFIG, warmed.id)
    ]
    assert [row["sha256"] for row in done.json["blobs"]] == list(store.blobs())
    assert len(neffcache("ls", "--graphs", "--dir", store.root).out.splitlines()) == 3


def test_ls_of_a_manifest_that_is_not_current_says_so(neffcache: Run, store: LocalStore, warmed: Manifest) -> None:
    newer = put_job(store, job_of(request_of()), "one", created="2026-02-01T00:00:00+00:00")
    older = put_job(store, job_of(request_of(), threads=2), "one", created="2025-12-31T00:00:00+00:00")
    rows = [(row["id"], row["current"]) for row in neffcache("ls", "--dir", store.root, "--json").json["manifests"]]
    assert rows == [(newer.id, True), (warmed.id, False), (older.id, True)], "not the newest first"


def test_ls_leaves_a_damaged_record_out_and_where_it_is(neffcache: Run, store: LocalStore, warmed: Manifest) -> None:
    path = store.root / layout.graph_name(xxh3_128_hex(b"one"))
    path.chmod(0o600)
    path.write_bytes(b"{}")
    done = neffcache("ls", "--graphs", "--dir", store.root, "--json")
    assert done.code == 0
    assert [row["name"] for row in done.json["graphs"]] == ["two"]
    assert path.exists()


def test_ls_of_no_store_is_empty_and_makes_none(neffcache: Run, tmp_path: Path) -> None:
    done = neffcache("ls", "--dir", tmp_path / "absent", "--json")
    assert (done.code, done.json["totals"]["blobs"]) == (0, 0)
    assert "there is no store" in done.err
    assert not (tmp_path / "absent").exists()


def test_show_finds_a_manifest_by_its_config_its_id_and_its_job_key(
    neffcache: Run, store: LocalStore, warmed: Manifest
) -> None:
    for name in (CONFIG, warmed.id[:8], warmed.id, warmed.cache_key[:8]):
        done = neffcache("show", name, "--dir", store.root, "--json")
        assert (done.code, done.json["kind"]) == (0, "manifest")
        assert done.json["document"] == warmed.to_json()
        assert done.json["missing"] == []
    assert "everything that it names is in the store" in neffcache("show", CONFIG, "--dir", store.root).out


def test_show_says_what_a_manifest_lacks(neffcache: Run, store: LocalStore, warmed: Manifest) -> None:
    (store.root / layout.graph_name(xxh3_128_hex(b"two"))).unlink()
    done = neffcache("show", CONFIG, "--dir", store.root, "--json")
    assert [item["what"] for item in done.json["missing"]] == [xxh3_128_hex(b"two")]
    assert f"MISSING graph {xxh3_128_hex(b'two')}" in neffcache("show", CONFIG, "--dir", store.root).out


def test_show_finds_a_graph_and_prints_its_text(neffcache: Run, store: LocalStore, warmed: Manifest) -> None:
    key = xxh3_128_hex(b"one")
    done = neffcache("show", key[:10], "--dir", store.root, "--json")
    assert (done.json["kind"], done.json["document"]["compile_key"]) == ("graph", key)
    text = "neffcache graph 1\ninputs 1\n%0 = input one\n"
    assert neffcache("show", key[:10], "--text", "--dir", store.root).out == text
    assert neffcache("show", key[:10], "--text", "--dir", store.root, "--json").json["text"] == text


def test_show_of_a_config_with_several_requests_lists_them(neffcache: Run, store: LocalStore, warmed: Manifest) -> None:
    other = put_job(store, job_of(request_of(sets=["training.seq_len=512"]), {"training": {"seq_len": 512}}), "three")
    done = neffcache("show", CONFIG, "--dir", store.root, "--json")
    assert (done.code, done.json["kind"]) == (0, "refs")
    assert {entry["document"]["manifest"] for entry in done.json["refs"]} == {warmed.id, other.id}
    assert "training.seq_len=512" in neffcache("show", CONFIG, "--dir", store.root).out


@pytest.mark.parametrize("name", ["nothing", "abcdef", "ab"])
def test_show_of_nothing_is_a_miss_with_a_hint(neffcache: Run, store: LocalStore, warmed: Manifest, name: str) -> None:
    done = neffcache("show", name, "--dir", store.root)
    assert (done.code, done.out) == (3, "")
    assert [line.partition(":")[0] for line in done.err.splitlines()] == ["error", "hint"]


def test_show_refuses_a_beginning_of_two_ids(
    neffcache: Run, store: LocalStore, warmed: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neffcache.flows.listing.SHORTEST", 1)
    for number in range(20):
        put_graph(store, f"more {number}")
    first = [key[0] for key in store.graph_keys()]
    doubled = next(digit for digit in first if first.count(digit) > 1)
    done = neffcache("show", doubled, "--dir", store.root, "--json")
    assert (done.code, done.json["error"], done.json["hint"]) == (2, "Usage", "give more digits")


def test_show_text_of_a_manifest_is_refused(neffcache: Run, store: LocalStore, warmed: Manifest) -> None:
    done = neffcache("show", warmed.id, "--text", "--dir", store.root)
    assert (done.code, done.out) == (2, "")


def test_verify_of_a_good_store_is_zero_and_counts_all(neffcache: Run, store: LocalStore, warmed: Manifest) -> None:
    done = neffcache("verify", "--dir", store.root, "--json")
    assert (done.code, done.json["good"], done.json["findings"], done.json["quarantined"]) == (0, True, [], 0)
    for kind, total in (("blobs", 4), ("graphs", 2), ("manifests", 1), ("keys", 1), ("refs", 1)):
        tally = done.json[kind]
        assert tally["total"] == total == sum(tally[name] for name in ("good", "damaged", "unreadable", "gone"))


def test_verify_quarantines_what_is_damaged_says_so_and_exits_with_seven(
    neffcache: Run, store: LocalStore, warmed: Manifest
) -> None:
    blob = next(store.blobs())
    damage(store.blob_path(blob))
    done = neffcache("verify", "--dir", store.root)
    assert done.code == 7
    assert f"damaged: blobs {blob}" in done.out
    assert "moved to quarantine" in done.out
    assert "hint:" in done.err
    assert len(store.quarantined()) == 1
    again = neffcache("verify", "--dir", store.root, "--json")
    assert (again.code, {item["state"] for item in again.json["findings"]}) == (3, {"absent"})


def test_verify_knows_that_an_incomplete_manifest_may_lack_graphs(neffcache: Run, store: LocalStore) -> None:
    put_job(store, job_of(request_of()), "one", complete=False, known=False)
    assert neffcache("verify", "--dir", store.root).code == 0
    put_job(store, job_of(request_of()), "two")
    (store.root / layout.graph_name(xxh3_128_hex(b"two"))).unlink()
    assert neffcache("verify", "--dir", store.root).code == 3


def test_verify_of_no_store_is_refused(neffcache: Run, tmp_path: Path) -> None:
    done = neffcache("verify", "--dir", tmp_path / "absent")
    assert done.code == 7
    assert [line.partition(":")[0] for line in done.err.splitlines()] == ["error", "hint"]
    assert not (tmp_path / "absent").exists()
