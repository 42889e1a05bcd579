"""What of a job, apart from its graphs, Trainium cannot take: target, tensor-parallel groups, compile modes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from neffcache.key.target import Mesh, Placement

COMPILE_MODES = ("max_autotune", "max_autotune_gemm", "triton.cudagraphs", "coordinate_descent_tuning")
"""Inductor settings that `torch.compile(mode=...)` other than "default" stands for."""


def job_findings(mesh: Mesh, placement: Placement) -> list[dict[str, Any]]:
    """Findings of where a job runs, in the form of `graph.neuron.Finding.to_json`."""
    found: list[dict[str, Any]] = []
    if placement.target.startswith(("trn1", "inf2")):
        found.append(_finding("target", "stops", placement.target, "TorchNeuron supports Trn2 and Trn3 only"))
    cores = placement.logical_cores_per_device
    if cores is not None and mesh.tp > 1 and (mesh.tp > cores or cores % mesh.tp):
        found.append(
            _finding(
                "tp-group",
                "slows",
                f"tp {mesh.tp}, {cores} logical cores a device at LNC {placement.lnc}",
                "a tensor-parallel group larger than a device sends its collectives over the links between devices",
            )
        )
    return found


def mode_findings(graphs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Findings of the settings that graphs were compiled with: {"name", "settings": {...}} each."""
    for graph in graphs:
        settings = graph["settings"].get("inductor", graph["settings"])
        chosen = [name for name in COMPILE_MODES if settings.get(name) is True]
        if chosen:
            why = "torch.compile takes mode='default' only"
            return [{**_finding("compile-mode", "stops", ", ".join(chosen), why), "graph": graph["name"]}]
    return []


def _finding(rule: str, effect: str, detail: str, why: str) -> dict[str, Any]:
    return {"rule": rule, "effect": effect, "graph": "", "node": "", "detail": detail, "count": 1, "why": why}
