"""Signatures: who warms signs, and a reader that requires a key takes nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from neffcache.errors import Mismatch
from neffcache.flows.trust import Trust, check_manifest, graph_digest, sign, trust_of
from neffcache.key.canonical import digest, xxh3_128_hex
from neffcache.store import layout
from neffcache.store.local import LocalStore
from neffcache.store.pointers import next_serial
from neffcache.store.records import Artifact, GraphRecord, Manifest, Ref, Signatures, encode
from neffcache.store.signing import PublicKey, make_key, private_key
from tests.cli.conftest import BY_REF, CONFIG, VERSIONS, Answer, job_of, put_graph, put_job, request_of

pytestmark = pytest.mark.fast

Run = Callable[..., Answer]
NAME = digest(request_of().named(VERSIONS))


@pytest.fixture
def public(tmp_path: Path) -> PublicKey:
    return make_key(tmp_path / "fleet.key")


@pytest.fixture
def key(tmp_path: Path, public: PublicKey) -> Path:
    return tmp_path / "fleet.key"


@pytest.fixture
def signed(neffcache: Run, store: LocalStore, warmed: Manifest, key: Path) -> Manifest:
    assert neffcache("sign", CONFIG, "--key", key, "--dir", store.root).code == 0
    return warmed


def check(neffcache: Run, store: LocalStore, *more: Any) -> Answer:
    return neffcache("check", CONFIG, "--by-ref", *BY_REF, "--dir", store.root, "--json", *more)


def test_keygen_makes_a_pair_and_prints_the_public_half(neffcache: Run, tmp_path: Path) -> None:
    done = neffcache("keygen", tmp_path / "k", "--json")
    assert done.code == 0
    assert (tmp_path / "k.pub").read_text().strip() == done.json["key"]
    assert neffcache("keygen", tmp_path / "k").code == 2


def test_what_was_signed_is_taken_and_by_another_s_key_refused(
    neffcache: Run, store: LocalStore, signed: Manifest, public: PublicKey, tmp_path: Path
) -> None:
    assert check(neffcache, store, "--require-signature", public).json[0]["state"] == "HIT"
    other = make_key(tmp_path / "other")
    done = check(neffcache, store, "--require-signature", other)
    assert (done.code, done.json["error"]) == (5, "Mismatch")
    assert check(neffcache, store, "--require-signature", other, "--require-signature", public).code == 0


def test_what_was_not_signed_is_refused_and_says_what_to_do(
    neffcache: Run, store: LocalStore, warmed: Manifest, public: PublicKey
) -> None:
    done = check(neffcache, store, "--require-signature", public)
    assert (done.code, done.json["exit_code"]) == (5, 5)
    assert "not signed" in done.json["message"]
    assert "neffcache sign" in done.json["hint"]


def test_a_key_may_be_required_by_a_variable(
    neffcache: Run, store: LocalStore, warmed: Manifest, public: PublicKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEFFCACHE_REQUIRE_SIGNATURE", str(public))
    assert check(neffcache, store).code == 5


def rewrite(store: LocalStore, record: GraphRecord | Ref | Signatures, name: str) -> None:
    """Put a record where it belongs, as whoever can write to the store could: sealed and whole."""
    path = store.root / name
    path.unlink()
    path.write_bytes(encode(record))


def test_another_graph_record_under_a_signed_compile_key_is_refused(
    neffcache: Run, store: LocalStore, signed: Manifest, public: PublicKey
) -> None:
    key = xxh3_128_hex(b"one")
    record = store.get_graph(key)
    assert record is not None
    evil = store.put_blob(b"another program")
    [artifact] = record.artifacts
    other = replace(record, artifacts=(replace(artifact, sha256=evil, size=15),))
    rewrite(store, other, layout.graph_name(key))
    assert check(neffcache, store).json[0]["state"] == "HIT", "only a signature can see this"
    done = check(neffcache, store, "--require-signature", public)
    assert done.code == 5
    assert key in done.json["message"]
    assert done.json["details"]["graphs"] == [key]


@pytest.mark.parametrize("changed", ["serial", "manifest", "request", "channel"])
def test_a_signature_does_not_cover_another_ref(
    neffcache: Run, store: LocalStore, signed: Manifest, public: PublicKey, changed: str
) -> None:
    ref = store.ref("current", CONFIG, NAME)
    assert ref is not None
    if changed == "serial":
        rewrite(store, replace(ref, serial=8), layout.ref_name("current", CONFIG, NAME))
    elif changed == "manifest":
        other = put_job(store, job_of(request_of()), "one", created="2026-02-02T00:00:00+00:00")
        rewrite(store, replace(ref, manifest=other.id), layout.ref_name("current", CONFIG, NAME))
    elif changed == "request":  # the same manifest under a request that nobody signed
        named = request_of(sets=["training.seq_len=512"]).named(VERSIONS)
        store.put_ref("current", CONFIG, digest(named), replace(ref, request=named))
        done = check(neffcache, store, "--set", "training.seq_len=512", "--require-signature", public)
        assert done.code == 5
        return
    else:
        found = store.signatures(signed.id, public.signer)
        assert found is not None
        statement = {**found.statements[0], "channel": "next"}
        name = layout.signature_name(signed.id, public.signer)
        rewrite(store, replace(found, statements=(statement,)), name)
    assert check(neffcache, store).code == 0
    assert check(neffcache, store, "--require-signature", public).code == 5


@pytest.mark.parametrize("field", ["serial", "graphs", "request", "cache_key", "signature"])
def test_a_statement_that_was_altered_counts_for_nothing(
    neffcache: Run, store: LocalStore, signed: Manifest, public: PublicKey, field: str
) -> None:
    found = store.signatures(signed.id, public.signer)
    assert found is not None
    other: dict[str, Any] = {"serial": 9, "graphs": {}, "request": {}, "cache_key": "0" * 32, "signature": "AAAA"}
    statement = {**found.statements[0], field: other[field]}
    rewrite(store, replace(found, statements=(statement,)), layout.signature_name(signed.id, public.signer))
    assert check(neffcache, store, "--require-signature", public).code == 5


def test_an_older_state_is_refused_where_a_newer_one_is_demanded(
    neffcache: Run, store: LocalStore, signed: Manifest, public: PublicKey
) -> None:
    assert check(neffcache, store, "--require-signature", public, "--min-serial", "7").code == 0
    done = check(neffcache, store, "--require-signature", public, "--min-serial", "8")
    assert done.code == 5
    assert "older state" in done.json["message"]
    assert neffcache("check", CONFIG, "--by-ref", "--min-serial", "8", "--dir", store.root).code == 2


def test_by_key_any_statement_about_the_manifest_will_do_but_its_content_must_be_signed(
    store: LocalStore, warmed: Manifest, key: Path, public: PublicKey
) -> None:
    trust = trust_of([str(public)])
    with pytest.raises(Mismatch, match="not signed"):
        check_manifest(trust, warmed, store.signatures, store.get_graph)
    ref = store.ref("current", CONFIG, NAME)
    assert ref is not None
    sign(store, private_key(key), "another-channel", ref)
    check_manifest(trust, warmed, store.signatures, store.get_graph)
    check_manifest(Trust(), warmed, lambda *_: None, store.get_graph)

    def other(compile_key: str) -> GraphRecord | None:
        record = store.get_graph(compile_key)
        return record and replace(record, text="0" * 64)

    with pytest.raises(Mismatch, match="2 of 2 graphs"):
        check_manifest(trust, warmed, store.signatures, other)


def test_signing_again_after_a_new_warm_leaves_both_statements(
    neffcache: Run, store: LocalStore, signed: Manifest, key: Path, public: PublicKey
) -> None:
    put_job(store, job_of(request_of()), "one", "two", serial=9)
    done = neffcache("sign", "--all", "--key", key, "--dir", store.root, "--json")
    assert [row["serial"] for row in done.json] == [9]
    found = store.signatures(signed.id, public.signer)
    assert found is not None
    assert [item["serial"] for item in found.statements] == [7, 9]


def test_only_what_is_complete_and_here_can_be_signed(
    neffcache: Run, store: LocalStore, warmed: Manifest, key: Path
) -> None:
    assert neffcache("sign", "llama3_8b", "--key", key, "--dir", store.root).code == 3
    put_job(store, job_of(request_of()), "one", complete=False, serial=8)
    done = neffcache("sign", CONFIG, "--key", key, "--dir", store.root, "--json")
    assert (done.code, done.json["exit_code"]) == (3, 3)
    assert "not complete" in done.json["message"]
    assert neffcache("sign", "--key", key, "--dir", store.root).code == 2


def test_the_digest_of_a_graph_counts_every_file_and_not_their_order() -> None:
    one, two = (Artifact("host", name, digit * 64, 1, 0o444) for name, digit in (("a", "1"), ("b", "2")))
    record = GraphRecord("0" * 32, {}, "forward", "g", 1, 1, "3" * 64, (one, two), 1.0, None)
    same = replace(record, artifacts=(two, one), seconds=2.0, name="h")
    assert graph_digest(same) == graph_digest(record)
    for other in (replace(one, path="c"), replace(one, mode=0o555), replace(one, size=2), replace(one, store="neff")):
        assert graph_digest(replace(record, artifacts=(other, two))) != graph_digest(record)
    assert graph_digest(replace(record, artifacts=(one,))) != graph_digest(record)


def test_a_serial_grows_with_every_change_and_stays_without_one() -> None:
    ref = Ref({}, "0" * 32, "a" * 64, "x", 5)
    assert next_serial(ref, "a" * 64) == 5
    assert next_serial(ref, "b" * 64) > 1_700_000_000
    late = replace(ref, serial=1 << 40)
    assert next_serial(late, "b" * 64) == (1 << 40) + 1
    assert next_serial(None, "a" * 64) > 1_700_000_000
    assert next_serial(replace(ref, serial=0), "a" * 64) > 1_700_000_000


def test_verify_looks_at_signatures_too(neffcache: Run, store: LocalStore, signed: Manifest, public: PublicKey) -> None:
    done = neffcache("verify", "--dir", store.root, "--json")
    assert (done.code, done.json["signatures"]["good"]) == (0, 1)
    path = store.root / layout.signature_name(signed.id, public.signer)
    text = json.loads(path.read_text())
    text["statements"][0]["serial"] = 99
    path.chmod(0o600)
    path.write_text(json.dumps(text))
    assert neffcache("verify", "--dir", store.root, "--json").json["signatures"]["damaged"] == 1


def test_the_graph_of_another_job_does_not_disturb(
    neffcache: Run, store: LocalStore, signed: Manifest, public: PublicKey
) -> None:
    put_graph(store, "three")
    assert check(neffcache, store, "--require-signature", public).code == 0
