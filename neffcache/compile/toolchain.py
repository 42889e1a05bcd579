"""What every toolchain is: its identity, and the capabilities that are asked for, never inferred from its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from neffcache.key.canonical import digest


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
