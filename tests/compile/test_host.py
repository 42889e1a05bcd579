"""The host toolchain on a small module: a graph travels as bytes, compiles in one process and loads in another."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from neffcache.errors import Mismatch, StoreFault, Unsupported

torch = pytest.importorskip("torch")

KEY = "0" * 32

CAPTURE = """
import json, sys
from pathlib import Path
import torch
from neffcache.compile.host import identity
from neffcache.graph.payload import pack
from neffcache.graph.settings import current_settings
from neffcache.graph.text import canonical_text
from neffcache.trace import torch_internals

place = Path(sys.argv[1])

import kernel_of_ours

def function(x, w, scale):
    return torch.softmax(torch.ops.ours.halved(x) @ w, -1) * scale + torch.tensor([0.5, 1.5] * 4), x, 3

def compiler(kind, gm, inputs, settings):
    text = canonical_text(gm)
    (place / "payload").write_bytes(pack(gm, text))
    (place / "settings.json").write_text(json.dumps(settings()))
    (place / "toolchain.json").write_text(json.dumps(dict(identity.identity({"OMP_NUM_THREADS": "1"}, 4).value)))
    (place / "text").write_text(text.text)
    return lambda given: gm(*given)

torch_internals.replace_inductor(torch_internals.aot_backend(compiler, current_settings))
with torch.no_grad():
    torch.compile(function, fullgraph=True)(torch.ones(4, 8), torch.ones(8, 8), torch.full((4, 8), 2.0))
"""

LOAD = """
import json, sys
from pathlib import Path
import torch
from neffcache.compile.host.load import load_graph
from neffcache.graph.text import canonical_text
from neffcache.runtime.processes import watch
from neffcache.trace import torch_internals
from neffcache.graph.settings import current_settings

place, key = Path(sys.argv[1]), sys.argv[2]
compiles = []
watch(lambda words, is_compile: compiles.append(words) if is_compile else None)

import kernel_of_ours

def function(x, w, scale):
    return torch.softmax(torch.ops.ours.halved(x) @ w, -1) * scale + torch.tensor([0.5, 1.5] * 4), x, 3

def compiler(kind, gm, inputs, settings):
    return load_graph(place / "host", key, canonical_text(gm))[0]

torch_internals.replace_inductor(torch_internals.aot_backend(compiler, current_settings))
torch.manual_seed(0)
x, w, scale = torch.randn(4, 8), torch.randn(8, 8), torch.randn(4, 8)
with torch.no_grad():
    got = torch.compile(function, fullgraph=True)(x, w, scale)
    want = function(x, w, scale)
same = torch.allclose(got[0], want[0], atol=1e-6)
print(json.dumps([same, torch.equal(got[1], x), got[2], len(compiles)]))
"""


KERNEL = """
import torch
from torch import library

@library.custom_op("ours::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2

@halved.register_fake
def _(x):
    return torch.empty_like(x)
"""
"""A module with an operator of its own: a compile worker must import it before it can read the graph."""


def python(program: str, *arguments: str, environ: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the payload, its settings and text, and what the worker made of it below host/."""
    place = tmp_path_factory.mktemp("graph")
    (place / "kernel_of_ours.py").write_text(KERNEL)
    python(CAPTURE, str(place), environ=with_kernel(place))
    subprocess.run(
        [sys.executable, "-m", "neffcache.compile.host.worker", KEY, str(place)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **with_kernel(place)},
        check=True,
    )
    return place


def with_kernel(place: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(place), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])}


def test_a_fresh_process_loads_it_and_starts_no_compiler(compiled: Path, tmp_path: Path) -> None:
    said = python(
        LOAD, str(compiled), KEY, environ={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "empty"), **with_kernel(compiled)}
    )
    assert json.loads(said) == [True, True, 3, 0]


def test_no_file_of_an_artifact_holds_a_path(compiled: Path) -> None:
    meta = json.loads((compiled / "host" / "graphs" / KEY / "meta.json").read_text())
    assert meta["kernels"]
    names = {path.stem for path in (compiled / "host" / "graphs" / KEY / "kernels").iterdir()}
    assert names == set(meta["kernels"])
    for path in (compiled / "host").rglob("*"):
        if path.name in ("code", "meta.json"):
            assert str(compiled).encode() not in path.read_bytes()


def test_it_compiles_twice_to_the_same_names(compiled: Path, tmp_path: Path) -> None:
    for name in ("payload", "settings.json", "toolchain.json"):
        shutil.copy(compiled / name, tmp_path)
    subprocess.run(
        [sys.executable, "-m", "neffcache.compile.host.worker", KEY, str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **with_kernel(compiled)},
        check=True,
    )

    def kernels(place: Path) -> list[str]:
        found: list[str] = json.loads((place / "host" / "graphs" / KEY / "meta.json").read_text())["kernels"]
        return found

    assert kernels(tmp_path) == kernels(compiled)


def test_a_worker_that_is_another_toolchain_refuses(compiled: Path, tmp_path: Path) -> None:
    for name in ("payload", "settings.json", "toolchain.json"):
        shutil.copy(compiled / name, tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "neffcache.compile.host.worker", KEY, str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 5
    assert "threads: 1 -> 2" in done.stderr
    assert not (tmp_path / "host").exists()


def loaded(place: Path, text: Any) -> Callable[..., Any]:
    from neffcache.compile.host.load import load_graph

    return load_graph(place / "host", KEY, text)[0]


@pytest.fixture
def text() -> Any:
    from neffcache.graph.text import GraphText

    return GraphText(text="", sha256="0" * 64, nodes=0, inputs=3, groups=(), symbolic=False)


@pytest.fixture
def copy(compiled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(compiled, tmp_path / "copy"))


def test_a_missing_library_is_never_compiled_but_refused(copy: Path, text: Any) -> None:
    for library in (copy / "host" / "graphs" / KEY / "kernels").iterdir():
        library.unlink()
    with pytest.raises(StoreFault, match="lacks its library"):
        loaded(copy, text)


def test_an_artifact_of_another_graph_is_refused(copy: Path, text: Any) -> None:
    meta = copy / "host" / "graphs" / KEY / "meta.json"
    document = json.loads(meta.read_text())
    meta.chmod(0o644)
    meta.write_text(json.dumps({**document, "compile_key": "1" * 32}))
    with pytest.raises(StoreFault, match="another graph"):
        loaded(copy, text)


def test_one_alias_never_means_two_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    from neffcache.compile.host import load
    from neffcache.graph.payload import Binding
    from neffcache.graph.text import GraphText, GroupUse

    ranks = {"7": (0, 1), "8": (1, 2), "9": (0, 1)}
    registered: list[str] = []
    monkeypatch.setattr(load, "_bound", {})
    monkeypatch.setattr(load, "group_ranks", ranks.__getitem__)
    monkeypatch.setattr(
        load.torch_internals, "register_group", lambda name, group: registered.append(f"{name}={group}")
    )
    monkeypatch.setattr(load.torch_internals, "find_group", lambda name: name)
    binding = Binding((), (), {"alias": 0})
    here = GraphText("", "0" * 64, 0, 0, (GroupUse("7", "2:1", 0),), False)
    load.bind_groups(binding, here)
    load.bind_groups(binding, replace(here, groups=(GroupUse("9", "2:1", 0),)))
    assert registered == ["alias=7"], "another name of the same members is the same group"
    with pytest.raises(Mismatch, match=r"\[0, 1\] and \[1, 2\], share one compiled graph"):
        load.bind_groups(binding, replace(here, groups=(GroupUse("8", "2:1", 0),)))


def test_settings_reach_the_key_and_the_compiler() -> None:
    from torch._inductor import config

    from neffcache.graph.settings import current_settings, enforced
    from neffcache.key.canonical import digest

    plain = current_settings()
    with config.patch("epilogue_fusion", not config.epilogue_fusion):
        other = current_settings()
        with enforced(plain):
            assert digest(current_settings()) == digest(plain)
    assert digest(other) != digest(plain)
    with config.patch("_micro_pipeline_tp", True):
        assert digest(current_settings()) != digest(plain)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert digest(current_settings()) != digest(plain)
        with enforced(plain):
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(threads)
    with config.patch("compile_threads", 77):
        assert digest(current_settings()) == digest(plain)
    torch.use_deterministic_algorithms(True)
    try:
        deterministic = current_settings()
        assert digest(deterministic) != digest(plain)
        with enforced(plain):
            assert not torch.are_deterministic_algorithms_enabled()
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_identity_counts_what_changes_code(monkeypatch: pytest.MonkeyPatch) -> None:
    from neffcache.compile.host import identity

    here = identity.identity({}, 4)
    assert identity.identity({}, 4).id == here.id
    assert here.value["threads"] == 1
    assert identity.identity({"OMP_NUM_THREADS": "2"}, 4).id != here.id
    assert set(here.value["compiler"]["programs"]) >= {"cc1plus", "as"}
    with monkeypatch.context() as patch:
        patch.setattr(identity, "instruction_set", lambda: ["sse4_2"])
        assert identity.identity({}, 4).id != here.id
    with monkeypatch.context() as patch:
        patch.setattr(identity, "ARTIFACT", identity.ARTIFACT + 1)
        assert identity.identity({}, 4).id != here.id


def test_the_rank_s_identity_is_the_launcher_s_without_asking_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from neffcache.compile.host import identity

    threads = torch.get_num_threads()
    recorded = identity.identity({"OMP_NUM_THREADS": str(threads)}, 4)

    def nobody(*_: object, **__: object) -> None:
        raise AssertionError("a rank asked a compiler")

    monkeypatch.setattr(identity, "_answer", nobody)
    assert identity.identity_in_rank(recorded.value).id == recorded.id


def test_an_unknown_compiler_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from neffcache.compile.host import identity

    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    identity.compiler.cache_clear()
    try:
        with pytest.raises(Unsupported, match="does not answer"):
            identity.identity({}, 4)
    finally:
        identity.compiler.cache_clear()


def test_another_compiler_of_the_same_version_is_another_toolchain(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from neffcache.compile.host import identity

    here = identity.identity({}, 4)
    real = shutil.which("g++")
    for number, more in enumerate(["", "# patched\n"]):
        place = tmp_path / str(number)
        place.mkdir()
        (place / "g++").write_text(f'#!/bin/sh\nexec {real} "$@"\n{more}')
        (place / "g++").chmod(0o755)
    found = []
    for number in range(2):
        monkeypatch.setenv("PATH", f"{tmp_path / str(number)}:{os.environ['PATH']}")
        identity.compiler.cache_clear()
        try:
            found.append(identity.identity({}, 4))
        finally:
            identity.compiler.cache_clear()
    assert {item.versions["compiler"] for item in found} == {here.versions["compiler"]}
    assert len({here.id, *(item.id for item in found)}) == 3


def test_nothing_of_the_identity_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    from neffcache.compile.host import identity

    value = identity.identity({}, 4).value
    parts = [value["python"], value["libc"], value["compiler"]["version"], *value["torch"].values()]
    assert all(isinstance(part, str) and part for part in parts)
    assert value["instruction_set"]
    for module, name, empty in (
        (identity.platform, "libc_ver", ("", "")),
        (identity.sysconfig, "get_config_var", None),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda *_, empty=empty: empty)
            with pytest.raises(Unsupported, match="cannot be told"):
                identity.identity({}, 4)


@pytest.mark.parametrize("words", ["none", "0", "-1"])
def test_a_thread_count_that_is_none_is_refused(words: str) -> None:
    from neffcache.compile.host import identity

    with pytest.raises(Unsupported, match="OMP_NUM_THREADS"):
        identity.thread_count({"OMP_NUM_THREADS": words}, 4)
