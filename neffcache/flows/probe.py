"""Probe a configuration: trace it at its default placement in a process of its own, and give the verdict."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neffcache.compile.host.identity import environment
from neffcache.errors import NeffcacheError, Unsupported, Usage
from neffcache.flows.neuron import job_findings, mode_findings
from neffcache.flows.request import Request, make_request
from neffcache.flows.verdicts import OPTIONAL, Kind, Verdict
from neffcache.flows.warmers import WarmerRun
from neffcache.flows.warmers import known as known_runs
from neffcache.flows.workers import Series
from neffcache.key.canonical import digest
from neffcache.key.target import Mesh, resolve_mesh
from neffcache.trace.registries import Registered

WORKER = "neffcache.flows.worker_probe"
SECONDS = 600.0
MEMORY = 6_000_000_000


def run_of(entry: Registered, runs: Mapping[str, WarmerRun]) -> str:
    """What to type for a registry function: the warmer's run of it, else its name."""
    same = [run for run in runs.values() if run.config == entry.function and run.module in ("", entry.module)]
    best = next((run for run in same if run.name == entry.function), same[0] if same else None)
    if best is not None:
        return best.name
    return entry.function if entry.function not in runs else f"{entry.module}:{entry.function}"


class Prober:
    """Traces configurations one after another, each in a fork of a process that has imported torch."""

    def __init__(self, environ: Mapping[str, str], place: Path) -> None:
        self.environ = environ
        self._place = place
        self._series: Series | None = None
        self._variables: dict[str, str] = {}

    def __enter__(self) -> Prober:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._series is not None:
            self._series.__exit__()
            self._series = None

    def ask(self, document: Mapping[str, Any], *, seconds: float, memory: int) -> dict[str, Any]:
        """What `worker_probe` finds. Raises Unsupported beyond a limit, Bug when the process left no answer."""
        variables = {**self.environ, **environment(self.environ, document["world_size"])}
        if self._series is None or not self._series.alive or variables != self._variables:
            self.close()
            # Variables such as the number of threads are read when torch is imported.
            self._series, self._variables = Series(WORKER, variables, self._place), variables
        return self._series.ask(document, seconds=seconds, memory=memory)


def probe(
    entry: Registered,
    prober: Prober,
    *,
    seconds: float = SECONDS,
    memory: int = MEMORY,
) -> Verdict:
    """The verdict on one configuration. Never raises for what is wrong with the configuration: that is the verdict."""
    environ = prober.environ
    name = run_of(entry, known_runs(environ))
    common: dict[str, Any] = {
        "family": entry.family,
        "module": entry.module,
        "config": entry.function,
        "run": name if name != entry.function else "",
    }
    started = time.monotonic()
    try:
        request = make_request(name, environ=environ)
        lncs = _ranks_at_lnc(name, environ)
        found, needs = _needing(request, entry, prober, seconds, memory)
        if (fixed := _fixed_world(found)) not in (None, request.placement.world_size):
            # Its mesh leaves nothing to the number of ranks: it means that world and no other.
            request = make_request(name, world_size=fixed, environ=environ)
            lncs = {request.placement.lnc: request}
            found, needs = _needing(request, entry, prober, seconds, memory)
        common |= {
            "target": request.placement.target,
            "ranks": request.placement.world_size,
            "ranks_at_lnc": {str(lnc): placed.placement.world_size for lnc, placed in lncs.items()},
        }
    except NeffcacheError as fault:
        refused = fault.to_json()
        return Verdict(**common, verdict="unsupported", kind=kind_of(refused), reason=reason_of(refused))
    common |= {"needs": needs, "mode": found.get("mode", ""), "peak_bytes": found["peak_bytes"]}
    common |= {"files": found.get("files", [])}
    common |= {"seconds": found.get("seconds", round(time.monotonic() - started, 3))}
    common |= {"mesh": _mesh(found, request), "replaced": found.get("replaced", [])}
    if "refused" in found:
        missing = found["refused"].get("details", {}).get("package", "")
        return Verdict(
            **common,
            verdict="unsupported",
            missing=missing,
            kind=kind_of(found["refused"]),
            reason=reason_of(found["refused"]),
        )
    graphs = found["graphs"]
    mesh = resolve_mesh(Mesh(**found["mesh"]), request.placement.world_size)
    return Verdict(
        **common,
        verdict="traces",
        reason="" if graphs or found["uncacheable"] else "nothing in it is compiled: every operator runs eagerly",
        neuron=[*job_findings(mesh, request.placement), *mode_findings(graphs), *_together(found["neuron"])],
        phases=found["phases"],
        graphs=len(graphs) + len(found["uncacheable"]),
        nodes=sum(graph["nodes"] for graph in graphs),
        dynamic=sum(graph["symbolic"] for graph in graphs),
        uncacheable=found["uncacheable"],
        graphs_digest=digest(sorted([graph["text"], graph["env"]] for graph in graphs))[:16],
    )


def _needing(
    request: Request, entry: Registered, prober: Prober, seconds: float, memory: int
) -> tuple[dict[str, Any], list[str]]:
    """What the worker found, and which optional packages it takes: each is hidden until its absence stops it."""
    needs: list[str] = []
    while True:
        document = {
            "module": request.module or entry.module,
            "function": request.function,
            "settings": dict(request.settings),
            "world_size": request.placement.world_size,
            "cpu": True,
            "hidden": [name for name in OPTIONAL if name not in needs],
        }
        found = prober.ask(document, seconds=seconds, memory=memory)
        package = found.get("refused", {}).get("details", {}).get("package", "")
        if package not in OPTIONAL or package in needs:
            return found, needs
        needs.append(package)


def _mesh(found: Mapping[str, Any], request: Request) -> dict[str, int]:
    if "mesh" not in found:
        return {}
    try:
        return dict(vars(resolve_mesh(Mesh(**found["mesh"]), request.placement.world_size)))
    except Usage:
        return dict(found["mesh"])


def _fixed_world(found: Mapping[str, Any]) -> int | None:
    """The world size of a mesh without a degree of -1, where the one that was tried does not fit it."""
    degrees = [found.get("mesh", {}).get(name, -1) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")]
    return math.prod(degrees) if "refused" in found and min(degrees) > 0 else None


def _ranks_at_lnc(name: str, environ: Mapping[str, str]) -> dict[int, Request]:
    """The request at both LNCs; a run on CPUs has one placement only."""
    found: dict[int, Request] = {}
    for lnc in (1, 2):
        try:
            found[lnc] = make_request(name, lnc=lnc, environ=environ)
        except Usage:
            continue
    return found


def _together(findings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each rule once: the first graph and node that meet it, and how many nodes do."""
    found: dict[str, dict[str, Any]] = {}
    for each in findings:
        first = found.setdefault(each["rule"], {**each, "count": 0})
        first["count"] += each["count"]
    return list(found.values())


HARDWARE = re.compile(r"CUDA|\bcuda|NVIDIA|\bGPU|SM\d|sm_?\d\d|compute capability|active driver|Blackwell|Hopper|ROCm")
FILES = re.compile(r"Hugging Face|huggingface\.co|does not exist\. Please download|No such file")


def kind_of(refused: Mapping[str, Any]) -> Kind:
    """What sort of reason it is; the sentence itself is TorchTitan's or PyTorch's own."""
    details, message = refused.get("details", {}), str(refused["message"])
    if details.get("package"):
        return "package"
    if details.get("class") == "limit":
        return "limit"
    if "not one of a Trainer" in message:
        return "trainer"
    if FILES.search(message):
        return "files"
    if HARDWARE.search(message):
        return "hardware"
    return "titan" if message.startswith("TorchTitan") else "trace"


def reason_of(refused: Mapping[str, Any]) -> str:
    """One sentence without paths or addresses of this machine."""
    text = " ".join(str(refused["message"]).split())
    if refused["error"] not in (Unsupported.__name__, Usage.__name__):
        text = f"{refused['error']}: {text}"
    return text[:400]
