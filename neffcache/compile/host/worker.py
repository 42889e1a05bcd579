"""Compile one payload in a process of its own: `python -m neffcache.compile.host.worker KEY DIRECTORY`.

DIRECTORY holds `payload`, `settings.json` and `toolchain.json`; `host/` and `result.json` are left in it.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from neffcache.compile.host.build import compile_graph
from neffcache.compile.toolchain import CompileRequest
from neffcache.errors import NeffcacheError


def main(key: str, place: Path) -> int:
    settings, toolchain = (json.loads((place / f"{name}.json").read_text()) for name in ("settings", "toolchain"))
    try:
        compiled = compile_graph(CompileRequest(key, key, place / "payload", settings, toolchain), place / "work")
    except NeffcacheError as fault:
        print(fault.message, file=sys.stderr)
        return fault.exit_code
    for product in compiled.products:
        target = place / product.store / product.path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(product.source, target)
    result = {
        "products": [[p.store, p.path, p.mode] for p in compiled.products],
        "seconds": compiled.seconds,
        "peak_bytes": compiled.peak_bytes,
    }
    (place / "result.tmp").write_text(json.dumps(result))
    (place / "result.tmp").rename(place / "result.json")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
