from __future__ import annotations

import builtins
import errno
import os
import resource
import signal
import stat
from pathlib import Path

import pytest

from neffcache.errors import Miss, StoreFault, Usage
from neffcache.key.canonical import sha256_hex
from neffcache.store import blobs as blobs_module
from neffcache.store import files
from neffcache.store.blobs import Blobs
from neffcache.store.local import LocalStore
from neffcache.store.records import Damaged

pytestmark = pytest.mark.fast

DATA = b"neff" * 1000


def everything(store: LocalStore) -> list[str]:
    return [str(path.relative_to(store.root)) for path in store.root.rglob("*") if path.is_file()]


@pytest.fixture
def hashes(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were hashed while reading."""
    seen: list[Path] = []
    real = blobs_module.hash_regular

    def counting(path: Path):
        if (found := real(path)) is not None:
            seen.append(path)
        return found

    monkeypatch.setattr(blobs_module, "hash_regular", counting)
    return seen


def test_a_blob_is_found_under_its_digest_and_cannot_be_written(store: LocalStore) -> None:
    sha256 = store.put_blob(DATA)
    path = store.blob_path(sha256)
    assert sha256 == sha256_hex(DATA)
    assert path == store.root / "blobs" / "sha256" / sha256[:2] / sha256
    assert stat.S_IMODE(path.stat().st_mode) == 0o444
    assert store.read_blob(sha256) == DATA
    assert list(store.blobs()) == [sha256]
    assert everything(store) == [str(path.relative_to(store.root))]


def test_a_file_is_copied_in_pieces(store: LocalStore, tmp_path: Path) -> None:
    source = tmp_path / "big"
    source.write_bytes(os.urandom(files.CHUNK * 2 + 5))
    assert store.read_blob(store.put_blob_file(source)) == source.read_bytes()
    with pytest.raises(Miss):
        store.put_blob_file(tmp_path / "absent")


def test_the_empty_blob_is_a_blob(store: LocalStore) -> None:
    assert store.read_blob(store.put_blob(b"")) == b""


def test_an_absent_blob_is_a_miss_and_a_bad_name_is_not(store: LocalStore) -> None:
    with pytest.raises(Miss):
        store.read_blob("a" * 64)
    with pytest.raises(Miss):
        store.blob_path("a" * 64)
    assert store.check_blob("a" * 64) is False
    for name in ("../../etc/passwd", "A" * 64, "", "a" * 63, "a" * 64 + "\n"):
        with pytest.raises(Usage):
            store.has_blob(name)


def test_a_second_use_is_free_and_a_new_process_looks_again(store: LocalStore, hashes: list[Path]) -> None:
    sha256 = store.put_blob(DATA)
    store.blob_path(sha256)
    assert hashes == []  # hashed while it was written
    other = LocalStore.open(store.root, writable=False)
    for _ in range(3):
        other.blob_path(sha256)
        other.check_blob(sha256)
    assert len(hashes) == 1
    other.check_blob(sha256, fresh=True)
    assert len(hashes) == 2


@pytest.mark.parametrize("fault", ["flip", "cut", "empty", "longer", "link", "pipe", "directory"])
def test_a_damaged_blob_is_never_used_and_never_a_miss(store: LocalStore, flip, fault: str, tmp_path: Path) -> None:
    sha256 = store.put_blob(DATA)
    path = store.blob_path(sha256)  # remembered as verified, and damaged afterwards
    if fault == "flip":
        flip(path)
    else:
        path.unlink()
        elsewhere = tmp_path / "elsewhere"
        elsewhere.write_bytes(DATA)
        match fault:
            case "cut":
                path.write_bytes(DATA[:-1])
            case "empty":
                path.write_bytes(b"")
            case "longer":
                path.write_bytes(DATA + b"x")
            case "link":
                path.symlink_to(elsewhere)
            case "pipe":
                os.mkfifo(path)
            case "directory":
                path.mkdir()
    with pytest.raises(Damaged) as caught:
        store.read_blob(sha256)
    assert caught.value.exit_code == 7
    assert caught.value.details["blob"] == sha256
    assert os.path.lexists(caught.value.details["quarantined"])
    assert store.quarantined() == [Path(caught.value.details["quarantined"]).name]
    assert store.put_blob(DATA) == sha256  # healed
    assert store.read_blob(sha256) == DATA


def test_check_and_path_find_the_same_damage(store: LocalStore, flip) -> None:
    for use in (store.check_blob, store.blob_path):
        sha256 = store.put_blob(DATA)
        flip(store.root / "blobs" / "sha256" / sha256[:2] / sha256)
        with pytest.raises(Damaged):
            use(sha256)


def test_putting_the_same_bytes_heals_a_damaged_blob(store: LocalStore, flip, tmp_path: Path) -> None:
    sha256 = store.put_blob(DATA)
    flip(store.blob_path(sha256))
    store.put_blob(DATA)
    assert store.read_blob(sha256) == DATA
    flip(store.blob_path(sha256))
    source = tmp_path / "source"
    source.write_bytes(DATA)
    store.put_blob_file(source)
    assert store.read_blob(sha256) == DATA
    assert len(store.quarantined()) == 2


def test_a_blob_that_was_healed_meanwhile_is_not_quarantined(store: LocalStore, flip, monkeypatch) -> None:
    sha256 = store.put_blob(DATA)
    path = store.blob_path(sha256)
    flip(path)
    real = blobs_module.hash_regular

    def judged_late(path: Path):
        found = real(path)
        path.unlink()
        path.write_bytes(DATA)  # somebody heals it between the verdict and the move
        return found

    monkeypatch.setattr(blobs_module, "hash_regular", judged_late)
    with pytest.raises(Damaged) as caught:
        store.check_blob(sha256)
    monkeypatch.undo()
    assert caught.value.details["quarantined"] is None
    assert store.read_blob(sha256) == DATA


def test_a_file_that_changed_a_moment_ago_is_not_trusted_by_its_time(root: Path, store: LocalStore, hashes) -> None:
    sha256 = sha256_hex(DATA)
    path = store.base.place(f"blobs/sha256/{sha256[:2]}/{sha256}")
    path.write_bytes(DATA)  # as another program would, with the present time
    store.check_blob(sha256)
    store.check_blob(sha256)
    assert len(hashes) == 2


def test_nothing_of_a_batch_is_visible_before_all_of_it_is_flushed(store: LocalStore, monkeypatch, tmp_path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"from a file")
    flushed: list[bool] = []
    monkeypatch.setattr(blobs_module, "flush_file", lambda path: flushed.append(any(store.blobs())))
    with store.batch() as batch:
        names = [batch.put(b"one"), batch.put(b"two"), batch.put(b"one"), batch.put_file(source)]
        names.append(batch.put_chunks([b"th", b"ree"], expect=sha256_hex(b"three")))
        assert list(store.blobs()) == []
    assert flushed == [False] * 4
    assert set(store.blobs()) == set(names)
    assert store.read_blob(names[-1]) == b"three"


def test_files_are_flushed_before_they_have_a_name_and_directories_after(store: LocalStore, monkeypatch) -> None:
    events: list[str] = []
    real_link, real_fsync = os.link, os.fsync

    def fsync(descriptor: int) -> None:
        events.append("directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", lambda *names: (events.append("link"), real_link(*names))[1])
    with store.batch() as batch:
        for number in range(3):
            batch.put(b"%d" % number)
    assert events[:6] == ["file"] * 3 + ["link"] * 3
    assert set(events[6:]) == {"directory"}


def test_an_error_inside_a_batch_leaves_nothing(store: LocalStore) -> None:
    def interrupted() -> None:
        with store.batch() as batch:
            batch.put(DATA)
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert everything(store) == []


def test_a_stream_with_wrong_bytes_or_an_error_leaves_nothing(store: LocalStore) -> None:
    def broken():
        yield b"begin"
        raise ConnectionResetError("the peer")

    with pytest.raises(Damaged), store.batch() as batch:
        batch.put_chunks([b"wrong"], expect="a" * 64)
    with pytest.raises(ConnectionResetError), store.batch() as batch:  # not a fault of this store
        batch.put_chunks(broken())
    assert everything(store) == []


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ENOSPC, errno.EROFS, errno.EMFILE, errno.ESTALE])
def test_an_error_of_the_file_system_is_never_a_miss(store: LocalStore, monkeypatch, code: int) -> None:
    sha256 = store.put_blob(DATA)
    other = LocalStore.open(store.root, writable=True)
    real_open = os.open
    monkeypatch.setattr(files, "RETRY_DELAYS", (0.0, 0.0))

    def failing(path, *rest, **named):
        if str(path).startswith(str(store.root)):
            raise OSError(code, os.strerror(code), str(path))
        return real_open(path, *rest, **named)

    monkeypatch.setattr(os, "open", failing)
    for use in (other.read_blob, other.blob_path, other.check_blob, lambda _: other.put_blob(b"new")):
        with pytest.raises(StoreFault) as caught:
            use(sha256)
        assert not isinstance(caught.value, Damaged)
        assert caught.value.details["errno"] == errno.errorcode[code]
        assert caught.value.hint
    monkeypatch.undo()
    assert other.read_blob(sha256) == DATA
    assert other.quarantined() == []


def test_stale_and_busy_answers_are_asked_again(store: LocalStore, monkeypatch) -> None:
    sha256 = store.put_blob(DATA)
    monkeypatch.setattr(files, "RETRY_DELAYS", (0.0,) * 4)
    answers = [errno.ESTALE, errno.EBUSY, errno.ESTALE]
    real_open = os.open

    def passing(path, *rest, **named):
        if str(path).endswith(sha256) and answers:
            code = answers.pop()
            raise OSError(code, os.strerror(code))
        return real_open(path, *rest, **named)

    monkeypatch.setattr(os, "open", passing)
    assert store.read_blob(sha256) == DATA
    assert answers == []


def test_a_read_that_fails_half_way_is_a_fault(store: LocalStore, monkeypatch) -> None:
    sha256 = store.put_blob(DATA)
    other = LocalStore.open(store.root, writable=True)

    def failing(descriptor: int, size: int) -> bytes:
        raise OSError(errno.EIO, "bad sector")

    monkeypatch.setattr(os, "read", failing)
    with pytest.raises(StoreFault) as caught:
        other.check_blob(sha256)
    assert caught.value.details["errno"] == "EIO"
    monkeypatch.undo()
    assert other.read_blob(sha256) == DATA


def test_a_full_disk_leaves_nothing_partial(store: LocalStore, child) -> None:
    kept = store.put_blob(b"kept")

    def fill() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        with pytest.raises(StoreFault, match="larger than the limit") as caught:
            store.put_blob(b"x" * 3_000_000)
        assert caught.value.hint
        with pytest.raises(StoreFault), store.batch() as batch:
            batch.put_chunks([b"y" * 60_000, b"y" * 60_000])

    assert child(fill).wait() == 0
    assert everything(store) == [f"blobs/sha256/{kept[:2]}/{kept}"]
    assert store.read_blob(kept) == b"kept"


def test_no_space_is_said_before_the_first_byte(store: LocalStore) -> None:
    store.require_space(1)
    with pytest.raises(StoreFault, match="needs 1,000,000,000,000,000 bytes and has") as caught:
        store.require_space(10**15)
    assert caught.value.details["needed_bytes"] == 10**15


def test_a_file_system_without_hard_links_works(store: LocalStore, monkeypatch) -> None:
    def refused(*names: object) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refused)
    sha256 = store.put_blob(DATA)
    assert store.put_blob(DATA) == sha256
    assert store.read_blob(sha256) == DATA
    assert len(everything(store)) == 1


def test_orphans_block_nothing(store: LocalStore) -> None:
    sha256 = store.put_blob(DATA)
    top = store.root / "blobs" / "sha256"
    (top / "README").write_text("x")
    (top / "zz").write_text("x")
    (top / sha256[:2] / "note").write_text("x")
    (top / "ab").mkdir(exist_ok=True)
    (top / "ab" / ("c" * 64)).write_text("in the wrong directory")
    assert list(store.blobs()) == [sha256]
    assert store.read_blob(sha256) == DATA


def test_only_old_leftovers_are_swept(store: LocalStore) -> None:
    temporary = store.root / "tmp"
    (temporary / "old").write_bytes(b"x")
    (temporary / "tree").mkdir()
    (temporary / "tree" / "inner").write_bytes(b"x")
    (temporary / "young").write_bytes(b"x")
    for name in ("old", "tree"):
        os.utime(temporary / name, (1_000, 1_000))
    assert store.sweep(older_than=3600) == ["old", "tree"]
    assert [path.name for path in temporary.iterdir()] == ["young"]


def test_no_store_module_can_unpickle(monkeypatch, store: LocalStore) -> None:
    """A pickle planted as a blob's, record's or pointer's bytes is data like any other."""
    planted = b"cbuiltins\nexec\n(S'raise SystemExit(99)'\ntR."
    monkeypatch.setattr(builtins, "exec", lambda *_: pytest.fail("a pickle ran"))
    for name in ("graphs/" + "a" * 32, "keys/" + "a" * 32, "manifests/" + "a" * 64):
        (store.root / f"{name}.json").write_bytes(planted)
        with pytest.raises(Damaged):
            store.get(f"{name}.json")
    assert Blobs(store.base).read(store.put_blob(planted)) == planted


def test_a_directory_that_another_writer_s_replaces_at_that_moment_costs_a_retry(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, asked = os.link, list[Path]()

    def racing(source: Path, target: Path) -> None:
        asked.append(target)
        if len(asked) == 1:
            raise FileNotFoundError(errno.ENOENT, "the directory that was looked up is gone")
        link(source, target)

    monkeypatch.setattr(os, "link", racing)
    sha256 = store.put_blob(b"data")
    assert store.read_blob(sha256) == b"data"
    assert len(asked) == 2


def test_a_temporary_file_that_is_gone_is_an_error_at_once(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    link, asked = os.link, list[Path]()

    def counted(source: Path, target: Path) -> None:
        asked.append(target)
        link(source, target)

    monkeypatch.setattr(os, "link", counted)
    with pytest.raises(StoreFault):
        files.publish(tmp_path / "gone", tmp_path / "name")
    assert len(asked) == 1


@pytest.mark.parametrize("modern", [True, False])
def test_a_directory_never_takes_the_place_of_a_full_one(
    modern: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not modern:
        monkeypatch.setattr(files, "_renameat2", lambda: None)
    (tmp_path / "taken" / "inside").mkdir(parents=True)
    (tmp_path / "new").mkdir()
    with pytest.raises(OSError, match="taken"):
        files.rename_new(tmp_path / "new", tmp_path / "taken")
    assert (tmp_path / "taken" / "inside").is_dir()
    files.rename_new(tmp_path / "new", tmp_path / "free")
    assert (tmp_path / "free").is_dir()


def test_a_directory_does_not_take_the_place_of_an_empty_one_either(tmp_path: Path) -> None:
    for name in ("taken", "new"):
        (tmp_path / name).mkdir()
    before = os.stat(tmp_path / "taken").st_ino
    try:
        files.rename_new(tmp_path / "new", tmp_path / "taken")
    except FileExistsError:
        assert os.stat(tmp_path / "taken").st_ino == before
    else:
        pytest.skip("this system has no renameat2 with RENAME_NOREPLACE")
