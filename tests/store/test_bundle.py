"""A bundle gives back what went in, and no trick of a path or a header gets past the reader."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from neffcache.errors import StoreFault, Usage
from neffcache.store import bundle, layout
from neffcache.store.bundle import INDEX, Named
from neffcache.store.local import LocalStore
from neffcache.store.records import Damaged, Manifest, Ref, Signatures
from tests.store.conftest import Made

pytestmark = pytest.mark.fast

Members = list[tuple[tarfile.TarInfo, bytes]]


@pytest.fixture
def manifest(store: LocalStore, made: Made) -> Manifest:
    manifest = made.job(store, "one", "two")
    store.put_signatures(Signatures(manifest.id, "f" * 32, ({"serial": 1},)))
    return manifest


@pytest.fixture
def data(store: LocalStore, manifest: Manifest) -> bytes:
    return written(store, manifest)


@pytest.fixture
def target(tmp_path: Path) -> LocalStore:
    return LocalStore.open(tmp_path / "target", writable=True)


def written(store: LocalStore, *manifests: Manifest) -> bytes:
    refs = [Named("current", Ref({"config": "m:x"}, item.cache_key, item.id, "m:x", 3)) for item in manifests]
    file = io.BytesIO()
    bundle.write(store, manifests, refs, file)
    return file.getvalue()


def members_of(data: bytes) -> Members:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        files = [(info, archive.extractfile(info)) for info in archive]
        return [(info, file.read() if file else b"") for info, file in files]


def packed(members: Members, *, format: int = tarfile.USTAR_FORMAT, index: dict[str, Any] | None = None) -> bytes:
    """A tar as somebody with bad intentions makes one, with an index that fits it unless parts of one are given."""
    rest = [item for item in members if item[0].name != INDEX]
    said = json.loads(next(content for info, content in members if info.name == INDEX))
    said |= {"members": len(rest), "bytes": sum(len(content) for _, content in rest), **(index or {})}
    text = json.dumps(said).encode()
    first = tarfile.TarInfo(INDEX)
    first.size = len(text)
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format) as archive:
        archive.addfile(first, io.BytesIO(text))
        for info, content in rest:
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def member(name: str, content: bytes = b"x", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


def test_it_is_a_plain_tar_with_the_names_of_the_layout_in_the_order_of_writing(data: bytes) -> None:
    names = [info.name for info, _ in members_of(data)]
    assert names[0] == INDEX
    kinds = [name.kind for item in names[1:] if (name := layout.parse(item))]
    assert kinds == ["blob"] * 4 + ["graph"] * 2 + ["manifest", "signature"]
    assert all(info.mtime == info.uid == 0 and info.uname == "" for info, _ in members_of(data))


def test_equal_content_gives_equal_bytes_whoever_made_it_and_when(
    data: bytes, manifest: Manifest, tmp_path: Path, made: Made
) -> None:
    other = LocalStore.open(tmp_path / "other", writable=True)
    made.job(other, "unrelated")
    for word in ("two", "one"):
        made.graph(other, word)
    other.put_manifest(manifest)
    other.put_signatures(Signatures(manifest.id, "f" * 32, ({"serial": 1},)))
    assert written(other, manifest) == data


def test_what_went_in_comes_out(data: bytes, manifest: Manifest, store: LocalStore, target: LocalStore) -> None:
    held = bundle.read(io.BytesIO(data), target)
    assert held.manifests == {manifest.id: manifest}
    assert set(held.graphs) == set(manifest.compile_keys())
    assert [item.ref.serial for item in held.refs] == [3]
    assert held.signatures[manifest.id, "f" * 32].statements == ({"serial": 1},)
    assert list(target.blobs()) == list(store.blobs())
    assert target.graph_keys() == target.manifest_ids() == [], "records are for the caller to place"


def test_it_can_be_read_from_a_pipe(data: bytes, target: LocalStore) -> None:
    class Pipe(io.BytesIO):
        def seek(self, *_: Any) -> int:
            raise AssertionError("a pipe cannot seek")

        tell = seek

    assert bundle.read(Pipe(data), target).members == 8


TRICKS: dict[str, Callable[[], tuple[tarfile.TarInfo, bytes]]] = {
    "an absolute name": lambda: member("/etc/passwd"),
    "a way out": lambda: member("blobs/sha256/aa/../../../../x"),
    "a name of nothing of ours": lambda: member("views/x/host/code.so"),
    "an empty name": lambda: member(""),
    "a backslash": lambda: member("..\\x"),
    "a local file": lambda: member("locks/fetch.lock"),
    "a pointer": lambda: member(f"keys/{'a' * 32}.json"),
    "a ref": lambda: member(f"refs/current/x-{'a' * 64}.json"),
    "a directory": lambda: member("blobs/sha256/aa", b"", type=tarfile.DIRTYPE),
    "a symbolic link": lambda: member(f"manifests/{'a' * 64}.json", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
    "a hard link": lambda: member(f"manifests/{'a' * 64}.json", b"", type=tarfile.LNKTYPE, linkname="../x"),
    "a character device": lambda: member(f"graphs/{'a' * 32}.json", b"", type=tarfile.CHRTYPE),
    "a block device": lambda: member(f"graphs/{'a' * 32}.json", b"", type=tarfile.BLKTYPE),
    "a pipe": lambda: member(f"graphs/{'a' * 32}.json", b"", type=tarfile.FIFOTYPE),
    "a sparse file": lambda: member(f"graphs/{'a' * 32}.json", b"", type=tarfile.GNUTYPE_SPARSE),
    "an old kind of file": lambda: member(f"graphs/{'a' * 32}.json", b"", type=tarfile.AREGTYPE),
    "a blob under another's name": lambda: member(layout.blob_name("a" * 64), b"x"),
    "a manifest under another's name": lambda: member(f"manifests/{'a' * 64}.json", b"{}"),
    "a graph that is none": lambda: member(f"graphs/{'a' * 32}.json", b"[]"),
    "a signature that is none": lambda: member(f"signatures/{'a' * 64}/{'b' * 32}", b"\x80\x04N."),
}


@pytest.mark.parametrize("trick", TRICKS)
def test_a_trick_is_refused_and_nothing_gets_a_name(
    data: bytes, target: LocalStore, tmp_path: Path, trick: str
) -> None:
    before = sorted(path for path in tmp_path.rglob("*") if not path.is_relative_to(target.root))
    evil = packed([*members_of(data), TRICKS[trick]()])
    with pytest.raises(Damaged) as refused:
        bundle.read(io.BytesIO(evil), target)
    assert refused.value.message
    assert refused.value.exit_code == 7
    assert list(target.blobs()) == target.graph_keys() == target.manifest_ids() == []
    assert sorted(path for path in tmp_path.rglob("*") if not path.is_relative_to(target.root)) == before
    assert not list((target.root / "tmp").iterdir())


def test_the_same_members_without_a_trick_are_taken(data: bytes, target: LocalStore) -> None:
    assert bundle.read(io.BytesIO(packed(members_of(data))), target).members == 8


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_extended_headers_are_refused_they_could_say_another_name_or_size(
    data: bytes, target: LocalStore, format: int
) -> None:
    long = member("blobs/sha256/" + "a" * 200)
    with pytest.raises(Damaged, match="extended header"):
        bundle.read(io.BytesIO(packed([*members_of(data), long], format=format)), target)


def test_a_name_that_comes_twice_is_refused(data: bytes, target: LocalStore) -> None:
    members = members_of(data)
    with pytest.raises(Damaged, match="twice"):
        bundle.read(io.BytesIO(packed([members[0], members[1], members[1], *members[2:]])), target)


@pytest.mark.parametrize("kind", ["graphs", "signatures"])
def test_a_whole_record_under_another_s_name_is_refused(data: bytes, target: LocalStore, kind: str) -> None:
    members = members_of(data)
    info, _ = next(item for item in members if item[0].name.startswith(kind))
    digits = 32
    suffix = ".json" if kind == "graphs" else ""
    info.name = info.name.removesuffix(suffix)[:-digits] + "0" * digits + suffix
    with pytest.raises(Damaged, match="what belongs to"):
        bundle.read(io.BytesIO(packed(members)), target)
    assert target.graph_keys() == []


def test_records_before_what_they_name_are_refused(data: bytes, target: LocalStore) -> None:
    members = members_of(data)
    with pytest.raises(Damaged, match="after what names it"):
        bundle.read(io.BytesIO(packed([*members[5:], *members[1:5], members[0]])), target)


def test_a_bundle_that_says_more_than_the_file_has_is_refused_before_the_first_byte(
    data: bytes, target: LocalStore, tmp_path: Path
) -> None:
    path = tmp_path / "bomb.tar"
    path.write_bytes(packed(members_of(data), index={"bytes": 1 << 50}))
    with path.open("rb") as file, pytest.raises(Damaged, match="the file has"):
        bundle.read(file, target)
    with pytest.raises(StoreFault, match="needs 1,125,899,906,842,624 bytes"):
        bundle.read(io.BytesIO(path.read_bytes()), target)  # of a pipe the size is not known, the space is
    assert list(target.blobs()) == []


@pytest.mark.parametrize("index", [{"bytes": 100}, {"members": 3}])
def test_a_bundle_that_holds_more_than_it_says_is_refused(
    data: bytes, target: LocalStore, index: dict[str, Any]
) -> None:
    with pytest.raises(Damaged, match="more than it says"):
        bundle.read(io.BytesIO(packed(members_of(data), index=index)), target)
    assert list(target.blobs()) == []


@pytest.mark.parametrize("claimed", [bundle.MAX_MEMBER, 1_000_000])
def test_a_member_that_says_it_is_huge_ends_where_the_file_ends(data: bytes, target: LocalStore, claimed: int) -> None:
    for name in (layout.blob_name("a" * 64), f"graphs/{'a' * 32}.json"):
        huge = tarfile.TarInfo(name)
        huge.size = claimed
        start = packed(members_of(data)[:1], index={"members": 1, "bytes": 1_000_000, "manifests": [], "refs": []})
        evil = start.rstrip(b"\0")
        evil += bytes(-len(evil) % 512) + huge.tobuf(tarfile.USTAR_FORMAT) + b"short"
        with pytest.raises(Damaged, match="ends early" if claimed == 1_000_000 else "more than it says"):
            bundle.read(io.BytesIO(evil), target)
    assert list(target.blobs()) == []


def test_a_record_larger_than_any_record_is_not_read(data: bytes, target: LocalStore) -> None:
    huge = tarfile.TarInfo(f"graphs/{'a' * 32}.json")
    huge.size = bundle.MAX_DOCUMENT + 1
    said = {"members": 1, "bytes": huge.size, "manifests": [], "refs": []}
    evil = packed(members_of(data)[:1], index=said).rstrip(b"\0")
    evil += bytes(-len(evil) % 512) + huge.tobuf(tarfile.USTAR_FORMAT)
    with pytest.raises(Damaged, match="has 67,108,865 bytes"):
        bundle.read(io.BytesIO(evil), target)


@pytest.mark.parametrize("at", [0, 1, 511, 512, 700, 5_000, -1025, -1024])
def test_one_that_ends_early_is_refused(data: bytes, target: LocalStore, at: int) -> None:
    with pytest.raises((Damaged, Usage)):
        bundle.read(io.BytesIO(data[:at]), target)
    assert list(target.blobs()) == []


def test_a_flipped_bit_anywhere_is_found_or_changes_nothing(data: bytes, manifest: Manifest, tmp_path: Path) -> None:
    found = 0
    for at in range(0, len(data), 997):
        target = LocalStore.open(tmp_path / str(at), writable=True)
        changed = bytearray(data)
        changed[at] ^= 1
        try:
            held = bundle.read(io.BytesIO(changed), target)
        except (StoreFault, Usage):
            found += 1
        else:
            assert held.manifests == {manifest.id: manifest}
            assert set(held.graphs) == set(manifest.compile_keys())
    assert found > len(range(0, len(data), 997)) / 2  # the others fall into padding


@pytest.mark.parametrize("data", [b"", b"x" * 2_000, b"\x80\x04N." * 500, bytes(2_000)])
def test_what_is_no_bundle_is_called_so(data: bytes, target: LocalStore) -> None:
    with pytest.raises((Usage, Damaged)) as refused:
        bundle.read(io.BytesIO(data), target)
    assert refused.value.hint


@pytest.mark.parametrize(
    "index",
    [
        {"refs": [{"channel": "../x", "document": {}}]},
        {"refs": [{"channel": "current", "document": {"schema": 1}}]},
        {"refs": ["x"]},
        {"members": -1},
        {"bytes": True},
        {"manifests": ["a" * 64]},
    ],
)
def test_an_index_that_lies_is_refused(data: bytes, target: LocalStore, index: dict[str, Any]) -> None:
    with pytest.raises(Damaged):
        bundle.read(io.BytesIO(packed(members_of(data), index=index)), target)


def test_a_newer_schema_is_refused(data: bytes, target: LocalStore) -> None:
    with pytest.raises(StoreFault, match="schema 2"):
        bundle.read(io.BytesIO(packed(members_of(data), index={"schema": 2})), target)
