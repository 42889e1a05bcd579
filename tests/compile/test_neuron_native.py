"""The caches of the Neuron stacks: warm -> collect -> view -> run, with stubs for TorchNeuron and its compiler.

What is proved is what neffcache does with a cache and a compiler process. No NEFF is made here and no device is asked.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from neffcache.compile.neuron import shim
from neffcache.compile.neuron.environment import Places, environment
from neffcache.compile.neuron.native import LibneuronxlaStore, ModuleRules, NeffRules, TorchNeuronStore
from neffcache.compile.neuron.operators import GRAPH, STORM, group, operator_of
from neffcache.compile.stores import native_store
from neffcache.errors import Usage
from neffcache.flows.native import Cast, classes_of, native_manifest, operators_of, private_stores
from neffcache.flows.request import make_request
from neffcache.flows.resolve import Job
from neffcache.key.canonical import digest
from neffcache.key.job import job_key
from neffcache.key.native import torchneuron_arguments, torchneuron_disk_key, torchneuron_memory_key, torchneuron_path
from neffcache.key.options import Options
from neffcache.key.target import Mesh
from neffcache.runtime.identity import place_differences
from neffcache.runtime.report import RankReport
from neffcache.store.local import LocalStore
from neffcache.store.native import Collected, added, collect
from neffcache.store.records import Manifest, RankClass, manifest
from neffcache.store.view import materialise
from tests.compile.neuron_stubs import BIN, environ

# A rank: two graphs and an eager operator, then what the native store counts in this very process.
RANK = """
import json, sys
import torch_neuronx
from neffcache.compile.neuron.native import TorchNeuronStore
store = TorchNeuronStore()
fault = None
try:
    for name in sys.argv[2].split(","):
        torch_neuronx._C.compile_graph(f"base-{name}", f"stablehlo of {name}".encode(), False)
    torch_neuronx._C.stub_eager("add", "[4, 4]")
except RuntimeError as error:
    fault = str(error)
counted = store.counters()
print(json.dumps({"compiles": counted.compiles, "hits": counted.hits, "misses": counted.misses,
                  "keys": sorted(counted.keys), "labels": dict(counted.labels), "fault": fault}))
"""


def launched(
    user: Mapping[str, str], stores: Path, private: Path, *, ranks: int = 2, graphs: str = "one,two", **more: str
) -> list[dict[str, Any]]:
    """Ranks of a job with the contract's environment, all at once; what each counted."""
    private.mkdir(parents=True, exist_ok=True)
    contract = environment(
        user, options=Options.parse([]), target="trn2", lnc=2, places=Places(stores, private), ranks_per_node=ranks
    )
    given = {**contract.applied(user), **more}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), graphs],
            env={**given, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    return [json.loads(process.communicate(timeout=120)[0]) for process in running]


def manifest_of(found: Collected) -> Manifest:
    return manifest(
        cache_key="0" * 32,
        components={"toolchain": {"sha256": digest("stub"), "value": "stub"}},
        request={},
        complete=True,
        phases=("first_step",),
        rank_classes=(RankClass("0-1", {"first_step": ()}),),
        artifacts=found.artifacts,
        environment={},
        versions={},
        created="2026-01-02T03:04:05+00:00",
        host={},
    )


@pytest.fixture
def user(tmp_path: Path) -> dict[str, str]:
    return environ(tmp_path / "user", STUB_COMPILE_LOG=str(tmp_path / "compiles"))


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore.open(tmp_path / "store", writable=True, given=True)


def compiles(user: Mapping[str, str]) -> int:
    log = Path(user["STUB_COMPILE_LOG"])
    return len(log.read_text().splitlines()) if log.exists() else 0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest, str]:
    """A store that two ranks warmed, its manifest, and the log of their compiler."""
    place = tmp_path_factory.mktemp("warmed")
    user = environ(place / "user", STUB_COMPILE_LOG=str(place / "compiles"))
    launched(user, place / "stores", place / "private")
    store = LocalStore.open(place / "store", writable=True, given=True)
    made = store.put_manifest(manifest_of(collect(store, place / "stores", TorchNeuronStore().rules)))
    return store.root, made, (place / "compiles").read_text()


@pytest.fixture
def warmed(shared: tuple[Path, Manifest, str], user: dict[str, str], store: LocalStore) -> Manifest:
    """The warm store, as this test's own copy of hard links."""
    root, made, log = shared
    shutil.copytree(root, store.root, copy_function=os.link, dirs_exist_ok=True)
    Path(user["STUB_COMPILE_LOG"]).write_text(log)
    return made


def test_warm_collect_view_run_compiles_nothing(
    user: dict[str, str], store: LocalStore, warmed: Manifest, tmp_path: Path
) -> None:
    assert compiles(user) == 3  # two graphs and an operator, each by one of two ranks
    assert len(warmed.artifacts) == 3
    view = materialise(store, warmed)
    ranks = launched(user, view.path, tmp_path / "run")
    assert [(rank["compiles"], rank["hits"], rank["fault"]) for rank in ranks] == [(0, 3, None)] * 2
    assert compiles(user) == 3
    # What each rank says it used is what the manifest holds.
    held = {item.path[6:-5] for item in warmed.artifacts}
    assert all(set(rank["keys"]) == held for rank in ranks)


def test_the_keys_are_those_of_the_published_recipe(warmed: Manifest) -> None:
    arguments = torchneuron_arguments(None)
    keys = {
        torchneuron_disk_key(torchneuron_memory_key(f"base-{name}", "trn2", 2, "-O2", arguments), ir)
        for name, ir in (("one", b"stablehlo of one"), ("two", b"stablehlo of two"))
    }
    assert {str(torchneuron_path(key)) for key in keys} < {item.path for item in warmed.artifacts}


def test_a_missing_neff_is_one_compile(
    user: dict[str, str], store: LocalStore, warmed: Manifest, tmp_path: Path
) -> None:
    view = materialise(store, warmed)
    (view.path / "neff" / warmed.artifacts[0].path).unlink()
    ranks = launched(user, view.path, tmp_path / "run", ranks=1)
    assert [rank["compiles"] for rank in ranks] == [1]


def test_an_empty_neff_is_a_miss_and_is_never_collected(
    user: dict[str, str], store: LocalStore, tmp_path: Path
) -> None:
    launched(user, tmp_path / "stores", tmp_path / "private", ranks=1)
    first = next((tmp_path / "stores" / "neff").rglob("*.neff"))
    first.write_bytes(b"")
    (first.parent / ".tmp.AbCdEf").write_bytes(b"half of a")
    found = collect(store, tmp_path / "stores", TorchNeuronStore().rules)
    assert len(found.artifacts) == 2
    assert sorted(found.left_out["neff"].values()) == ["empty", "transient"]


def test_ranks_that_wait_for_a_sibling_do_not_trip_the_gate(
    user: dict[str, str], store: LocalStore, warmed: Manifest, tmp_path: Path
) -> None:
    view = materialise(store, warmed)
    (view.path / "neff" / warmed.artifacts[0].path).unlink()
    ranks = launched(user, view.path, tmp_path / "run", ranks=3, STUB_COMPILE_SECONDS="1")
    assert sum(rank["compiles"] for rank in ranks) == 1
    waited = [rank for rank in ranks if not rank["compiles"]]
    # They missed, waited and hit: compiles tell, misses do not.
    assert [rank["misses"] - 3 for rank in waited] == [1, 1]


def test_a_new_neff_is_a_compile_and_a_new_lowering_is_not(
    user: dict[str, str], store: LocalStore, warmed: Manifest, tmp_path: Path
) -> None:
    view = materialise(store, warmed, writable_overlay=True)
    rules = TorchNeuronStore().rules
    (view.path / "hlo").mkdir()
    (view.path / "hlo" / "lowered").write_bytes(b"x")
    assert added(view.path, rules, warmed) == []
    launched(user, view.path, tmp_path / "run", ranks=1, graphs="one,other")
    (new,) = added(view.path, rules, warmed)
    assert new.startswith("neff/")


def test_a_refusing_compiler_is_asked_and_nothing_is_compiled(
    user: dict[str, str], store: LocalStore, warmed: Manifest, tmp_path: Path
) -> None:
    view = materialise(store, warmed)
    (view.path / "neff" / warmed.artifacts[0].path).unlink()
    private = tmp_path / "run"
    path = shim.install(private, user, BIN / "neuronx-cc", private / "mark")
    (rank,) = launched({**user, **path}, view.path, private, ranks=1)
    assert rank["fault"] is not None
    assert rank["compiles"] == 0
    assert compiles(user) == 3
    assert (private / "mark").exists()
    assert [line.split()[0] for line in shim.refused(private)] == ["compile"]


def test_a_refusing_compiler_still_answers_questions(user: dict[str, str], tmp_path: Path) -> None:
    path = shim.install(tmp_path, user, BIN / "neuronx-cc", tmp_path / "mark")
    done = subprocess.run(["neuronx-cc", "--version"], env={**user, **path}, capture_output=True, text=True, check=True)
    assert "2.33.1.0+5f1ab000" in done.stdout
    assert not shim.refused(tmp_path)


def test_a_strict_run_that_hits_never_asks_the_refusing_compiler(
    user: dict[str, str], store: LocalStore, warmed: Manifest, tmp_path: Path
) -> None:
    path = shim.install(tmp_path / "run", user, BIN / "neuronx-cc", tmp_path / "mark")
    ranks = launched({**user, **path}, materialise(store, warmed).path, tmp_path / "run")
    assert [rank["compiles"] for rank in ranks] == [0, 0]
    assert not shim.refused(tmp_path / "run")


def test_a_read_only_view_serves_hits(
    user: dict[str, str], store: LocalStore, warmed: Manifest, tmp_path: Path
) -> None:
    view = materialise(store, warmed)
    folders = [Path(folder) for folder, _, _ in os.walk(view.path)]
    for folder in folders:
        folder.chmod(0o555)
    try:
        ranks = launched(user, view.path, tmp_path / "run")
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert [(rank["compiles"], rank["hits"]) for rank in ranks] == [(0, 3)] * 2
    assert all(not stat.S_IMODE((view.path / "neff" / item.path).stat().st_mode) & 0o222 for item in warmed.artifacts)


def test_another_lnc_or_option_uses_no_file_of_this_one(
    user: dict[str, str], store: LocalStore, warmed: Manifest, tmp_path: Path
) -> None:
    view = materialise(store, warmed)
    (rank,) = launched(user, view.path, tmp_path / "run", ranks=1, NEURON_LOGICAL_NC_CONFIG="1")
    assert rank["compiles"] == 3
    (rank,) = launched(user, view.path, tmp_path / "run2", ranks=1, NEURON_CC_FLAGS="--enable-saturate-infinity")
    assert rank["compiles"] == 3


def test_a_second_jobs_files_are_left_out_by_what_the_ranks_used(
    user: dict[str, str], store: LocalStore, tmp_path: Path
) -> None:
    stores = tmp_path / "stores"
    launched(user, stores, tmp_path / "private", ranks=1, graphs="other")
    (rank,) = launched(user, stores, tmp_path / "private", ranks=1, graphs="one,two")
    found = collect(store, stores, TorchNeuronStore().rules, used=rank["keys"])
    assert len(found.artifacts) == 3
    assert list(found.left_out["neff"].values()) == ["unused"]


def job_of(toolchain: Mapping[str, Any]) -> Job:
    """A job of that toolchain, as TorchTitan could have resolved it."""
    request = make_request("llama3_8b", toolchain="neuron", environ={})
    key = job_key(
        workload={},
        target=request.placement.target_component(),
        lnc=request.placement.lnc_component(),
        toolchain=toolchain,
        options=request.options.component(),
    )
    return Job(request, key, (), Mesh(dp_shard=16, tp=4), (), (), {}, {}, {})


def test_two_toolchain_ids_never_share_a_file(user: dict[str, str], store: LocalStore, tmp_path: Path) -> None:
    """One compiler, then another whose version is not in the NEFFs' names, then the first again."""
    made: dict[str, Manifest] = {}
    for version in ("1", "2", "1 again"):
        job = job_of({"name": "neuron", "native_store": "torchneuron", "version": version.split()[0]})
        native = job.native_store
        assert native is not None
        stores = private_stores(job, native, store, tmp_path / version, None)
        assert job.toolchain_id in stores.parts
        before = compiles(user)
        launched(user, stores, tmp_path / version / "private", ranks=1)
        assert compiles(user) - before == 3, "the directory of another toolchain was not empty"
        made[version] = native_manifest(job, collect(store, stores, native.rules).artifacts, (), complete=True)
    one, two = made["1"], made["2"]
    assert [item.path for item in one.artifacts] == [item.path for item in two.artifacts]
    assert one.cache_key != two.cache_key
    assert one.id == made["1 again"].id


def test_the_first_and_the_last_rank_stand_for_all_of_a_class() -> None:
    job = job_of({"name": "neuron", "native_store": "torchneuron"})
    cast = Cast.corners(job, {"TORCH_NEURONX_COMPILE_ONLY": "1"})
    assert list(cast.members) == [0, 63]
    assert cast.reporting(job) == 2
    same = {"named": True, "phases": {"first_step": ["a"], "steady_step": []}, "others": [], "misses": 1}
    reports = {rank: RankReport(rank, 0, 1, native=same) for rank in cast.members}
    (together,) = classes_of(reports, TorchNeuronStore(), cast)
    assert together.ranks == "0-63"
    other = {**same, "phases": {"first_step": ["b"], "steady_step": []}}
    reports[63] = RankReport(63, 0, 1, native=other)
    assert [entry.ranks for entry in classes_of(reports, TorchNeuronStore(), cast)] == ["0-62", "63"]
    assert Cast.whole(job).reporting(job) == 64


def test_what_was_kept_is_counted_by_operator(store: LocalStore, user: dict[str, str], tmp_path: Path) -> None:
    (rank,) = launched(user, tmp_path / "stores", tmp_path / "private", ranks=1)
    found = collect(store, tmp_path / "stores", TorchNeuronStore().rules)
    operators = operators_of(found, {0: RankReport(0, 0, 1, native={"labels": rank["labels"]})})
    assert operators is not None
    assert operators.by_name["add"] == 1
    assert operators_of(found, {0: RankReport(0, 0, 1)}) is None


def test_another_lnc_target_or_world_size_is_named_before_a_model_is_built() -> None:
    job = job_of({"name": "neuron", "native_store": "torchneuron"})
    made = native_manifest(job, (), (), complete=True)
    right = {"WORLD_SIZE": "64", "NEURON_LOGICAL_NC_CONFIG": "2", "NEURON_PLATFORM_TARGET_OVERRIDE": "trn2"}
    assert place_differences(made, right) == []
    wrong = {
        "WORLD_SIZE": "128",
        "NEURON_LOGICAL_NC_CONFIG": "1",
        "NEURON_PLATFORM_TARGET_OVERRIDE": "trn1",
        "NEURON_CC_FLAGS": "-O1",
    }
    told = [entry.path for entry in place_differences(made, wrong)]
    assert told[:3] == [
        "lnc.world_size",
        "lnc.lnc (NEURON_LOGICAL_NC_CONFIG)",
        "target.target (NEURON_PLATFORM_TARGET_OVERRIDE)",
    ]
    assert told[3].startswith("options")


def test_the_lock_outlasts_what_a_warm_measured_on_this_host(
    user: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", user["XDG_CACHE_HOME"])
    native = TorchNeuronStore({"name": "neuron"})
    name = "TORCH_NEURONX_NEFF_CACHE_LOCK_TIMEOUT"
    assert native.environment(tmp_path, tmp_path)[name] == "21600"
    native.measured(user, [{"total_compilation_time_ms": 5}, {"total_compilation_time_ms": 40_000_000}])
    native.measured(user, [{}])
    assert native.environment(tmp_path, tmp_path)[name] == "80060"
    assert TorchNeuronStore({"name": "neuron", "other": 1}).environment(tmp_path, tmp_path)[name] == "21600"


def test_counters_are_zero_where_torch_neuronx_was_never_imported() -> None:
    counted = TorchNeuronStore().counters()
    assert (counted.compiles, counted.hits, counted.keys) == (0, 0, frozenset())
    assert "torch_neuronx" not in sys.modules


@pytest.mark.parametrize(
    ("path", "verdict"),
    [
        (f"ab/cd/abcd{'0' * 28}.neff", "artifact"),
        (f"ab/ce/abcd{'0' * 28}.neff", "foreign"),
        (f"ab/cd/abcd{'0' * 27}.neff", "foreign"),
        (f"ab/cd/ABCD{'0' * 28}.neff", "foreign"),
        ("ab/cd/.tmp.XyZ123", "transient"),
        ("locks/abc.lock", "transient"),
        ("notes.txt", "foreign"),
    ],
)
def test_only_a_neff_at_its_own_place_is_an_artifact(path: str, verdict: str) -> None:
    assert NeffRules().verdict(path, {path}) == verdict


@pytest.mark.parametrize("name", ["TORCH_NEURONX_DISABLE_NEFF_CACHE", "TORCH_NEURONX_NEFF_DISABLE_CACHE"])
def test_a_cache_that_is_switched_off_is_refused(name: str) -> None:
    with pytest.raises(Usage, match=name):
        TorchNeuronStore().check_environment({name: "1"})


def test_counters_that_are_switched_off_are_refused() -> None:
    with pytest.raises(Usage, match="counters"):
        TorchNeuronStore().check_environment({"TORCH_NEURONX_METRICS_ENABLED": "0"})


# --- the older stack ----------------------------------------------------------------------------------------------

VERSION = "neuronxcc-2.21.18209.0+043b1bf7"


def entry(root: Path, name: str, files: Mapping[str, bytes]) -> None:
    folder = root / "xla" / VERSION / name
    folder.mkdir(parents=True)
    for file, data in files.items():
        (folder / file).write_bytes(data)


WHOLE = {"model.hlo_module.pb": b"hlo", "compile_flags.json": b"[]", "model.neff": b"neff", "model.done": b""}


def test_whole_entries_of_libneuronxla_are_collected_and_put_back(store: LocalStore, tmp_path: Path) -> None:
    entry(tmp_path, "MODULE_1+d41d8cd9", {**WHOLE, "model.hlo_module.pb.lock": b""})
    entry(tmp_path, "MODULE_2+d41d8cd9", {"model.hlo_module.pb": b"hlo", "model.log": b"Ctrl-C"})
    entry(tmp_path, "MODULE_3+d41d8cd9", {name: WHOLE[name] for name in WHOLE if name != "model.neff"})
    entry(tmp_path, "MODULE_4+d41d8cd9", {"compile_flags.json": b"[]", "model.hlo_module.pb.lock": b""})
    entry(tmp_path, "MODULE_5+d41d8cd9", {**WHOLE, "compile_flags.txt": b""})
    found = collect(store, tmp_path, LibneuronxlaStore().rules)
    entries = {item.path.split("/")[1] for item in found.artifacts}
    assert entries == {"MODULE_1+d41d8cd9", "MODULE_5+d41d8cd9"}
    made = store.put_manifest(manifest_of(found))
    view = materialise(store, made, writable_overlay=True)
    folder = view.path / "xla" / VERSION / "MODULE_5+d41d8cd9"
    assert {path.name for path in folder.iterdir()} == {*WHOLE, "compile_flags.txt"}
    assert (folder / "model.done").stat().st_size == 0


def test_an_entry_whose_neff_is_empty_is_left_out_whole(store: LocalStore, tmp_path: Path) -> None:
    entry(tmp_path, "MODULE_1+d41d8cd9", {**WHOLE, "model.neff": b""})
    assert collect(store, tmp_path, LibneuronxlaStore().rules).artifacts == ()


def test_new_entries_are_compiles_and_new_logs_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "xla"))
    entry(tmp_path, "MODULE_1+d41d8cd9", WHOLE)
    native = LibneuronxlaStore()
    assert native.counters().compiles == 0
    entry(tmp_path, "MODULE_2+d41d8cd9", WHOLE)
    entry(tmp_path, "MODULE_3+d41d8cd9", {"model.log": b"[NCC_EVRF001]"})
    counted = native.counters()
    assert (counted.compiles, counted.errors) == (2, 1)


@pytest.mark.parametrize("flags", ["--cache_dir=/tmp/x", "-O1 --no_cache"])
def test_flags_that_lead_past_the_view_are_refused(flags: str) -> None:
    with pytest.raises(Usage, match="the view would not be used"):
        LibneuronxlaStore().check_environment({"NEURON_CC_FLAGS": flags})


def test_a_toolchains_own_word_chooses_its_store() -> None:
    assert isinstance(native_store({"native_store": "torchneuron"}), TorchNeuronStore)
    assert isinstance(native_store({"native_store": "libneuronxla"}), LibneuronxlaStore)
    assert ModuleRules().graph(f"{VERSION}/MODULE_1+a/model.neff") == "MODULE_1+a"


# --- eager operators ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "operator"),
    [
        ("aten::add|[4, 4]_trn2_2_O1_--model-type_transformer", "add"),
        ("aten::_foreach_mul|[4]_trn2_2_O1_--model-type_transformer", "_foreach_mul"),
        ("matmul_0123456789abcdef0123_trn2_1_O1_--x", "matmul"),
        (f"{'a' * 64}_trn2_2_O2_--model-type_transformer", GRAPH),
        ("|||_trn2_2_O1_--x", "(unknown)"),
        ("", "(unknown)"),
    ],
)
def test_an_in_memory_key_names_its_operator(key: str, operator: str) -> None:
    assert operator_of(key) == operator


def test_a_storm_names_its_top_operators() -> None:
    keys = [f"aten::add|[{size}]_trn2_2_O1_x" for size in range(STORM)] + ["aten::mul|[1]_trn2_2_O1_x"]
    found = group(map(operator_of, [*keys, f"{'a' * 64}_trn2_2_O2_x"]))
    assert (found.graphs, found.eager) == (1, STORM + 1)
    said = found.storm()
    assert said is not None
    assert f"add {STORM}, mul 1" in said
    assert group(map(operator_of, keys[:3])).storm() is None
