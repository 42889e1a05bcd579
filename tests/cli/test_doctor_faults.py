"""One broken set-up each: the doctor names it in a sentence with a hint, and ends with the code of the contract."""

from __future__ import annotations

import os
import pickle
import shutil
import sqlite3
import stat
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from neffcache.flows import doctor as doctor_flow
from neffcache.flows import examine as store_flow
from neffcache.store.index import Failure, Index
from neffcache.store.local import LocalStore
from neffcache.store.records import Manifest
from scripts.seaweedfs import Server
from tests.cli.conftest import Answer, damage
from tests.cli.test_doctor import stubs as stubs
from tests.remote.conftest import READER
from tests.remote.conftest import credentials as credentials
from tests.remote.conftest import front as front
from tests.remote.conftest import prefix as prefix
from tests.remote.conftest import server as server
from tests.remote.conftest import url as url
from tests.remote.proxy import Proxy, resets, says

Run = Callable[..., Answer]


@dataclass(frozen=True)
class Place:
    """What a fault is planted in: a store of one complete manifest, and this process's environment."""

    store: LocalStore
    manifest: Manifest
    patch: pytest.MonkeyPatch
    tmp: Path

    def blob(self) -> Path:
        graph = self.store.get_graph(self.manifest.compile_keys()[0])
        assert graph is not None
        return self.store.root / "blobs" / "sha256" / graph.artifacts[0].sha256[:2] / graph.artifacts[0].sha256


@pytest.fixture
def place(store: LocalStore, warmed: Manifest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Place:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("NEFFCACHE_DIR", str(store.root))
    return Place(store, warmed, monkeypatch, tmp_path)


def told(done: Answer, area: str, state: str, *words: str) -> None:
    """The finding is there, has a hint when it is not merely a note, and no traceback stands beside it."""
    findings: list[dict[str, Any]] = done.json["findings"]
    found = [item for item in findings if item["area"] == area and item["state"] == state]
    matching = [item for item in found if all(word in item["said"] for word in words)]
    assert matching, findings
    if state != "note":
        assert matching[0]["hint"]
    assert "Traceback" not in done.err


# --- what is set --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "code", "area", "state", "words"),
    [
        pytest.param(
            {"NEURON_LOGICAL_NC_CONFIG": "1", "NEURON_CC_FLAGS": "--lnc=2"},
            2, "LNC", "error", ["NEURON_LOGICAL_NC_CONFIG = 1", "NEURON_CC_FLAGS = 2"], id="two LNCs",
        ),
        pytest.param({"NEURON_LOGICAL_NC_CONFIG": "3"}, 2, "LNC", "error", ["'3'", "1 or 2"], id="no LNC"),
        pytest.param(
            {"NEURON_PLATFORM_TARGET_OVERRIDE": "trn1", "NEURON_LOGICAL_NC_CONFIG": "2"},
            2, "LNC", "error", ["does not exist on trn1"], id="an LNC that the target lacks",
        ),
        pytest.param(
            {"NEURON_PLATFORM_TARGET_OVERRIDE": "trn9"}, 2, "target", "error", ["unknown target 'trn9'"], id="no target"
        ),
        pytest.param(
            {"NEURON_PLATFORM_TARGET_OVERRIDE": "trn2", "NEURON_CC_FLAGS": "--target=trn1"},
            2, "target", "error", ["trn2", "trn1"], id="two targets",
        ),
        pytest.param({"NEURON_CC_FLAGS": "--optlevel"}, 2, "variables", "error", ["--optlevel"], id="a flag cut off"),
        pytest.param(
            {"NEURON_COMPILE_CACHE_URI": "s3://b"}, 0, "variables", "warning", ["did you mean"], id="R7 misspelled"
        ),
        pytest.param({"NEFFCACHE_REMOT": "s3://b"}, 0, "variables", "warning", ["NEFFCACHE_REMOTE"], id="R7 ours"),
        pytest.param(
            {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, 2, "variables", "error", ["keeps us out"], id="the door is shut"
        ),
        pytest.param({"NEFFCACHE_WARMERS": "/none"}, 2, "warmers", "error", ["/none"], id="no warmers there"),
        pytest.param({"NEFFCACHE_JOBS": "many"}, 2, "settings", "error", ["'many'"], id="not a number"),
        pytest.param({"NEFFCACHE_EXECUTOR": "ray://x"}, 2, "settings", "error", ["ray://x"], id="no executor"),
        pytest.param({"NEFFCACHE_REQUIRE_SIGNATURE": "me"}, 2, "settings", "error", ["me"], id="no public key"),
        pytest.param({"NEFFCACHE_REMOTE": "bucket"}, 2, "remote", "error", ["'bucket'"], id="S4 no URL"),
        pytest.param(
            {"NEFFCACHE_REMOTE": "s3://bucket/../c"}, 2, "remote", "error", ["not a plain name"], id="S4 upwards"
        ),
        pytest.param({"NEFFCACHE_SSE": "rot13"}, 2, "remote", "error", ["rot13"], id="no encryption"),
    ],
)  # fmt: skip
def test_a_setting(
    neffcache: Run, place: Place, environ: Mapping[str, str], code: int, area: str, state: str, words: list[str]
) -> None:
    for name, value in environ.items():
        place.patch.setenv(name, value)
    done = neffcache("doctor", "--json")
    assert done.code == done.json["exit_code"] == code, done.out
    told(done, area, state, *words)


@pytest.mark.parametrize("text", ["remote = ", "remot = 's3://b/p'\n"], ids=["no TOML", "unknown name"])
def test_a_settings_file_that_is_not_understood(neffcache: Run, place: Place, text: str) -> None:
    Path("neffcache.toml").write_text(text)
    done = neffcache("doctor", "--json")
    assert done.code == 2
    told(done, "settings", "error", "neffcache.toml")


def test_variables_that_options_read_are_no_misspellings(neffcache: Run, place: Place) -> None:
    for name, value in {"NEFFCACHE_EXECUTOR": "local", "NEFFCACHE_TIME_LIMIT": "60", "NEFFCACHE_SHARDS": "4"}.items():
        place.patch.setenv(name, value)
    done = neffcache("doctor", "--json")
    assert done.code == 0
    assert not [item for item in done.json["findings"] if item["area"] in ("variables", "settings")]


# --- the store ----------------------------------------------------------------------------------------------------


def _pickle(place: Place) -> None:
    Index.open(place.store).close()
    with sqlite3.connect(place.store.root / "index" / "cache.db") as connection:
        row = ("failure/x", 1, 0.0, 0.0, 0, None, 10, 4, None, pickle.dumps(["boom"]))
        connection.execute(
            "INSERT INTO Cache (key, raw, store_time, access_time, access_count, tag, size, mode, filename, value)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            row,
        )
    connection.close()


def _refused(place: Place) -> None:
    with Index.open(place.store) as index:
        index.put_failure("a" * 32, Failure("b" * 64, "NCC_EXTP004", "too many", "", time.time()))


def _index_of_somebody(place: Place) -> None:
    (place.store.root / "index").mkdir(exist_ok=True)
    (place.store.root / "index" / "cache.db").write_bytes(b"not a database at all" * 100)


def _leftover(place: Place) -> None:
    old = place.store.root / "tmp" / "0123"
    old.write_text("half")
    os.utime(old, (0, 0))


def _quarantined(place: Place) -> None:
    (place.store.root / "quarantine" / "abcd.0123").write_text("damaged")


def _shrink(place: Place) -> None:
    place.blob().chmod(0o600)
    place.blob().write_bytes(b"")


def _full(free: int) -> Callable[[Place], None]:
    def plant(place: Place) -> None:
        usage = shutil.disk_usage("/")._replace(free=free)
        place.patch.setattr(store_flow.shutil, "disk_usage", lambda path: usage)

    return plant


def _on(kind: str, **environ: str) -> Callable[[Place], None]:
    def plant(place: Place) -> None:
        place.patch.setattr(store_flow, "file_system", lambda path: ("/mnt", kind))
        for name, value in environ.items():
            place.patch.setenv(name, value)

    return plant


def _default_root(change: Callable[[Path], object]) -> Callable[[Place], None]:
    """The user's default place instead of a named one, then made unsafe."""

    def plant(place: Place) -> None:
        place.patch.delenv("NEFFCACHE_DIR")
        place.patch.setenv("XDG_CACHE_HOME", str(place.tmp / "cache"))
        (place.tmp / "cache").mkdir()
        change(place.tmp / "cache" / "neffcache")

    return plant


def _linked(path: Path) -> None:
    path.with_name("elsewhere").mkdir()
    path.symlink_to(path.with_name("elsewhere"))


def _open_to_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def _not_a_directory(place: Place) -> None:
    (place.tmp / "file").write_text("")
    place.patch.setenv("NEFFCACHE_DIR", str(place.tmp / "file"))


def _read_only(place: Place) -> None:
    place.patch.setattr(store_flow.os, "access", lambda path, mode, **_: not mode & os.W_OK)


def _absent_and_read_only(place: Place) -> None:
    place.patch.setenv("NEFFCACHE_DIR", str(place.tmp / "none"))
    _read_only(place)


@pytest.mark.parametrize(
    ("plant", "code", "area", "state", "words"),
    [
        pytest.param(_leftover, 0, "store", "note", ["1 leftovers"], id="L1 leftovers of a killed writer"),
        pytest.param(_shrink, 7, "store", "error", ["lacks 1 files"], id="L2 an emptied blob"),
        pytest.param(lambda p: p.blob().unlink(), 7, "store", "error", ["lacks 1 files"], id="L2 a blob that is gone"),
        pytest.param(
            lambda p: damage(p.store.root / "manifests" / f"{p.manifest.id}.json"),
            7, "store", "error", ["1 records are damaged"], id="L2 a damaged manifest",
        ),
        pytest.param(
            lambda p: damage(p.store.root / "graphs" / f"{p.manifest.compile_keys()[0]}.json"),
            7, "store", "error", ["manifest "], id="L2 a damaged graph record",
        ),
        pytest.param(_quarantined, 0, "store", "warning", ["1 damaged files"], id="L2 damage in quarantine"),
        pytest.param(_read_only, 0, "store", "note", ["cannot be written"], id="L5 a read-only store"),
        pytest.param(_absent_and_read_only, 7, "store", "error", ["cannot be made"], id="L5 nowhere to make it"),
        pytest.param(_on("nfs4"), 0, "store", "note", ["network file system"], id="L6 a network file system"),
        pytest.param(_default_root(_linked), 7, "store", "error", ["symbolic link"], id="L7 a link"),
        pytest.param(_default_root(_open_to_all), 7, "store", "error", ["by everybody"], id="L7 open to all"),
        pytest.param(_not_a_directory, 7, "store", "error", ["not a directory"], id="L7 not a directory"),
        pytest.param(_full(5 * 10**9), 0, "space", "warning", ["5.0 GB"], id="L8 little space"),
        pytest.param(_full(0), 7, "space", "error", ["nothing more can be kept"], id="B7 L8 a full disk"),
        pytest.param(_on("tmpfs"), 0, "store", "warning", ["it is memory"], id="L10 in memory"),
        pytest.param(
            _on("overlay", KUBERNETES_SERVICE_HOST="x"), 0, "store", "warning", ["gone with the pod"], id="L10 in a pod"
        ),
        pytest.param(_pickle, 0, "store", "warning", ["1 rows of the index are not JSON"], id="L11 a pickle"),
        pytest.param(_index_of_somebody, 0, "store", "warning", ["the index cannot be used"], id="L11 no database"),
        pytest.param(_refused, 0, "store", "note", ["1 graphs", "NCC_EXTP004"], id="B3 a remembered refusal"),
    ],
)  # fmt: skip
def test_a_store(
    neffcache: Run, place: Place, plant: Callable[[Place], None], code: int, area: str, state: str, words: list[str]
) -> None:
    plant(place)
    before = tree(place.store.root)
    done = neffcache("doctor", "--json")
    assert done.code == done.json["exit_code"] == code, done.out
    told(done, area, state, *words)
    assert tree(place.store.root) == before, "the doctor changes nothing"


def tree(root: Path) -> list[tuple[str, int, bytes]]:
    return [
        (str(path), path.lstat().st_mtime_ns, path.read_bytes() if stat.S_ISREG(path.lstat().st_mode) else b"")
        for path in sorted(root.rglob("*"))
    ]


# --- the machine and its toolchain --------------------------------------------------------------------------------


def test_b10_less_memory_than_one_compile_takes(neffcache: Run, place: Place) -> None:
    place.patch.setattr(doctor_flow.pool, "memory_limit", lambda: 5 * 10**8)
    done = neffcache("doctor", "--json")
    assert done.code == 0
    told(done, "memory", "warning", "0.5 GB")


def test_s1_a_clock_that_stands_in_the_past(neffcache: Run, place: Place) -> None:
    class Past(doctor_flow.datetime.datetime):  # type: ignore[misc, name-defined]
        @classmethod
        def now(cls, tz: object = None) -> Any:
            return cls(2001, 1, 1, tzinfo=doctor_flow.datetime.UTC)

    place.patch.setattr(doctor_flow.datetime, "datetime", Past)
    done = neffcache("doctor", "--json")
    assert done.code == 4
    told(done, "clock", "error", "before this program was written")


def test_a_torch_that_is_too_old(neffcache: Run, place: Place) -> None:
    versions = {"torch": "2.13.1+cpu", "torchtitan": "0.2.2"}
    place.patch.setattr(doctor_flow, "installed", versions.get)
    place.patch.setattr(doctor_flow.importlib.util, "find_spec", lambda name: object() if name == "torch" else None)
    done = neffcache("doctor", "--json")
    assert done.code == 8
    told(done, "toolchain", "error", "torch 2.13.1+cpu", "2.14")
    told(done, "toolchain", "error", "torchtitan 0.2.2", "0.3")


def test_a_torch_without_a_compiler_and_without_torchtitan(neffcache: Run, place: Place) -> None:
    place.patch.setattr(doctor_flow, "installed", {"torch": "2.14.1"}.get)
    place.patch.setattr(doctor_flow.importlib.util, "find_spec", lambda name: object() if name == "torch" else None)
    place.patch.setenv("CXX", "no-such-compiler")
    done = neffcache("doctor", "--json")
    assert done.code == 8
    told(done, "toolchain", "error", "no C++ compiler")
    told(done, "toolchain", "note", "torchtitan is not installed")


def test_the_oldest_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
    wanted = {f"{name}>={version}" for name, version in doctor_flow.OLDEST.items()}
    assert wanted == {text.partition(",")[0] for text in project["optional-dependencies"]["host"]}


@pytest.fixture(scope="module")
def hashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the digests of packages are remembered: torch is large, and hashed once for all tests here."""
    return tmp_path_factory.mktemp("user-cache")


@pytest.mark.parametrize(
    ("plant", "code", "area", "state", "words"),
    [
        pytest.param(
            lambda p, s: shutil.rmtree(next(s.glob("neuronx_cc-*.dist-info"))),
            8, "toolchain", "error", ["the version of neuronx-cc cannot be told"], id="K7 a compiler without a version",
        ),
        pytest.param(
            lambda p, s: p.patch.setenv("PATH", "/usr/bin:/bin"),
            8, "toolchain", "error", ["not on PATH"], id="K8 no compiler on PATH",
        ),
        pytest.param(
            lambda p, s: other_compiler(p, "echo 'NeuronX Compiler version 9.9.9'"),
            8, "toolchain", "error", ["two compilers"], id="K8 two compilers",
        ),
        pytest.param(
            lambda p, s: other_compiler(p, "echo 'libnrt.so: cannot open shared object file' >&2; exit 127"),
            8, "toolchain", "error", ["does not answer --version"], id="B7 a library is missing",
        ),
        pytest.param(
            lambda p, s: [path.unlink() for path in (s / "torch_neuronx").iterdir() if path.name != "__init__.py"
                          and path.is_file()],
            0, "toolchain", "warning", ["placeholder"], id="K7 PyPI's placeholder",
        ),
        pytest.param(lambda p, s: None, 0, "store", "note", ["1 of 1 manifests are of"], id="K9 another compiler"),
        pytest.param(
            lambda p, s: p.patch.setenv("TORCH_NEURONX_NEFF_CACHE_DIR", "/elsewhere"),
            2, "variables", "error", ["/elsewhere"], id="R2 another directory",
        ),
        pytest.param(
            lambda p, s: p.patch.setenv("TORCH_NEURONX_NEFF_CACHE_DIR", "s3://b/p"),
            2, "variables", "error", ["local directory"], id="R2 a URL for a directory",
        ),
        pytest.param(
            lambda p, s: p.patch.setenv("TORCH_NEURONX_METRICS_ENABLED", "0"),
            2, "variables", "error", ["counters"], id="R8 counters off",
        ),
        pytest.param(
            lambda p, s: p.patch.setenv("TORCH_NEURONX_DISABLE_NEFF_CACHE", "0"),
            0, "variables", "warning", ["may switch TorchNeuron's cache off"], id="the cache is off",
        ),
        pytest.param(
            lambda p, s: p.patch.setenv("NEURON_COMPILE_CACHE_URL", "/x"),
            0, "variables", "warning", ["does not read it"], id="R7 of the other stack",
        ),
    ],
)  # fmt: skip
def test_a_neuron_installation(
    neffcache: Run,
    place: Place,
    stubs: Path,
    hashed: Path,
    plant: Callable[[Place, Path], object],
    code: int,
    area: str,
    state: str,
    words: list[str],
) -> None:
    place.patch.setenv("XDG_CACHE_HOME", str(hashed))
    plant(place, stubs)
    done = neffcache("doctor", "--json")
    assert done.code == done.json["exit_code"] == code, done.out
    told(done, area, state, *words)


def other_compiler(place: Place, script: str) -> None:
    folder = place.tmp / "other"
    folder.mkdir()
    program = folder / "neuronx-cc"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    place.patch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


# --- the remote ---------------------------------------------------------------------------------------------------

REGION = {"x-amz-bucket-region": "eu-west-1"}
LATE = {"Date": "Mon, 01 Jan 2035 00:00:00 GMT"}


@pytest.mark.parametrize(
    ("action", "words"),
    [
        pytest.param(says(404, "NoSuchBucket"), ["there is no bucket"], id="S1 no bucket"),
        pytest.param(says(301, "PermanentRedirect", REGION), ["eu-west-1"], id="S1 region"),
        pytest.param(says(400, "ExpiredToken"), ["have expired"], id="S1 expired"),
        pytest.param(says(403, "InvalidAccessKeyId"), ["no usable credentials"], id="S1 unknown key"),
        pytest.param(says(403, "RequestTimeTooSkewed", LATE), ["clock is", "behind"], id="S1 clock"),
        pytest.param(says(503, "SlowDown"), ["asks to slow down"], id="S1 throttled"),
        pytest.param(says(500, "InternalError"), ["InternalError"], id="S6 a server that fails"),
        pytest.param(resets, ["no connection that holds"], id="S1 no network"),
        pytest.param(says(403, "AccessDenied"), ["may not get"], id="S1 S2 everything denied"),
    ],
)  # fmt: skip
def test_a_remote(
    neffcache: Run, place: Place, front: Proxy, url: str, action: Callable[..., None], words: list[str]
) -> None:
    place.patch.setenv("NEFFCACHE_REMOTE", url)
    place.patch.setenv("NEFFCACHE_REMOTE_TIMEOUT", "0.3")
    front.on(action)
    done = neffcache("doctor", "--json")
    assert done.code == done.json["exit_code"] == 4, done.out
    told(done, "remote", "error", *words)
    assert url in done.out


def test_s1_a_server_that_is_not_there_and_credentials_that_are_not(neffcache: Run, place: Place) -> None:
    place.patch.setenv("NEFFCACHE_REMOTE", "s3://bucket/p")
    place.patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    place.patch.setenv("NEFFCACHE_REMOTE_TIMEOUT", "0.2")
    done = neffcache("doctor", "--json")
    assert done.code == 4
    told(done, "remote", "error", "no usable credentials")
    place.patch.setenv("NEFFCACHE_ANONYMOUS", "1")
    done = neffcache("doctor", "--json")
    assert done.code == 4
    told(done, "remote", "error", "no connection that holds")


def test_s2_a_reader_s_rights_are_named_and_are_no_fault(
    neffcache: Run, place: Place, front: Proxy, server: Server
) -> None:
    for name, value in server.environment(READER).items():
        if name != "AWS_ENDPOINT_URL":
            place.patch.setenv(name, value)
    place.patch.setenv("NEFFCACHE_REMOTE", "s3://cache/team/x")
    done = neffcache("doctor", "--json")
    assert done.code == 0, done.out
    assert done.json["remote"]["get"] is True
    assert done.json["remote"]["put"] is False
    assert any("may get; may not list, put, delete" in item["said"] for item in done.json["findings"])


def test_s9_a_store_without_conditional_writes(
    neffcache: Run, place: Place, front: Proxy, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neffcache.remote.tier.RemoteStore.conditional", lambda self: False)
    place.patch.setenv("NEFFCACHE_REMOTE", url)
    done = neffcache("doctor", "--json")
    assert done.code == 0, done.out
    told(done, "remote", "warning", "If-None-Match")
