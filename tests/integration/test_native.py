"""Inductor's own cache on 4 real gloo ranks: collected, put back on another path, and proved by its own counters."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from neffcache import variables
from neffcache.compile.host.native import SETTINGS, InductorRules, InductorStore
from neffcache.errors import Miss
from neffcache.key.canonical import digest
from neffcache.runtime.report import any_refused, read_reports
from neffcache.store.local import LocalStore
from neffcache.store.native import EXTRA, all_graph_keys, collect
from neffcache.store.ranks import expand_ranks
from neffcache.store.records import Manifest, RankClass, encode, manifest
from tests.integration.conftest import CONFIG, Answer, Warmed, neffcache

pytestmark = pytest.mark.integration


HOW_TO = Path(__file__).resolve().parents[2] / "docs/how-to/native.md"
WARM, CHECK, RUN = (shlex.split(line)[1:] for line in HOW_TO.read_text().splitlines() if line.startswith("neffcache "))


@pytest.fixture(scope="module")
def native_warmed(tmp_path_factory: pytest.TempPathFactory) -> Warmed:
    """A warm store whose own path, which had a space in it, is gone: whatever still names it finds nothing."""
    first = tmp_path_factory.mktemp("warmed here") / "store"
    answer = neffcache(first, *WARM)
    assert answer.code == 0, answer.stderr
    moved = tmp_path_factory.mktemp("moved") / "store"
    first.rename(moved)
    return Warmed(moved, answer)


@pytest.fixture
def native_store(native_warmed: Warmed, tmp_path: Path) -> Path:
    return native_warmed.copy(tmp_path / "another" / "place" / "store")


def current(store: Path) -> tuple[LocalStore, Manifest]:
    local = LocalStore.open(store, writable=True, given=True)
    (pointer,) = local.pointers()
    found = local.get_manifest(pointer.manifest)
    assert found is not None
    return local, found


def run(store: Path, tmp_path: Path) -> Answer:
    """On a machine with another HOME and TMPDIR, where nothing of Inductor's lies about."""
    environ = {name: str(tmp_path / name.lower()) for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME")}
    for place in environ.values():
        Path(place).mkdir()
    return neffcache(store, *RUN, environ=environ)


def test_warm_keeps_complete_files_and_proves_them_in_a_fresh_process_group(native_warmed: Warmed) -> None:
    document = native_warmed.answer.document
    graphs = document["graphs"]
    assert document["complete"]
    assert graphs["total"] == graphs["compiled"] >= 2
    _, found = current(native_warmed.root)
    assert found.complete
    assert len(all_graph_keys(found)) == graphs["total"]
    assert sorted(rank for entry in found.rank_classes for rank in expand_ranks(entry.ranks)) == [0, 1, 2, 3]
    assert {"first_step", "steady_step"} <= set(found.phases)
    rules = InductorRules()
    assert {item.store for item in found.artifacts} == {rules.name}
    names = {item.path for item in found.artifacts}
    assert {rules.verdict(path, names) for path in names} <= {"artifact", "marker"}
    assert {item.extra["graph"] for item in found.artifacts if item.path.startswith("fxgraph/")} == set(
        all_graph_keys(found)
    )
    assert document["native"]["stores"][0]["left_out"].keys() == {"transient"}, "locks, and nothing unknown"
    assert found.environment["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] == "0"


def test_four_ranks_on_another_path_compile_nothing_by_inductor_s_own_counters(
    native_warmed: Warmed, native_store: Path, tmp_path: Path
) -> None:
    assert neffcache(native_store, *CHECK).document[0]["state"] == "HIT"
    answer = run(native_store, tmp_path)
    assert answer.code == 0, answer.stderr
    document = answer.document
    assert document["identity"] == "proved"
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1, 2, 3]
    for rank in document["ranks"]:
        assert rank["hits"] == rank["graphs"] >= 2
        assert (rank["misses"], rank["compiles"], rank["compiler_processes"]) == (0, 0, [])
        counters = document["native"]["counters"][str(rank["rank"])]
        assert counters["fxgraph_cache_hit"] == rank["graphs"]
        assert (counters["fxgraph_cache_miss"], counters["fxgraph_cache_bypass"]) == (0, 0)
        assert counters["autograd_cache_miss"] == 0
    assert document["native"]["added"] == []
    assert document["steps"] == 2
    left = [path for path in (tmp_path / "tmpdir").rglob("*") if path.suffix in (".gch", ".so", ".cpp")]
    assert left == [], "nothing was built beside the view"
    _, found = current(native_store)
    assert document["manifest"] == found.id


def test_a_lost_file_is_refused_and_a_damaged_one_quarantined_before_launch(native_store: Path) -> None:
    local, found = current(native_store)
    library = next(item for item in found.artifacts if item.path.endswith(".so"))
    blob = local.blob_path(library.sha256)
    whole = blob.read_bytes()
    blob.unlink()  # the copy shares inodes with the other tests' store
    answer = neffcache(native_store, "run", CONFIG, "--native")
    assert answer.code == 3, answer.stderr
    assert "launching" not in answer.stderr
    blob.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    answer = neffcache(native_store, "run", CONFIG, "--native")
    assert answer.code == 7, answer.stderr
    assert "launching" not in answer.stderr
    assert library.sha256 in " ".join(LocalStore.open(native_store, writable=True, given=True).quarantined())


ALONE = textwrap.dedent(
    """
    import torch
    torch.manual_seed(0)
    model = torch.compile(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU()))
    print("compiled", model(torch.randn(4, 8)).shape)
    """
)


IDENTITY = """
import json, os
from neffcache.compile.host.toolchain import HostToolchain
print(json.dumps(dict(HostToolchain(native=True).identity(os.environ, 1).value)))
"""

NATIVE = {**SETTINGS, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def toolchain() -> dict[str, Any]:
    command = [sys.executable, "-c", IDENTITY]
    found = subprocess.run(command, env={**os.environ, **NATIVE}, check=True, capture_output=True, text=True)
    value: dict[str, Any] = json.loads(found.stdout)
    return value


@pytest.mark.parametrize("policy", ["fail", pytest.param("warn", marks=pytest.mark.soak)])
def test_a_rank_whose_view_lacks_a_graph_ends_before_a_compiler_starts(
    tmp_path: Path, toolchain: dict[str, Any], policy: str
) -> None:
    """One process with the variables that `run` sets and an empty view; the program is a toy, the doors are real."""
    parts: dict[str, dict[str, Any]] = {
        "workload": {},
        "toolchain": toolchain,
        "target": {"target": "cpu"},
        "lnc": {"lnc": 1, "world_size": 1},
        "options": {},
    }
    made = manifest(
        cache_key="0" * 32,
        components={name: {"sha256": digest(value), "value": value} for name, value in parts.items()},
        request={},
        complete=True,
        phases=("first_step",),
        rank_classes=[RankClass("0", {}, {EXTRA: {"phases": {"first_step": ["fkey"]}, "misses": 0}})],
        artifacts=(),
        environment={},
        versions={},
        created="2026-01-01T00:00:00+00:00",
        host={},
    )
    (tmp_path / "manifest.json").write_bytes(encode(made))
    (tmp_path / "reports").mkdir()
    (tmp_path / "toy.py").write_text(ALONE)
    environ = {
        **{name: value for name, value in os.environ.items() if name not in variables.OF_A_RANK},
        **NATIVE,
        **InductorStore().environment(tmp_path / "stores", tmp_path),
        variables.MANIFEST: str(tmp_path / "manifest.json"),
        variables.REPORTS: str(tmp_path / "reports"),
        variables.ON_MISS: policy,
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
    }
    done = subprocess.run([sys.executable, str(tmp_path / "toy.py")], env=environ, capture_output=True, text=True)
    (report,) = read_reports(tmp_path / "reports").values()
    libraries = list((tmp_path / "stores").rglob("*.so"))
    if policy == "fail":
        assert done.returncode == Miss.exit_code, done.stderr
        assert (report.state, libraries) == ("refused", [])
        assert any_refused(tmp_path / "reports")
        assert report.error is not None
        assert "did not find what it needs" in report.error["message"]
        assert "compiled" not in done.stdout
    else:
        assert done.returncode == 0, done.stderr
        assert report.backend_compiles == 1
        assert report.compiler_processes
        assert libraries
        assert [entry["compile_key"] for entry in report.misses] == report.native["phases"]["first_step"]


TOY = textwrap.dedent(
    """
    import json, os, pathlib
    import torch
    from neffcache.compile.host.native import InductorStore

    torch.manual_seed(0)
    width = 8 * (int(os.environ["RANK"]) + 1)
    weight = torch.randn(8, width, requires_grad=True)
    torch.compile(torch.matmul)(torch.randn(4, 8), weight).sum().backward()
    said = InductorStore().counters()
    out = {"keys": sorted(said.keys), "others": sorted(said.others), "compiles": said.compiles, "hits": said.hits}
    pathlib.Path(os.environ["OUT"], os.environ["RANK"]).write_text(json.dumps(out))
    """
)


@pytest.mark.soak
def test_of_two_configurations_in_one_directory_each_gets_its_own_graphs(tmp_path: Path) -> None:
    """Two ranks of a toy program, each another model, one directory: worse than a warm ever is."""
    program, stores = tmp_path / "toy.py", tmp_path / "stores"
    program.write_text(TOY)
    environ = {
        **os.environ,
        **InductorStore().environment(stores, tmp_path),
        "OUT": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    subprocess.run([*torchrun, "--rdzv-endpoint", "localhost:0", str(program)], env=environ, check=True, timeout=600)
    one, two = (json.loads((tmp_path / str(rank)).read_text()) for rank in range(2))
    assert one["compiles"] == two["compiles"] == 2
    assert not set(one["keys"]) & set(two["keys"])
    local = LocalStore.open(tmp_path / "store", writable=True, given=True)
    for said, other in ((one, two), (two, one)):
        used = {*said["keys"], *said["others"]}
        collected = collect(local, stores, InductorStore.rules, used=used)
        assert {item.extra["graph"] for item in collected.artifacts if "graph" in item.extra} == used
        left = {path for path, why in collected.left_out["inductor"].items() if why == "unused"}
        assert {InductorRules().graph(path) for path in left} == {*other["keys"], *other["others"]}
