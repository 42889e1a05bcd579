"""Inference workloads, from the command line: warm, run on real ranks, and what is said of bad ones."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Answer, neffcache

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs/examples/inference"
HOW_TO = (ROOT / "docs/how-to/inference.md").read_text()
WARM, RUN, WARM_BY_MODULE, RUN_OWN, WARM_HF, RUN_HF = (
    shlex.split(line)[1:] for line in HOW_TO.splitlines() if line.startswith("neffcache ")
)
"""The commands of the documentation, in its order."""


def there(*arguments: str, store: Path, **more: str) -> Answer:
    """A command with the examples of the documentation as its warmers and on its path."""
    path = os.pathsep.join([str(EXAMPLES), str(ROOT)])
    return neffcache(store, *arguments, environ={"NEFFCACHE_WARMERS": str(EXAMPLES), "PYTHONPATH": path, **more})


def counts(document: dict[str, Any]) -> list[tuple[int, int, int, int]]:
    return [(rank["graphs"], rank["hits"], rank["misses"], rank["compiles"]) for rank in document["ranks"]]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with `blocks_tp2`."""
    root = tmp_path_factory.mktemp("inference") / "store"
    answer = there(*WARM, store=root)
    assert answer.code == 0, answer.stderr
    assert answer.document["complete"]
    assert answer.document["graphs"]["compiled"] == answer.document["graphs"]["total"] == 2
    return root


ONE = """
from blocks import tiny
from neffcache.inference import World, workload

@workload
def one(world: World, *, width: int = 16):
    module, inputs = tiny(world, layers=1, width=width)
    return module, {"prefill": inputs["prefill"]}
"""


def test_a_callable_is_warmed_and_two_ranks_from_an_empty_cache_compile_nothing(tmp_path: Path) -> None:
    (tmp_path / "ones.py").write_text(ONE)
    path = os.pathsep.join([str(tmp_path), str(EXAMPLES), str(ROOT)])
    words = ("ones:one", "--target", "cpu", "--world-size", "2", "--set", "width=32")
    warm = there("warm", *words, store=tmp_path / "store", PYTHONPATH=path)
    assert warm.code == 0, warm.stderr
    assert warm.document["complete"]
    assert warm.document["graphs"]["compiled"] == warm.document["graphs"]["total"] == 1
    answer = there("run", *words, store=tmp_path / "store", PYTHONPATH=path)
    assert answer.code == 0, answer.stderr
    assert answer.document["identity"] == "proved"
    assert counts(answer.document) == [(1, 1, 0, 0)] * 2
    assert set(answer.document["calls"]) == {"prefill"}


# --- what takes longer --------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_prefill_and_decode_are_two_graphs_and_their_first_calls_compile_nothing(store: Path) -> None:
    answer = there(*RUN, store=store)
    assert answer.code == 0, answer.stderr
    found = answer.document
    assert found["identity"] == "proved"
    assert counts(found) == [(2, 2, 0, 0)] * 2
    assert found["step_one"]["hits"] == 4
    assert found["steps"] == 3
    assert set(found["calls"]) == {"prefill", "decode"}


@pytest.mark.soak
def test_a_second_warm_has_nothing_to_do_and_other_arguments_are_another_job(store: Path) -> None:
    # The run of the warmer and the module with the same arguments are one job.
    for words in (WARM, WARM_BY_MODULE):
        again = there(*words, store=store)
        assert again.document["graphs"] == {"total": 2, "hit": 2, "compiled": 0, "failed": 0, "skipped": 0}
    words = ("blocks:tiny", "--target", "cpu", "--world-size", "2", "--set", "width=32")
    same = there("check", *words, "--set", "layers=1", store=store)
    assert (same.code, same.document[0]["state"]) == (0, "HIT")
    cold = there("run", *words, store=store)
    assert cold.code == 3, cold.stderr
    told = there("explain", *words, store=store)
    assert told.code == 3
    assert "--set layers=1" in str(told.document)


@pytest.mark.soak
def test_a_program_of_one_s_own_is_proved_by_the_call_of_the_workload(store: Path) -> None:
    assert RUN_OWN[:4] == ["run", "blocks_tp2", "--", "torchrun"]
    command = [sys.executable, "-m", "torch.distributed.run", *RUN_OWN[4:-1], str(ROOT / RUN_OWN[-1])]
    good = there("run", "blocks_tp2", "--", *command, store=store)
    assert good.code == 0, good.stderr
    assert good.document["identity"] == "proved"
    assert good.document["steps"] == 4
    assert counts(good.document) == [(2, 2, 0, 0)] * 2
    other = there("run", "blocks_tp2", "--", *command, "--layers", "2", store=store)
    assert other.code == 5, other.stderr
    assert "config.arguments.layers is 2, the manifest has 1" in other.document["error"]["message"]
    # One that never calls the workload proves nothing.
    none = there(
        "run", "blocks_tp2", "--", *command[:-1], "--no-python", sys.executable, "-c", "import torch", store=store
    )
    assert none.code == 5, none.stderr
    assert "did not call the workload" in none.document["error"]["message"]


@pytest.mark.soak
def test_what_is_served_computes_what_the_module_computes(store: Path, tmp_path: Path) -> None:
    (tmp_path / "compare.py").write_text(
        "import torch\n"
        "from blocks import tiny\n"
        "from neffcache.inference import World, call\n"
        "module, inputs = tiny(World.here(), layers=1, width=32)\n"
        "with torch.no_grad():\n"
        "    for given in inputs.values():\n"
        "        served = call(module, given)\n"
        "        with torch.compiler.set_stance('force_eager'):\n"
        "            plain = call(module, given)\n"
        "        assert served.abs().sum() > 1 and served is not plain\n"
        "        torch.testing.assert_close(served, plain)\n"
        "torch.distributed.destroy_process_group()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(tmp_path / "compare.py")]
    answer = there("run", "blocks_tp2", "--", *command, store=store)
    assert answer.code == 0, answer.stderr
    assert counts(answer.document) == [(2, 2, 0, 0)] * 2


@pytest.mark.soak
def test_an_own_cache_of_a_compiler_that_does_not_hold_a_callable_is_refused_by_its_replay(tmp_path: Path) -> None:
    """Inductor's key of a module of DTensors is another one in each process (seen on torch 2.14.1)."""
    root = tmp_path / "store"
    warm = there("warm", "blocks_tp2", "--native", store=root)
    assert warm.code == 8, warm.stderr
    assert "a fresh process group compiled again what had just been kept" in warm.stderr + str(warm.document)
    assert there("run", "blocks_tp2", "--native", store=root).code == 3


@pytest.mark.soak
def test_qwen3_of_transformers_is_warmed_and_two_ranks_compile_nothing(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra `models` is not installed")
    root = tmp_path / "store"
    warm = there(*WARM_HF, store=root)
    assert warm.code == 0, warm.stderr
    answer = there(*RUN_HF, store=root)
    assert answer.code == 0, answer.stderr
    assert answer.document["identity"] == "proved"
    assert counts(answer.document) == [(2, 2, 0, 0)] * 2
    assert set(answer.document["calls"]) == {"prefill", "decode"}


# --- bad ones -----------------------------------------------------------------------------------------------------

BAD = """
import random
import torch
from torch import nn
from neffcache.inference import World, workload

def compiled(module):
    module.compile(backend="inductor", dynamic=False)
    return module

@workload
def nothing_compiled(world: World):
    return nn.Linear(4, 4), {"only": torch.zeros(2, 4)}

@workload
def dynamic(world: World):
    module = nn.Linear(4, 4)
    module.compile(backend="inductor", dynamic=True)
    return module, {"only": torch.zeros(2, 4)}

@workload
def marked(world: World):
    x = torch.zeros(8, 4)
    torch._dynamo.mark_dynamic(x, 0)
    return compiled(nn.Linear(4, 4)), {"only": x}

@workload
def growing(world: World):
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.seen = 1
        def forward(self, x):
            self.seen += 1
            return torch.ones(self.seen) + x.sum()
    return compiled(Growing()), {"only": torch.zeros(2, 4)}

@workload
def uneven(world: World):
    return compiled(nn.Sequential(*(nn.Linear(4, 4) for _ in range(1 + world.rank)))), {"only": torch.zeros(2, 4)}

@workload
def by_rank(world: World):
    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (2 + world.rank)
    return compiled(Scaled(4, 4)), {"only": torch.zeros(2, 4)}

@workload
def by_chance(world: World):
    return compiled(nn.Linear(4, random.SystemRandom().randrange(1, 1 << 20))), {"only": torch.zeros(2, 4)}

@workload
def breaking(world: World):
    raise ValueError("no weights here")

@workload
def reading(world: World):
    x = torch.zeros(2, 4)
    if x.sum().item() > 0:
        x = x + 1
    return compiled(nn.Linear(4, 4)), {"only": x}

@workload
def alone(world: World):
    world.mesh(tp=3)
"""


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from neffcache.flows.workers import Series

    place = tmp_path_factory.mktemp("bad")
    (place / "bad.py").write_text(BAD)
    path = os.pathsep.join([str(place), str(ROOT)])
    with Series("neffcache.flows.worker_trace", {**os.environ, "PYTHONPATH": path}, place) as worker:

        def traced(name: str, rank: int = 0) -> dict[str, Any]:
            question = {"kind": "callable", "arguments": [f"bad:{name}"], "rank": rank, "world_size": 2, "cpu": True}
            return worker.ask({**question, "into": str(place / f"{name}-{rank}")})

        yield traced


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("nothing_compiled", "Unsupported", "the workload bad:nothing_compiled compiles nothing"),
        ("dynamic", "Unsupported", "are not static"),
        ("marked", "Unsupported", "are not static"),
        ("growing", "Unsupported", "every one of 6 steps adds graphs: the shapes of the workload bad:growing"),
        ("breaking", "Unsupported", "bad:breaking cannot be traced: ValueError: no weights here"),
        ("reading", "Unsupported", "bad:reading cannot be traced"),
        ("alone", "Usage", "the mesh tp 3 does not multiply to the world size 2"),
    ],
)
def test_a_bad_workload_is_refused_in_one_sentence(series: Any, name: str, kind: str, words: str) -> None:
    from neffcache.errors import NeffcacheError

    with pytest.raises(NeffcacheError) as caught:
        series(name)
    assert type(caught.value).__name__ == kind
    assert words in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.soak
def test_ranks_that_build_other_modules_are_refused_and_ranks_with_other_graphs_are_not(series: Any) -> None:
    from neffcache.errors import Unsupported
    from neffcache.flows.tracing import _require_structure

    with pytest.raises(Unsupported) as caught:
        _require_structure({rank: series("uneven", rank) for rank in (0, 1)})
    assert "rank 1 builds another module than rank 0: module 1: Linear | " in caught.value.message
    traces: Sequence[dict[str, Any]] = [series("by_rank", rank) for rank in (0, 1)]
    _require_structure(dict(enumerate(traces)))
    assert traces[0]["graphs"][0]["text"] != traces[1]["graphs"][0]["text"]


@pytest.mark.soak
def test_a_workload_that_is_another_one_each_time_is_refused_by_its_replay(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(BAD)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    words = ("bad:by_chance", "--target", "cpu", "--world-size", "1")
    answer = there("warm", *words, store=tmp_path / "store", PYTHONPATH=path)
    assert answer.code == 8, answer.stderr
    assert "a fresh process did not find what was just compiled" in answer.stderr
    assert "it must depend on its arguments alone" in answer.stderr
    lint = there("warm", *words, "--lint", store=tmp_path / "store", PYTHONPATH=path)
    assert lint.code == 8
    assert "--lint is for configurations of TorchTitan" in lint.stderr


@pytest.mark.soak
def test_ranks_with_graphs_of_their_own_are_classes_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(BAD)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    words = ("bad:by_rank", "--target", "cpu", "--world-size", "2")
    warm = there("warm", *words, store=tmp_path / "store", PYTHONPATH=path)
    assert warm.code == 0, warm.stderr
    assert warm.document["graphs"]["total"] == 2
    answer = there("run", *words, store=tmp_path / "store", PYTHONPATH=path)
    assert answer.code == 0, answer.stderr
    assert [rank["class"] for rank in answer.document["ranks"]] == [0, 1]
    assert counts(answer.document) == [(1, 1, 0, 0)] * 2
