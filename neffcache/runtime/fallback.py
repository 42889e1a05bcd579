"""What a rank does when a graph is not in the manifest: name the nearest record, and compile when told to."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from neffcache.compile.host.load import load_graph
from neffcache.errors import CompileFailed
from neffcache.graph.payload import pack
from neffcache.graph.text import GraphText, first_difference
from neffcache.key.canonical import digest
from neffcache.runtime import variables


def nearest_record(texts: Path, keys: Sequence[str], text: str) -> dict[str, Any] | None:
    """Among the texts `texts`/<key>.txt, the one that agrees with `text` the longest; None when none is there."""
    best: tuple[int, dict[str, Any]] | None = None
    for key in keys:
        path = texts / f"{key}.txt"
        try:
            other = path.read_text()
        except OSError:
            continue
        found = first_difference(other, text)
        line = found[0] if found else len(text)
        if best is None or line > best[0]:
            entry = {"compile_key": key}
            if found:
                entry.update(line=str(found[0]), recorded=found[1][:300], here=found[2][:300])
            best = line, entry
    return None if best is None else best[1]


def compile_here(
    key: str, text: GraphText | None, gm: Any, settings: dict[str, Any], *, keep: str | None
) -> Callable[[list[Any]], list[Any]]:
    """Compile a graph in a process of its own, load it here, and leave its files in `keep`/<compile key> when given.

    Whoever launched this job makes records of them: a rank never writes a store. Raises CompileFailed.
    """
    if text is None or text.symbolic:
        raise CompileFailed(f"graph {key} has no canonical text or no static shapes, so it cannot be compiled apart")
    place = Path(tempfile.mkdtemp(prefix=f"missed-{key}-", dir=os.environ[variables.REPORTS]))
    (place / "payload").write_bytes(pack(gm, text))
    (place / "settings.json").write_text(json.dumps(settings))
    (place / "text").write_text(text.text)
    (place / "graph.json").write_text(
        json.dumps({"text": text.sha256, "env": digest(settings), "nodes": text.nodes, "inputs": text.inputs})
    )
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in (variables.MANIFEST, variables.RANK_PROCESS, "LOCAL_RANK", "RANK", "WORLD_SIZE")
    }
    done = subprocess.run(
        [sys.executable, "-m", "neffcache.compile.host.worker", key, str(place)],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise CompileFailed(
            f"graph {key} could not be compiled: {(done.stderr.strip().splitlines() or ['no word'])[-1][:300]}",
            details={"log": done.stderr[-20000:]},
        )
    run = load_graph(place / "host", key, text)  # mapped libraries survive the rename below
    if keep is not None:
        kept = Path(keep) / key
        kept.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # another rank was first; the same key has the same meaning
            os.rename(place, kept)
    return run
