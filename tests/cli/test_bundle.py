from __future__ import annotations

import io
import json
import os
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from neffcache.key.canonical import digest, xxh3_128_hex
from neffcache.store import layout
from neffcache.store.local import LocalStore
from neffcache.store.records import Manifest
from neffcache.store.signing import PublicKey, make_key
from tests.cli.conftest import BY_REF, CONFIG, VERSIONS, Answer, job_of, put_job, request_of

pytestmark = pytest.mark.fast

Run = Callable[..., Answer]
NAME = digest(request_of().named(VERSIONS))


@pytest.fixture
def public(tmp_path: Path) -> PublicKey:
    return make_key(tmp_path / "fleet.key")


@pytest.fixture
def file(neffcache: Run, store: LocalStore, warmed: Manifest, public: PublicKey, tmp_path: Path) -> Path:
    assert neffcache("sign", "--all", "--key", tmp_path / "fleet.key", "--dir", store.root).code == 0
    done = neffcache("export", CONFIG, "-o", tmp_path / "job.tar", "--dir", store.root, "--json")
    assert done.code == 0
    assert (done.json["manifests"], done.json["refs"]) == ([warmed.id], 1)
    return tmp_path / "job.tar"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return tmp_path / "other"


def test_exported_and_imported_it_is_a_hit_in_another_store(
    neffcache: Run, warmed: Manifest, file: Path, other: Path, public: PublicKey
) -> None:
    done = neffcache("import", file, "--dir", other, "--json")
    assert (done.code, done.json["manifests"], done.json["graphs"]) == (0, [warmed.id], 2)
    held = neffcache("check", CONFIG, "--by-ref", *BY_REF, "--verify", "--dir", other, "--json")
    assert (held.code, held.json[0]["manifest"]) == (0, warmed.id)
    assert neffcache("check", CONFIG, "--by-ref", *BY_REF, "--require-signature", public, "--dir", other).code == 0
    assert neffcache("verify", "--dir", other).code == 0
    assert neffcache("import", file, "--dir", other).code == 0, "again"


def test_a_required_signature_is_asked_for_before_anything_gets_a_name(
    neffcache: Run, store: LocalStore, file: Path, other: Path, public: PublicKey, tmp_path: Path
) -> None:
    assert neffcache("import", file, "--require-signature", public, "--dir", tmp_path / "good").code == 0
    done = neffcache("import", file, "--require-signature", make_key(tmp_path / "no"), "--dir", other, "--json")
    assert (done.code, done.json["error"]) == (5, "Mismatch")
    opened = LocalStore.open(other, writable=False)
    assert opened.graph_keys() == opened.manifest_ids() == opened.channels() == []


def test_an_unsigned_change_of_a_graph_in_a_signed_bundle_is_refused(
    neffcache: Run, file: Path, other: Path, public: PublicKey
) -> None:
    with tarfile.open(file) as archive:
        members = [(info, archive.extractfile(info).read()) for info in archive]  # type: ignore[union-attr]
    name = layout.graph_name(xxh3_128_hex(b"one"))
    changed = []
    for info, data in members:
        if info.name == name:
            record = json.loads(data)
            del record["seal"]  # documented as optional
            record["artifacts"][0]["mode"] = 0o555
            data = json.dumps(record).encode()
        changed.append((info, data))
    index = json.loads(changed[0][1])
    index["bytes"] = sum(len(data) for _, data in changed[1:])
    changed[0] = (changed[0][0], json.dumps(index).encode())
    evil = file.with_name("evil.tar")
    with tarfile.open(evil, "w", format=tarfile.USTAR_FORMAT) as archive:
        for info, data in changed:
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    assert neffcache("import", evil, "--require-signature", public, "--dir", other).code == 5
    assert LocalStore.open(other, writable=False).graph_keys() == []
    assert neffcache("import", evil, "--dir", other).code == 0, "without a required signature nobody can tell"


def test_a_newer_ref_stays_and_an_older_bundle_is_refused_under_a_signature(
    neffcache: Run, store: LocalStore, file: Path, public: PublicKey, tmp_path: Path
) -> None:
    newer = put_job(store, job_of(request_of()), "one", serial=9)
    done = neffcache("import", file, "--dir", store.root, "--json")
    assert (done.code, done.json["kept_newer"]) == (0, [CONFIG])
    ref = store.ref("current", CONFIG, NAME)
    assert ref is not None
    assert ref.manifest == newer.id
    done = neffcache("import", file, "--require-signature", public, "--dir", store.root, "--json")
    assert done.code == 5
    assert "older state" in done.json["message"]


def test_what_is_not_whole_is_not_exported_and_leaves_no_file(
    neffcache: Run, store: LocalStore, warmed: Manifest, tmp_path: Path
) -> None:
    record = store.get_graph(xxh3_128_hex(b"one"))
    assert record is not None
    store.blob_path(record.artifacts[0].sha256).unlink()
    done = neffcache("export", "--all", "-o", tmp_path / "job.tar", "--dir", store.root, "--json")
    assert (done.code, done.json["error"]) == (3, "Miss")
    assert "lacks 1 files" in done.json["message"]
    assert neffcache("export", "llama3_8b", "-o", tmp_path / "job.tar", "--dir", store.root).code == 3
    assert neffcache("export", "-o", tmp_path / "job.tar", "--dir", store.root).code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_it_goes_through_pipes(
    neffcache: Run, store: LocalStore, file: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=out, write=lambda text: None, flush=lambda: None))
    assert neffcache("export", CONFIG, "-o", "-", "--dir", store.root).code == 0
    monkeypatch.undo()
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    assert out.getvalue() == file.read_bytes()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(out.getvalue())))
    assert neffcache("import", "-", "--dir", other).code == 0
    assert neffcache("export", CONFIG, "-o", "-", "--json", "--dir", store.root).code == 2


@pytest.mark.parametrize("content", [None, b"", b"no tar at all"])
def test_what_is_no_bundle_is_refused_in_a_sentence(
    neffcache: Run, tmp_path: Path, other: Path, content: bytes | None
) -> None:
    path = tmp_path / "x.tar"
    if content is not None:
        path.write_bytes(content)
    done = neffcache("import", path, "--dir", other, "--json")
    assert done.code in (2, 7)
    assert done.json["message"]
