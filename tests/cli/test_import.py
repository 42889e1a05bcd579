"""Caches that others filled, from `import` to `export`, as people and scripts call it."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from neffcache.store.local import LocalStore
from neffcache.store.records import Manifest
from neffcache.store.signing import make_key
from scripts.seaweedfs import Server
from tests.cli.conftest import CONFIG, Answer
from tests.flows.caches import below, module, place_of, read, torchneuron, vllm, written
from tests.remote.conftest import credentials as credentials
from tests.remote.conftest import prefix as prefix
from tests.remote.conftest import server as server
from tests.remote.conftest import url as url

pytestmark = pytest.mark.fast

Run = Callable[..., Answer]
TREE = module("a") | module("b", old=True) | torchneuron("c") | vllm("d")
FAILED = below(place_of(module("failed")), {"model.log": b"error"})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return written(tmp_path / "neuron-compile-cache", TREE | FAILED)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_a_directory_becomes_a_collection_that_is_listed_shown_and_exported_again(
    neffcache: Run, source: Path, root: Path, tmp_path: Path
) -> None:
    done = neffcache("import", source, "--dir", root)
    assert done.code == 0
    assert "entries: 5 found = 4 imported + 0 present + 1 left out" in done.out
    assert "failed" in done.out
    again = neffcache("import", source, "--dir", root, "--json")
    assert (again.code, again.json["copied"]["blobs"], again.json["entries"]["present"]) == (0, 0, 4)
    assert again.json["left_out"][0]["reason"] == "failed"

    listed = neffcache("ls", "--dir", root, "--json")
    rows = {row["graphs"]: row["config"] for row in listed.json["manifests"] if row["collection"]}
    assert rows == {2: "neuron-compile-cache", 1: "neuron-compile-cache"}
    assert "collection" in neffcache("ls", "--dir", root).out
    assert "libneuronxla" in neffcache("show", "neuron-compile-cache", "--dir", root).out
    for row in listed.json["manifests"]:
        shown = neffcache("show", row["id"][:12], "--dir", root)
        assert "of no job" in shown.out
    assert neffcache("verify", "--dir", root).code == 0

    out = neffcache(
        "export", "neuron-compile-cache", "--layout", "auto", "-o", tmp_path / "out", "--dir", root, "--json"
    )
    assert (out.code, out.json["entries"]["written"]) == (0, 4)
    assert read(tmp_path / "out") == TREE
    assert out.json["environment"]["NEURON_COMPILE_CACHE_URL"] == str(tmp_path / "out")
    other = neffcache("import", tmp_path / "out", "--as", "neuron-compile-cache", "--dir", tmp_path / "other", "--json")
    assert other.json["manifests"] == [{**item, "new": item["entries"]} for item in again.json["manifests"]]


def test_the_words_are_one_clear_sentence_for_what_is_wrong(
    neffcache: Run, source: Path, root: Path, tmp_path: Path, store: LocalStore, warmed: Manifest
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_bytes(b"x" * 1000)
    said = {
        ("import", tmp_path / "empty", "--dir", root): (3, "no complete entry"),
        ("import", tmp_path / "absent", "--dir", root): (2, "cannot be read"),
        ("import", tmp_path / "file", "--dir", root): (7, "the bundle"),
        ("import", tmp_path / "file", "--as", "x", "--dir", root): (2, "no directory"),
        ("import", source, "--as", "../x", "--dir", root): (2, "cannot be the name"),
        ("import", source, "--as", CONFIG, "--dir", store.root): (2, "is a configuration"),
        ("import", source, "--require-signature", str(make_key(tmp_path / "k")), "--dir", root): (2, "nobody signs"),
        ("import", "s3://", "--dir", root): (2, "bucket"),
        ("export", CONFIG, "--layout", "auto", "-o", tmp_path / "out", "--dir", store.root): (3, "no entries"),
        ("export", "none", "--layout", "auto", "-o", tmp_path / "out", "--dir", store.root): (3, "no ref"),
        ("export", CONFIG, "--layout", "auto", "-o", tmp_path / "file", "--dir", store.root): (2, "no directory"),
        ("env", "--collection", "none", "--dir", store.root): (3, "no collection"),
        ("env", "--dir", store.root): (2, "--collection"),
        ("env", CONFIG, "--layout", "vllm", "--dir", store.root): (2, "--collection"),
    }
    for words, (code, sentence) in said.items():
        answer = neffcache(*words)
        assert (answer.code, sentence in answer.err) == (code, True), (words, answer)
        assert "Traceback" not in answer.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("layout", "variable", "tree"),
    [
        ("torchneuron", "TORCH_NEURONX_NEFF_CACHE_DIR", torchneuron("c")),
        ("libneuronxla", "NEURON_COMPILE_CACHE_URL", module("a") | module("b", old=True)),
        ("vllm", "NEURON_LIBTORCH_REMOTE_CACHE", vllm("d")),
    ],
)
def test_env_points_a_package_to_a_view_in_which_it_may_write(
    neffcache: Run, source: Path, root: Path, layout: str, variable: str, tree: dict[str, bytes]
) -> None:
    neffcache("import", source, "--as", "fleet", "--dir", root)
    several = neffcache("env", "--collection", "fleet", "--dir", root)
    assert (several.code, "could be meant" in several.err) == (2, True)
    done = neffcache("env", "--collection", "fleet", "--layout", layout, "--dir", root)
    assert done.code == 0
    [line] = done.out.splitlines()
    name, _, value = shlex.split(line)[1].partition("=")
    assert (name, read(Path(value))) == (variable, tree)
    before = read(root / "blobs")
    (Path(value) / "new.lock").write_bytes(b"")
    if layout == "libneuronxla":
        for path in Path(value).rglob("model.neff"):
            path.write_bytes(b"written over")
    assert read(root / "blobs") == before


def test_a_collection_is_signed_and_travels_as_a_bundle(
    neffcache: Run, source: Path, root: Path, tmp_path: Path
) -> None:
    public = make_key(tmp_path / "key")
    neffcache("import", source, "--as", "fleet", "--dir", root)
    assert neffcache("sign", "fleet", "--key", tmp_path / "key", "--dir", root).code == 0
    assert neffcache("export", "fleet", "-o", tmp_path / "fleet.tar", "--dir", root).code == 0
    other = tmp_path / "other"
    done = neffcache("import", tmp_path / "fleet.tar", "--require-signature", str(public), "--dir", other, "--json")
    assert (done.code, len(done.json["manifests"]), done.json["configs"]) == (0, 3, ["fleet"])
    neffcache("export", "fleet", "--layout", "auto", "-o", tmp_path / "out", "--dir", other)
    assert read(tmp_path / "out") == TREE


def test_push_and_pull_take_a_collection_by_its_name(
    neffcache: Run, source: Path, root: Path, tmp_path: Path, server: Server, credentials: None, url: str
) -> None:
    neffcache("import", source, "--as", "fleet", "--dir", root)
    assert neffcache("push", "--collection", "none", "--remote", url, "--dir", root).code == 3
    pushed = neffcache("push", "--collection", "fleet", "--remote", url, "--dir", root, "--json")
    assert (pushed.code, len(pushed.json["targets"])) == (0, 3)
    checked = neffcache("check", "--remote", url, "--channel", "collections", "--dir", root, "--json")
    assert (checked.code, {row["state"] for row in checked.json}) == (3, {"UNKNOWN"}), "of no job, so no HIT"
    other = tmp_path / "other"
    assert neffcache("pull", "--collection", "none", "--remote", url, "--dir", other).code == 3
    pulled = neffcache("pull", "--collection", "fleet", "--remote", url, "--dir", other, "--json")
    assert (pulled.code, {row["state"] for row in pulled.json["targets"]}) == (0, {"HIT"})
    neffcache("export", "fleet", "--layout", "auto", "-o", tmp_path / "out", "--dir", other)
    assert read(tmp_path / "out") == TREE
    # What lies below the remote is ours, and no cache of a Neuron package.
    assert neffcache("import", url, "--as", "again", "--dir", other).code == 3
