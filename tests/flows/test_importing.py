"""Caches that others filled: what is complete is kept, folded and exported again, the rest is named with its reason."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from neffcache.compile.neuron.layouts import REASONS
from neffcache.errors import Miss, StoreFault, Usage
from neffcache.flows import collections, importing
from neffcache.flows.check import check_job, check_ref
from neffcache.flows.exporting import export_directory
from neffcache.flows.importing import Imported, fault_of, import_cache
from neffcache.flows.origins import Directory
from neffcache.flows.request import CHANNEL
from neffcache.key.canonical import digest
from neffcache.store.blobs import Batch
from neffcache.store.local import LocalStore
from neffcache.store.records import Ref
from neffcache.store.verify import verify
from neffcache.store.view import materialise
from tests.cli.conftest import VERSIONS, job_of, request_of
from tests.flows.caches import (
    VERSION,
    Tree,
    below,
    everything,
    key,
    module,
    older,
    place_of,
    read,
    stub_neff,
    torchneuron,
    vllm,
    without,
    written,
)
from tests.store.conftest import child as child  # a fixture

pytestmark = pytest.mark.fast


@pytest.fixture(autouse=True)
def no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore.open(tmp_path / "store", writable=True)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "source"


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The SHA-256 of everything that is copied into a store from now on."""
    found: list[str] = []
    put = Batch.put_chunks

    def counted(self: Batch, *args: object, **given: object) -> str:
        sha256 = put(self, *args, **given)  # type: ignore[arg-type]
        found.append(sha256)
        return sha256

    monkeypatch.setattr(Batch, "put_chunks", counted)
    return found


def imported(source: Path, store: LocalStore, name: str = "fleet", **given: str) -> Imported:
    origin = Directory(source, store)
    try:
        done = import_cache(origin, store, name, **given)  # type: ignore[arg-type]
    finally:
        origin.close()
    for tally in (done.entries, done.files):
        assert tally.found == tally.imported + tally.present + tally.left_out.total()
    assert done.files.found == sum(len(files) for _, _, files in os.walk(source))
    assert verify(store).good
    return done


def held(store: LocalStore, name: str = "fleet") -> Tree:
    """Every file of a collection, by its path in the store of its manifest."""
    return {
        f"{item.store}/{item.path}": store.read_blob(item.sha256)
        for part in collections.find(store, name)
        for item in part.manifest.artifacts
    }


def left(done: Imported) -> dict[str, int]:
    """Reason -> entries, or files of none."""
    return {
        reason: done.entries.left_out[reason] or done.files.left_out[reason]
        for reason in REASONS
        if done.files.left_out[reason]
    }


LAYOUTS: dict[str, tuple[Tree, str]] = {
    "torchneuron": (torchneuron("a"), "neff"),
    "torchneuron-older": (older("a"), "neff"),
    "libneuronxla": (module("a"), "xla"),
    "libneuronxla-old": (module("a", old=True), "xla"),
    "vllm": (vllm("a"), "vllm"),
}


@pytest.mark.parametrize("above", ["", "some/folders/"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_entry_of_each_layout_is_kept_byte_for_byte_in_a_collection_that_says_what_it_is(
    store: LocalStore, source: Path, layout: str, above: str
) -> None:
    tree, name = LAYOUTS[layout]
    done = imported(written(source / above, tree) and source, store)
    assert (done.entries.imported, done.files.imported, left(done)) == (1, len(tree), {})
    assert fault_of(done) is None
    assert held(store) == below(name, tree)
    [part] = collections.find(store, "fleet")
    assert part.part.layout == layout.removesuffix("-old")
    assert part.part.compiler == (VERSION if name == "xla" else None)
    assert part.manifest.components["toolchain"]["value"]["compiler"] == part.part.compiler
    assert collections.entry_count(part.manifest) == 1
    assert read(materialise(store, part.manifest).path / name) == tree


def test_what_one_compiler_made_and_what_another_made_are_two_manifests(store: LocalStore, source: Path) -> None:
    done = imported(written(source, module("a") | module("a", version="2.22.1+b") | torchneuron("a")), store)
    assert [item.part.compiler for item in done.kept] == [VERSION, "2.22.1+b", None]
    assert len({item.manifest for item in done.kept}) == 3
    said = imported(written(source.with_name("more"), torchneuron("b")), store, compiler="2.22.1+b")
    assert [str(item.part) for item in said.kept] == ["torchneuron, compiler 2.22.1+b"]
    assert len(collections.find(store, "fleet")) == 4


def test_the_folder_of_one_compiler_may_be_the_source(store: LocalStore, source: Path) -> None:
    written(source, module("a"))
    done = imported(source / f"neuronxcc-{VERSION}", store)
    assert (done.entries.imported, done.kept[0].part.compiler) == (1, VERSION)


A, B = module("a"), vllm("a")
NEFF_AND_MARK = {"model.neff": stub_neff("a"), "model.done": b""}
LEFT_OUT: dict[str, tuple[Tree, str]] = {
    "a failed compile": (below(place_of(A), {"model.hlo_module.pb": b"hlo", "model.log": b"error"}), "failed"),
    "a killed compile": (
        below(place_of(A), {"model.hlo_module.pb": b"hlo", "model.hlo_module.pb.lock": b"", "compile_flags.json": b""}),
        "locked",
    ),
    "a copy made while it was written": (without(A, "model.done"), "incomplete"),
    "a mark and no NEFF": (without(A, "model.neff"), "incomplete"),
    "an empty NEFF": (A | below(place_of(A), {"model.neff": b""}), "empty"),
    "an empty HLO": (A | below(place_of(A), {"model.hlo_module.pb": b""}), "empty"),
    "a NEFF that was cut": (A | below(place_of(A), {"model.neff": stub_neff("a")[:-1]}), "truncated"),
    "a NEFF that is only a header": (A | below(place_of(A), {"model.neff": stub_neff("a")[:1000]}), "truncated"),
    "a page of an error": (A | below(place_of(A), {"model.neff": b"<html>" * 500}), "truncated"),
    "a compressed HLO that was cut": (
        {path: data[:-9] if path.endswith("hlo.pb") else data for path, data in module("a", old=True).items()},
        "truncated",
    ),
    "TorchNeuron's empty file": (dict.fromkeys(torchneuron("a"), b""), "empty"),
    "TorchNeuron's cut file": (dict.fromkeys(torchneuron("a"), stub_neff("a")[:1100]), "truncated"),
    "an older empty file": (dict.fromkeys(older("a"), b""), "empty"),
    "an older temporary file": ({f"{key('a', 64)}/tmpab12.tmp": stub_neff("a")}, "incomplete"),
    "vLLM without its mark": (without(B, ".compilation_complete"), "incomplete"),
    "vLLM without a NEFF": (without(B, ".neff"), "incomplete"),
    "vLLM's graph being compiled": ({f"{key('a')}/graph.hlo": b"hlo", f"{key('a')}/{key('a')}.lock": b""}, "locked"),
    "vLLM's mark of another size": (
        B | below(place_of(B), {f"graph_{place_of(B)}.neff": stub_neff("a", 100)}),
        "truncated",
    ),
    "a file that nobody knows": ({"README.md": b"hello"}, "foreign"),
    "NKI's results, which name files elsewhere": ({"nki/abc.json": b"{}"}, "foreign"),
    "a lock of TorchNeuron's": ({f"locks/{key('a')}.lock": b""}, "lock"),
    "a temporary file of TorchNeuron's": ({"ab/cd/.tmp.x1y2z3": stub_neff("a")}, "temporary"),
    "a name that prints on a terminal": (below(f"neuronxcc-{VERSION}/MODULE_\x1b[2J+0", NEFF_AND_MARK), "name"),
}  # fmt: skip


@pytest.mark.parametrize("fault", LEFT_OUT)
def test_what_is_no_result_is_left_out_by_name_beside_one_that_is(store: LocalStore, source: Path, fault: str) -> None:
    tree, reason = LEFT_OUT[fault]
    good = module("good")
    done = imported(written(source, tree | good), store)
    assert left(done) == {reason: 1}
    assert done.files.left_out[reason] == len(tree)
    assert all(example.isprintable() for example in done.examples[reason])
    assert held(store) == below("xla", good)


def test_a_cache_without_a_result_makes_no_collection_and_is_a_miss(store: LocalStore, source: Path) -> None:
    done = imported(written(source, LEFT_OUT["a NEFF that was cut"][0]), store)
    assert isinstance(fault_of(done), Miss)
    assert (store.manifest_ids(), store.channels(), collections.find(store, "fleet")) == ([], [], [])


def test_locks_and_logs_beside_a_result_do_not_spoil_it(store: LocalStore, source: Path) -> None:
    beside = below(place_of(A), {"model.log": b"words", "model.neff.lock": b"", "notes": b"?", "model.tmp": b"x"})
    done = imported(written(source, A | beside), store)
    assert (done.entries.imported, left(done)) == (1, {"lock": 1, "log": 1, "temporary": 1, "foreign": 1})
    assert held(store) == below("xla", A)


def test_copies_of_each_rank_are_folded_by_content_and_the_first_of_different_ones_stays(
    store: LocalStore, source: Path, writes: list[str]
) -> None:
    tree = everything("a", "b")
    for rank in range(4):
        written(source / f"r{rank}", tree)
    [other] = torchneuron("a")
    (source / "r3" / other).write_bytes(stub_neff("another compile"))
    done = imported(source, store)
    assert (done.entries.found, done.entries.imported, done.entries.present) == (40, 10, 29)
    assert left(done) == {"differs": 1}
    assert (done.folded, done.examples["differs"]) == (29, [f"r3/{other}"])
    assert held(store)[f"neff/{other}"] == tree[other]
    assert len(writes) == len(set(writes)) == done.copied == len(set(tree.values()))


def test_a_copy_that_has_more_of_an_entry_adds_it(store: LocalStore, source: Path) -> None:
    written(source / "r0", without(A, "wrapped_neff.hlo"))
    written(source / "r1", A)
    done = imported(source, store)
    assert (done.entries.imported, done.entries.present, done.files.imported) == (1, 1, len(A))
    assert held(store) == below("xla", A)


def test_the_second_import_copies_nothing_and_changes_nothing(
    store: LocalStore, source: Path, writes: list[str]
) -> None:
    written(source, everything("a", "b"))
    first = imported(source, store)
    before = read(store.root)
    writes.clear()
    again = imported(source, store)
    assert (writes, again.copied, again.entries.imported, again.files.imported) == ([], 0, 0, 0)
    assert again.entries.present == first.entries.imported == 10
    assert [item.manifest for item in again.kept] == [item.manifest for item in first.kept]
    assert read(store.root) == before


def test_an_import_adds_to_what_the_collection_has(store: LocalStore, source: Path, writes: list[str]) -> None:
    imported(written(source, module("a")), store)
    writes.clear()
    done = imported(written(source, module("b")), store)
    assert (done.entries.imported, done.entries.present, len(writes)) == (1, 1, 3)
    assert (done.kept[0].entries, done.kept[0].new) == (2, 1)
    other = imported(written(source.with_name("elsewhere"), module("c")), store)
    assert other.kept[0].entries == 3
    assert held(store) == below("xla", module("a") | module("b") | module("c"))
    [part] = collections.find(store, "fleet")
    assert store.pointer(part.manifest.cache_key).manifest == part.manifest.id  # type: ignore[union-attr]


def test_what_somebody_else_adds_meanwhile_stays(
    store: LocalStore, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(source, module("a"))
    name = importing._Import._name

    def late(self: importing._Import) -> None:
        monkeypatch.setattr(importing._Import, "_name", name)
        imported(written(source.with_name("other"), module("b")), store)
        name(self)

    monkeypatch.setattr(importing._Import, "_name", late)
    done = imported(source, store)
    assert (done.kept[0].entries, done.kept[0].new) == (2, 1)
    assert held(store) == below("xla", module("a") | module("b"))


@pytest.mark.parametrize("layouts", ["everything", "torchneuron", "libneuronxla"])
def test_a_round_trip_loses_nothing(store: LocalStore, source: Path, tmp_path: Path, layouts: str) -> None:
    every = everything("a", "b", "c")
    tree = {"everything": every, "torchneuron": torchneuron("a"), "libneuronxla": module("a") | module("b", old=True)}[
        layouts
    ]
    first = imported(written(source, tree | below(place_of(module("failed")), {"model.log": b"error"})), store)
    manifests = [part.manifest for part in collections.find(store, "fleet")]
    done = export_directory(store, manifests, tmp_path / "out")
    assert (done.entries, done.written, done.present, done.kept) == (
        first.entries.imported,
        first.entries.imported,
        0,
        [],
    )
    assert read(tmp_path / "out") == tree
    other = LocalStore.open(tmp_path / "other", writable=True)
    second = imported(tmp_path / "out", other)
    assert left(second) == {}
    assert [item.manifest for item in second.kept] == [item.manifest for item in first.kept], "equal content, equal ids"
    assert held(other) == held(store)
    again = export_directory(store, manifests, tmp_path / "out")
    assert (again.written, again.present) == (0, first.entries.imported)


def test_an_export_takes_the_layout_that_is_asked_for_or_that_the_installed_package_reads(
    store: LocalStore, source: Path, tmp_path: Path
) -> None:
    imported(written(source, everything("a")), store)
    manifests = [part.manifest for part in collections.find(store, "fleet")]
    asked = export_directory(store, manifests, tmp_path / "asked", layout="vllm")
    assert read(tmp_path / "asked") == vllm("vllm a")
    assert asked.environment == {"NEURON_LIBTORCH_REMOTE_CACHE": str(tmp_path / "asked")}
    assert asked.others == {"torchneuron": 1, "torchneuron-older": 1, "libneuronxla": 2}
    export_directory(store, manifests, tmp_path / "native", stack="native")
    assert read(tmp_path / "native") == torchneuron("a")
    export_directory(store, manifests, tmp_path / "xla", stack="xla")
    assert read(tmp_path / "xla") == module("a") | module("old a", old=True)
    alone = [item for item in manifests if item.request["layout"] == "vllm"]
    export_directory(store, alone, tmp_path / "only", stack="native")
    assert read(tmp_path / "only") == vllm("vllm a"), "what there is, where the installed package's is not there"
    with pytest.raises(Miss, match="no entries of the layout libneuronxla"):
        export_directory(store, alone, tmp_path / "none", layout="libneuronxla")
    assert not (tmp_path / "none").exists()


def test_an_export_replaces_nothing_and_leaves_no_half_of_an_entry(
    store: LocalStore, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported(written(source, module("a") | module("b") | torchneuron("a")), store)
    manifests = [part.manifest for part in collections.find(store, "fleet")]
    out = tmp_path / "out"
    mine = written(out, dict.fromkeys(torchneuron("a"), b"mine"))
    done = export_directory(store, manifests, mine)
    assert (done.written, done.kept) == (2, list(torchneuron("a")))
    assert read(out) == module("a") | module("b") | dict.fromkeys(torchneuron("a"), b"mine")

    monkeypatch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(OSError(28, "no space")))
    with pytest.raises(StoreFault):
        export_directory(store, manifests, tmp_path / "full")
    assert read(tmp_path / "full") == {}
    assert not list((tmp_path / "full").glob(".*"))


def test_an_export_is_a_copy_and_a_damaged_blob_is_not_exported(
    store: LocalStore, source: Path, tmp_path: Path
) -> None:
    imported(written(source, torchneuron("a")), store)
    [part] = collections.find(store, "fleet")
    export_directory(store, [part.manifest], tmp_path / "out")
    [file] = list((tmp_path / "out").rglob("*.neff"))
    assert file.stat().st_nlink == 1
    assert file.stat().st_mode & 0o200
    blob = store.blob_path(part.manifest.artifacts[0].sha256)
    blob.chmod(0o600)
    blob.write_bytes(stub_neff("b"))
    with pytest.raises(StoreFault):
        export_directory(LocalStore.open(store.root, writable=True), [part.manifest], tmp_path / "bad")
    assert read(tmp_path / "bad") == {}


# Tricks


def test_no_link_is_followed_and_no_special_file_is_opened(store: LocalStore, source: Path, tmp_path: Path) -> None:
    secret = written(tmp_path / "secret", module("secret"))
    written(source, module("good"))
    (source / "folder").symlink_to(secret, target_is_directory=True)
    fifo, linked, hard, up = (source / place_of(torchneuron(word)) for word in "abcd")
    for folder in (fifo, linked, hard, up):
        folder.mkdir(parents=True)
    os.mkfifo(source / next(iter(torchneuron("a"))))
    (source / next(iter(torchneuron("b")))).symlink_to(next(secret.rglob("model.neff")))
    os.link(next(secret.rglob("model.neff")), source / next(iter(torchneuron("c"))))
    (source / next(iter(torchneuron("d")))).symlink_to("../../../secret")
    mixed = written(source, without(module("mixed"), "compile_flags.json"))
    (mixed / place_of(module("mixed")) / "compile_flags.json").symlink_to("/etc/hostname")
    done = import_cache(Directory(source, store), store, "fleet")
    assert left(done) == {"special": 1, "link": 3, "hard-link": 1}
    assert done.files.left_out["link"] == 3 + len(module("mixed")), "the folder is one, and its content is not seen"
    assert held(store) == below("xla", module("good"))


def test_links_among_the_copies_of_a_source_are_copies(store: LocalStore, source: Path) -> None:
    written(source / "r0", A)
    for path in A:
        (source / "r1" / path).parent.mkdir(parents=True, exist_ok=True)
        os.link(source / "r0" / path, source / "r1" / path)
    done = imported(source, store)
    assert (done.entries.imported, done.folded, left(done)) == (1, 1, {})


def test_the_view_of_a_collection_may_be_imported_with_what_was_added_there(
    store: LocalStore, source: Path, tmp_path: Path
) -> None:
    imported(written(source, torchneuron("a")), store)
    [part] = collections.find(store, "fleet")
    view = materialise(store, part.manifest, where=tmp_path / "views").path / "neff"
    assert next(view.rglob("*.neff")).stat().st_nlink > 1
    done = imported(written(view, torchneuron("b")), store)
    assert (done.entries.present, done.entries.imported, left(done)) == (1, 1, {})
    other = LocalStore.open(tmp_path / "other", writable=True)
    assert left(imported(view, other)) == {"hard-link": 1}, "for any other store it is somebody's file"


def test_a_directory_that_becomes_a_link_while_it_is_read_is_not_followed(
    store: LocalStore, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = written(tmp_path / "secret", torchneuron("a"))
    written(source, torchneuron("a") | module("good"))
    top = source / key("a")[:2]
    sha256 = Directory.sha256

    def swapped(self: Directory, *args: object, **given: object) -> str | None:
        if not top.is_symlink():
            top.rename(tmp_path / "away")
            top.symlink_to(secret / top.name, target_is_directory=True)
        return sha256(self, *args, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(Directory, "sha256", swapped)
    done = import_cache(Directory(source, store), store, "fleet")
    assert left(done) == {"unreadable": 1}
    assert isinstance(fault_of(done), StoreFault)
    assert held(store) == below("xla", module("good"))


def test_a_file_that_moves_while_it_is_read_is_left_out_and_said(
    store: LocalStore, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(source, torchneuron("a") | module("good"))
    moving = source / next(iter(torchneuron("a")))
    copy = Directory.copy

    def written_to(self: Directory, *args: object, **given: object) -> str:
        moving.write_bytes(stub_neff("b"))
        return copy(self, *args, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(Directory, "copy", written_to)
    done = imported(source, store)
    assert left(done) == {"moving": 1}
    assert isinstance(fault_of(done), StoreFault)


def test_a_huge_file_is_not_read(store: LocalStore, source: Path) -> None:
    path = written(source, torchneuron("a") | module("good")) / next(iter(torchneuron("a")))
    os.truncate(path, 1 << 43)
    done = imported(source, store)
    assert left(done) == {"huge": 1}


def test_a_disk_that_is_too_small_is_said_before_a_byte_is_written_and_nothing_new_needs_none(
    store: LocalStore, source: Path, monkeypatch: pytest.MonkeyPatch, writes: list[str]
) -> None:
    free = shutil.disk_usage(store.root)._replace(free=1_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(StoreFault, match="needs"):
        imported(written(source, torchneuron("a")), store)
    assert writes == []
    monkeypatch.undo()
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    imported(source, store)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    assert imported(source, store).entries.present == 1


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a b", ".hidden", "é", "x" * 101])
def test_a_collection_has_a_plain_name(store: LocalStore, source: Path, name: str) -> None:
    with pytest.raises(Usage):
        import_cache(Directory(written(source, A), store), store, name)
    assert store.manifest_ids() == []


@pytest.mark.parametrize(
    ("path", "name"),
    [("/var/tmp/neuron-compile-cache", "neuron-compile-cache"), ("/caches/r 0/", "r-0"), ("b/..", "b"), ("/x/.y", "y")],
)
def test_the_directory_gives_the_name(path: str, name: str) -> None:
    assert collections.default_name(path) == name


# A collection is of no job


def test_a_collection_is_never_a_hit_even_where_somebody_points_a_job_at_it(store: LocalStore, source: Path) -> None:
    imported(written(source, everything("a")), store)
    part = collections.find(store, "fleet")[0]
    request = request_of()
    job = job_of(request)
    assert check_job(job, store).state == "MISS"
    store.set_pointer(job.key.cache_key, part.manifest.id)
    assert check_job(job, store).state == "MISS"
    said = request_of(versions=[f"{name}={text}" for name, text in VERSIONS.items()])
    named = said.named()
    store.put_ref(
        CHANNEL, said.config, digest(named), Ref(named, part.manifest.cache_key, part.manifest.id, said.config)
    )
    assert check_ref(said, store).state == "UNKNOWN"
    with pytest.raises(Usage, match="is a configuration"):
        import_cache(Directory(source, store), store, said.config)


# A kill


def test_a_killed_import_shows_nothing_and_the_next_one_copies_only_the_rest(
    store: LocalStore, source: Path, child: Callable[..., object], monkeypatch: pytest.MonkeyPatch, writes: list[str]
) -> None:
    tree = everything(*"abcdefgh")
    written(source, tree)
    monkeypatch.setattr(importing, "BATCH_FILES", 10)
    finish, batches = Batch.finish, 0

    def dying() -> None:
        def counted(self: Batch) -> None:
            nonlocal batches
            batches += 1
            if batches == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            finish(self)

        monkeypatch.setattr(Batch, "finish", counted)
        import_cache(Directory(source, store), store, "fleet")

    process = child(dying)
    assert process.wait() == -signal.SIGKILL  # type: ignore[attr-defined]
    monkeypatch.setattr(Batch, "finish", finish)
    assert (store.manifest_ids(), store.channels()) == ([], [])
    there = set(store.blobs())
    assert there, "some batches were safe"
    assert verify(store).good
    writes.clear()
    done = imported(source, store)
    assert done.entries.imported == 40
    assert not there & set(writes)
    assert len(there) + done.copied == len(set(tree.values()))
    assert {path.partition("/")[2] for path in held(store)} == set(tree)
