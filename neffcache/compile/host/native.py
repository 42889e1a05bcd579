"""Inductor's own cache directory, treated as any compiler-owned store (checked on torch 2.14).

Layout below TORCHINDUCTOR_CACHE_DIR, where <key> is 52 or 53 characters of base 32 that Inductor makes:
    fxgraph/<2>/<key>/<digest>        one compiled graph (FxGraphCache)
    aotautograd/<key>/<digest>        what AOTAutograd made around graphs, naming them by key (AOTAutogradCache)
    <2>/<key>.{py,h,cpp,so}, <2>/<key>.main.{cpp,so}   sources and C++ libraries, named by source and command line
    <2>/<key>.so.load_ok              empty: such a library can be loaded here
    locks/<key>.lock                  flock while a library is built
Results are written under another name and renamed; a library is written in place while its lock is held.

The directory may move: no key holds its path. A library's key holds the command line, and with it where torch and
Python are installed; that is part of the toolchain's identity (`identity.native_parts`). Inductor would also keep a
precompiled header of 150 MB below TMPDIR, outside of this directory, and build it again on every new host even when all
graphs hit: it is switched off, by a setting of its own.
"""

from __future__ import annotations

import os
import re
import struct
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from neffcache.compile.toolchain import Counters
from neffcache.errors import Usage
from neffcache.store.native import Rules, Verdict

NAME = "inductor"

SETTINGS = {
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    "TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE": "0",
    "TORCHINDUCTOR_AUTOGRAD_REMOTE_CACHE": "0",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "0",
    "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
}
"""Inductor's switches under which all that it compiles is in its directory, and nothing comes from elsewhere."""

_KEY = "[a-z2-7]{40,60}"
_GRAPH = re.compile(rf"fxgraph/[a-z2-7]{{2}}/(?P<key>{_KEY})/{_KEY}")
_AROUND = re.compile(rf"aotautograd/(?P<key>{_KEY})/{_KEY}")
_FILE = re.compile(rf"[a-z2-7]{{2}}/(?P<key>{_KEY})(?:\.main|\.optimized|\.kernel)?\.(?:py|h|cpp|so)")
_MARKER = re.compile(rf"[a-z2-7]{{2}}/{_KEY}(?:\.main)?\.so\.load_ok")
_PASSING = re.compile(r"(?:.*/)?(?:[^/]+\.lock|[^/]*\.tmp|[^/]+\.o|\.[^/]*)")


class InductorRules:
    """Which files of Inductor's directory are results."""

    name = NAME
    compiled = True

    def verdict(self, path: str, names: Collection[str]) -> Verdict:
        if _GRAPH.fullmatch(path) or _AROUND.fullmatch(path) or _FILE.fullmatch(path):
            return "artifact"
        if _MARKER.fullmatch(path):
            return "marker" if path.removesuffix(".load_ok") in names else "incomplete"
        return "transient" if _PASSING.fullmatch(path) else "foreign"

    def locks(self, path: str) -> Sequence[str]:
        found = _FILE.fullmatch(path)
        return () if found is None else (f"locks/{found['key']}.lock",)

    def whole(self, path: str, file: Path) -> bool:
        return not path.endswith(".so") or elf_is_whole(file)

    def graph(self, path: str) -> str | None:
        found = _GRAPH.fullmatch(path) or _AROUND.fullmatch(path)
        return None if found is None else found["key"]


def elf_is_whole(file: Path) -> bool:
    """Whether a 64-bit ELF file reaches to its table of section headers, which linkers write last."""
    with file.open("rb") as opened:
        head = opened.read(64)
        size = os.fstat(opened.fileno()).st_size
    if len(head) < 64 or head[:5] != b"\x7fELF\x02":
        return False
    order = "<" if head[5] == 1 else ">"
    table: int = struct.unpack_from(f"{order}Q", head, 40)[0]
    entry, count = struct.unpack_from(f"{order}HH", head, 58)
    return table > 0 and bool(table + entry * count <= size)


class InductorStore:
    """`native_store` of the host toolchain."""

    rules: Sequence[Rules] = (InductorRules(),)
    overlay = True  # locks, and sources where they are missing
    refuses_compilers = True
    misses_repeat = True

    def environment(self, stores: Path, private: Path) -> dict[str, str]:
        return {**SETTINGS, "TORCHINDUCTOR_CACHE_DIR": str(stores / NAME)}

    def check_environment(self, environ: Mapping[str, str]) -> None:
        for name, ours in SETTINGS.items():
            said = environ.get(name, ours)
            if said != ours:
                raise Usage(
                    f"{name} is {said!r}, and Inductor's own cache can only be kept and proved with {ours!r}",
                    hint=f"unset {name}",
                    details={"variable": name, "said": said, "needed": ours},
                )

    def refusing(self, environ: Mapping[str, str], private: Path, mark: Path) -> dict[str, str]:
        return {}  # the audit hook of each rank sees g++ before it starts

    def refused(self, private: Path) -> list[str]:
        return []

    def says(self, environ: Mapping[str, str]) -> str:
        return "before a compiler starts"

    def apart(
        self, environ: Mapping[str, str], target: str, lnc: int, note: Callable[[str], None]
    ) -> dict[str, str] | None:
        return None  # a compile of Inductor is a run

    def measured(self, environ: Mapping[str, str], counts: Iterable[Mapping[str, int]]) -> None: ...

    def counters(self, *, names: bool = True) -> Counters:
        """From `torch._dynamo.utils.counters`, and `torch.compiler.save_cache_artifacts`, which names the entries.

        A graph is compiled when FxGraphCache misses or is bypassed. AOTAutograd's misses cost a trace, not a compile.
        """
        if "torch._dynamo.utils" not in sys.modules:
            return Counters(0, 0, 0, frozenset() if names else None)
        from torch._dynamo.utils import counters

        graphs, around = counters["inductor"], counters["aot_autograd"]
        detail = {
            **{f"fxgraph_cache_{what}": graphs.get(f"fxgraph_cache_{what}", 0) for what in ("hit", "miss", "bypass")},
            **{f"autograd_cache_{what}": around.get(f"autograd_cache_{what}", 0) for what in ("hit", "miss", "bypass")},
        }
        keys, others = _entries() if names else (None, frozenset[str]())
        return Counters(
            compiles=detail["fxgraph_cache_miss"] + detail["fxgraph_cache_bypass"],
            hits=detail["fxgraph_cache_hit"],
            misses=detail["autograd_cache_miss"],
            keys=keys,
            others=others,
            detail=detail,
        )


def _entries() -> tuple[frozenset[str], frozenset[str]]:
    """The keys of the graphs and of the AOTAutograd entries that this process read or wrote."""
    import torch

    saved: Any = torch.compiler.save_cache_artifacts()
    if saved is None:
        return frozenset(), frozenset()
    _, info = saved
    return frozenset(info.inductor_artifacts), frozenset(info.aot_autograd_artifacts)
