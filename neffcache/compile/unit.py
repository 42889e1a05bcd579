"""One compile in a process of its own, for executors whose workers cannot start a compiler in their own process.

`python -m neffcache.compile.unit PLACE` reads PLACE/unit.json and PLACE/payload, compiles below PLACE/out, and leaves
PLACE/result.json: products with their paths relative to PLACE, or a fault.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from neffcache.compile.failures import failure, of_exit, shortened
from neffcache.compile.pool import GRACE, expired
from neffcache.compile.toolchain import Compiled, CompileRequest, Product
from neffcache.errors import NeffcacheError
from neffcache.lifetime import MARK, die_with_parent, end_marked, guard
from neffcache.variables import without_rank


def describe(request: CompileRequest, compiler: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """The JSON that `run` takes; the payload travels beside it."""
    return {
        "request": {**asdict(request), "payload": request.payload.name, "settings": dict(request.settings)},
        "compiler": compiler,
        "environment": dict(environment),
    }


def run(unit: Mapping[str, Any], place: Path, mark: str) -> dict[str, Any]:
    """Compile below `place`, which holds the file `payload`, and wait; the result document.

    The process gets `mark` into its environment, so that all it starts can be ended by it.
    """
    (place / "unit.json").write_text(json.dumps(unit))
    request = _request(unit, place)
    log = place / "unit.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "neffcache.compile.unit", os.fspath(place)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**without_rank(os.environ), **unit["environment"], MARK: mark},
            start_new_session=True,
        )
    limit = None if request.time_limit is None else request.time_limit + GRACE
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        return fault_document(expired(request, log.read_text(errors="replace")))
    finally:
        end_marked(mark)
        process.wait()
    with suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads((place / "result.json").read_bytes())
        return found
    said = shortened(log.read_text(errors="replace"))
    return fault_document(of_exit(request.compile_key, request.name, status, said))


def fault_document(fault: NeffcacheError) -> dict[str, Any]:
    return {"error": fault.to_json()}


def compiled(document: Mapping[str, Any], place: Path) -> Compiled:
    """What a good result document says, with its files below `place`."""
    products = [Product(store, path, place / source, mode) for store, path, source, mode in document["products"]]
    log = None if document["log"] is None else place / document["log"]
    return Compiled(document["compile_key"], products, document["seconds"], document["peak_bytes"], log)


def _request(unit: Mapping[str, Any], place: Path) -> CompileRequest:
    return CompileRequest(**{**unit["request"], "payload": place / "payload"})


def _work(place: Path) -> dict[str, Any]:
    unit = json.loads((place / "unit.json").read_bytes())
    module, _, name = unit["compiler"].rpartition(".")
    try:
        made: Compiled = getattr(importlib.import_module(module), name)(_request(unit, place), place / "out")
    except NeffcacheError as fault:
        return fault_document(fault)
    except OSError as fault:
        return fault_document(failure("io", f"compiling stopped at {unit['request']['name']}: {fault}"))
    return {
        "compile_key": made.compile_key,
        "products": [[p.store, p.path, os.fspath(p.source.relative_to(place)), p.mode] for p in made.products],
        "seconds": made.seconds,
        "peak_bytes": made.peak_bytes,
        "log": None if made.log is None else os.fspath(made.log.relative_to(place)),
    }


def main(place: Path) -> int:
    die_with_parent()
    mark = os.environ[MARK]
    guarding = guard(mark, os.environ)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    document = _work(place)
    temporary = place / "result.tmp"
    temporary.write_text(json.dumps(document))
    os.replace(temporary, place / "result.json")
    del guarding
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
