"""The caches that Neuron's packages keep on disk: which files are one entry, and whether that is a result.

| layout | an entry | is a result when |
|---|---|---|
| torchneuron | `ab/cd/<32 hex>.neff` | it is there: it appears by rename |
| torchneuron-older | `<hash>/<hash>.neff` | it is there: it appears by rename |
| libneuronxla | `neuronxcc-<version>/MODULE_<graph>+<flags>/` | `model.done` and `model.neff` are there |
| vllm | `<32 hex>/` | `.compilation_complete` and a NEFF are there |

Any folders may lie above an entry: caches that each rank has for itself hold the same entries. Where the layouts are
documented docs/how-to/import.md says. What a file holds is looked at besides; see `check_of`.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from neffcache.compile.neuron import neff
from neffcache.compile.neuron.environment import NEFF_DIR, XLA_URL
from neffcache.compile.neuron.installation import Stack
from neffcache.store.records import Artifact

Layout = Literal["torchneuron", "torchneuron-older", "libneuronxla", "vllm"]
STORES: Mapping[Layout, str] = {
    "torchneuron": "neff",
    "torchneuron-older": "neff",
    "libneuronxla": "xla",
    "vllm": "vllm",
}
"""Every layout -> the store that its files have in manifests and views."""

VARIABLES: Mapping[Layout, str] = {
    "torchneuron": NEFF_DIR,
    "torchneuron-older": NEFF_DIR,
    "libneuronxla": XLA_URL,
    "vllm": "NEURON_LIBTORCH_REMOTE_CACHE",
}
"""Layout -> the variable that points its package to a directory of it."""

READS: Mapping[Stack, Layout] = {"native": "torchneuron", "xla": "libneuronxla"}
"""What the installed torch_neuronx reads."""

REASONS: Mapping[str, str] = {
    "failed": "the compile failed: a log and no NEFF",
    "locked": "a lock and no result: being compiled, or its compiler was killed",
    "incomplete": "no mark of success, or no NEFF",
    "empty": "a file of 0 bytes that must hold something",
    "truncated": "cut off, or no NEFF at all",
    "differs": "another copy of the same entry came first, with other content",
    "moving": "changed or vanished while it was read",
    "unreadable": "permission is denied, or the device reports an error",
    "link": "a symbolic link, which is never followed",
    "hard-link": "a file that has another name outside of the source",
    "special": "a pipe, socket or device",
    "huge": "larger than any NEFF, and than a bundle can hold",
    "name": "a path that could leave its directory, or cannot be printed",
    "lock": "a lock beside results",
    "log": "a compiler's log",
    "temporary": "a temporary or hidden file",
    "foreign": "of no layout that is known",
}
"""Why something is left out."""

DONE, NEFF, LOG = "model.done", "model.neff", "model.log"
XLA_FILES = (NEFF, "model.hlo_module.pb", "model.hlo.pb", "wrapped_neff.hlo", "compile_flags.json")
XLA_MARKERS = (DONE, "compile_flags.txt")  # may be empty
COMPLETE = ".compilation_complete"
_VLLM_FILES = frozenset({COMPLETE, "graph.hlo", ".artifact_metadata_v0.json", "command.txt"})
_VLLM_LOG = "log-neuron-cc.txt"

_ABOVE = r"((?:[^/]+/)*)"
_XLA = re.compile(_ABOVE + r"(neuronxcc-[^/]+/MODULE_[^/]+)/(.+)", re.DOTALL)
_SHARDED = re.compile(_ABOVE + r"([0-9a-f]{2})/([0-9a-f]{2})/(\2\3[0-9a-f]{28}\.neff)")
_HASHED = re.compile(_ABOVE + r"([0-9a-f]{64}|[0-9a-f]{32})/(.+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a path belongs: `kind` of entry, the folders `above` it, its `entry` path and the `file` in it."""

    kind: Literal["xla", "sharded", "hashed"]
    above: str
    entry: str
    file: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an entry is. A result has a `layout`, the files to `keep` (the NEFF first) and the reason for each other
    file in `beside`; for anything else `reason` holds for all of it.
    """

    layout: Layout | None
    reason: str = ""
    keep: tuple[str, ...] = ()
    beside: Mapping[str, str] = field(default_factory=dict)


class Wrong(Exception):
    """The content of a file is not what its entry needs; `reason` is one of `REASONS`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Check(Protocol):
    """Looks at a file's bytes while they pass. Both raise Wrong."""

    def feed(self, chunk: bytes) -> None: ...

    def end(self) -> None: ...


def spot(path: str) -> Spot | None:
    """Where a path relative to the source belongs, None when no layout knows it."""
    if match := _XLA.fullmatch(path):
        return Spot("xla", match[1], match[2], match[3])
    if match := _SHARDED.fullmatch(path):
        return Spot("sharded", match[1], f"{match[2]}/{match[3]}/{match[4]}", match[4])
    if match := _HASHED.fullmatch(path):
        return Spot("hashed", match[1], match[2], match[3])
    return None


def judge(where: Spot, sizes: Mapping[str, int]) -> Verdict:
    """What the entry of a spot is, by the names and sizes (bytes) of all its files."""
    if where.kind == "xla":
        return _judge_xla(sizes)
    if where.kind == "sharded":
        empty = not sizes[where.file]
        return Verdict(None, "empty") if empty else Verdict("torchneuron", keep=(where.file,))
    own = f"{where.entry}.neff"
    if own in sizes:
        beside = {name: beside_reason(name) for name in sizes if name != own}
        return Verdict("torchneuron-older", keep=(own,), beside=beside) if sizes[own] else Verdict(None, "empty")
    if len(where.entry) == 32 and (sizes.keys() & _VLLM_FILES or f"graph_{where.entry}.neff" in sizes):
        return _judge_vllm(sizes)
    reasons = {beside_reason(name) for name in sizes}
    return Verdict(None, "foreign" if "foreign" in reasons else "incomplete")


def _judge_xla(sizes: Mapping[str, int]) -> Verdict:
    if DONE not in sizes or NEFF not in sizes:
        return Verdict(None, _unfinished(sizes, LOG if NEFF not in sizes else ""))
    keep = tuple(name for name in (*XLA_FILES, *XLA_MARKERS) if name in sizes)
    if any(not sizes[name] for name in keep if name not in XLA_MARKERS):
        return Verdict(None, "empty")
    return Verdict("libneuronxla", keep=keep, beside={name: beside_reason(name) for name in sizes if name not in keep})


def _judge_vllm(sizes: Mapping[str, int]) -> Verdict:
    # Its files are not all documented: whatever is no lock, log or temporary belongs to it.
    keep = [name for name in sizes if name in _VLLM_FILES or (beside_reason(name) == "foreign" and "/" not in name)]
    neffs = [name for name in keep if name.endswith(".neff")]
    if COMPLETE not in sizes or not neffs:
        return Verdict(None, _unfinished(sizes, ""))
    if any(not sizes[name] for name in neffs):
        return Verdict(None, "empty")
    ordered = (*sorted(neffs), *sorted(set(keep) - {*neffs, COMPLETE}), COMPLETE)
    return Verdict("vllm", keep=ordered, beside={name: beside_reason(name) for name in sizes if name not in keep})


def _unfinished(names: Iterable[str], log: str) -> str:
    if log in names:
        return "failed"
    return "locked" if any(name.endswith(".lock") for name in names) else "incomplete"


def beside_reason(path: str) -> str:
    """Why a file that is no part of a result is left out."""
    name = path.rpartition("/")[2]
    if name.endswith(".lock"):
        return "lock"
    if name.endswith(".log") or name == _VLLM_LOG:
        return "log"
    return "temporary" if name.startswith(".") or re.search(r"\.tmp(\.|$)", name) else "foreign"


def compiler_of(layout: Layout, entry: str) -> str | None:
    """The version of neuronx-cc that made an entry, where its path says it."""
    return entry.partition("/")[0].removeprefix("neuronxcc-") if layout == "libneuronxla" else None


def path_of(layout: Layout, entry: str, file: str) -> str:
    """Where a file of an entry lies in its store."""
    return entry if layout == "torchneuron" else f"{entry}/{file}"


def key_of(entry: str) -> str:
    """The package's own key of the graph that an entry was compiled from."""
    return entry.rpartition("/")[2].removesuffix(".neff")


def of_artifact(item: Artifact) -> tuple[Layout, str] | None:
    """The layout and entry that an artifact of a manifest belongs to, None for what no layout has."""
    where = spot(item.path)
    if where is None or where.above:
        return None
    layouts: Mapping[tuple[str, str], Layout] = {
        ("neff", "sharded"): "torchneuron",
        ("neff", "hashed"): "torchneuron-older",
        ("xla", "xla"): "libneuronxla",
        ("vllm", "hashed"): "vllm",
    }
    layout = layouts.get((item.store, where.kind))
    return None if layout is None else (layout, where.entry)


def check_of(layout: Layout, file: str, sizes: Mapping[str, int]) -> Check | None:
    """What the bytes of a kept file have to pass; None: anything will do. `sizes` are those of its entry's files."""
    if file.endswith(".neff"):
        return _NeffCheck(sizes[file])
    if layout == "libneuronxla" and file in ("model.hlo.pb", "model.hlo_module.pb"):
        return _GzipCheck()
    return _MarkCheck({sizes[name] for name in sizes if name.endswith(".neff")}) if file == COMPLETE else None


class _NeffCheck:
    def __init__(self, size: int) -> None:
        self._size, self._start, self._looked = size, b"", False

    def feed(self, chunk: bytes) -> None:
        if not self._looked:
            self._start += bytes(chunk[: neff.START])
            if len(self._start) >= neff.START:
                self._look()

    def end(self) -> None:
        if not self._looked:
            self._look()

    def _look(self) -> None:
        self._looked = True
        if neff.wrong_start(self._start, self._size):
            raise Wrong("truncated")


class _GzipCheck:
    """HLO may be compressed. What begins as gzip does must end as one, too."""

    MAGIC = b"\x1f\x8b\x08"
    PIECE = 1 << 20

    def __init__(self) -> None:
        self._stream: zlib._Decompress | None = None
        self._first = True

    def feed(self, chunk: bytes) -> None:
        if self._first:
            self._first = False
            if chunk.startswith(self.MAGIC):
                self._stream = zlib.decompressobj(wbits=31)
        if self._stream is None or self._stream.eof:
            return
        try:
            self._stream.decompress(chunk, self.PIECE)
            while self._stream.unconsumed_tail and not self._stream.eof:  # never more than a piece in memory
                self._stream.decompress(self._stream.unconsumed_tail, self.PIECE)
        except zlib.error:
            raise Wrong("truncated") from None

    def end(self) -> None:
        if self._stream is not None and not self._stream.eof:
            raise Wrong("truncated")


class _MarkCheck:
    """vLLM's mark of success says how many bytes the NEFF has."""

    _SIZE = re.compile(rb"^neff_size:(\d+)\s*$", re.MULTILINE)

    def __init__(self, neffs: set[int]) -> None:
        self._neffs, self._text = neffs, b""

    def feed(self, chunk: bytes) -> None:
        self._text += bytes(chunk[: max(0, 4096 - len(self._text))])

    def end(self) -> None:
        said = self._SIZE.search(self._text)
        if said is not None and int(said[1]) not in self._neffs:
            raise Wrong("truncated")
