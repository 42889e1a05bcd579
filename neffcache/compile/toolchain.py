"""What every toolchain is: its identity, and the capabilities that are asked for, never inferred from its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """One graph to compile. `payload` is a file of `graph.payload.pack`, or IR; `settings` are JSON for the compiler.

    `toolchain` is the identity's value that is in the compile key: a worker that is not it must refuse.
    `time_limit` is in seconds (None: none), `peak_bytes` the memory that it is expected to take.
    """

    compile_key: str
    name: str
    payload: Path
    settings: Mapping[str, Any]
    toolchain: Mapping[str, Any]
    time_limit: float | None = None
    peak_bytes: int = 0


@dataclass(frozen=True)
class Product:
    """One file that a compile made: for store `store`, at `path` below it; `source` is where it lies now."""

    store: str
    path: str
    source: Path
    mode: int = 0o444


@dataclass(frozen=True)
class Compiled:
    """What a compile gave.

    `seconds` is wall time, `peak_bytes` the resident peak of the compiler and its children; `log` is what it said.
    """

    compile_key: str
    products: Sequence[Product]
    seconds: float
    peak_bytes: int
    log: Path | None = None


class Toolchain(Protocol):
    """A compiler and its framework, for one request."""

    name: str
    capabilities: frozenset[str]  # "compile_graph": a graph in, artifacts out; "native_store": it owns a cache

    harness: bool
    """Whether the CPU stands for TorchTitan's device."""

    @property
    def first_line(self) -> str:
        """What every command that uses the toolchain says first: what its artifacts are."""
        ...

    def identity(self, environ: Mapping[str, str], world_size: int) -> Identity: ...

    def environment(self, environ: Mapping[str, str], world_size: int) -> dict[str, str]:
        """What every process of the job must see before Python starts. Raises Usage for a contradiction."""
        ...

    def cleared(self) -> tuple[str, ...]:
        """Variables that no process of the job may see."""
        ...

    def settings(self, said: Mapping[str, Any]) -> dict[str, Any]:
        """TorchTitan options that it needs besides those that the user `said`. Raises Usage for a contradiction."""
        ...


@dataclass(frozen=True)
class Counters:
    """What a compiler says of one process, since that process started.

    `compiles` are compilations that it began, whatever came of them; `hits` and `misses` are look-ups in its own cache
    (a miss need not compile: a rank may wait for a sibling); `keys` its own names of the graphs that this process used,
    None when it does not tell, and `others` those of its other entries; `errors` are compile errors that it met;
    `detail` is every count that it gave; `labels` says of a key what it is, as far as the compiler tells.
    """

    compiles: int
    hits: int
    misses: int
    keys: frozenset[str] | None = None
    others: frozenset[str] = frozenset()
    errors: int = 0
    detail: Mapping[str, int] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


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

    def refusing(self, environ: Mapping[str, str], private: Path, mark: Path) -> dict[str, str]:
        """Variables under which compiler processes refuse to compile, for a strict run; {} where it cannot be had.

        A refusal makes the file `mark`; `refused` tells what was asked.
        """
        ...

    def refused(self, private: Path) -> list[str]:
        """Command lines of compiles that were refused in the run of that private directory."""
        ...

    def says(self, environ: Mapping[str, str]) -> str:
        """When a strict run learns of a compile, as the report says it."""
        ...

    def apart(
        self, environ: Mapping[str, str], target: str, lnc: int, note: Callable[[str], None]
    ) -> dict[str, str] | None:
        """Variables under which a rank alone, in a fake process group, compiles and executes nothing; None: it cannot.

        Raises Unsupported when a warm can neither do that nor run the job on this host.
        """
        ...

    def measured(self, environ: Mapping[str, str], counts: Iterable[Mapping[str, int]]) -> None:
        """Remember on this host what the compiles of a warm took; `counts` are the `detail` of each rank."""
        ...

    def counters(self, *, names: bool = True) -> Counters:
        """Read in the training process at any time; without `names` (no keys) cheap enough for once a second."""
        ...
