from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
import pytest

from neffcache.cli import check as check_verb
from neffcache.flows import check as flow
from neffcache.flows.check import UNPROVED
from neffcache.flows.request import make_request, words
from neffcache.flows.resolve import Job
from neffcache.key.canonical import digest, xxh3_128_hex
from neffcache.store import layout
from neffcache.store.local import LocalStore
from neffcache.store.records import Manifest, Ref
from tests.cli.conftest import BY_REF, CONFIG, SAID, VERSIONS, Answer, damage, job_of, put_job, request_of

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
    done = neffcache("check", CONFIG, "--by-ref", *BY_REF, "--dir", store.root, "--json")
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
            "reason": UNPROVED,
        }
    ]
    assert "not yet proved" in neffcache("check", CONFIG, "--by-ref", *BY_REF, "--dir", store.root).out


@pytest.mark.parametrize("other", [["--set", "training.seq_len=512"], ["--target", "trn2"], ["--option=-O1"]])
def test_by_ref_another_request_is_unknown_never_a_miss(
    neffcache: Run, store: LocalStore, warmed: Manifest, other: list[str]
) -> None:
    done = neffcache("check", CONFIG, "--by-ref", *BY_REF, *other, "--dir", store.root, "--json")
    assert (done.code, done.json[0]["state"], done.json[0]["manifest"]) == (3, "UNKNOWN", None)


def test_by_ref_a_ref_under_another_request_s_name_proves_nothing(
    neffcache: Run, store: LocalStore, warmed: Manifest
) -> None:
    named, other = (request_of(sets=sets).named(VERSIONS) for sets in (["training.seq_len=512"], []))
    store.put_ref("current", CONFIG, digest(named), Ref(other, warmed.cache_key, warmed.id, CONFIG, 8))
    done = neffcache(
        "check", CONFIG, "--by-ref", *BY_REF, "--set", "training.seq_len=512", "--dir", store.root, "--json"
    )
    assert (done.code, done.json[0]["state"]) == (3, "UNKNOWN")
    assert "another request" in done.json[0]["reason"]


def test_by_ref_a_ref_to_a_manifest_of_another_job_proves_nothing(
    neffcache: Run, store: LocalStore, warmed: Manifest
) -> None:
    named = request_of().named(VERSIONS)
    store.put_ref("current", CONFIG, digest(named), Ref(named, "0" * 32, warmed.id, CONFIG, 8))
    done = neffcache("check", CONFIG, "--by-ref", *BY_REF, "--dir", store.root, "--json")
    assert (done.code, done.json[0]["state"]) == (3, "UNKNOWN")
    assert "another job key" in done.json[0]["reason"]


def test_by_ref_a_ref_whose_manifest_is_gone_is_a_miss(neffcache: Run, store: LocalStore, warmed: Manifest) -> None:
    (store.root / layout.manifest_name(warmed.id)).unlink()
    done = neffcache("check", CONFIG, "--by-ref", *BY_REF, "--dir", store.root, "--json")
    assert (done.code, done.json[0]["state"]) == (3, "MISS")
    assert warmed.id in done.json[0]["reason"]


def test_without_torchtitan_it_goes_by_ref_and_says_so(
    neffcache: Run, store: LocalStore, warmed: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neffcache.flows.resolve.titan_installed", lambda: False)
    done = neffcache("check", CONFIG, *BY_REF, "--dir", store.root, "--json")
    assert (done.code, done.json[0]["by"]) == (0, "ref")
    assert "TorchTitan is not installed" in done.err


def test_by_ref_what_is_not_said_is_unknown_and_is_named(
    neffcache: Run, store: LocalStore, warmed: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neffcache.flows.resolve.titan_installed", lambda: False)
    for said, lacking in ((SAID, "--toolchain"), (["--toolchain", "host"], "--version-of torchtitan")):
        done = neffcache("check", CONFIG, *said, "--dir", store.root, "--json")
        assert (done.code, done.json[0]["state"]) == (3, "UNKNOWN")
        assert f"not said: {lacking}" in done.json[0]["reason"]


@pytest.mark.parametrize("name", VERSIONS)
@pytest.mark.parametrize("how", ["other", "unsaid", "more"])
def test_by_ref_every_version_must_match_and_the_nearest_is_told(
    neffcache: Run, store: LocalStore, warmed: Manifest, name: str, how: str
) -> None:
    said = {**VERSIONS, **({name: "9"} if how == "other" else {"more": "9"} if how == "more" else {})}
    if how == "unsaid":
        del said[name]
    words = [word for item in said.items() for word in ("--version-of", "=".join(item))]
    done = neffcache("check", CONFIG, "--by-ref", "--toolchain", "host", *words, "--dir", store.root, "--json")
    assert (done.code, done.json[0]["state"]) == (3, "UNKNOWN")
    assert f"versions.{'more' if how == 'more' else name}: " in done.json[0]["reason"]


def test_by_ref_versions_may_be_said_by_a_variable(
    neffcache: Run, store: LocalStore, warmed: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEFFCACHE_VERSIONS", "; ".join(f"{name}={text}" for name, text in VERSIONS.items()))
    assert neffcache("check", CONFIG, "--by-ref", "--toolchain", "host", "--dir", store.root).code == 0


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"sets": ["training.seq_len=512", "debug.seed=7"], "options": ["-O1", "--enable-mixed-precision-accumulation"]},
        {"target": "trn2", "lnc": 1, "nodes": 2},
    ],
)
def test_the_words_of_a_ref_make_its_request_again(given: dict[str, Any]) -> None:
    named = request_of(**given).named(VERSIONS)
    config, *said = words(named)
    with click.Context(check_verb.command) as context:
        parser = check_verb.command.make_parser(context)
        parsed, _, _ = parser.parse_args([config, *said])
    again = make_request(
        config,
        sets=parsed.get("sets", ()),
        target=parsed["target"],
        lnc=int(parsed["lnc"]),
        world_size=int(parsed["world_size"]),
        toolchain=parsed["toolchain"],
        options=parsed.get("options", ()),
        versions=parsed["said"],
        environ={},
    )
    assert digest(again.named()) == digest(named)


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
    assert neffcache("check", CONFIG, "--by-ref", *BY_REF, "--dir", store.root, "--json").json[0]["state"] == "HIT"
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
    done = neffcache("check", CONFIG, "--by-ref", *BY_REF, "--dir", store.root, "--json")
    assert (done.code, done.json[0]["state"], done.json[0]["manifest"]) == (3, "PARTIAL", warmed.id)
    listed = {(item["kind"], item["what"], item["quarantined"]) for item in done.json[0]["missing"]}
    assert listed == {
        ("artifact", record.artifacts[0].sha256, False),
        ("graph", xxh3_128_hex(b"two"), False),
    }
    shown = neffcache("check", CONFIG, "--by-ref", *BY_REF, "--dir", store.root).out
    assert "PARTIAL" in shown
    assert record.artifacts[0].sha256 in shown


def test_an_incomplete_manifest_is_partial(neffcache: Run, store: LocalStore) -> None:
    put_job(store, job_of(request_of()), "one", complete=False)
    done = neffcache("check", CONFIG, "--by-ref", *BY_REF, "--dir", store.root, "--json")
    assert (done.code, done.json[0]["state"], done.json[0]["missing"]) == (3, "PARTIAL", [])
    assert "not complete" in done.json[0]["reason"]


def test_a_flipped_bit_is_found_only_by_verify_which_quarantines_it(
    neffcache: Run, store: LocalStore, warmed: Manifest
) -> None:
    record = store.get_graph(xxh3_128_hex(b"one"))
    assert record is not None
    damage(store.blob_path(record.artifacts[0].sha256))
    assert neffcache("check", CONFIG, "--by-ref", *BY_REF, "--dir", store.root).code == 0
    done = neffcache("check", CONFIG, "--by-ref", *BY_REF, "--verify", "--dir", store.root, "--json")
    assert (done.code, done.json["error"], done.json["exit_code"]) == (7, "StoreFault", 7)
    assert "1 files of manifest" in done.json["message"]
    assert "now in quarantine" in done.json["message"]
    assert len(store.quarantined()) == 1
    after = neffcache("check", CONFIG, "--by-ref", *BY_REF, "--dir", store.root, "--json")
    assert [item["quarantined"] for item in after.json[0]["missing"]] == [True]


def test_a_truncated_file_is_partial_without_hashing(neffcache: Run, store: LocalStore, warmed: Manifest) -> None:
    record = store.get_graph(xxh3_128_hex(b"one"))
    assert record is not None
    path = store.blob_path(record.artifacts[0].sha256)
    path.chmod(0o600)
    path.write_bytes(b"short")
    done = neffcache("check", CONFIG, "--by-ref", *BY_REF, "--dir", store.root, "--json")
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
    done = neffcache("check", CONFIG, "--by-ref", *BY_REF, "--dir", store.root, "--json")
    assert (done.code, done.json["exit_code"]) == (7, 7)
    assert path.exists(), "a command that only reads moved a file"


def test_a_store_that_is_no_directory_is_a_fault_of_the_store(neffcache: Run, store: LocalStore) -> None:
    (store.root / "file").write_text("")
    done = neffcache("check", CONFIG, "--by-ref", *BY_REF, "--dir", store.root / "file")
    assert done.code == 7
    assert_sentence_and_hint(done)


def test_no_store_at_all_is_unknown_and_none_is_made(neffcache: Run, store: LocalStore) -> None:
    absent = store.root / "absent"
    for more in ([], ["--verify"]):
        done = neffcache("check", CONFIG, "--by-ref", *BY_REF, *more, "--dir", absent, "--json")
        assert (done.code, done.json[0]["state"]) == (3, "UNKNOWN")
        assert not absent.exists()


def test_several_are_checked_each_and_one_that_is_no_hit_decides(
    neffcache: Run, store: LocalStore, warmed: Manifest
) -> None:
    done = neffcache("check", CONFIG, "llama3_8b", "--by-ref", *BY_REF, "--dir", store.root, "--json")
    assert done.code == 3
    assert [(row["config"], row["state"]) for row in done.json] == [(CONFIG, "HIT"), ("llama3_8b", "UNKNOWN")]


def test_a_fault_of_one_does_not_hide_the_others(neffcache: Run, store: LocalStore, warmed: Manifest) -> None:
    done = neffcache("check", "no such name", CONFIG, "--by-ref", *BY_REF, "--dir", store.root, "--json")
    assert done.code == 2
    rows: list[dict[str, Any]] = done.json
    assert (rows[0]["config"], rows[0]["error"], rows[0]["exit_code"]) == ("no such name", "Usage", 2)
    assert rows[1]["state"] == "HIT"


def assert_sentence_and_hint(done: Answer) -> None:
    lines = done.err.strip().splitlines()
    assert [line.partition(":")[0] for line in lines[-2:]] == ["error", "hint"]
    assert all(line.partition(": ")[2] for line in lines[-2:])
    assert "Traceback" not in done.err
