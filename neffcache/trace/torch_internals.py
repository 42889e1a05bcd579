"""Every private PyTorch function that tracing and the training process touch, checked on torch 2.14.

What is touched, and why a public way does not serve:

- `torch._inductor.compile_fx.compile_fx`: `torch.compile(backend="inductor")` does not go through the backend registry.
- `torch._dynamo.backends.common.aot_autograd`, `min_cut_rematerialization_partition`: what Inductor itself uses to
  turn a Dynamo graph into flat forward, backward and inference graphs.
- `torch.distributed._functional_collectives._are_we_tracing`, `_maybe_wrap_tensor`: inside an ambient FakeTensorMode
  they take every eager collective for a traced one and wait at once; a real run hands the first compiled block an
  AsyncCollectiveTensor, so its graph differs.
- `torch._inductor.config` and `torch._functorch.config`: settings that change generated code.
- `torch._dynamo.symbolic_convert.get_funcname`: tokenizes each source file that Dynamo meets, for a line of a log that
  is nearly always off; `torch._functorch._aot_autograd.graph_compile._log_joint_graph`, `_log_fw_bw_graphs` print
  every graph for one.
- `torch.nn.attention.flex_attention._validate_device`: refuses gradients on a CPU; a trace runs nothing, and stands for
  a device that has them. (A CPU that is to run such a graph still refuses it when it compiles.)
- `torch.fx.GraphModule.__deepcopy__`: fails for a real constant tensor under an ambient FakeTensorMode.
- `torch.distributed.pipelining`: a fake process group carries nothing, so the shapes that stages tell each other before
  the first step are given by `stages_alone`, and sending and receiving activations does nothing.
- `torch.distributed.tensor._sharding_prop.ShardingPropagator.propagate_op_sharding_non_cached`: takes time that grows
  with the square of an optimizer's parameters; `equal_elements_propagated_once` asks it about the different ones.
- `torch.distributed.device_mesh.DeviceMesh.__init__`: it reads the values of its own rank map, which an ambient
  FakeTensorMode would not have.

`probe()` fails loudly, by name, when one of them has moved.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from neffcache.errors import Unsupported
from neffcache.probing import require

CHECKED_ON = "2.14"
TOUCHED = (
    ("torch._inductor.compile_fx", "compile_fx"),
    ("torch._inductor", "standalone_compile"),
    ("torch._dynamo.backends.common", "aot_autograd"),
    ("torch._functorch.partitioners", "min_cut_rematerialization_partition"),
    ("torch.distributed._functional_collectives", "_are_we_tracing"),
    ("torch.distributed._functional_collectives", "_maybe_wrap_tensor"),
    ("torch.distributed._functional_collectives", "AsyncCollectiveTensor"),
    ("torch._guards", "TracingContext"),
    ("torch._guards", "CompileContext"),
    ("torch._subclasses.fake_tensor", "FakeTensorMode"),
    ("torch._subclasses.fake_tensor", "unset_fake_temporarily"),
    ("torch.distributed.device_mesh", "DeviceMesh.__init__"),
    ("torch.distributed.tensor._sharding_prop", "ShardingPropagator.propagate_op_sharding_non_cached"),
    ("torch.distributed.tensor._op_schema", "OpSchema"),
    ("torch.distributed.tensor._op_schema", "OutputSharding"),
    ("torch.fx", "GraphModule.__deepcopy__"),
    ("torch.fx.experimental.symbolic_shapes", "ShapeEnv"),
    ("torch._dynamo.symbolic_convert", "get_funcname"),
    ("torch._dynamo.output_graph", "trace_call_log"),
    ("torch._functorch._aot_autograd.graph_compile", "_log_joint_graph"),
    ("torch._functorch._aot_autograd.graph_compile", "_log_fw_bw_graphs"),
    ("torch._functorch._aot_autograd.graph_compile", "aot_joint_log"),
    ("torch._functorch._aot_autograd.graph_compile", "aot_graphs_log"),
    ("torch._logging._internal", "trace_log"),
    ("torch._dynamo.config", "automatic_dynamic_shapes"),
    ("torch._dynamo.config", "assume_static_by_default"),
    ("torch._dynamo.config", "fail_on_recompile_limit_hit"),
    ("torch._inductor.config", "get_config_copy"),
    ("torch._functorch.config", "get_config_copy"),
    ("torch.nn.attention.flex_attention", "_validate_device"),
    ("torch.distributed.pipelining.schedules", "_batch_p2p"),
    ("torch.distributed.pipelining.schedules", "_sorted_batch_p2p"),
    ("torch.distributed.pipelining.schedules", "_PipelineSchedule._warmup_p2p"),
    ("torch.distributed.pipelining.stage", "PipelineStage._send_meta"),
    ("torch.distributed.pipelining.stage", "PipelineStage._recv_meta"),
    ("torch.distributed.pipelining.stage", "PipelineStage._forward_metadata_inference"),
    ("torch.distributed.pipelining.stage", "PipelineStage._backward_metadata_inference"),
    ("torch.distributed.pipelining._utils", "_TensorMeta"),
    ("torch.distributed.pipelining._utils", "_DTensorMeta"),
    ("torch.distributed.pipelining._utils", "_StageForwardMeta"),
    ("torch.distributed.pipelining._utils", "_StageBackwardMeta"),
    ("torch.distributed.pipelining._utils", "_derive_grad_metas"),
    ("torch.distributed.pipelining._utils", "InferenceMode.needs_dynamic"),
)

Settings = Callable[[], dict[str, Any]]
Compiler = Callable[[str, torch.fx.GraphModule, Sequence[Any], Settings], Callable[..., Any]]
"""(kind, flat graph, fake inputs, settings) -> a boxed callable. kind: forward, backward or inference.

`settings()` reads the settings of this compile; it may raise Uncacheable.
"""


def probe() -> None:
    """Raise Unsupported naming the first private function that this torch does not have."""
    require(TOUCHED, library="torch", version=torch.__version__, checked=CHECKED_ON)


def aot_backend(compiler: Compiler, settings: Settings) -> Callable[..., Any]:
    """A Dynamo backend (graph, inputs, options=...) that hands every flat AOTAutograd graph to `compiler`.

    `options` are those of the `torch.compile` call; they count in the settings of all its graphs, the backward graph
    too, which AOTAutograd lowers later.
    """
    from torch._inductor import config

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None) -> Any:
        patches = {name.replace("-", "_"): value for name, value in (options or {}).items()}

        def with_options() -> dict[str, Any]:
            with config.patch(patches):
                return settings()

        return _aot_autograd(compiler, with_options)(gm, inputs)

    return backend


def _aot_autograd(compiler: Compiler, settings: Settings) -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def of_kind(kind: str) -> Callable[..., Any]:
        def compile_graph(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            run = compiler(kind, gm, inputs, settings)
            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        return compile_graph

    return aot_autograd(
        fw_compiler=of_kind("forward"),
        bw_compiler=of_kind("backward"),
        inference_compiler=of_kind("inference"),
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )


_bypass = threading.local()


@contextlib.contextmanager
def stock_inductor() -> Iterator[None]:
    """Within it, `torch.compile(backend="inductor")` and Inductor's own entry points reach the real Inductor."""
    before = getattr(_bypass, "depth", 0)
    _bypass.depth = before + 1
    try:
        yield
    finally:
        _bypass.depth = before


def replace_inductor(backend: Callable[..., Any]) -> Callable[[], None]:
    """Let `torch.compile(backend="inductor")` call `backend`; returns the function that undoes it."""
    inductor: Any = importlib.import_module("torch._inductor.compile_fx")
    original = inductor.compile_fx

    def compile_fx(model: torch.fx.GraphModule, inputs: Sequence[Any], *args: Any, **given: Any) -> Any:
        if getattr(_bypass, "depth", 0):
            return original(model, inputs, *args, **given)
        return backend(model, inputs, options=given.get("config_patches"))

    inductor.compile_fx = compile_fx

    def undo() -> None:
        inductor.compile_fx = original

    return undo


def compile_in_place(gm: torch.fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Let stock Inductor compile a flat graph in this process, inside the compile that is in flight; keeps nothing.

    What `torch.fx.passes.regional_inductor` does for a region. Raises what Inductor raises.
    """
    inductor: Any = importlib.import_module("torch._inductor")
    inputs = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    with stock_inductor():
        compiled = inductor.standalone_compile(gm, inputs, dynamic_shapes="from_tracing_context", aot=False)

    def run(given: list[Any]) -> Any:
        values = list(given)
        given.clear()
        return compiled(*values)

    return run


def static_shapes() -> None:
    """Let Dynamo never turn a size or a stride that changed into a symbol: every shape is a graph of its own.

    By default it does after the first change, and a stride of a dimension of size 1 is enough (llama3_8b's layers).
    Compilers for Trainium take static shapes only, so both the trace and the training process switch it off.
    """
    from torch._dynamo import config

    config.automatic_dynamic_shapes = False
    config.assume_static_by_default = True


def no_unread_log_lines() -> None:
    """Spare Dynamo the search for function names that only a debug log would show (5 % of a warm first step)."""
    convert: Any = importlib.import_module("torch._dynamo.symbolic_convert")
    log = importlib.import_module("torch._dynamo.output_graph").trace_call_log
    find = convert.get_funcname

    def get_funcname(filename: str, lineno: int) -> str | None:
        name: str | None = find(filename, lineno) if log.isEnabledFor(logging.DEBUG) else None
        return name

    convert.get_funcname = get_funcname
    _graphs_unprinted()


def _graphs_unprinted() -> None:
    """AOTAutograd prints every graph; here only where a log, or the cache that keeps what is printed, is there."""
    stages: Any = importlib.import_module("torch._functorch._aot_autograd.graph_compile")
    traced = importlib.import_module("torch._logging._internal").trace_log

    def when_read(prints: Callable[..., Any], log: Any, unprinted: Any) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            # The last argument is AOTAutograd's configuration; called in another way it prints, as it always did.
            known = not options and hasattr(args[-1], "cache_info") and args[-1].cache_info is None
            unread = known and not traced.handlers and not log.isEnabledFor(logging.INFO)
            return unprinted if unread else prints(*args, **options)

        return call

    stages._log_joint_graph = when_read(stages._log_joint_graph, stages.aot_joint_log, None)
    stages._log_fw_bw_graphs = when_read(stages._log_fw_bw_graphs, stages.aot_graphs_log, (None, None))


def compile_name(gm: torch.fx.GraphModule, kind: str) -> str:
    """A name for people: the innermost compiled module's class and Dynamo's compile id. Not part of any key."""
    from torch._guards import CompileContext

    current = CompileContext.current_compile_id()
    owner = ""
    for node in gm.graph.nodes:
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
        if stack:
            owner = str(next(iter(stack.values()))[1])
            break
    owner = owner.rsplit(".", 1)[-1].strip("'<>") or "graph"
    return f"{owner}.{kind}" + (f"[{current}]" if current is not None else "")


def fake_mode() -> Any:
    """A FakeTensorMode with static shapes: what one process needs to stand for any world size."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)


@contextlib.contextmanager
def eager_collectives_stay_asynchronous() -> Iterator[None]:
    """Under an ambient FakeTensorMode, let functional collectives outside compilation behave as in a real run."""
    funcol: Any = importlib.import_module("torch.distributed._functional_collectives")

    class Wrap(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            wrapped: torch.Tensor = funcol.AsyncCollectiveTensor(value)
            return wrapped

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    tracing, wrap = funcol._are_we_tracing, funcol._maybe_wrap_tensor

    def eager() -> bool:
        return not torch.compiler.is_dynamo_compiling() and torch._guards.TracingContext.try_get() is None

    funcol._are_we_tracing = lambda: False if eager() else tracing()
    funcol._maybe_wrap_tensor = lambda value: Wrap.apply(value) if eager() else wrap(value)
    try:
        yield
    finally:
        funcol._are_we_tracing, funcol._maybe_wrap_tensor = tracing, wrap


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Another value of an attribute, for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def meshes_stay_real() -> Iterator[None]:
    """Under an ambient FakeTensorMode, let a DeviceMesh know its ranks: they are values, not shapes."""
    from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
    from torch.distributed.device_mesh import DeviceMesh

    build: Any = DeviceMesh.__init__

    def __init__(self: Any, *args: Any, **given: Any) -> None:
        with unset_fake_temporarily():
            ranks = given.get("_rank_map")
            if isinstance(ranks, FakeTensor):
                # Only `init_device_mesh` makes one under our mode, and it is 0, 1, 2, ...; a submesh takes its root's.
                given["_rank_map"] = torch.arange(ranks.numel(), dtype=ranks.dtype)
            build(self, *args, **given)

    with _replaced(DeviceMesh, "__init__", __init__):
        yield


@contextlib.contextmanager
def spans_unmarked() -> Iterator[None]:
    """Let `record_function` mark nothing: no profiler reads a trace, and each mark is two operators on fake tensors."""
    marks = torch.autograd.profiler.record_function
    with _replaced(marks, "__enter__", lambda self: self), _replaced(marks, "__exit__", lambda *_: None):
        yield


LISTED = ("aten::_foreach_", "aten::_fused_adam")
"""Operators that do the same to every element of their lists, each by itself."""


@contextlib.contextmanager
def equal_elements_propagated_once() -> Iterator[None]:
    """Let DTensor find the sharding of a list operator from the elements that differ.

    The layers of a model have equal parameters, and an optimizer or a norm takes all of them in one list; the answer
    for an element depends on that element alone.
    """
    from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    propagate: Any = ShardingPropagator.propagate_op_sharding_non_cached

    def propagate_op_sharding_non_cached(self: Any, schema: Any) -> Any:
        if (found := _different_elements(schema)) is None:
            return propagate(self, schema)
        first, which = found

        def only(value: Any) -> Any:
            return type(value)(value[index] for index in first) if _is_listed(value) else value

        def every(value: Any) -> Any:
            return type(value)(value[index] for index in which) if _is_listed(value) else value

        asked = OpSchema(schema.op, tuple(map(only, schema.args_schema)), schema.kwargs_schema, schema.schema_info)
        answer = propagate(self, asked)
        wanted = answer.redistribute_schema
        if wanted is not None:
            wanted = OpSchema(wanted.op, tuple(map(every, wanted.args_schema)), wanted.kwargs_schema)
        return OutputSharding(
            every(answer.output_spec), wanted, answer.needs_redistribute, answer.use_val_from_redistribute_schema
        )

    with _replaced(ShardingPropagator, "propagate_op_sharding_non_cached", propagate_op_sharding_non_cached):
        yield


def _is_listed(value: Any) -> bool:
    """Whether an argument of an operator is a list of DTensors."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], DTensorSpec)


def _different_elements(schema: Any) -> tuple[list[int], list[int]] | None:
    """Of a list operator: the elements that differ, and for every element the place of its like among them.

    None when it is none, when all of its elements differ, or when a list in it is not of DTensors.
    """
    if not schema.op.name().startswith(LISTED):
        return None
    lists = [value for value in schema.args_schema if isinstance(value, (list, tuple)) and value]
    if not lists or not all(map(_is_listed, lists)) or len(set(map(len, lists))) != 1:
        return None
    places: dict[Any, int] = {}
    first: list[int] = []
    which: list[int] = []
    for index, element in enumerate(zip(*lists, strict=True)):
        place = places.setdefault(element, len(places))
        if place == len(first):
            first.append(index)
        which.append(place)
    return (first, which) if len(first) < len(which) else None


@contextlib.contextmanager
def attention_for_any_device() -> Iterator[None]:
    """Let FlexAttention be traced with gradients on a CPU, which could not run it."""
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    with _replaced(flex, "_validate_device", lambda query, key, value: None):
        yield


@contextlib.contextmanager
def graphs_copied_with_their_constants() -> Iterator[None]:
    """Under an ambient FakeTensorMode, copy the constant tensors of a graph as what they are.

    AOTAutograd copies a backward graph before it compiles it, which is when the first backward pass runs.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    copy: Any = torch.fx.GraphModule.__deepcopy__

    def deepcopy(self: Any, memo: Any) -> Any:
        with unset_fake_temporarily():
            return copy(self, memo)

    with _replaced(torch.fx.GraphModule, "__deepcopy__", deepcopy):
        yield


Edge = list[dict[str, Any]]
"""Tensors that cross from one pipeline stage to the next: {"shape", "stride", "dtype", "requires_grad"} each."""


class Edges:
    """What crosses the edges of this rank's pipeline stages, as it is told before the first step.

    A stage's input is what the stage before sends; in one process that is not known, so it is taken from `given`, else
    from an earlier stage of this rank: between two blocks of a decoder every edge is alike. `sent` and `received` are
    for whoever compares the edges of all ranks: {"forward 0>1": [...], "backward 1>0": [...]}.
    """

    def __init__(self, given: Edge | None) -> None:
        self._given = given
        self.sent: dict[str, Edge] = {}
        self.received: dict[str, Edge] = {}

    def forward(self) -> Edge:
        edge = self._given
        for name, sent in self.sent.items():
            if name.startswith("forward"):
                edge = sent
        if edge is None:
            raise Unsupported("what the first pipeline stage of this rank receives is not known")
        return edge


def _edge(metas: Any) -> Edge:
    utils: Any = importlib.import_module("torch.distributed.pipelining._utils")
    found: Edge = []
    for meta in metas:
        if isinstance(meta, utils._DTensorMeta):
            raise Unsupported("DTensors cross the edges of these pipeline stages, which one process cannot stand for")
        if meta is None:
            found.append({})
            continue
        dtype = str(meta.dtype).removeprefix("torch.")
        found.append(
            {
                "shape": list(meta.shape),
                "stride": list(meta.stride),
                "dtype": dtype,
                "requires_grad": bool(meta.requires_grad),
            }
        )
    return found


def _metas(edge: Edge) -> tuple[Any, ...]:
    utils: Any = importlib.import_module("torch.distributed.pipelining._utils")
    return tuple(
        utils._TensorMeta(
            shape=torch.Size(item["shape"]),
            stride=tuple(item["stride"]),
            dtype=getattr(torch, item["dtype"]),
            requires_grad=item["requires_grad"],
        )
        for item in edge
    )


@contextlib.contextmanager
def stages_alone(edges: Edges) -> Iterator[None]:
    """Pipeline stages of one rank run without their neighbours: nothing is sent, and `edges` says what is received.

    A gradient that comes back has the form of the activation that went out (PyTorch's own rule for plain tensors).
    """
    schedules: Any = importlib.import_module("torch.distributed.pipelining.schedules")
    stages: Any = importlib.import_module("torch.distributed.pipelining.stage")
    utils: Any = importlib.import_module("torch.distributed.pipelining._utils")
    cls = stages.PipelineStage
    direction = ["forward"]

    def warm(self: Any, local: Any, has_backward: bool, p2p_done: bool) -> None:
        for stage in local:
            dynamic = utils.InferenceMode.needs_dynamic(stage._user_meta, has_backward)
            stage._inference_mode = utils.InferenceMode.DYNAMIC if dynamic else utils.InferenceMode.STATIC
            if stage.device.type == "cpu":
                # A real CPU tensor forgets the index of its device, a fake one keeps it and fails its guards.
                stage.device = torch.device("cpu")

    def send(self: Any, meta: Any, dst_stage: int) -> None:
        metas = meta.forward_metas if direction[0] == "forward" else meta.backward_metas
        edges.sent[f"{direction[0]} {self.stage_index}>{dst_stage}"] = _edge(metas)

    def receive(self: Any, src_stage: int) -> Any:
        if direction[0] == "forward":
            edge = edges.forward()
            answer = utils._StageForwardMeta(forward_metas=_metas(edge))
        else:
            metas = utils._derive_grad_metas(self._stage_meta.outputs)
            edge = _edge(metas)
            answer = utils._StageBackwardMeta(backward_metas=metas)
        edges.received[f"{direction[0]} {src_stage}>{self.stage_index}"] = edge
        return answer

    def facing(name: str, inference: Any) -> Any:
        def inferred(self: Any, *args: Any, **given: Any) -> Any:
            direction[0] = name
            return inference(self, *args, **given)

        return inferred

    replaced: tuple[tuple[Any, str, Any], ...] = (
        (schedules, "_batch_p2p", lambda ops, desc=None: []),
        (schedules, "_sorted_batch_p2p", lambda ops, desc=None: {}),
        (schedules._PipelineSchedule, "_warmup_p2p", warm),
        (cls, "_send_meta", send),
        (cls, "_recv_meta", receive),
        (cls, "_forward_metadata_inference", facing("forward", cls._forward_metadata_inference)),
        (cls, "_backward_metadata_inference", facing("backward", cls._backward_metadata_inference)),
    )
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def compiling() -> bool:
    """Whether Dynamo or AOTAutograd is at work: ops seen now belong to a graph, not to the eager program."""
    return torch.compiler.is_dynamo_compiling() or torch._guards.TracingContext.try_get() is not None
