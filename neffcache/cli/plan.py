"""neffcache plan."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from neffcache.cli.completing import offer
from neffcache.cli.options import Output, job_options, open_to_mend, output_options, size, store_option

if TYPE_CHECKING:
    from neffcache.flows.plan import Plan, PlannedGraph


@click.command("plan", epilog="Example:  neffcache plan llama3_70b --lnc 2")
@click.argument("configs", nargs=-1, metavar="CONFIG...", shell_complete=offer("config"))
@click.option("--all", "every", is_flag=True, help="Every run, told by refs and verdicts.")
@click.option("--trace", is_flag=True, help="With --all: trace each of them.")
@click.option("--jobs", type=click.IntRange(1), envvar="NEFFCACHE_JOBS", help="Compile workers.")
@job_options
@store_option
@output_options
def command(
    configs: tuple[str, ...],
    every: bool,
    trace: bool,
    jobs: int | None,
    directory: str | None,
    choose: Callable[[str], Any],
    output: Output,
) -> int:
    """What a warm of CONFIG would trace and compile: graphs, minutes, memory, workers. Compiles nothing.

    Minutes and memory come from what was measured for the same graph, else for one of about its size, else from a
    default; the plan says how often which.
    """
    from neffcache.cli.several import for_each
    from neffcache.flows.everything import everything
    from neffcache.flows.plan import plan

    store = open_to_mend(directory)
    if every and not configs and not trace:
        return _outlined(store, jobs, choose, output)
    names = list(configs) or ([entry.name for entry in everything(os.environ) if entry.supported] if every else [])
    if not names:
        raise click.UsageError("give a CONFIG, or --all")

    def one(name: str) -> tuple[dict[str, Any], list[str]]:
        found = plan(choose(name), store, os.environ, jobs=jobs, progress=output.note)
        return found.to_json(), describe(found)

    done = for_each(names, one)
    output.emit(done.documents[0] if len(configs) == 1 else done.documents, done.lines)
    if done.fault is not None:
        if done.fault.hint:
            output.note(f"hint: {done.fault.hint}")
        return done.fault.exit_code
    return 0


def _outlined(store: Any, jobs: int | None, choose: Callable[[str], Any], output: Output) -> int:
    """Every entry in a few seconds: nothing is resolved or traced."""
    from neffcache.cli.table import table
    from neffcache.flows.costs import capacity
    from neffcache.flows.everything import everything, outlines

    workers = capacity(jobs).slots
    found, seconds = outlines(everything(os.environ), choose, store, workers=workers)
    lines = table(
        ("config", "state", "known by", "ranks", "graphs", "hit", "trace", "compile", "reason"),
        [
            (
                entry.name,
                entry.state,
                entry.known_by,
                "" if entry.ranks is None else entry.ranks,
                entry.total,
                entry.hit,
                f"{entry.trace_seconds:.0f} s",
                f"{entry.compile_seconds / 60:.1f} min",
                entry.reason[:80],
            )
            for entry in found
        ],
        right=("ranks", "graphs", "hit", "trace", "compile"),
    )
    unsupported = sum(entry.state == "unsupported" for entry in found)
    lines.append(
        f"{len(found)} runs: {len(found) - unsupported} can be warmed, {unsupported} cannot; about "
        f"{seconds / 60:.0f} min of compiling with {workers} workers, less where runs share graphs"
    )
    output.emit([entry.to_json() for entry in found], lines)
    return 0


def describe(plan: Plan) -> list[str]:
    """A plan for people."""
    from neffcache.flows.plan import class_size

    placement, mesh = plan.job.request.placement, plan.job.mesh
    where = placement.target if placement.instance is None else f"{placement.nodes} x {placement.instance}"
    degrees = " x ".join(
        f"{name} {getattr(mesh, name)}"
        for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
        if name in ("dp_shard", "tp") or getattr(mesh, name) > 1
    )
    if plan.job.called:
        degrees = " ".join(plan.job.arguments)
    refused = f" + {len(plan.refused)} that this toolchain cannot compile" if plan.refused else ""
    lines = [
        f"{plan.job.request.config}: {placement.world_size} ranks on {where}, LNC {placement.lnc}, {degrees}",
        f"  job key {plan.job.key.cache_key}, toolchain {plan.job.request.toolchain}",
        f"  {plan.total} graphs = {plan.hit} in the store + {len(plan.compile)} to compile{refused}"
        + (" (known by the manifest)" if plan.known_by == "manifest" else " (known by tracing)"),
        *(f"  ranks {item.ranks}: {class_size(item)} graphs" for item in plan.rank_classes),
        *(f"    {item.compile_key[:12]}  {_cost(item)}  {item.name}" for item in plan.compile),
        *(f"    {key[:12]}  REFUSED  {name}: {reason}" for key, name, reason in plan.refused),
        *(f"  not compiled: {name}: {reason}" for name, reason in plan.not_compiled.items()),
        *(f"  no key: {name}: {reason}" for name, reason in plan.uncacheable.items()),
    ]
    if plan.compile:
        told = ", ".join(f"{count} {name}" for name, count in plan.basis().items() if count)
        lines.append(
            f"  about {plan.compile_seconds / 60:.1f} min of compiling with {plan.workers} workers and "
            f"{size(plan.memory_bytes)} of memory (estimates: {told})"
        )
        room = plan.room
        who = f"{room.slots}, as --jobs says" if room.budget is None else f"{room.cpus.value} CPUs ({room.cpus.source})"
        lines.append(f"  workers: {who}; {size(room.memory.value)} of memory free ({room.memory.source})")
    lines += [f"  warning: {warning}" for warning in plan.job.warnings]
    lines += [
        f"  replaced: {entry['what']} by {entry['by']}"
        + (" (changes what the model computes)" if entry["changes_meaning"] else "")
        for entry in plan.job.replaced
    ]
    lines += [f"  without effect: {entry}" for entry in plan.job.request.dropped]
    return lines


def _cost(item: PlannedGraph) -> str:
    estimate = item.estimate
    basis = f"as {estimate.nodes} nodes" if estimate.basis == "similar" else estimate.basis
    return f"{item.nodes:6} nodes  {estimate.seconds:6.1f} s  {size(estimate.peak_bytes):>8}  {basis:13}"
