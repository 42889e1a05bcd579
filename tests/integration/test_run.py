"""Real training on 4 gloo ranks from the warm store: hits, identity, and everything that must be refused."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from neffcache.flows.request import make_request
from neffcache.flows.run import run
from neffcache.store.local import LocalStore
from neffcache.store.records import Manifest, RankClass, manifest
from tests.integration.conftest import CONFIG, Answer, Warmed, neffcache

pytestmark = pytest.mark.integration


def current(store: Path) -> Manifest:
    local = LocalStore.open(store, writable=True, given=True)
    found = [local.get_manifest(pointer.manifest) for pointer in local.pointers()]
    (compiled,) = [entry for entry in found if entry is not None and entry.compile_keys()]
    return compiled


def without_one_graph(store: Path) -> str:
    """Make a manifest that claims to be complete and lacks one graph the current one; its compile key."""
    local = LocalStore.open(store, writable=True, given=True)
    found = current(store)
    lost = found.compile_keys()[-1]
    fewer = manifest(
        cache_key=found.cache_key,
        components=found.components,
        request=found.request,
        complete=True,
        phases=found.phases,
        rank_classes=[
            RankClass(entry.ranks, {phase: tuple(k for k in keys if k != lost) for phase, keys in entry.graphs.items()})
            for entry in found.rank_classes
        ],
        artifacts=(),
        environment=found.environment,
        versions=found.versions,
        created=found.created,
        host=found.host,
    )
    local.put_manifest(fewer)
    local.set_pointer(found.cache_key, fewer.id)
    return lost


def assert_warm(answer: Answer, graphs: int) -> None:
    assert answer.code == 0, answer.stderr
    document = answer.document
    assert document["identity"] == "proved"
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1, 2, 3]
    for rank in document["ranks"]:
        assert (rank["hits"], rank["misses"], rank["compiles"]) == (graphs, 0, 0)
        assert rank["compiler_processes"] == []
    assert document["step_one"]["hits"] == 4 * graphs
    assert document["step_one"]["compiles"] == 0
    assert document["exit_code"] == 0
    assert document["command_status"] == 0


def test_warm_compiled_every_graph_and_replayed_it(warmed: Warmed) -> None:
    graphs = warmed.answer.document["graphs"]
    assert graphs["total"] == graphs["compiled"] >= 2
    assert graphs["hit"] == graphs["failed"] == graphs["skipped"] == 0
    assert warmed.answer.document["complete"]
    assert warmed.answer.stderr.splitlines()[0].startswith("toolchain host")


def test_a_second_warm_compiles_nothing(warmed: Warmed) -> None:
    again = neffcache(warmed.root, "warm", CONFIG)
    assert again.code == 0
    assert again.document["graphs"] == {
        **warmed.answer.document["graphs"],
        "compiled": 0,
        "hit": again.document["graphs"]["total"],
    }
    assert again.document["cache_key"] == warmed.answer.document["cache_key"]


def test_four_ranks_hit_on_step_one_and_start_no_compiler(warmed: Warmed, store: Path) -> None:
    """The real run's compile keys are those of the fake trace: every rank hits all of its class and misses none."""
    answer = neffcache(store, "run", CONFIG, "--steps", "3", "--set", "debug.seed=7")
    assert_warm(answer, warmed.answer.document["graphs"]["total"])
    assert answer.document["steps"] == 3
    assert len(answer.document["losses"]) == 3


@pytest.mark.soak
def test_losses_are_those_of_an_eager_run(store: Path) -> None:
    """The quickstart compares them too."""
    answer = neffcache(store, "run", CONFIG, "--steps", "3", "--set", "debug.seed=7")
    eager = ("--set", "compile.enable=false")
    assert neffcache(store, "warm", CONFIG, *eager).code == 0
    plain = neffcache(store, "run", CONFIG, "--steps", "3", "--set", "debug.seed=7", *eager)
    assert plain.code == 0, plain.stderr
    assert answer.document["losses"] == pytest.approx(plain.document["losses"], rel=5e-4)
    assert len(plain.document["losses"]) == 3


def test_the_store_may_be_read_only(warmed: Warmed, tmp_path: Path) -> None:
    store = warmed.copy(tmp_path / "store")
    before = sorted(str(path.relative_to(store)) for path in store.rglob("*"))
    request = make_request(CONFIG, environ=os.environ)
    document = run(
        request,
        LocalStore.open(store, writable=False, given=True),
        os.environ,
        steps=1,
        output=lambda: sys.stderr,
    )
    assert document["exit_code"] == 0
    assert {rank["compiles"] for rank in document["ranks"]} == {0}
    assert sorted(str(path.relative_to(store)) for path in store.rglob("*")) == before


def test_a_command_of_ones_own_runs_unchanged(
    warmed: Warmed, store: Path, command_line: Callable[..., list[str]]
) -> None:
    answer = neffcache(store, "run", CONFIG, "--", *command_line())
    assert_warm(answer, warmed.answer.document["graphs"]["total"])


def test_a_command_with_another_shape_is_refused_before_the_model_is_built(
    store: Path, command_line: Callable[..., list[str]]
) -> None:
    answer = neffcache(store, "run", CONFIG, "--", *command_line("--training.seq_len", "128"))
    assert answer.code == 5, answer.stderr
    assert "config.training.seq_len" in answer.document["error"]["message"]
    states = {rank["state"] for rank in answer.document["ranks"]}
    assert "refused" in states
    assert states <= {"refused", "started"}, "a rank that did not refuse by itself was ended before it built a model"
    assert answer.document["steps"] == 0
    assert answer.document["identity"] == "unproved"


def program_of(rank_two: str) -> str:
    """TorchTitan's own entry point, with a line of one's own before it on rank 2."""
    return textwrap.dedent(
        f"""
        import os, runpy, signal
        if os.environ["RANK"] == "2":
            {rank_two}
        runpy.run_module("torchtitan.train", run_name="__main__")
        """
    )


def instead_of_titan(command: list[str], program: Path) -> list[str]:
    place = command.index("torchtitan.train")
    return [*command[: place - 1], str(program), *command[place + 1 :]]


def test_one_rank_with_another_thread_count_ends_all_of_them(
    store: Path, tmp_path: Path, command_line: Callable[..., list[str]]
) -> None:
    program = tmp_path / "threads.py"
    program.write_text(program_of('os.environ["OMP_NUM_THREADS"] = "2"'))
    answer = neffcache(store, "run", CONFIG, "--", *instead_of_titan(command_line(), program))
    assert answer.code == 5, answer.stderr
    assert answer.document["error"]["message"].startswith("rank 2: ")
    assert "toolchain.threads" in answer.document["error"]["message"]
    assert answer.document["steps"] == 0


def test_another_thread_count_is_another_key_and_launches_nothing(store: Path) -> None:
    answer = neffcache(store, "run", CONFIG, environ={"OMP_NUM_THREADS": "2"})
    assert answer.code == 3, answer.stderr
    assert answer.document["error"] == "Miss"
    assert "launching" not in answer.stderr


def test_a_deleted_artifact_is_refused_before_launch(store: Path) -> None:
    local = LocalStore.open(store, writable=True, given=True)
    victim = local.artifacts(current(store))[0]
    local.blob_path(victim.sha256).unlink()
    answer = neffcache(store, "run", CONFIG)
    assert answer.code == 3, answer.stderr
    assert "launching" not in answer.stderr


def test_a_flipped_bit_is_quarantined_and_refused(store: Path) -> None:
    local = LocalStore.open(store, writable=True, given=True)
    victim = local.blob_path(local.artifacts(current(store))[0].sha256)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.unlink()  # the copy shares inodes with the other tests' store
    victim.write_bytes(bytes(data))
    answer = neffcache(store, "run", CONFIG)
    assert answer.code == 7, answer.stderr
    assert "launching" not in answer.stderr
    assert victim.name in " ".join(LocalStore.open(store, writable=True, given=True).quarantined())


def test_a_graph_that_the_manifest_lacks_ends_every_rank_before_step_one(store: Path) -> None:
    lost = without_one_graph(store)
    answer = neffcache(store, "run", CONFIG)
    assert answer.code == 3, answer.stderr
    assert answer.document["steps"] == 0
    missed = [miss for rank in answer.document["ranks"] for miss in rank["missed"]]
    assert {miss["compile_key"] for miss in missed} == {lost}
    assert missed[0]["nearest"]["compile_key"] in current(store).compile_keys()
    assert "line" in missed[0]["nearest"]


def test_with_on_miss_compile_it_is_compiled_kept_and_warm_afterwards(warmed: Warmed, store: Path) -> None:
    lost = without_one_graph(store)
    (store / "graphs" / f"{lost}.json").unlink()
    answer = neffcache(store, "run", CONFIG, "--on-miss", "compile", "--steps", "1")
    assert answer.code == 0, answer.stderr
    assert sum(rank["compiles"] for rank in answer.document["ranks"]) == 1
    assert answer.document["local_manifest"]
    assert lost in current(store).compile_keys()
    assert_warm(neffcache(store, "run", CONFIG, "--steps", "1"), warmed.answer.document["graphs"]["total"])


@pytest.mark.soak
def test_with_on_miss_warn_it_is_counted_and_not_kept(store: Path) -> None:
    lost = without_one_graph(store)
    (store / "graphs" / f"{lost}.json").unlink()
    answer = neffcache(store, "run", CONFIG, "--on-miss", "warn", "--steps", "1")
    assert answer.code == 0, answer.stderr
    assert {rank["misses"] for rank in answer.document["ranks"]} == {1}
    assert sum(rank["compiles"] for rank in answer.document["ranks"]) == 1, "the ranks of a node share a compile"
    assert not (store / "graphs" / f"{lost}.json").exists()


def test_a_rank_that_is_killed_fails_the_command(
    store: Path, tmp_path: Path, command_line: Callable[..., list[str]]
) -> None:
    program = tmp_path / "killed.py"
    hook = "from torch.optim.optimizer import register_optimizer_step_post_hook as after"
    program.write_text(program_of(f"{hook}; after(lambda *_: os.kill(os.getpid(), signal.SIGKILL))"))
    answer = neffcache(store, "run", CONFIG, "--", *instead_of_titan(command_line(), program))
    assert answer.code == 9, answer.stderr
    assert answer.document["command_status"] != 0


def test_a_command_that_only_imports_torch_proves_nothing(store: Path, tmp_path: Path) -> None:
    program = tmp_path / "nothing.py"
    program.write_text("import torch")
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", str(program))
    answer = neffcache(store, "run", CONFIG, "--", *launcher)
    assert answer.code == 5
    assert "did not prove" in answer.document["error"]["message"]


def test_a_command_that_trains_nothing_proves_nothing(store: Path) -> None:
    answer = neffcache(store, "run", CONFIG, "--", sys.executable, "-c", "pass")
    assert answer.code == 5
    assert "0 of 4 ranks" in answer.document["error"]["message"]


def test_autoload_switched_off_is_refused(store: Path) -> None:
    answer = neffcache(store, "run", CONFIG, environ={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert answer.code == 2
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" in answer.document["message"]


def test_an_edited_comment_heals_by_tracing_again(store: Path, tmp_path: Path) -> None:
    """Another job key, the same compile keys: the run goes on with a local manifest and compiles nothing."""
    import torchtitan

    assert torchtitan.__file__ is not None
    package = Path(torchtitan.__file__).parent
    copy = tmp_path / "copy" / "torchtitan"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__", "tests"))
    for info in package.parent.glob("torchtitan-*.dist-info"):
        shutil.copytree(info, tmp_path / "copy" / info.name)
    model = copy / "models" / "llama3" / "model.py"
    model.write_text(model.read_text() + "\n# a comment\n")
    environ = {"PYTHONPATH": str(tmp_path / "copy")}
    before = current(store).cache_key
    answer = neffcache(store, "run", CONFIG, "--steps", "1", environ=environ)
    assert answer.code == 0, answer.stderr
    assert answer.document["cache_key"] != before
    assert {rank["compiles"] for rank in answer.document["ranks"]} == {0}
    assert "tracing again" in answer.stderr
