from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from neffcache.flows import check as flow
from neffcache.flows.resolve import Job
from neffcache.key.canonical import xxh3_128_hex
from neffcache.store import layout
from neffcache.store.local import LocalStore
from neffcache.store.records import Manifest, Ref
from tests.cli.conftest import CONFIG, Answer, damage, job_of, put_job, request_of

pytestmark = pytest.mark.fast

Run = Callable[..., Answer]


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> dict[str, Job]:
    """TorchTitan's answers by configuration: what is in here is what it would say."""
    jobs = {CONFIG: job_of(request_of())}
    monkeypatch.setattr("neffcache.flows.resolve.titan_installed", lambda: True)
    monkeypatch.setattr(flow, "resolve", lambda request, environ, place: jobs[request.config])
    return jobs


def test_by_ref_a_warmed_request_is_a_hit_and_says_how_it_knows(
    neffcache: Run, store: LocalStore, warmed: Manifest
) -> None:
    done = neffcache("check", CONFIG, "--by-ref", "--dir", store.root, "--json")
    assert done.code == 0
    assert done.json == [
        {
            "config": CONFIG,
            "state": "HIT",
            "by": "ref",
            "tier": "local",
            "cache_key": warmed.cache_key,
            "manifest": warmed.id,
            "missing": [],
            "reason": "",
        }
    ]
    assert "by ref" in neffcache("check", CONFIG, "--by-ref", "--dir", store.root).out


@pytest.mark.parametrize("other", [["--set", "training.seq_len=512"], ["--target", "trn2"], ["--option=-O1"]])
def test_by_ref_another_request_is_unknown_never_a_miss(
    neffcache: Run, store: LocalStore, warmed: Manifest, other: list[str]
) -> None:
    done = neffcache("check", CONFIG, "--by-ref", *other, "--dir", store.root, "--json")
    assert (done.code, done.json[0]["state"], done.json[0]["manifest"]) == (3, "UNKNOWN", None)


def test_by_ref_a_ref_under_another_request_s_name_proves_nothing(
    neffcache: Run, store: LocalStore, warmed: Manifest
) -> None:
    request = request_of(sets=["training.seq_len=512"])
    store.put_ref("current", CONFIG, request.digest, Ref(request_of().to_json(), warmed.cache_key, warmed.id, CONFIG))
    done = neffcache("check", CONFIG, "--by-ref", "--set", "training.seq_len=512", "--dir", store.root, "--json")
    assert (done.code, done.json[0]["state"]) == (3, "UNKNOWN")
    assert "another request" in done.json[0]["reason"]


def test_by_ref_a_ref_to_a_manifest_of_another_job_proves_nothing(
    neffcache: Run, store: LocalStore, warmed: Manifest
) -> None:
    request = request_of()
    store.put_ref("current", CONFIG, request.digest, Ref(request.to_json(), "0" * 32, warmed.id, CONFIG))
    done = neffcache("check", CONFIG, "--by-ref", "--dir", store.root, "--json")
    assert (done.code, done.json[0]["state"]) == (3, "UNKNOWN")
    assert "another job key" in done.json[0]["reason"]


def test_by_ref_a_ref_whose_manifest_is_gone_is_a_miss(neffcache: Run, store: LocalStore, warmed: Manifest) -> None:
    (store.root / layout.manifest_name(warmed.id)).unlink()
    done = neffcache("check", CONFIG, "--by-ref", "--dir", store.root, "--json")
    assert (done.code, done.json[0]["state"]) == (3, "MISS")
    assert warmed.id in done.json[0]["reason"]


def test_without_torchtitan_it_goes_by_ref_and_says_so(
    neffcache: Run, store: LocalStore, warmed: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neffcache.flows.resolve.titan_installed", lambda: False)
    done = neffcache("check", CONFIG, "--dir", store.root, "--json")
    assert (done.code, done.json[0]["by"]) == (0, "ref")
    assert "TorchTitan is not installed" in done.err


def test_by_key_a_complete_manifest_of_this_job_is_a_hit(
    neffcache: Run, store: LocalStore, warmed: Manifest, resolved: dict[str, Job]
) -> None:
    done = neffcache("check", CONFIG, "--dir", store.root, "--json")
    assert done.code == 0
    assert (done.json[0]["state"], done.json[0]["by"]) == ("HIT", "key")


def test_by_key_what_the_request_means_today_decides_not_that_it_was_warmed(
    neffcache: Run, store: LocalStore, warmed: Manifest, resolved: dict[str, Job]
) -> None:
    resolved[CONFIG] = job_of(request_of(), threads=2)
    assert neffcache("check", CONFIG, "--by-ref", "--dir", store.root, "--json").json[0]["state"] == "HIT"
    done = neffcache("check", CONFIG, "--dir", store.root, "--json")
    assert (done.code, done.json[0]["state"], done.json[0]["manifest"]) == (3, "MISS", None)


def test_by_key_a_manifest_of_other_components_under_this_key_is_no_hit(
    neffcache: Run, store: LocalStore, resolved: dict[str, Job]
) -> None:
    other = put_job(store, job_of(request_of(), threads=2), "one")
    store.set_pointer(resolved[CONFIG].key.cache_key, other.id)
    done = neffcache("check", CONFIG, "--dir", store.root, "--json")
    assert (done.code, done.json[0]["state"]) == (3, "MISS")
    assert "other components" in done.json[0]["reason"]


def test_what_lacks_makes_it_partial_and_is_listed(neffcache: Run, store: LocalStore, warmed: Manifest) -> None:
    record = store.get_graph(xxh3_128_hex(b"one"))
    assert record is not None
    store.blob_path(record.artifacts[0].sha256).unlink()
    (store.root / layout.graph_name(xxh3_128_hex(b"two"))).unlink()
    done = neffcache("check", CONFIG, "--by-ref", "--dir", store.root, "--json")
    assert (done.code, done.json[0]["state"], done.json[0]["manifest"]) == (3, "PARTIAL", warmed.id)
    listed = {(item["kind"], item["what"], item["quarantined"]) for item in done.json[0]["missing"]}
    assert listed == {
        ("artifact", record.artifacts[0].sha256, False),
        ("graph", xxh3_128_hex(b"two"), False),
    }
    shown = neffcache("check", CONFIG, "--by-ref", "--dir", store.root).out
    assert "PARTIAL" in shown
    assert record.artifacts[0].sha256 in shown


def test_an_incomplete_manifest_is_partial(neffcache: Run, store: LocalStore) -> None:
    put_job(store, job_of(request_of()), "one", complete=False)
    done = neffcache("check", CONFIG, "--by-ref", "--dir", store.root, "--json")
    assert (done.code, done.json[0]["state"], done.json[0]["missing"]) == (3, "PARTIAL", [])
    assert "not complete" in done.json[0]["reason"]


def test_a_flipped_bit_is_found_only_by_verify_which_quarantines_it(
    neffcache: Run, store: LocalStore, warmed: Manifest
) -> None:
    record = store.get_graph(xxh3_128_hex(b"one"))
    assert record is not None
    damage(store.blob_path(record.artifacts[0].sha256))
    assert neffcache("check", CONFIG, "--by-ref", "--dir", store.root).code == 0
    done = neffcache("check", CONFIG, "--by-ref", "--verify", "--dir", store.root, "--json")
    assert (done.code, done.json["error"], done.json["exit_code"]) == (7, "StoreFault", 7)
    assert "1 files of manifest" in done.json["message"]
    assert "now in quarantine" in done.json["message"]
    assert len(store.quarantined()) == 1
    after = neffcache("check", CONFIG, "--by-ref", "--dir", store.root, "--json")
    assert [item["quarantined"] for item in after.json[0]["missing"]] == [True]


def test_a_truncated_file_is_partial_without_hashing(neffcache: Run, store: LocalStore, warmed: Manifest) -> None:
    record = store.get_graph(xxh3_128_hex(b"one"))
    assert record is not None
    path = store.blob_path(record.artifacts[0].sha256)
    path.chmod(0o600)
    path.write_bytes(b"short")
    done = neffcache("check", CONFIG, "--by-ref", "--dir", store.root, "--json")
    assert (done.code, done.json[0]["state"]) == (3, "PARTIAL")
    assert [(item["kind"], item["what"]) for item in done.json[0]["missing"]] == [
        ("damaged", record.artifacts[0].sha256)
    ]


def test_a_damaged_manifest_is_a_fault_of_the_store_never_a_miss(
    neffcache: Run, store: LocalStore, warmed: Manifest
) -> None:
    path = store.root / layout.manifest_name(warmed.id)
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-40])
    done = neffcache("check", CONFIG, "--by-ref", "--dir", store.root, "--json")
    assert (done.code, done.json["exit_code"]) == (7, 7)
    assert path.exists(), "a command that only reads moved a file"


def test_a_store_that_is_no_directory_is_a_fault_of_the_store(neffcache: Run, store: LocalStore) -> None:
    (store.root / "file").write_text("")
    done = neffcache("check", CONFIG, "--by-ref", "--dir", store.root / "file")
    assert done.code == 7
    assert_sentence_and_hint(done)


def test_no_store_at_all_is_unknown_and_none_is_made(neffcache: Run, store: LocalStore) -> None:
    absent = store.root / "absent"
    for more in ([], ["--verify"]):
        done = neffcache("check", CONFIG, "--by-ref", *more, "--dir", absent, "--json")
        assert (done.code, done.json[0]["state"]) == (3, "UNKNOWN")
        assert not absent.exists()


def test_several_are_checked_each_and_one_that_is_no_hit_decides(
    neffcache: Run, store: LocalStore, warmed: Manifest
) -> None:
    done = neffcache("check", CONFIG, "llama3_8b", "--by-ref", "--dir", store.root, "--json")
    assert done.code == 3
    assert [(row["config"], row["state"]) for row in done.json] == [(CONFIG, "HIT"), ("llama3_8b", "UNKNOWN")]


def test_a_fault_of_one_does_not_hide_the_others(neffcache: Run, store: LocalStore, warmed: Manifest) -> None:
    done = neffcache("check", "no such name", CONFIG, "--by-ref", "--dir", store.root, "--json")
    assert done.code == 2
    rows: list[dict[str, Any]] = done.json
    assert (rows[0]["config"], rows[0]["error"], rows[0]["exit_code"]) == ("no such name", "Usage", 2)
    assert rows[1]["state"] == "HIT"


def assert_sentence_and_hint(done: Answer) -> None:
    lines = done.err.strip().splitlines()
    assert [line.partition(":")[0] for line in lines[-2:]] == ["error", "hint"]
    assert all(line.partition(": ")[2] for line in lines[-2:])
    assert "Traceback" not in done.err
