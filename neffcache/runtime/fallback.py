"""What a rank does when a graph is not in the manifest: name the nearest record, and compile when told to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from neffcache import variables
from neffcache.compile.host.load import load_graph
from neffcache.errors import CompileFailed
from neffcache.graph.difference import first_difference, nearest
from neffcache.graph.payload import Binding, pack
from neffcache.graph.text import GraphText
from neffcache.key.canonical import digest
from neffcache.runtime.report import MISSED
from neffcache.store.root import kernel_lock

LOCK_TIMEOUT = 3600.0
"""Seconds that a rank waits for another one's compile."""


def nearest_record(texts: Path, keys: Sequence[str], text: str) -> dict[str, Any] | None:
    """Of the graphs whose texts lie in `texts`, the one most like `text`, and where they differ; None without any."""
    known = {key: (texts / f"{key}.txt").read_text() for key in keys if (texts / f"{key}.txt").exists()}
    best = nearest(text, known.items())
    if best is None:
        return None
    found = first_difference(known[best], text)
    where = {} if found is None else {"line": found[0], "recorded": found[1][:300], "here": found[2][:300]}
    return {"compile_key": best, **where}


def compile_here(
    key: str,
    text: GraphText,
    gm: Any,
    settings: Mapping[str, Any],
    toolchain: Mapping[str, Any],
    *,
    reports: Path,
    compiling: Callable[[], None],
) -> tuple[Callable[[list[Any]], list[Any]], Binding]:
    """Compile a graph in a process of its own and load it here; ranks of a node that want the same one share it.

    Calls `compiling()` when it is this rank that compiles. The files stay in the run's own directory: whoever launched
    the job makes records of them, a rank never writes a store. Raises CompileFailed.
    """
    place = reports / MISSED / key
    place.mkdir(parents=True, exist_ok=True)
    with kernel_lock(place.with_suffix(".lock"), 0o600, timeout=LOCK_TIMEOUT):
        if not (place / "result.json").exists():
            compiling()
            _compile(key, text, gm, settings, toolchain, place)
    return load_graph(place / "host", key, text)


def _compile(
    key: str, text: GraphText, gm: Any, settings: Mapping[str, Any], toolchain: Mapping[str, Any], place: Path
) -> None:
    (place / "payload").write_bytes(pack(gm, text))
    (place / "toolchain.json").write_text(json.dumps(toolchain))
    (place / "settings.json").write_text(json.dumps(settings))
    (place / "text").write_text(text.text)
    (place / "graph.json").write_text(
        json.dumps({"text": text.sha256, "env": digest(settings), "nodes": text.nodes, "inputs": text.inputs})
    )
    done = subprocess.run(
        [sys.executable, "-m", "neffcache.compile.host.worker", key, str(place)],
        env=variables.without_rank(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise CompileFailed(
            f"graph {key} could not be compiled: {(done.stderr.strip().splitlines() or ['no word'])[-1][:300]}",
            details={"log": done.stderr[-20000:]},
        )
