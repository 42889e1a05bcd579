"""What every toolchain is: its identity, and the capabilities that are asked for, never inferred from its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from neffcache.key.canonical import digest
from neffcache.store.native import Rules


@dataclass(frozen=True)
class Identity:
    """What compiles, and the framework around it.

    `value` is JSON and goes whole into the toolchain id; `versions` is for people and for checks at run time.
    """

    name: str
    value: Mapping[str, Any]
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """The toolchain id: SHA-256 of the canonical JSON of the value."""
        return digest(self.value)


@dataclass(frozen=True)
class CompileRequest:
    """One graph to compile. `payload` is a file of `graph.payload.pack`; `settings` those of its capture.

    `toolchain` is the identity's value that is in the compile key: a worker that is not it must refuse.
    """

    compile_key: str
    name: str
    payload: Path
    settings: Mapping[str, Any]
    toolchain: Mapping[str, Any]


@dataclass(frozen=True)
class Product:
    """One file that a compile made: for store `store`, at `path` below it; `source` is where it lies now."""

    store: str
    path: str
    source: Path
    mode: int = 0o444


@dataclass(frozen=True)
class Compiled:
    """What a compile gave. `seconds` is wall time, `peak_bytes` the worker's resident peak."""

    compile_key: str
    products: Sequence[Product]
    seconds: float
    peak_bytes: int


class Toolchain(Protocol):
    """A compiler and its framework."""

    name: str
    capabilities: frozenset[str]  # "compile_graph": a graph in, artifacts out; "native_store": it owns a cache

    def identity(self, environ: Mapping[str, str], world_size: int) -> Identity: ...

    def environment(self, environ: Mapping[str, str], world_size: int) -> dict[str, str]: ...


@dataclass(frozen=True)
class Counters:
    """What a compiler says of one process, since that process started.

    `compiles` are compilations that it began, whatever came of them; `hits` and `misses` are look-ups in its own cache
    (a miss need not compile: a rank may wait for a sibling); `keys` its own names of the graphs that this process used,
    None when it does not tell, and `others` those of its other entries; `errors` are compile errors that it met;
    `detail` is every count that it gave.
    """

    compiles: int
    hits: int
    misses: int
    keys: frozenset[str] | None = None
    others: frozenset[str] = frozenset()
    errors: int = 0
    detail: Mapping[str, int] = field(default_factory=dict)


class NativeStore(Protocol):
    """The capability `native_store`: a compiler that owns cache directories.

    Modules that implement it import no torch at their top: only `counters` runs in a training process, and while the
    compiler is not imported there it imports nothing and counts nothing.
    """

    rules: Sequence[Rules]
    """One for each directory; a directory lies at <stores>/<rules.name>."""

    overlay: bool
    """Whether the compiler writes into its directories even when all is there (locks): each run gets its own copy."""

    refuses_compilers: bool
    """Whether a compile is known before it begins (a compiler process that the audit hook sees), so that a strict run
    ends before it. Without it `counters` are watched each second, and one compile may begin."""

    misses_repeat: bool
    """Whether each run from a complete view has exactly the misses of the replay; not where ranks wait for another."""

    def environment(self, stores: Path, private: Path) -> dict[str, str]:
        """The variables that point the compiler to its directories below `stores`, set before Python starts.

        What must be writable and local to this host (lock directories) goes below `private`.
        """
        ...

    def check_environment(self, environ: Mapping[str, str]) -> None:
        """Refuse settings of the user under which the compiler would not use these directories. Raises Usage."""
        ...

    def counters(self, *, names: bool = True) -> Counters:
        """Read in the training process at any time; without `names` (no keys) cheap enough for once a second."""
        ...
