"""Worker: what one configuration is and whether it can be traced, in one process: resolve it, trace one rank, look.

For the verdicts on all of TorchTitan's configurations: cheaper than a warm's resolve and trace, and nothing is kept.
"""

from __future__ import annotations

import os
import resource
import sys
from typing import Any

from neffcache.flows.workers import SERIES, answer, answer_series


def probe(given: dict[str, Any]) -> dict[str, Any]:
    """{"module", "function", "settings", "world_size", "cpu", "hidden": [package, ...]} -> what was found.

    `hidden` packages are as if they were not installed: so it shows which one a configuration needs.
    Where it cannot be traced, `refused` is the error; what was learnt before is in the answer all the same.
    """
    hide(frozenset(given["hidden"]))
    from neffcache.trace import titan

    if given["cpu"]:
        titan.use_cpu()
    titan.probe()
    found: dict[str, Any] = {}
    from neffcache.errors import NeffcacheError

    try:
        _look(given, found)
    except NeffcacheError as fault:
        found["refused"] = fault.to_json()
    found["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found


def prepare() -> None:
    """Import of torch what every trace needs, and nothing that asks for a package that may be hidden."""
    import torch._dynamo
    import torch._inductor.compile_fx
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor
    import torch.nn.attention.flex_attention  # noqa: F401


class _Hiding:
    """A finder of modules that does not find some."""

    def __init__(self, finder: Any, hidden: frozenset[str]) -> None:
        self._finder = finder
        self._hidden = hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in self._hidden:
            return None
        return self._finder.find_spec(name, path, target)


def hide(packages: frozenset[str]) -> None:
    """Let these packages be absent in this process."""
    if packages:
        finders: list[Any] = [_Hiding(finder, packages) for finder in sys.meta_path]
        sys.meta_path[:] = finders


def _look(given: dict[str, Any], found: dict[str, Any]) -> None:
    from neffcache.key.canonical import digest
    from neffcache.key.target import Mesh, resolve_mesh
    from neffcache.trace import hub, titan
    from neffcache.trace.capture import Capture
    from neffcache.trace.tracer import trace

    config, arguments, replaced = titan.command_line(
        given["module"], given["function"], given["settings"], cpu=given["cpu"]
    )
    found["mode"] = titan.execution_mode(config)
    found["mesh"] = titan.mesh_degrees(config)
    found["arguments"] = arguments
    found["files"] = list(hub.contents(config))
    found["replaced"] = [entry.what for entry in replaced if entry.changes_meaning]
    # What does not fit its world is refused before anything is built.
    resolve_mesh(Mesh(**found["mesh"]), given["world_size"])
    capture = Capture(payloads=False, inspect=True)
    seen = trace(config, rank=0, world_size=given["world_size"], capture=capture, cpu=given["cpu"])
    found["graphs"] = [
        {
            "kind": graph.kind,
            "name": graph.name,
            "phase": graph.phase,
            "nodes": graph.text.nodes,
            "symbolic": graph.text.symbolic,
            "text": graph.text.sha256,
            "env": digest(graph.settings),
            "settings": graph.settings,
        }
        for graph in seen.graphs
    ]
    found["neuron"] = capture.neuron
    found["uncacheable"] = capture.uncacheable
    found["phases"] = list(seen.phases)
    found["eager"] = len(seen.eager)
    found["seconds"] = seen.seconds


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(answer_series(prepare, probe) if SERIES in sys.argv[1:] else answer(probe))
