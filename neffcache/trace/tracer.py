"""Trace a job: one CPU process, one rank, its real world size, no values.

The process stands for one rank of the job: a fake process group of the job's size, parameters that are FakeTensors,
TorchTitan's own Trainer and train_step, or an inference workload's own module. Steps are run until one adds no graph.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from neffcache.errors import NeffcacheError, Unsupported
from neffcache.graph.settings import current_settings
from neffcache.trace import titan, torch_fakes, torch_internals
from neffcache.trace.capture import Capture, CapturedGraph, EagerOps
from neffcache.trace.inference import Inference

STEADY = "steady_step"
MAX_STEPS = 6
"""Steps after which a configuration that still adds graphs is given up: its shapes are not static."""


@dataclass(frozen=True)
class Trace:
    """What one rank of a job compiles. `seconds` is wall time, `peak_bytes` the process's resident peak.

    `sent` and `received` are what crosses the edges of this rank's pipeline stages, by edge.
    """

    rank: int
    graphs: Sequence[CapturedGraph]
    phases: Sequence[str]
    eager: Mapping[str, int]
    calls: int
    seconds: float
    peak_bytes: int
    sent: Mapping[str, torch_internals.Edge]
    received: Mapping[str, torch_internals.Edge]
    structure: Sequence[str] = ()


class Program(Protocol):
    """What is traced: it is prepared, built, and run in steps, each of which enters its phases."""

    @property
    def what(self) -> str: ...

    @property
    def structure(self) -> Sequence[str]: ...

    def prepare(self, fake_mode: Any, *, alone: bool) -> None: ...

    def build(self, fake_mode: Any) -> Any: ...

    def steps(self, built: Any, fake_mode: Any, enter: Callable[[str], None], steady: str) -> Iterator[None]: ...


@dataclass(frozen=True)
class Training:
    """A Trainer.Config as a program."""

    config: Any
    cpu: bool
    what: str = "this configuration"
    structure: Sequence[str] = ()

    def prepare(self, fake_mode: Any, *, alone: bool) -> None:
        if self.cpu:
            titan.force_sum_reduction(self.config)
        titan.prepare_for_tracing(self.config, fake_mode, alone=alone)

    def build(self, fake_mode: Any) -> Any:
        with titan.positions_computed_once():
            return self.config.build()

    def steps(self, built: Any, fake_mode: Any, enter: Callable[[str], None], steady: str) -> Iterator[None]:
        return titan.run_fake_steps(built, fake_mode, enter)


def trace(
    config: Any,
    *,
    rank: int,
    world_size: int,
    capture: Capture,
    cpu: bool,
    edge: torch_internals.Edge | None = None,
    meet: tuple[str, int] | None = None,
) -> Trace:
    """Run the steps of a Trainer.Config or an Inference on fake tensors as `rank` of `world_size`, in a fresh process.

    The process is alone, in a fake process group; or, with `meet` (address, port), one of `world_size` that trace at
    the same time in a real one, which proves the fake one.
    `capture` collects the graphs (or, in a replay, loads them); `edge` is what this rank's first pipeline stage
    receives, None for a rank that has the first of all. Raises Unsupported when the configuration cannot be traced, or
    when every step adds graphs.
    """
    started = time.perf_counter()
    torch_internals.probe()
    torch_fakes.probe()
    os.environ.update(NGPU=str(world_size), RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world_size))
    if meet is not None:
        os.environ.update(MASTER_ADDR=meet[0], MASTER_PORT=str(meet[1]))
    torch_internals.static_shapes()
    torch_internals.no_unread_log_lines()
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    fake = torch_internals.fake_mode()
    program: Program = config if isinstance(config, Inference) else Training(config, cpu)
    program.prepare(fake, alone=meet is None)
    ops = EagerOps()
    undo = torch_internals.replace_inductor(torch_internals.aot_backend(capture.compiler, current_settings))
    phases: list[str] = []

    def enter(phase: str) -> None:
        again = sum(name.startswith(phase) for name in phases)
        capture.phase = phase if phase != STEADY or not again else f"{phase}_{again + 1}"
        if capture.phase not in phases:
            phases.append(capture.phase)

    edges = torch_internals.Edges(edge)
    try:
        with torch_internals.eager_collectives_stay_asynchronous(), contextlib.ExitStack() as stack:
            stack.enter_context(torch_internals.stages_alone(edges))
            stack.enter_context(torch_internals.attention_for_any_device())
            stack.enter_context(torch_internals.equal_elements_propagated_once())
            stack.enter_context(torch_internals.spans_unmarked())
            stack.enter_context(torch_fakes.fakes_at_once())
            stack.enter_context(torch_internals.graphs_copied_with_their_constants())
            built = _reasoned(lambda: program.build(fake), program.what)
            stack.enter_context(ops)
            steps = program.steps(built, fake, enter, STEADY)
            while True:
                _reasoned(lambda: next(steps, None), program.what)
                added = [g for g in capture.graphs.values() if g.phase == capture.phase]
                steady = [name for name in phases if name.startswith(STEADY)]
                if steady and not added:
                    break
                if len(steady) >= MAX_STEPS:
                    raise Unsupported(
                        f"every one of {MAX_STEPS} steps adds graphs: the shapes of {program.what} are not static",
                        details={"last": [g.name for g in added]},
                    )
            del built
    finally:
        undo()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return Trace(
        rank=rank,
        graphs=list(capture.graphs.values()),
        phases=phases,
        eager=dict(ops.seen),
        calls=capture.calls,
        seconds=round(time.perf_counter() - started, 3),
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        sent=edges.sent,
        received=edges.received,
        structure=program.structure,
    )


T = TypeVar("T")


def _reasoned(work: Callable[[], T], what: str) -> T:
    """What `work` gives; whatever it raises becomes Unsupported with the reason, our own errors stay themselves."""
    try:
        return work()
    except NeffcacheError:
        raise
    except Exception as fault:
        inner: BaseException | None = fault
        while inner is not None:
            if isinstance(inner, NeffcacheError):
                raise inner from None
            inner = getattr(inner, "inner_exception", None) or inner.__cause__
        first = next(iter(str(fault).strip().splitlines()), "")
        if isinstance(fault, ImportError) and (package := titan.absent_package(fault)):
            raise titan.needs(package) from fault
        raise Unsupported(
            f"{what} cannot be traced: {type(fault).__name__}: {first[:300]}",
            details={"log": "".join(traceback.format_exception(fault))[-20000:]},
        ) from fault
