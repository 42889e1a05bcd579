"""Compile one graph with Inductor for this CPU, and keep files that load anywhere without a compiler.

An artifact of the host toolchain is
    graphs/<compile key>/code               torch's own serialised form of the graph (`CompiledArtifact.save`)
    graphs/<compile key>/meta.json          how to call it, its groups and its libraries
    graphs/<compile key>/kernels/<name>.so  C++ libraries, named by their source (equal ones are one blob in a store)
Source: torch._inductor.standalone_compile (torch 2.14).
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from neffcache.compile.failures import failure, of_text, shortened
from neffcache.compile.host import constants, torch_internals
from neffcache.compile.host.identity import identity_in_rank
from neffcache.compile.toolchain import Compiled, CompileRequest, Product
from neffcache.errors import CompileFailed, Mismatch
from neffcache.graph.payload import Payload, unpack
from neffcache.graph.settings import enforced
from neffcache.key.compare import differences

STORE = "host"


def code_path(compile_key: str) -> str:
    return f"graphs/{compile_key}/code"


def meta_path(compile_key: str) -> str:
    return f"graphs/{compile_key}/meta.json"


def kernels_path(compile_key: str) -> str:
    return f"graphs/{compile_key}/kernels"


def compile_graph(request: CompileRequest, into: Path) -> Compiled:
    """Compile `request` and leave its files below `into`, which must be private to this compile.

    Raises Mismatch when this process is not the toolchain of the key (threads, settings, torch), CompileFailed with
    the compiler's first words.
    """
    started = time.perf_counter()
    different = differences(dict(request.toolchain), dict(identity_in_rank(request.toolchain).value))
    if different:
        raise Mismatch(
            f"the worker that should compile {request.compile_key} is another toolchain: {different[0]}",
            hint="this is what its environment makes of it; see `neffcache env`",
            details={"differences": [entry.to_json() for entry in different]},
        )
    try:
        payload = unpack(request.payload.read_bytes())
    except Exception as fault:
        raise CompileFailed(
            f"the graph of {request.compile_key} cannot be read in a compile worker: {type(fault).__name__}: {fault}",
            hint="an operator of its own must be importable without the program that defines it",
            details={"compile_key": request.compile_key, "class": "unreadable"},
        ) from fault
    meta = compile_payload(payload, request.settings, into, request.compile_key)
    products = [
        Product(STORE, code_path(request.compile_key), into / "code"),
        Product(STORE, meta_path(request.compile_key), into / "meta.json"),
        *(
            Product(STORE, f"{kernels_path(request.compile_key)}/{name}.so", into / f"{name}.so")
            for name in meta["kernels"]
        ),
    ]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Compiled(request.compile_key, products, round(time.perf_counter() - started, 3), peak)


def compile_payload(payload: Payload, settings: Any, into: Path, compile_key: str) -> dict[str, Any]:
    """Compile a lean graph; writes `code`, `meta.json` and the `.so` files below `into`; returns the meta document."""
    from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir
    from torch._inductor.utils import clear_caches

    torch_internals.probe()
    into.mkdir(parents=True, exist_ok=True)
    module, held = constants.lifted(payload.module)
    if inner := [name for name, _ in (*module.named_parameters(), *module.named_buffers())]:
        raise failure(
            "failed",
            f"{compile_key} has a constant tensor in a sub-graph ({inner[0]}), which no artifact can hold",
            compile_key=compile_key,
        )
    # Private to this process and not to this graph: the precompiled header in it costs as much as several kernels.
    private = into.parent / f"inductor-{os.getpid()}"
    with temporary_cache_dir(str(private)), groups_exist(payload.groups), enforced(settings):
        clear_caches()
        with torch_internals.kernels_recorded() as kernels:
            try:
                artifact = torch_internals.standalone_compile(module, example_inputs(module))
            except Exception as fault:
                said = shortened(str(fault))
                if (told := of_text(compile_key, compile_key, said, log=said)) is not None:
                    raise told from fault  # the machine's fault or want of memory, not the graph's
                first = said.strip().splitlines() or [type(fault).__name__]
                raise failure(
                    "failed",
                    f"Inductor could not compile {compile_key}: {first[0][:300]}",
                    compile_key=compile_key,
                    fault=type(fault).__name__,
                    log=said,
                ) from fault
        artifact.save(path=os.fspath(into / "code"), format="binary")
    for name, built in kernels.items():
        shutil.copyfile(built, into / f"{name}.so")
    meta = {
        "schema": 1,
        "compile_key": compile_key,
        "binding": payload.binding.to_json(),
        "kernels": sorted(kernels),
        "constants": [constants.to_json(tensor) for tensor in held],
    }
    (into / "meta.json").write_text(json.dumps(meta, sort_keys=True))
    return meta


def example_inputs(module: torch.fx.GraphModule) -> list[torch.Tensor]:
    """Fake inputs with the shapes, strides and types of the graph's placeholders."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with FakeTensorMode(shape_env=ShapeEnv()):
        return [
            torch.empty_strided(
                node.meta["val"].shape,
                node.meta["val"].stride(),
                dtype=node.meta["val"].dtype,
                device=node.meta["val"].device,
            )
            for node in module.graph.nodes
            if node.op == "placeholder"
        ]


class groups_exist:
    """Process groups under the payload's aliases, on torch's fake backend: sizes are asked for while compiling."""

    def __init__(self, groups: dict[str, tuple[int, ...]]) -> None:
        self._groups = groups

    def __enter__(self) -> None:
        if not self._groups:
            return
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore

        world = max(max(ranks) for ranks in self._groups.values()) + 1
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
        for name, ranks in self._groups.items():
            torch_internals.register_group(name, dist.new_group(list(ranks)))

    def __exit__(self, *_: object) -> None:
        if self._groups:
            import torch.distributed as dist

            for name in self._groups:
                torch_internals.unregister_group(name)
            dist.destroy_process_group()
