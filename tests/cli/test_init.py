"""What a container does before the training starts, from the directory of another store."""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from neffcache.errors import RemoteFault, StoreFault
from neffcache.flows import init as flow
from neffcache.flows.check import UNPROVED
from neffcache.flows.sources import Directory
from neffcache.flows.trust import trust_of
from neffcache.key.canonical import digest, xxh3_128_hex
from neffcache.store import layout
from neffcache.store.local import LocalStore
from neffcache.store.records import Manifest, Ref, encode
from neffcache.store.signing import PublicKey, make_key
from neffcache.store.view import has_view
from tests.cli.conftest import BY_REF, CONFIG, VERSIONS, Answer, damage, job_of, put_job, request_of
from tests.store.conftest import Child, ordinary_user, snapshot

pytestmark = pytest.mark.fast

Run = Callable[..., Answer]
REQUEST = replace(request_of(), versions=VERSIONS)
NAME = digest(REQUEST.named())


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """A mounted volume as Kubernetes gives an emptyDir: everybody may write, no sticky bit."""
    path = tmp_path / "volume"
    path.mkdir()
    path.chmod(0o777)
    return path


@pytest.fixture
def init(neffcache: Run, store: LocalStore, volume: Path, tmp_path: Path) -> Callable[..., Answer]:
    def run(*more: Any, config: str = CONFIG, remote: Path | None = None, to: Path | None = None) -> Answer:
        log = tmp_path / "termination-log"
        words = ["init", config, *BY_REF, "--remote", remote or store.root, "--dir", to or volume]
        return neffcache(*words, "--termination-log", log, *more)

    return run


def files(view: Path) -> set[str]:
    return {str(path.relative_to(view)) for path in view.rglob("*") if path.is_file()}


def test_it_fetches_makes_the_view_and_says_so_in_one_line(
    init: Run, store: LocalStore, warmed: Manifest, volume: Path
) -> None:
    done = init()
    assert done.code == 0
    assert len(done.out.splitlines()) == 1
    view = volume / "views" / warmed.id
    document = done.json
    assert document.pop("seconds") >= 0
    assert document.pop("bytes") == sum(store.blob_size(sha256) or 0 for sha256 in store.blobs())
    assert document == {
        "config": CONFIG,
        "state": "HIT",
        "by": "ref",
        "identity": "ref",
        "reason": UNPROVED,
        "manifest": warmed.id,
        "cache_key": warmed.cache_key,
        "serial": 7,
        "stale": False,
        "view": str(view),
        "environment": {"NEFFCACHE_DIR": str(volume), "OMP_NUM_THREADS": "1"},
        "requests": 0,
        "exit_code": 0,
    }
    graphs = {f"host/graphs/{xxh3_128_hex(word)}/code" for word in (b"one", b"two")}
    assert files(view) == {*graphs, "manifest.json", "ready.json"}
    made = LocalStore.open(volume, writable=False, given=True)
    assert made.damaged(warmed) == made.missing(warmed) == []
    assert has_view(made, warmed)
    pointer, ref = made.pointer(warmed.cache_key), made.ref("current", CONFIG, NAME)
    assert pointer is not None
    assert ref == store.ref("current", CONFIG, NAME)
    assert pointer.manifest == warmed.id


def test_run_again_it_fetches_nothing_and_writes_nothing(init: Run, warmed: Manifest, volume: Path) -> None:
    init()
    locks = [volume / "locks", *(volume / "locks").iterdir()]
    before = {name: state for name, state in snapshot(volume).items() if Path(name) not in locks}
    done = init()
    assert (done.code, done.json["bytes"], done.json["state"]) == (0, 0, "HIT")
    assert {name: state for name, state in snapshot(volume).items() if Path(name) not in locks} == before


def test_what_was_warmed_since_is_fetched_and_only_what_is_new(init: Run, store: LocalStore, warmed: Manifest) -> None:
    init()
    newer = put_job(store, job_of(request_of()), "one", "two", "three", serial=8)
    record = store.get_graph(xxh3_128_hex(b"three"))
    assert record is not None
    done = init()
    new = sum(store.blob_size(sha256) or 0 for sha256 in (record.text, record.artifacts[0].sha256))
    assert (done.json["manifest"], done.json["bytes"]) == (newer.id, new)


def test_the_source_is_only_read(init: Run, store: LocalStore, warmed: Manifest) -> None:
    before = snapshot(store.root)
    assert init().code == 0
    assert snapshot(store.root) == before


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_others_may_read_what_it_makes_whatever_the_umask(
    init: Run, warmed: Manifest, tmp_path: Path, umask: int
) -> None:
    old = os.umask(umask)
    try:
        done = init(to=tmp_path / "volume" / "new")
    finally:
        os.umask(old)
    assert done.code == 0
    made = tmp_path / "volume" / "new"
    looked = [path for path in [made, *made.rglob("*")] if not {"locks", "tmp"} & {*path.relative_to(made).parts}]
    assert made / "views" / warmed.id / "ready.json" in looked
    for path in looked:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode & (0o055 if path.is_dir() else 0o044) == (0o055 if path.is_dir() else 0o044), path
        assert not mode & 0o022, path


@pytest.fixture
def public_place() -> Iterator[Path]:
    """A directory that every user can reach; pytest's own is closed to others."""
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place, ignore_errors=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become two other users")
def test_one_user_fills_a_volume_of_root_s_and_another_reads_and_verifies_it(
    store: LocalStore,
    warmed: Manifest,
    public_place: Path,
    child: Callable[[Callable[[], object]], Child],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = public_place / "source"
    shutil.copytree(store.root, source)
    for path in [source, *source.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o444)
    volume = public_place / "volume"
    volume.mkdir()
    volume.chmod(0o777)

    def become(uid: int) -> None:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        os.environ["HOME"] = "/nonexistent"
        os.environ["TMPDIR"] = "/nonexistent"
        tempfile.tempdir = None
        os.chdir("/")

    def fill() -> None:
        become(4242)
        target = LocalStore.open(volume, writable=True, given=True, mode=0o755)
        document = flow.init(REQUEST, target, Directory(source))
        assert document["exit_code"] == 0, document

    def read() -> None:
        become(4343)
        made = LocalStore.open(volume, writable=False, given=True)
        assert made.missing(warmed) == made.damaged(warmed) == []
        assert has_view(made, warmed)
        assert json.loads((volume / "views" / warmed.id / "ready.json").read_bytes())["files"] == 2
        writable = LocalStore.open(volume, writable=True, given=True)
        assert flow.init(REQUEST, writable, Directory(source))["bytes"] == 0

    assert child(fill).wait() == 0
    assert child(read).wait() == 0
    assert (volume / "views" / warmed.id).stat().st_uid == 4242


def test_a_read_only_store_that_it_filled_is_used_as_it_is(init: Run, warmed: Manifest, volume: Path) -> None:
    init()
    for path in sorted(volume.rglob("*"), reverse=True):
        path.chmod(0o555 if path.is_dir() else 0o444)
    volume.chmod(0o555)
    try:
        with ordinary_user():
            before = snapshot(volume)
            made = LocalStore.open(volume, writable=False, given=True)
            assert has_view(made, warmed)
            assert made.damaged(warmed) == []
            assert snapshot(volume) == before
            done = init()
            assert (done.code, done.json["exit_code"]) == (7, 7), "it has to write, and says that it cannot"
    finally:
        for path in [volume, *volume.rglob("*")]:
            path.chmod(0o755)


def test_sixteen_at_once_with_an_empty_store_fetch_each_blob_once(
    store: LocalStore, warmed: Manifest, volume: Path, tmp_path: Path, child: Callable[[Callable[[], object]], Child]
) -> None:
    def one(number: int) -> Callable[[], None]:
        def work() -> None:
            target = LocalStore.open(volume, writable=True, given=True, mode=0o755)
            document = flow.init(REQUEST, target, Directory(store.root))
            (tmp_path / f"{number}.json").write_text(json.dumps(document))

        return work

    children = [child(one(number)) for number in range(16)]
    assert [item.wait() for item in children] == [0] * 16
    documents = [json.loads((tmp_path / f"{number}.json").read_bytes()) for number in range(16)]
    assert {item["state"] for item in documents} == {"HIT"}
    assert sum(item["bytes"] for item in documents) == sum(store.blob_size(sha256) or 0 for sha256 in store.blobs())


def test_a_disk_that_is_too_small_is_refused_before_the_first_byte(
    init: Run, warmed: Manifest, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 100, 10))  # type: ignore[attr-defined]
    done = init()
    assert (done.code, done.json["state"], done.json["exit_code"]) == (7, "ERROR", 7)
    assert "needs" in done.json["reason"]
    assert "has 10" in done.json["reason"]
    made = LocalStore.open(volume, writable=False, given=True)
    assert list(made.blobs()) == made.graph_keys() == made.manifest_ids() == []


def test_damage_in_the_volume_is_fetched_again(init: Run, store: LocalStore, warmed: Manifest, volume: Path) -> None:
    init()
    record = store.get_graph(xxh3_128_hex(b"one"))
    assert record is not None
    blob = volume / layout.blob_name(record.artifacts[0].sha256)
    damage(blob)
    (volume / layout.manifest_name(warmed.id)).chmod(0o600)
    (volume / layout.manifest_name(warmed.id)).write_bytes(b"{")
    done = init()
    assert (done.code, done.json["state"]) == (0, "HIT")
    assert done.json["bytes"] == record.artifacts[0].size
    assert LocalStore.open(volume, writable=False, given=True).damaged(warmed) == []


def test_damage_in_the_source_is_a_fault_and_never_a_view(
    init: Run, store: LocalStore, warmed: Manifest, volume: Path
) -> None:
    record = store.get_graph(xxh3_128_hex(b"one"))
    assert record is not None
    damage(store.blob_path(record.artifacts[0].sha256))
    done = init()
    assert (done.code, done.json["state"], done.json["view"]) == (7, "ERROR", None)
    assert not list((volume / "views").iterdir())


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--set", "training.seq_len=512"], "nobody warmed this request"),
        (["--version-of", "torchtitan=0.3.1"], "nobody warmed this request"),
        (["--lnc", "1", "--target", "trn2"], "nobody warmed this request"),
    ],
)
def test_another_request_is_unknown(init: Run, warmed: Manifest, more: list[str], reason: str) -> None:
    done = init(*more)
    assert (done.code, done.json["state"], done.json["exit_code"], done.json["view"]) == (3, "UNKNOWN", 3, None)
    assert reason in done.json["reason"]


def test_a_manifest_that_is_not_complete_is_no_hit(init: Run, store: LocalStore) -> None:
    put_job(store, job_of(request_of()), "one", complete=False)
    done = init()
    assert (done.code, done.json["state"]) == (3, "MISS")
    assert "not complete" in done.json["reason"]


def test_a_ref_to_a_manifest_of_another_job_is_refused(init: Run, store: LocalStore, warmed: Manifest) -> None:
    store.put_ref("current", CONFIG, NAME, Ref(REQUEST.named(), "0" * 32, warmed.id, CONFIG, 8))
    done = init()
    assert (done.code, done.json["state"], done.json["exit_code"]) == (5, "ERROR", 5)


def test_several_are_one_line_and_one_that_fails_does_not_stop_the_others(
    neffcache: Run, store: LocalStore, warmed: Manifest, volume: Path
) -> None:
    done = neffcache("init", "llama3_8b", "no such", CONFIG, *BY_REF, "--remote", store.root, "--dir", volume)
    assert done.code == 3
    assert len(done.out.splitlines()) == 1
    assert [(row["state"], row["exit_code"]) for row in done.json] == [("UNKNOWN", 3), ("ERROR", 2), ("HIT", 0)]


def test_the_line_also_goes_to_the_termination_log_when_there_is_one(
    init: Run, warmed: Manifest, tmp_path: Path
) -> None:
    log = tmp_path / "termination-log"
    init()
    assert not log.exists()
    log.write_text("older and longer than what comes now" * 100)
    done = init()
    assert log.read_text() == done.out
    done = init("--set", "a=b")
    assert json.loads(log.read_text())["exit_code"] == done.code == 3
    log.chmod(0o444)
    with ordinary_user():
        done = init()
    assert done.code == 0
    assert "termination log cannot be written" in done.err


def test_what_kubernetes_keeps_of_the_line_is_always_whole_json() -> None:
    row = {"config": "c" * 30, "state": "HIT", "environment": {"A": "x" * 60}, "error": {}, "view": "v" * 80}
    for count in (1, 10, 40, 2_000):
        line = flow.one_line([{**row, "exit_code": 0} for _ in range(count)], flow.TERMINATION_BYTES)
        assert len(line.encode()) < flow.TERMINATION_BYTES
        found = json.loads(line)
        assert isinstance(found, dict) if count in (1, 2_000) else len(found) == count
    assert found == {"configs": 2_000, "ready": 2_000, "exit_code": 0}


@pytest.mark.parametrize("remote", ["", "/nowhere/at/all", "ftp://x"])
def test_without_a_source_the_line_says_so(
    neffcache: Run, volume: Path, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEFFCACHE_REMOTE", remote)
    done = neffcache("init", CONFIG, *BY_REF, "--dir", volume)
    assert done.code == done.json["exit_code"] == (7 if "nowhere" in remote else 2)
    assert done.json["state"] == "ERROR"


def test_a_default_place_that_could_be_somebody_else_s_is_refused(
    neffcache: Run, store: LocalStore, warmed: Manifest, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (volume / "neffcache").mkdir()
    (volume / "neffcache").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(volume))
    monkeypatch.delenv("NEFFCACHE_DIR", raising=False)
    done = neffcache("init", CONFIG, *BY_REF, "--remote", store.root)
    assert (done.code, done.json["exit_code"]) == (7, 7)
    monkeypatch.setenv("NEFFCACHE_DIR", str(volume / "neffcache"))
    assert neffcache("init", CONFIG, *BY_REF, "--remote", store.root).code == 0


def test_jitter_waits_a_part_of_it_once_before_the_first_request(
    init: Run, warmed: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    flow.spread(30.0, waited.append)
    flow.spread(0.0, waited.append)
    assert len(waited) == 1
    assert 0 <= waited[0] <= 30
    asked: list[float] = []
    monkeypatch.setattr(flow, "spread", asked.append)
    init("--jitter", "5")
    assert asked == [5.0]


@dataclass
class Gone:
    """A source that has become unreachable."""

    where: str = "s3://gone"
    requests: int = 0

    def ref(self, *_: str) -> Ref | None:
        raise RemoteFault("s3://gone cannot be reached", hint="wait")

    signatures = fetch = ref  # type: ignore[assignment]


def test_a_remote_that_is_gone_does_not_matter_when_the_store_holds_everything(
    init: Run, store: LocalStore, warmed: Manifest, volume: Path
) -> None:
    init()
    target = LocalStore.open(volume, writable=True, given=True)
    notes: list[str] = []
    document = flow.init(REQUEST, target, Gone(), note=notes.append)  # type: ignore[arg-type]
    assert (document["state"], document["stale"], document["manifest"]) == ("HIT", True, warmed.id)
    assert "cannot be reached" in notes[0]
    document = flow.init(REQUEST, target, Gone(), on_remote_error="fail")  # type: ignore[arg-type]
    assert (document["state"], document["exit_code"]) == ("ERROR", 4)


def test_a_remote_that_is_gone_is_no_miss(volume: Path, store: LocalStore, warmed: Manifest) -> None:
    target = LocalStore.open(volume, writable=True, given=True)
    document = flow.init(REQUEST, target, Gone())  # type: ignore[arg-type]
    assert (document["state"], document["exit_code"], document["error"]["hint"]) == ("ERROR", 4, "wait")


# Signatures


@pytest.fixture
def public(neffcache: Run, store: LocalStore, warmed: Manifest, tmp_path: Path) -> PublicKey:
    made = make_key(tmp_path / "fleet.key")
    assert neffcache("sign", CONFIG, "--key", tmp_path / "fleet.key", "--dir", store.root).code == 0
    return made


def test_what_is_signed_is_taken_and_its_signature_kept(init: Run, public: PublicKey, volume: Path) -> None:
    assert init("--require-signature", public).code == 0
    made = LocalStore.open(volume, writable=False, given=True)
    assert [name for name in made.names("signature") if name.endswith(public.signer)]
    document = flow.init(
        REQUEST,
        LocalStore.open(volume, writable=True, given=True),
        Gone(),  # type: ignore[arg-type]
        trust=trust_of([str(public)]),
    )
    assert document["state"] == "HIT", "what was kept is enough when the remote is gone"


def test_what_is_not_signed_gets_no_name(init: Run, public: PublicKey, volume: Path, tmp_path: Path) -> None:
    done = init("--require-signature", make_key(tmp_path / "other"))
    assert (done.code, done.json["state"], done.json["exit_code"]) == (5, "ERROR", 5)
    made = LocalStore.open(volume, writable=False, given=True)
    assert list(made.blobs()) == made.graph_keys() == made.manifest_ids() == made.channels() == []


def put_another_program(store: LocalStore) -> None:
    """Another record under the compile key of a graph, whole and sealed, as whoever can write to the store could."""
    record = store.get_graph(xxh3_128_hex(b"one"))
    assert record is not None
    evil = store.put_blob(b"another program")
    name = store.root / layout.graph_name(record.compile_key)
    name.unlink()
    name.write_bytes(
        encode(replace(record, artifacts=(replace(record.artifacts[0], sha256=evil, size=len(b"another program")),)))
    )


def test_another_program_in_the_source_gets_no_name(
    init: Run, store: LocalStore, public: PublicKey, volume: Path
) -> None:
    put_another_program(store)
    done = init("--require-signature", public)
    assert (done.code, done.json["exit_code"]) == (5, 5)
    assert xxh3_128_hex(b"one") in done.json["reason"]
    made = LocalStore.open(volume, writable=False, given=True)
    assert list(made.blobs()) == made.graph_keys() == made.manifest_ids() == made.channels() == []


def test_another_program_that_the_volume_holds_already_is_refused(
    init: Run, public: PublicKey, volume: Path, warmed: Manifest
) -> None:
    assert init("--require-signature", public).code == 0
    put_another_program(LocalStore.open(volume, writable=True, given=True))
    done = init("--require-signature", public)
    assert (done.code, done.json["view"]) == (5, None)
    assert init().code == 0, "without a required signature whoever writes to the volume decides"


def test_an_older_signed_state_that_is_put_back_is_refused(
    neffcache: Run, init: Run, store: LocalStore, public: PublicKey, tmp_path: Path
) -> None:
    old = store.ref("current", CONFIG, NAME)
    assert old is not None
    put_job(store, job_of(request_of()), "one", "two", "three", serial=8)
    assert neffcache("sign", CONFIG, "--key", tmp_path / "fleet.key", "--dir", store.root).code == 0
    assert init("--require-signature", public).json["serial"] == 8
    (store.root / layout.ref_name("current", CONFIG, NAME)).unlink()
    store.put_ref("current", CONFIG, NAME, old)
    done = init("--require-signature", public)
    assert (done.code, done.json["exit_code"]) == (5, 5)
    assert "older state" in done.json["reason"]
    assert init().json["serial"] == 7, "without a required signature the owner of the store decides"
    fresh = tmp_path / "fresh"
    assert init("--require-signature", public, to=fresh).code == 0, "a reader without a memory cannot know"
    assert init("--require-signature", public, "--min-serial", "8", to=tmp_path / "told").code == 5


def test_a_faulty_store_keeps_its_hint(init: Run, warmed: Manifest, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = init(to=tmp_path / "file")
    assert done.json["error"]["error"] == StoreFault.__name__
    assert "hint:" in done.err
