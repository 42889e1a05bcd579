"""Worker: trace one rank of a job, or replay it from a view.

A replay is a trace whose graphs must all come from the view, loaded for real, with no compiler process: it proves
that a fresh process finds and loads everything.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from neffcache.flows.workers import SERIES, answer, answer_series


def run(given: dict[str, Any]) -> dict[str, Any]:
    """{"kind"?, "arguments", "rank", "world_size", "cpu", "into"?: directory, "view"?: directory, "toolchain"?,
    "expected"?, "not_compiled"?, "edge"?: what the first pipeline stage receives, "meet"?: [address, port] where
    `world_size` such processes form a real group}.

    With "changes" the fields at these paths get these values first, and what else could be changed is in the answer.
    """
    from neffcache.key.canonical import digest
    from neffcache.key.workload import CALLABLE
    from neffcache.trace import inference, titan
    from neffcache.trace.capture import Capture
    from neffcache.trace.tracer import trace

    config: Any
    called = given.get("kind") == CALLABLE
    if called:
        workload, arguments = inference.load(given["arguments"])
        config = inference.Inference(workload, arguments, given["rank"], given["world_size"])
    else:
        if given["cpu"]:
            titan.use_cpu()
        config = titan.load_config(given["arguments"])
    varied: dict[str, Any] = {}
    if "changes" in given:
        from neffcache.trace import variation

        neutral, watched = variation.variations(config)
        varied = {"neutral": neutral, "watched": watched}
        variation.apply(config, given["changes"])
    replay = _replay(given) if "view" in given else None
    capture = Capture(payloads=replay is None) if replay is None else replay
    seen = trace(
        config,
        rank=given["rank"],
        world_size=given["world_size"],
        capture=capture,
        cpu=given["cpu"],
        edge=given.get("edge"),
        meet=given.get("meet"),
    )
    if called and replay is None:
        inference.require_graphs(config.workload.name, seen.calls, seen.graphs)
    graphs: list[dict[str, Any]] = []
    for number, graph in enumerate(seen.graphs):
        entry = {
            "kind": graph.kind,
            "name": graph.name,
            "phase": graph.phase,
            "text": graph.text.sha256,
            "nodes": graph.text.nodes,
            "inputs": graph.text.inputs,
            "reason": graph.reason,
            "data_dependent": graph.data_dependent,
            "settings": graph.settings,
            "env": digest(graph.settings),
        }
        if replay is None:
            into = Path(given["into"])
            into.mkdir(parents=True, exist_ok=True)
            (into / f"{number}.txt").write_text(graph.text.text)
            entry["text_file"] = str(into / f"{number}.txt")
            if graph.payload is not None:
                (into / f"{number}.payload").write_bytes(graph.payload)
                entry["payload_file"] = str(into / f"{number}.payload")
        graphs.append(entry)
    return {
        "rank": seen.rank,
        "graphs": graphs,
        "phases": list(seen.phases),
        "uncacheable": dict(capture.uncacheable),
        "eager": dict(seen.eager),
        "seconds": seen.seconds,
        "peak_bytes": seen.peak_bytes,
        "sent": dict(seen.sent),
        "received": dict(seen.received),
        "structure": list(seen.structure),
        **({} if replay is None else replay.outcome()),
        **varied,
    }


def _replay(given: dict[str, Any]) -> Any:
    from neffcache.compile.host.load import load_graph
    from neffcache.graph.text import canonical_text
    from neffcache.key.canonical import digest
    from neffcache.key.job import CompileComponents, compile_key
    from neffcache.runtime.processes import watch
    from neffcache.trace.capture import Capture, shapes_only

    class Replay(Capture):
        """Loads every graph from the view instead of keeping it."""

        def __init__(self) -> None:
            super().__init__(payloads=False)
            self.hits: list[str] = []
            self.misses: list[str] = []
            self.compiles: list[str] = []

        def compiler(self, kind: str, gm: Any, inputs: Sequence[Any], settings: Any) -> Callable[..., Any]:
            text = canonical_text(gm)
            env = digest(settings())
            key = compile_key(CompileComponents(text=text.sha256, toolchain=given["toolchain"], env=env))
            if text.data_dependent:
                if key not in given["not_compiled"]:
                    self.misses.append(key)
            elif key not in given["expected"]:
                if key not in self.misses:
                    self.misses.append(key)
            elif key not in self.hits:
                load_graph(Path(given["view"]) / "host", key, text)
                self.hits.append(key)
            return shapes_only(gm)

        def outcome(self) -> dict[str, Any]:
            return {"hits": self.hits, "misses": self.misses, "compiles": self.compiles}

    replay = Replay()
    pid = os.getpid()

    def started(command: list[str], compiles: bool) -> None:
        if compiles and os.getpid() == pid:
            replay.compiles.append(" ".join(command)[:300])

    watch(started)
    return replay


def prepare() -> None:
    """Import what any trace on the CPU needs."""
    from neffcache.trace import titan

    titan.use_cpu()
    titan.probe()

    import neffcache.trace.tracer
    import neffcache.trace.variation  # noqa: F401


if __name__ == "__main__":
    sys.exit(answer_series(prepare, run) if SERIES in sys.argv[1:] else answer(run))
