"""A warm of a compiler-owned cache and a run from it, with a stub in place of the training job: what is kept, refused,
proved. The stub writes files and reports; the real job is tests/integration/test_native.py."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from neffcache import variables
from neffcache.errors import CompileFailed, Miss, StoreFault, Unsupported, Usage
from neffcache.flows import native as flow
from neffcache.flows import run as running
from neffcache.flows.gate import fault_of
from neffcache.flows.native import classes_of, private_stores, used_keys, warm_native
from neffcache.flows.request import make_request
from neffcache.flows.resolve import Job, current_manifest
from neffcache.flows.run import manifest_to_run, prepare, run
from neffcache.flows.warm import Progress
from neffcache.key.job import job_key
from neffcache.key.target import Mesh
from neffcache.runtime.report import RankReport, ReportFile
from neffcache.store.local import LocalStore
from neffcache.store.native import all_graph_keys
from neffcache.store.records import Manifest

pytestmark = pytest.mark.fast

CONFIG = "llama3_debugmodel"
VERSIONS = {"torch": "2.14.1", "torchtitan": "0.3.0", "compiler": "g++ 12"}


def key(word: str) -> str:
    return "f" + (word * 52)[:52]


def graph_file(word: str) -> str:
    return f"inductor/fxgraph/aa/{key(word)}/{(word * 52)[:52]}"


def job_of(*, threads: int = 1, **given: Any) -> Job:
    request = make_request(CONFIG, toolchain="host", native=True, environ={}, **given)
    made = job_key(
        workload={"config": {"training": {"seq_len": 256}}, "sources": {}, "environment": {}, "torchtitan": "0.3.0"},
        target=request.placement.target_component(),
        lnc=request.placement.lnc_component(),
        toolchain={"name": "host", "native_store": "inductor", "threads": threads},
        options=request.options.component(),
    )
    return Job(request, made, ("--module", "llama3"), Mesh(dp_shard=2, tp=2), (), (), {}, VERSIONS, {})


class Stub:
    """Stands where the training job is launched: ranks need `graphs`, find them in their directory or make them."""

    def __init__(self) -> None:
        self.graphs: dict[int, list[str]] = {0: ["a", "b"], 1: ["a", "b"], 2: ["a", "c"], 3: ["a", "c"]}
        self.launches: list[Mapping[str, str]] = []
        self.found: list[set[str]] = []
        self.forgets: set[str] = set()
        self.moving = False
        self.status = 0
        self.dies_at: int | None = None

    def __call__(
        self, command: Sequence[str], environ: Mapping[str, str], reports: Path, output: Callable[[], Any] | None
    ) -> tuple[int, dict[int, RankReport]]:
        self.launches.append(environ)
        policy, stores = environ[variables.ON_MISS], Path(environ["TORCHINDUCTOR_CACHE_DIR"]).parent
        made = Manifest.from_json(json.loads(Path(environ[variables.MANIFEST]).read_bytes()))
        self.found.append(
            {str(path.relative_to(stores)) for path in (stores / "inductor").rglob("*") if path.is_file()}
        )
        found: dict[int, RankReport] = {}
        for rank, words in self.graphs.items():
            compiles = 0
            for word in words:
                file = stores / graph_file(word)
                if not file.exists():
                    compiles += 1
                    file.parent.mkdir(parents=True, exist_ok=True)
                    if policy != "fail" and word not in self.forgets:
                        file.write_bytes(f"graph {word}".encode())
            lock = stores / "inductor/locks" / f"{key('a')}.lock"
            lock.parent.mkdir(parents=True, exist_ok=True)
            lock.touch()
            phases = {"first_step": [key(word) for word in words], "steady_step": []}
            if self.moving:
                phases["steady_step_2"] = [key("z")]
            report = RankReport(
                rank,
                rank,
                1,
                identity="proved",
                hits=[key(word) for word in words],
                rank_class=0,
                expected=sorted(
                    {
                        name
                        for entry in made.rank_classes
                        if rank in range(4) and str(rank) in entry.ranks
                        for names in entry.extra.get("native", {}).get("phases", {}).values()
                        for name in names
                    }
                ),
                step_count=0 if self.dies_at == len(self.launches) else 3,
                backend_compiles=compiles,
                native={"named": True, "phases": phases, "others": [], "misses": 0, "allowed": None, "counters": {}},
            )
            if policy == "fail" and compiles:
                report.error = Miss("the compiler did not find what it needs").to_json()
            ReportFile(reports, report).save("ended")
            found[rank] = report
        return (1 if self.dies_at == len(self.launches) else self.status), found


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    made = Stub()
    monkeypatch.setattr(flow, "launch", made)
    monkeypatch.setattr(running, "launch", made)
    return made


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore.open(tmp_path / "store", writable=True)


@pytest.fixture
def place(tmp_path: Path) -> Callable[[], Path]:
    """A new scratch directory for one warm."""
    numbers = iter(range(99))

    def new() -> Path:
        made = tmp_path / f"place-{next(numbers)}"
        made.mkdir()
        return made

    return new


def warmed(job: Job, store: LocalStore, place: Path, seed: Manifest | None = None) -> flow.NativeWarm:
    return warm_native(job, store, {"PATH": ""}, place, seed=seed, note=lambda _: None)


def test_a_warm_starts_empty_keeps_what_is_complete_and_replays_it_from_a_view(
    stub: Stub, store: LocalStore, place
) -> None:
    done = warmed(job_of(), store, place())
    assert stub.found[0] == set()
    assert stub.found[1] == {graph_file(word) for word in "abc"}, "no lock came into the view"
    assert [launch[variables.ON_MISS] for launch in stub.launches] == ["record", "fail"]
    assert (done.graphs, done.hit, done.manifest.complete) == (3, 0, True)
    assert [entry.ranks for entry in done.manifest.rank_classes] == ["0-1", "2-3"]
    assert current_manifest(store, job_of()) == done.manifest
    assert done.to_json()["stores"] == [{"store": "inductor", "files": 3, "left_out": {"transient": 1}}]


def test_the_compiler_sees_a_path_without_a_space(stub: Stub, store: LocalStore, tmp_path: Path) -> None:
    place = tmp_path / "home of somebody"
    place.mkdir()
    warmed(job_of(), store, place)
    seen = Path(stub.launches[0]["TORCHINDUCTOR_CACHE_DIR"])
    assert re.fullmatch(r"neffcache-\w+/stores/inductor", str(seen.relative_to(tempfile.gettempdir())))
    assert not seen.parent.parent.exists()


def test_no_two_toolchains_and_no_two_jobs_share_a_directory(store: LocalStore, tmp_path: Path) -> None:
    native = job_of().native_store
    assert native is not None
    places = {
        private_stores(job, native, store, tmp_path / str(n), None).relative_to(tmp_path / str(n))
        for n, job in enumerate([job_of(), job_of(threads=2), job_of(lnc=2, target="trn2", world_size=4)])
    }
    assert len(places) == 3
    assert len({path.parts[1] for path in places}) == 2, "two toolchain ids"


def test_a_second_configuration_s_files_never_get_into_the_first_one_s_manifest(
    stub: Stub, store: LocalStore, place
) -> None:
    root = place()
    first = warmed(job_of(), store, root)
    stub.graphs = {rank: ["a", "d"] for rank in range(4)}
    other = job_of(threads=2)
    second = warm_native(other, store, {}, root / "second", seed=None, note=lambda _: None)
    assert {key("d")} == set(all_graph_keys(second.manifest)) - set(all_graph_keys(first.manifest))
    again = store.get_manifest(first.manifest.id)
    assert again is not None
    assert not any(key("d") in item.path for item in again.artifacts)
    assert {item.path.split("/")[2] for item in second.manifest.artifacts} == {key("a"), key("d")}


def test_what_the_cache_does_not_hold_is_found_by_the_replay(stub: Stub, store: LocalStore, place) -> None:
    stub.forgets = {"b"}
    with pytest.raises(Unsupported, match="compiled again"):
        warmed(job_of(), store, place())
    left = current_manifest(store, job_of())
    assert left is not None
    assert not left.complete
    with pytest.raises(Miss):
        manifest_to_run(job_of(), store, {}, "fail", Progress())


def test_a_job_that_dies_leaves_what_was_complete_and_the_next_warm_starts_from_it(
    stub: Stub, store: LocalStore, place
) -> None:
    stub.dies_at = 1
    with pytest.raises(CompileFailed, match="does not run"):
        warmed(job_of(), store, place())
    seed = current_manifest(store, job_of())
    assert seed is not None
    assert not seed.complete
    assert len(seed.artifacts) == 3
    stub.dies_at = None
    done = warmed(job_of(), store, place(), seed)
    assert stub.found[1] == {graph_file(word) for word in "abc"}
    assert done.manifest.complete


def test_an_interrupted_warm_keeps_what_was_complete(
    stub: Stub, store: LocalStore, place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*given: Any) -> Any:
        stub(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(flow, "launch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        warmed(job_of(), store, place())
    seed = current_manifest(store, job_of())
    assert seed is not None
    assert (seed.complete, len(seed.artifacts)) == (False, 3)


def test_what_the_store_had_and_does_not_do_is_tried_once_then_nothing_is_used(
    stub: Stub, store: LocalStore, place
) -> None:
    seed = warmed(job_of(), store, place()).manifest
    stub.dies_at = 3
    done = warmed(job_of(), store, place(), seed)
    assert stub.found[2] == {graph_file(word) for word in "abc"}
    assert stub.found[3] == set()
    assert done.manifest.complete


def test_a_manifest_that_lost_a_file_is_made_whole_again(stub: Stub, store: LocalStore, place) -> None:
    seed = warmed(job_of(), store, place()).manifest
    lost = seed.artifacts[0]
    store.blob_path(lost.sha256).unlink()
    done = warmed(job_of(), store, place(), seed)
    assert stub.found[2] == {f"{item.store}/{item.path}" for item in seed.artifacts[1:]}
    assert store.missing(done.manifest) == []
    assert (done.graphs, done.hit) == (3, 3)


def test_shapes_that_move_are_refused(stub: Stub, store: LocalStore, place) -> None:
    stub.moving = True
    with pytest.raises(Unsupported, match="not static"):
        warmed(job_of(), store, place())


def test_a_job_of_several_nodes_cannot_be_warmed_by_running_it_here(store: LocalStore, place) -> None:
    with pytest.raises(Unsupported, match="2 nodes"):
        warmed(job_of(nodes=2, instance="trn2.48xlarge", lnc=2), store, place())


def test_a_switch_that_would_hide_compiles_is_refused(store: LocalStore, place) -> None:
    with pytest.raises(Usage, match="TORCHINDUCTOR_FORCE_DISABLE_CACHES"):
        warm_native(
            job_of(), store, {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}, place(), seed=None, note=lambda _: None
        )


def test_a_compiler_that_names_no_graph_gets_one_class_and_counts_files(
    stub: Stub, store: LocalStore, place, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent(Stub):
        def __call__(self, *given: Any) -> tuple[int, dict[int, RankReport]]:
            status, reports = super().__call__(*given)
            for report in reports.values():
                report.native, report.hits = {"named": False, "misses": 0}, []
            return status, reports

    silent = Silent()
    monkeypatch.setattr(flow, "launch", silent)
    done = warmed(job_of(), store, place())
    assert used_keys({0: RankReport(0, 0, 1, native={"named": False})}) is None
    assert [entry.ranks for entry in done.manifest.rank_classes] == ["0-3"]
    assert (all_graph_keys(done.manifest), done.graphs) == ((), 3)


def test_misses_are_part_of_a_class_only_where_they_repeat() -> None:
    native = job_of().native_store
    assert native is not None
    reports = {rank: RankReport(rank, rank, 1, native={"phases": {}, "misses": rank % 2}) for rank in range(4)}
    assert [entry.ranks for entry in classes_of(reports, native)] == ["0,2", "1,3"]
    native.misses_repeat = False
    assert [entry.ranks for entry in classes_of(reports, native)] == ["0-3"]


# --- run: what is launched, and what its end proves


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> Job:
    job = job_of()
    monkeypatch.setattr(running, "resolve", lambda *_: job)
    return job


def test_a_run_gets_its_own_copy_of_exactly_the_manifest_s_files(
    stub: Stub, store: LocalStore, place, resolved: Job
) -> None:
    made = warmed(resolved, store, place()).manifest
    document = run(resolved.request, store, {})
    assert document["exit_code"] == 0, document
    assert stub.found[-1] == {f"{item.store}/{item.path}" for item in made.artifacts}
    directory = Path(stub.launches[-1]["TORCHINDUCTOR_CACHE_DIR"])
    assert ".overlay-" in directory.parent.name
    assert not directory.exists(), "the copy went with the run"
    assert document["native"]["added"] == []
    assert {rank["hits"] for rank in document["ranks"]} == {2}


def test_a_run_whose_compiler_wrote_a_new_file_is_no_warm_run(
    stub: Stub, store: LocalStore, place, resolved: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its counters say."""
    warmed(resolved, store, place())

    def writes(command: Any, environ: Mapping[str, str], reports: Path, output: Any) -> Any:
        answer = stub(command, environ, reports, output)
        file = Path(environ["TORCHINDUCTOR_CACHE_DIR"]).parent / graph_file("n")
        file.parent.mkdir(parents=True)
        file.write_bytes(b"new")
        return answer

    monkeypatch.setattr(running, "launch", writes)
    document = run(resolved.request, store, {})
    assert document["exit_code"] == Miss.exit_code
    assert document["native"]["added"] == [graph_file("n")]


def test_lost_and_damaged_files_are_refused_before_launch(stub: Stub, store: LocalStore, place, resolved: Job) -> None:
    made = warmed(resolved, store, place()).manifest
    blob = store.blob_path(made.artifacts[0].sha256)
    data = blob.read_bytes()
    blob.unlink()
    with pytest.raises(Miss):
        run(resolved.request, store, {})
    blob.write_bytes(data[:-1] + b"X")
    with pytest.raises(StoreFault):
        run(resolved.request, LocalStore.open(store.root, writable=True), {})
    assert len(stub.launches) == 2, "those of the warm"
    assert blob.name in " ".join(store.quarantined())


def test_nothing_is_launched_for_a_job_that_was_never_warmed(stub: Stub, store: LocalStore, resolved: Job) -> None:
    with pytest.raises(Miss) as miss:
        run(resolved.request, store, {})
    assert miss.value.hint == f"neffcache warm {CONFIG} --native"
    assert stub.launches == []


def test_what_a_run_had_to_compile_is_kept_and_proved(stub: Stub, store: LocalStore, resolved: Job) -> None:
    document = run(resolved.request, store, {}, on_miss="compile")
    assert document["exit_code"] == 0, document
    found = current_manifest(store, resolved)
    assert found is not None
    assert (found.complete, found.id) == (True, document["local_manifest"])
    assert run(resolved.request, store, {})["exit_code"] == 0
    assert run(resolved.request, store, {}, on_miss="compile")["local_manifest"] is None


def test_a_read_only_store_serves_a_run(stub: Stub, store: LocalStore, place, resolved: Job, tmp_path: Path) -> None:
    made = warmed(resolved, store, place()).manifest
    reader = LocalStore.open(store.root, writable=False)
    (tmp_path / "own").mkdir()
    ready = prepare(resolved, made, reader, tmp_path / "own", environ={})
    assert ready.stores.is_relative_to(tmp_path / "own")
    assert (ready.stores / graph_file("a")).read_bytes() == b"graph a"
    assert ready.environment["TORCHINDUCTOR_CACHE_DIR"] == str(ready.stores / "inductor")


@pytest.mark.parametrize("policy", ["fail", "warn"])
def test_the_gate_counts_entries_that_the_replay_found(policy: str) -> None:
    good = RankReport(0, 0, 1, identity="proved", step_count=1, native={"misses": 1, "allowed": 1})
    assert fault_of({0: good}, 0, 1, policy) is None
    assert fault_of({0: replace(good, native={"misses": 1, "allowed": None})}, 0, 1, policy) is None
    worse = fault_of({0: replace(good, native={"misses": 2, "allowed": 1})}, 0, 1, policy)
    assert (worse is None) == (policy == "warn")
