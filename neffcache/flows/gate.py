"""The gate: did every rank prove that it is the job, hit all graphs of its class, and compile nothing?"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from neffcache.errors import CommandFailed, Mismatch, Miss, NeffcacheError, revive
from neffcache.flows.resolve import Job
from neffcache.key.workload import CALLABLE
from neffcache.runtime.report import RankReport
from neffcache.store.records import Manifest


def summary(
    job: Job, manifest: Manifest, reports: Mapping[int, RankReport], status: int, *, on_miss: str
) -> dict[str, Any]:
    """The gate: every local rank reported, each with hits = the graphs of its class and compiles = 0."""
    local = job.request.placement.ranks_per_node
    fault = fault_of(reports, status, local, on_miss)
    ranks = [
        {
            "rank": rank,
            "class": report.rank_class,
            "graphs": len(report.expected),
            **report.counts(),
            "state": report.state,
            "identity": report.identity,
            "missed": report.misses,
            "compiler_processes": report.compiler_processes,
            **({"not_compiled": len(report.not_compiled)} if report.not_compiled else {}),
        }
        for rank, report in sorted(reports.items())
    ]
    stepped = [report for report in reports.values() if report.steps]
    steady = [later - earlier for report in stepped for earlier, later in itertools.pairwise(report.steps)]
    at_one = [report.at_step_one or {} for report in stepped]
    losses: dict[str, float] = {}
    for _, report in sorted(reports.items(), reverse=True):
        losses.update(report.losses)
    identities = {report.identity for report in reports.values()}
    return {
        "config": job.request.config,
        "cache_key": job.key.cache_key,
        "toolchain": job.request.toolchain,
        "manifest": manifest.id,
        "identity": "proved" if identities == {"proved"} and len(reports) == local else "unproved",
        "step_one": {
            "seconds": round(max((r.steps[0] - (r.built or 0.0) for r in stepped), default=0.0), 3),
            "hits": sum(entry.get("hits", 0) for entry in at_one),
            "compiles": sum(entry.get("compiles", 0) for entry in at_one),
            "misses": sum(entry.get("misses", 0) for entry in at_one),
            "load_seconds": round(max((r.loads for r in stepped), default=0.0), 3),
            "text_seconds": round(max((r.texts for r in stepped), default=0.0), 3),
        },
        "steady_step_seconds": round(sorted(steady)[len(steady) // 2], 3) if steady else None,
        "steps": max((report.step_count for report in stepped), default=0),
        "losses": [losses[step] for step in sorted(losses, key=int)],
        "ranks": ranks,
        **({"calls": _calls(reports)} if job.called else {}),
        "replaced": list(job.replaced),
        "command_status": status,
        "exit_code": 0 if fault is None else fault.exit_code,
        **({} if fault is None else {"error": fault.to_json()}),
    }


def _calls(reports: Mapping[int, RankReport]) -> dict[str, Any]:
    """What the first rank says of each phase, with the slowest first call of all ranks."""
    first = next((report.calls for _, report in sorted(reports.items()) if report.calls), {})
    return {
        phase: {
            **said,
            "first_seconds": max(
                report.calls[phase]["first_seconds"] for report in reports.values() if phase in report.calls
            ),
        }
        for phase, said in first.items()
    }


def fault_of(reports: Mapping[int, RankReport], status: int, ranks: int, on_miss: str) -> NeffcacheError | None:
    """Why the gate does not hold, None when it does: a rank's own word first, then the command's, then the counts.

    `ranks` is how many this node must have.
    """
    refused = [report for _, report in sorted(reports.items()) if report.error is not None]
    if refused:
        first = refused[0]
        assert first.error is not None
        fault = revive(first.error)
        fault.message = f"rank {first.rank}: {fault.message}"
        fault.details.setdefault("ranks", [report.rank for report in refused])
        return fault
    if status != 0:
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        dead = [rank for rank, report in sorted(reports.items()) if not report.step_count]
        return CommandFailed(
            f"the command {how}",
            hint="its own output says why",
            details={"command_status": status, "ranks_without_a_step": dead, "ranks_reported": sorted(reports)},
        )
    if len(reports) != ranks:
        return Mismatch(
            f"{len(reports)} of {ranks} ranks reported, so nothing is proved about the others",
            hint="the command must start its ranks with RANK and LOCAL_RANK set, and import torch",
            details={"ranks_reported": sorted(reports)},
        )
    for _, report in sorted(reports.items()):
        if (broken := _rank_fault(report, on_miss)) is not None:
            return broken
    return None


def _rank_fault(report: RankReport, on_miss: str) -> NeffcacheError | None:
    rank = report.rank
    if report.kind == CALLABLE and report.identity != "proved":
        return Mismatch(
            f"rank {rank} did not call the workload that was warmed, so it did not prove that it is that job",
            hint="the command must call the very function, which @neffcache.inference.workload marks",
        )
    if report.identity != "proved":
        return Mismatch(
            f"rank {rank} built no TorchTitan Trainer, so it did not prove that it is the job that was warmed",
            hint="the command must train with TorchTitan's Trainer or a subclass that calls its __init__",
        )
    # A program of one's own need not mark its steps; that a callable ran shows in the graphs that were used.
    if not report.step_count and not (report.kind == CALLABLE and report.expected):
        return Mismatch(f"rank {rank} ended without a step", hint="its own output says why")
    allowed = 0 if on_miss == "fail" else report.backend_compiles
    # A compiler that owns its cache compiles in the rank itself, where the policy lets it.
    if report.compiles > allowed and (on_miss == "fail" or not report.native):
        return Miss(
            f"rank {rank} compiled: {report.backend_compiles} graphs, "
            f"{len(report.compiler_processes)} compiler processes",
            hint="neffcache warm the configuration again",
            details={"rank": rank, "compiler_processes": report.compiler_processes[:20]},
        )
    if on_miss == "fail" and report.native.get("looked") == 0:
        return Mismatch(
            f"the compiler of rank {rank} counted not one look-up in its cache, so its counters prove nothing",
            hint="its counters are off, or the command does not use this compiler: see `neffcache doctor`",
            details={"rank": rank, "counters": report.native.get("counters", {})},
        )
    misses, replayed = report.native.get("misses", 0), report.native.get("allowed")
    if on_miss == "fail" and replayed is not None and misses > replayed:
        return Miss(
            f"rank {rank} did not find {misses - replayed} entries of its compiler's cache",
            hint="neffcache warm the configuration again",
            details={"rank": rank, "counters": report.native.get("counters", {})},
        )
    unused = set(report.expected) - set(report.hits) - {entry["compile_key"] for entry in report.misses}
    unused -= set(report.optional)
    if unused:
        return Miss(
            f"rank {rank} used {len(report.hits)} of the {len(report.expected)} graphs of its class",
            hint="the command did not run a whole step of this job",
            details={"rank": rank, "unused": sorted(unused)},
        )
    return None
