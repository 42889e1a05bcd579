"""The whole way of the neuron toolchain with stubs: TorchTitan really trains, TorchNeuron and neuronx-cc are stubs.

It proves warm, collect, view, identity and gate of neffcache. It proves nothing about a NEFF or a device.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import neffcache

pytestmark = pytest.mark.integration

STUBS = Path(__file__).resolve().parent.parent / "stubs"
ROOT = STUBS.parent.parent
WARMER = """
family = "stub"
module = "llama3"

[[run]]
name = "stub_job"
config = "llama3_debugmodel"
target = "trn2"
world_size = {ranks}

[run.set]
"compile.components" = ["model"]
"training.seq_len" = 32
"training.local_batch_size" = 1
"training.mixed_precision_param" = "float32"
"training.disable_cuda_graphs" = true
"checkpoint.enable" = false
"validator.enable" = false
"debug.enable_structured_logging" = false
"override.imports" = [
    'neffcache.trace.harness.dataloader={"vocab": 2048}',
    "neffcache.trace.harness.tokenizer",
    "neffcache.trace.harness.flex_to_sdpa",
]
"""


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_warm_without_a_device_and_run_compiling_nothing(tmp_path: Path, ranks: int) -> None:
    (tmp_path / "warmers").mkdir()
    (tmp_path / "warmers" / "stub.toml").write_text(WARMER.replace("{ranks}", str(ranks)))
    log, store = tmp_path / "compiles", tmp_path / "store"
    stubbed = {
        "PYTHONPATH": os.pathsep.join([str(STUBS / "site"), str(ROOT)]),
        "PATH": os.pathsep.join([str(STUBS / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "XDG_CACHE_HOME": str(tmp_path),
        "NEFFCACHE_WARMERS": str(tmp_path / "warmers"),
        "STUB_COMPILE_LOG": str(log),
    }

    warm = neffcache(store, "warm", "stub_job", environ=stubbed)
    assert warm.code == 0, warm.stderr
    assert "not run on a device" in warm.stderr
    assert "single ranks compile and execute nothing" in warm.stderr
    assert warm.document["toolchain"] == "neuron"
    assert warm.document["complete"]
    # One forward and one backward graph, shared by all layers.
    assert warm.document["graphs"]["total"] == warm.document["graphs"]["compiled"] == 2
    assert warm.document["native"]["operators"]["graphs"] == 2
    compiles = len(log.read_text().splitlines())

    run = neffcache(store, "run", "stub_job", "--steps", "2", environ=stubbed)
    assert run.code == 0, run.stderr
    assert run.document["identity"] == "proved"
    assert [(rank["hits"], rank["compiles"]) for rank in run.document["ranks"]] == [(2, 0)] * ranks
    assert all(counted["total_compilations"] == 0 for counted in run.document["native"]["counters"].values())
    assert run.document["native"]["refuses"].startswith("before a compile begins")
    assert run.document["native"]["refused"] == []
    assert len(log.read_text().splitlines()) == compiles

    # A contradiction and a missing NEFF: neither is launched.
    contradiction = {"NEURON_RT_VIRTUAL_CORE_SIZE": "1", "NEURON_LOGICAL_NC_CONFIG": "2"}
    assert neffcache(store, "run", "stub_job", environ={**stubbed, **contradiction}).code == 2
    if ranks == 1:
        return  # the rest belongs to the soak test: it asks TorchTitan once more
    blob = next(iter((store / "views").glob("*/neff/*/*/*.neff")))
    digest = next(path for path in (store / "blobs" / "sha256").rglob("*") if path.is_file() and path.samefile(blob))
    digest.unlink()
    missing = neffcache(store, "run", "stub_job", environ=stubbed)
    assert missing.code == 3, missing.stderr
    assert len(log.read_text().splitlines()) == compiles
