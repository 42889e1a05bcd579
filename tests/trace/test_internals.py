"""Private functions are probed: a torch or a TorchTitan in which one has moved is refused by its name."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest

from neffcache.errors import Unsupported

torch = pytest.importorskip("torch")
pytest.importorskip("torchtitan")

MODULES = [
    "neffcache.trace.torch_internals",
    "neffcache.trace.torch_fakes",
    "neffcache.trace.titan",
    "neffcache.compile.host.torch_internals",
    "neffcache.graph.torch_internals",
]


@pytest.fixture(params=MODULES)
def internals(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


def test_everything_that_is_touched_is_there(internals: Any) -> None:
    internals.probe()


def test_what_has_moved_is_named(internals: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = internals.TOUCHED[0][0]
    monkeypatch.setattr(internals, "TOUCHED", (*internals.TOUCHED, (module, "moved_away")))
    with pytest.raises(Unsupported) as caught:
        internals.probe()
    assert f"{module}.moved_away" in caught.value.message
    assert caught.value.exit_code == 8


def test_every_touched_name_is_listed_once(internals: Any) -> None:
    assert len(set(internals.TOUCHED)) == len(internals.TOUCHED)


def test_replacing_inductor_reaches_torch_compile_and_is_undone() -> None:
    from neffcache.trace import torch_internals

    seen: list[str] = []

    def backend(gm: Any, inputs: Any, options: Any) -> Any:
        seen.append("here")
        return gm.forward

    undo = torch_internals.replace_inductor(backend)
    try:
        assert torch.compile(lambda x: x + 1, backend="inductor")(torch.ones(2)).tolist() == [2.0, 2.0]
    finally:
        undo()
    assert seen == ["here"]


def test_options_of_one_compile_count_in_all_its_graphs() -> None:
    from neffcache.graph.settings import current_settings
    from neffcache.trace import torch_internals

    seen: list[Any] = []

    def compiler(kind: str, gm: Any, inputs: Any, settings: Any) -> Any:
        seen.append((kind, settings()["inductor"]["fallback_random"]))
        return lambda given: gm(*given)

    undo = torch_internals.replace_inductor(torch_internals.aot_backend(compiler, current_settings))
    try:
        x = torch.ones(2, requires_grad=True)
        torch.compile(lambda x: (x * 2).sin())(x).sum().backward()
        torch.compile(lambda x: (x * 3).sin(), options={"fallback_random": True})(x).sum().backward()
    finally:
        undo()
    assert seen == [("forward", False), ("backward", False), ("forward", True), ("backward", True)]


def test_a_graph_that_has_no_text_can_be_compiled_in_place() -> None:
    from neffcache.graph.settings import current_settings
    from neffcache.trace import torch_internals

    def compiler(kind: str, gm: Any, inputs: Any, settings: Any) -> Any:
        return torch_internals.compile_in_place(gm)

    undo = torch_internals.replace_inductor(torch_internals.aot_backend(compiler, current_settings))
    try:
        x = torch.randn(8, 4)
        torch._dynamo.mark_dynamic(x, 0)
        function = torch.compile(lambda x: torch.softmax(x, -1) * 2, fullgraph=True)
        with torch.no_grad():
            assert torch.allclose(function(x), torch.softmax(x, -1) * 2)
            assert torch.allclose(function(x[:5].clone()), torch.softmax(x[:5], -1) * 2)
    finally:
        undo()


def test_function_names_are_looked_up_only_for_a_log_that_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    convert = importlib.import_module("torch._dynamo.symbolic_convert")
    log = importlib.import_module("torch._dynamo.output_graph").trace_call_log
    monkeypatch.setattr(convert, "get_funcname", convert.get_funcname)
    here = test_function_names_are_looked_up_only_for_a_log_that_is_on.__code__
    importlib.import_module("neffcache.trace.torch_internals").no_unread_log_lines()
    assert convert.get_funcname(here.co_filename, here.co_firstlineno + 1) is None
    monkeypatch.setattr(log, "isEnabledFor", lambda level: True)
    assert convert.get_funcname(here.co_filename, here.co_firstlineno + 1).endswith(here.co_name)


def test_graphs_are_printed_only_for_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    internals = importlib.import_module("neffcache.trace.torch_internals")
    stages = importlib.import_module("torch._functorch._aot_autograd.graph_compile")
    for name in ("_log_joint_graph", "_log_fw_bw_graphs"):
        monkeypatch.setattr(stages, name, getattr(stages, name))
    convert = importlib.import_module("torch._dynamo.symbolic_convert")
    monkeypatch.setattr(convert, "get_funcname", convert.get_funcname)
    internals.no_unread_log_lines()
    printed: list[str] = []
    printing = torch.fx.GraphModule.print_readable

    def noted(gm: Any, *args: Any, **options: Any) -> Any:
        printed.append(type(gm).__name__)
        return printing(gm, *args, **options)

    monkeypatch.setattr(torch.fx.GraphModule, "print_readable", noted)
    monkeypatch.setattr(importlib.import_module("torch._logging._internal").trace_log, "handlers", [])  # pytest's
    backend = internals.aot_backend(lambda kind, gm, inputs, settings: lambda given: gm(*given), dict)

    def compiled() -> int:
        torch._dynamo.reset()
        printed.clear()
        torch.compile(lambda x: (x * x).sum(), backend=backend)(torch.ones(3, requires_grad=True)).backward()
        return len(printed)

    assert compiled() == 0
    for log in (stages.aot_joint_log, stages.aot_graphs_log):
        monkeypatch.setattr(log, "isEnabledFor", lambda level: True)
    assert compiled() >= 3


def test_an_import_error_made_of_another_names_the_package_that_is_absent() -> None:
    from neffcache.trace import titan

    with pytest.raises(ImportError) as inner:
        importlib.import_module("no_such_library")
    outer = ImportError("HybridEP requires a library, install it from somewhere")
    outer.__cause__ = inner.value
    assert titan.absent_package(outer) == "no_such_library"
    assert titan.absent_package(ImportError("vllm is not installed")) == "vllm"
    assert titan.absent_package(ImportError("cannot import name x")) == ""


def test_constants_of_the_graph_trainer_stay_where_they_are() -> None:
    from neffcache.trace import titan

    real = importlib.import_module(titan.GRAPH_PASSES)
    assert callable(getattr(real, titan.MOVES_CONSTANTS)), "it has moved: a whole step would ask for CUDA"
    copied = ModuleType(titan.GRAPH_PASSES)
    titan.leave_constants(copied)
    assert getattr(copied, titan.MOVES_CONSTANTS)(torch.nn.Identity()) is None
