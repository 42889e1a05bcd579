"""Inductor's own cache directory, treated as any compiler-owned store (torch 2.14).

Layout below TORCHINDUCTOR_CACHE_DIR, `k` a key of 53 characters that Inductor makes:
    fxgraph/<k[1:3]>/<k>/<digest>     one compiled graph (FxGraphCache)
    aotautograd/<k>/<digest>          what AOTAutograd made around it, naming its graphs by key (AOTAutogradCache)
    <k[1:3]>/<k>.{py,cpp,so}, <k>.main.{cpp,so}   sources and C++ libraries, named by source and command line
    <k[1:3]>/<k>.so.load_ok           empty: this machine can load that library
    locks/<k>.lock                    flock while a library is built
Every result is written under another name and renamed, but for sources, which hold the lock of their library.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from neffcache.compile.toolchain import Counters
from neffcache.errors import Usage
from neffcache.store.native import Rules, Verdict

KEY = "[a-z2-7]{52,53}"
_GRAPH = re.compile(rf"(?:fxgraph/[a-z2-7]{{2}}|aotautograd)/(a?f?{KEY}|{KEY})/{KEY}")


class InductorRules:
    """Which files of Inductor's directory are results."""

    name = "inductor"

    def verdict(self, path: str, names: Collection[str]) -> Verdict:
        raise NotImplementedError

    def locks(self, path: str) -> Sequence[str]:
        raise NotImplementedError

    def graph(self, path: str) -> str | None:
        raise NotImplementedError


class InductorStore:
    """`native_store` of the host toolchain."""

    rules: Sequence[Rules] = (InductorRules(),)
    overlay = True
    refuses_compilers = True

    def environment(self, stores: Path, private: Path) -> dict[str, str]:
        return {"TORCHINDUCTOR_CACHE_DIR": str(stores / "inductor")}

    def check_environment(self, environ: Mapping[str, str]) -> None:
        if environ.get("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "0") != "0":
            raise Usage("TORCHINDUCTOR_FORCE_DISABLE_CACHES is set: Inductor would use no cache")

    def counters(self) -> Counters:
        raise NotImplementedError
