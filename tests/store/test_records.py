from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neffcache.errors import StoreFault
from neffcache.store.ranks import MAX_RANKS
from neffcache.store.records import (
    Artifact,
    Damaged,
    GraphRecord,
    KeyPointer,
    Manifest,
    Ref,
    decode,
    encode,
    expand_ranks,
    fold_ranks,
    has_rank,
    manifest_id,
)

pytestmark = pytest.mark.fast


def resealed(document: dict[str, Any]) -> bytes:
    document.pop("seal", None)
    return json.dumps(document).encode()


def test_every_record_survives_the_way_to_bytes_and_back(made) -> None:
    for record in (
        made.record("one"),
        made.manifest("one", native=(Artifact("neff", "a/b.neff", "c" * 64, 7, 0o644),)),
        Ref({"config": "x"}, made.key("job"), "d" * 64, "x"),
        KeyPointer(made.key("job"), "d" * 64),
    ):
        assert decode(type(record), encode(record)) == record
        assert encode(decode(type(record), encode(record))) == encode(record)


def test_unknown_fields_are_kept_at_every_depth(made) -> None:
    document = made.record("one").to_json()
    document |= {"new": [1.5, None], "extra": {"even": "this name"}}
    document["artifacts"][0]["newer"] = True
    again = GraphRecord.from_json(document).to_json()
    assert again == document

    whole = made.manifest("one").to_json()
    whole["rank_classes"][0]["why"] = "pp stage 0"
    whole["id"] = manifest_id(whole)
    assert Manifest.from_json(whole).to_json() == whole


@pytest.mark.parametrize("schema", [0, 2, "1", None, True, 1.0])
def test_an_unknown_schema_is_refused_and_is_not_called_damage(made, schema: object) -> None:
    document = made.record("one").to_json() | {"schema": schema}
    with pytest.raises(StoreFault, match="schema") as caught:
        decode(GraphRecord, resealed(document))
    assert not isinstance(caught.value, Damaged)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("compile_key", "A" * 32),
        ("compile_key", "a" * 32 + "\n"),
        ("nodes", -1),
        ("nodes", 1.0),
        ("nodes", True),
        ("seconds", "1"),
        ("text", None),
        ("artifacts", {}),
        ("artifacts", ["x"]),
        ("components", {"text": "short"}),
    ],
)
def test_a_wrong_type_is_refused_by_name(made, field: str, value: object) -> None:
    document = made.record("one").to_json() | {field: value}
    with pytest.raises(Damaged):
        decode(GraphRecord, resealed(document))


def test_a_missing_field_is_refused(made) -> None:
    for name in made.record("one").to_json():
        document = made.record("one").to_json()
        del document[name]
        with pytest.raises(StoreFault):
            decode(GraphRecord, resealed(document))


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b"\x80\x04K\x01.", b'{"schema": NaN}', b"[" * 200_000, b"\xff"]
)
def test_bytes_that_are_no_record_are_damage(data: bytes) -> None:
    for kind in (GraphRecord, Manifest, Ref, KeyPointer):
        with pytest.raises(Damaged):
            decode(kind, data)


def test_a_flipped_bit_anywhere_in_a_sealed_record_is_noticed_or_changes_nothing(made) -> None:
    record = made.record("one", seconds=1.25)
    data = encode(record)
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << at % 8
        try:
            found = decode(GraphRecord, bytes(flipped))
        except StoreFault:
            continue
        # White space, or the name of the seal itself: the content is what it was.
        assert {**found.to_json(), **record.to_json()} == found.to_json()


def test_a_record_without_a_seal_is_read(made) -> None:
    assert decode(GraphRecord, resealed(made.record("one").to_json())) == made.record("one")


def test_a_manifest_is_named_by_its_content_and_not_by_time_or_host(made) -> None:
    first, later = made.manifest("one"), made.manifest("one", created="2031-05-05T00:00:00Z")
    assert first.id == later.id
    assert first.created != later.created
    assert made.manifest("two").id != first.id
    assert made.manifest("one", complete=False).id != first.id
    document = first.to_json()
    assert manifest_id({**document, "host": {"kind": "other"}, "seconds": 3.5, "id": "x"}) == first.id
    assert manifest_id({**document, "new": 1}) != first.id


def test_native_artifacts_count_in_any_order(made) -> None:
    one, two = (Artifact("neff", f"{name}.neff", "c" * 64, 7, 0o644) for name in "ab")
    assert made.manifest("one", native=(one, two)).id == made.manifest("one", native=(two, one)).id


def test_an_altered_manifest_is_damage(made) -> None:
    document = made.manifest("one").to_json()
    document["environment"] = {"OMP_NUM_THREADS": "2"}
    with pytest.raises(Damaged, match="digest"):
        decode(Manifest, json.dumps(document).encode())


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "a/", "./a", "a\\b", "a\x00b", "a\nb", "\ud800", "x" * 256]
)
def test_a_path_that_could_leave_its_store_is_refused(path: str) -> None:
    with pytest.raises(StoreFault):
        Artifact("host", path, "a" * 64, 1, 0o644)
    with pytest.raises(Damaged):
        Artifact.from_json({"store": "host", "path": path, "sha256": "a" * 64, "size": 1, "mode": 420})


@pytest.mark.parametrize("name", ["", "..", "a/b", "ready.json", "manifest.json", "Host", "a\n"])
def test_a_store_name_that_could_leave_the_view_is_refused(name: str) -> None:
    with pytest.raises(StoreFault):
        Artifact(name, "a", "a" * 64, 1, 0o644)


def test_ordinary_paths_are_taken() -> None:
    for path in ("a", "a/b.c", "..a/b", "größe/x", "a b", "module_1/MODULE+abc/model.neff"):
        assert Artifact("neff", path, "a" * 64, 1, 0o644).path == path


@given(st.sets(st.integers(0, 400)))
def test_folded_ranks_expand_to_the_same_ranks(ranks: set[int]) -> None:
    folded = fold_ranks(ranks)
    assert expand_ranks(folded) == tuple(sorted(ranks))
    assert {rank for rank in range(401) if has_rank(folded, rank)} == ranks


def test_ranks_are_written_as_short_as_they_can_be() -> None:
    assert fold_ranks([128, 1, 0, 2, 3]) == "0-3,128"
    assert fold_ranks([]) == ""
    assert expand_ranks("") == ()


@pytest.mark.parametrize(
    "ranks", ["3-1", "1,1", "2,1", "0-3,2", "-1", "1-", "a", "01", "1 ", f"0-{MAX_RANKS}", "0-99999999999"]
)
def test_ranks_that_are_not_ranks_are_refused(ranks: str) -> None:
    with pytest.raises(StoreFault):
        expand_ranks(ranks)


def test_a_manifest_knows_its_keys_and_classes(made) -> None:
    whole = made.manifest("one", "two", "one")
    assert whole.compile_keys() == (made.key("one"), made.key("two"))
    assert whole.rank_class(3) is whole.rank_classes[0]
    assert whole.rank_class(4) is None
