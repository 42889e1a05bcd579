"""What a store remembers besides bytes: graph records, manifests, pointers and refs, and their JSON.

A record keeps the fields that it does not know in `extra`: a newer writer loses nothing through an older reader.
An unknown `schema` is refused. As bytes, graph records, pointers and refs carry a `seal`, the SHA-256 of the canonical
JSON of the rest: a flipped bit is damage, never another record. A manifest needs none, its id is its digest.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, Protocol, Self, TypeVar

import msgspec

from neffcache.errors import StoreFault
from neffcache.key.canonical import digest
from neffcache.store.ranks import expand_ranks as expand_ranks
from neffcache.store.ranks import fold_ranks as fold_ranks
from neffcache.store.ranks import has_rank, ranges

SCHEMA = 1

# Left out of a manifest's id: when, where and how fast, so that the same content has the same id everywhere.
# `packs` says where a remote keeps things, not what they are.
UNCOUNTED = frozenset({"id", "created", "host", "seconds", "peak_bytes", "measured", "seal", "packs"})

Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
Key128 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
Count = Annotated[int, msgspec.Meta(ge=0)]
Extra = Mapping[str, Any]

_STORE_NAME = re.compile(r"[a-z][a-z0-9_-]{0,63}", re.ASCII)
# What nearly every path of an artifact looks like, and nothing that could leave a directory: no part starts with a dot.
_USUAL_PATH = re.compile(r"[\w-][\w.-]{0,199}(?:/[\w-][\w.-]{0,199}){0,9}", re.ASCII)
_DAMAGED = "the record is damaged or was edited by hand; warm or pull again"


@dataclass(frozen=True, slots=True)
class Artifact:
    """One file that a compiler-owned store needs.

    `path` is relative inside `store`, `size` is in bytes, `mode` are permission bits. Raises StoreFault for a path that
    could leave its store.
    """

    store: str
    path: str
    sha256: Sha256
    size: Count
    mode: Annotated[int, msgspec.Meta(ge=0, le=0o777)]
    extra: Extra = field(default_factory=dict)

    def __post_init__(self) -> None:
        # A record made in Python is held to what a record that was read is held to.
        if not _STORE_NAME.fullmatch(self.store):
            raise StoreFault(f"{self.store[:80]!r} cannot be the name of a compiler's store", hint=_DAMAGED)
        check_relative_path(self.path)

    def to_json(self) -> dict[str, Any]:
        return _plain(self)

    @classmethod
    def from_json(cls, document: object) -> Self:
        """Raises Damaged for a wrong type, a missing field or a path that leaves its store."""
        return _convert(_artifact(document), cls)


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """What one graph compiled to.

    `components` are SHA-256 (None: does not reach this compiler), `text` is the blob of the graph text, `nodes` and
    `inputs` are counts, `seconds` is the compile's wall clock, `peak_bytes` the peak resident memory of its worker
    (None: not measured).
    """

    compile_key: Key128
    components: Mapping[str, Sha256 | None]
    kind: str
    name: str
    nodes: Count
    inputs: Count
    text: Sha256
    artifacts: tuple[Artifact, ...]
    seconds: float
    peak_bytes: Count | None
    extra: Extra = field(default_factory=dict)

    sealed: ClassVar[bool] = True

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **_plain(self)}

    @classmethod
    def from_json(cls, document: object) -> Self:
        """Raises Damaged for a wrong type, a missing field or a broken seal, StoreFault for an unknown schema."""
        own = _opened(document, cls)
        return _convert(_with_artifacts(own), cls)


@dataclass(frozen=True, slots=True)
class RankClass:
    """The ranks that share all their graphs (`ranks` like "0-63,128"), and their compile keys by phase."""

    ranks: str
    graphs: Mapping[str, tuple[Key128, ...]]
    extra: Extra = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return _plain(self)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one job's first step needs. `artifacts` are those of native stores; graphs bring their own in their records.

    `components` is {name: {"sha256", "value"}}, `environment` what the training process must see, `created` an RFC 3339
    time, `host` the kind of host only (never a name). Make one with `manifest(...)`, which computes the id.
    """

    id: Sha256
    cache_key: Key128
    components: Mapping[str, Mapping[str, Any]]
    request: Mapping[str, Any]
    complete: bool
    phases: tuple[str, ...]
    rank_classes: tuple[RankClass, ...]
    artifacts: tuple[Artifact, ...]
    environment: Mapping[str, str]
    versions: Mapping[str, Any]
    created: str
    host: Mapping[str, Any]
    extra: Extra = field(default_factory=dict)

    sealed: ClassVar[bool] = False

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **_plain(self)}

    @classmethod
    def from_json(cls, document: object) -> Self:
        """Raises Damaged for a wrong type or an id that is not its digest, StoreFault for an unknown schema."""
        own = _with_artifacts(_opened(document, cls))
        classes = own.get("rank_classes")
        if isinstance(classes, list):
            own["rank_classes"] = [_lift(item, RankClass) if isinstance(item, dict) else item for item in classes]
        made = _convert(own, cls)
        assert isinstance(document, Mapping)
        if manifest_id(document) != made.id:
            raise Damaged("a manifest's id is not the digest of its content", hint=_DAMAGED, details={"id": made.id})
        return made

    def compile_keys(self) -> tuple[str, ...]:
        """Every compile key of every phase and rank class, once, in order of first mention."""
        return tuple(dict.fromkeys(key for item in self.rank_classes for keys in item.graphs.values() for key in keys))

    def rank_class(self, rank: int) -> RankClass | None:
        """The class that `rank` belongs to, or None."""
        return next((item for item in self.rank_classes if has_rank(item.ranks, rank)), None)


@dataclass(frozen=True, slots=True)
class Ref:
    """A name in a channel for a manifest: the whole `request` that was typed, its job key and its manifest id.

    `serial` grows whenever the ref comes to name another manifest, so that an older state can be told from a newer one.
    """

    request: Mapping[str, Any]
    cache_key: Key128
    manifest: Sha256
    config: str
    serial: Count = 0
    extra: Extra = field(default_factory=dict)

    sealed: ClassVar[bool] = True

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **_plain(self)}

    @classmethod
    def from_json(cls, document: object) -> Self:
        """Raises Damaged for a wrong type or a broken seal, StoreFault for an unknown schema."""
        return _convert(_opened(document, cls), cls)


@dataclass(frozen=True, slots=True)
class KeyPointer:
    """The current manifest id of a job key."""

    cache_key: Key128
    manifest: Sha256
    extra: Extra = field(default_factory=dict)

    sealed: ClassVar[bool] = True

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **_plain(self)}

    @classmethod
    def from_json(cls, document: object) -> Self:
        """Raises Damaged for a wrong type or a broken seal, StoreFault for an unknown schema."""
        return _convert(_opened(document, cls), cls)


@dataclass(frozen=True, slots=True)
class Signatures:
    """What one signer says about one manifest; made and checked in `flows/trust.py`, kept here as it came.

    Each statement is {"channel", "request", "cache_key", "serial", "graphs", "signature"} and what newer versions add.
    `signer` is the beginning of the SHA-256 of the public key.
    """

    manifest: Sha256
    signer: Key128
    statements: tuple[Mapping[str, Any], ...]
    extra: Extra = field(default_factory=dict)

    sealed: ClassVar[bool] = True

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **_plain(self)}

    @classmethod
    def from_json(cls, document: object) -> Self:
        """Raises Damaged for a wrong type or a broken seal, StoreFault for an unknown schema."""
        return _convert(_opened(document, cls), cls)

    def united(self, other: Signatures) -> Signatures:
        """These statements and those of `other` that are not among them."""
        new = tuple(item for item in other.statements if item not in self.statements)
        return replace(self, statements=(*self.statements, *new)) if new else self


class Record(Protocol):
    """What can be written as one JSON file of a store."""

    sealed: ClassVar[bool]

    def to_json(self) -> dict[str, Any]: ...

    @classmethod
    def from_json(cls, document: object) -> Self: ...


class Damaged(StoreFault):
    """What is stored is not what was stored. A caller that has another source of the same content may heal it."""


RecordT = TypeVar("RecordT", bound=Record)
T = TypeVar("T")


def encode(record: Record) -> bytes:
    """The bytes of a record as every tier keeps them: sorted JSON, sealed unless its own id is its digest.

    Raises StoreFault when the record holds what JSON cannot.
    """
    document = record.to_json()
    if record.sealed:
        document["seal"] = _seal_of(document)
    try:
        # Indented by msgspec: `json` does it in Python, and a pull writes hundreds of records.
        text = json.dumps(document, sort_keys=True, ensure_ascii=False, allow_nan=False).encode()
        return msgspec.json.format(text, indent=1) + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreFault(f"a {type(record).__name__} holds what JSON cannot: {error}") from error


def decode(kind: type[RecordT], data: bytes) -> RecordT:
    """The record in `data`.

    Raises Damaged when it is not one (not JSON, wrong type, broken seal or id), StoreFault for an unknown schema.
    """
    try:
        document = json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"a {kind.__name__} is not JSON: {error}", hint=_DAMAGED) from error
    return kind.from_json(document)


def manifest_id(document: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical JSON of a manifest's document without id, time, host and measured fields (`UNCOUNTED`).

    Raises StoreFault when the document holds what JSON cannot.
    """
    return _digest({name: value for name, value in document.items() if name not in UNCOUNTED})


def is_collection(item: Manifest | Ref) -> bool:
    """Whether it is a named collection of files, which no job may take for its own."""
    return bool(item.request.get("collection"))


def manifest(
    *,
    cache_key: str,
    components: Mapping[str, Mapping[str, Any]],
    request: Mapping[str, Any],
    complete: bool,
    phases: Iterable[str],
    rank_classes: Iterable[RankClass],
    artifacts: Iterable[Artifact],
    environment: Mapping[str, str],
    versions: Mapping[str, Any],
    created: str,
    host: Mapping[str, Any],
    extra: Extra | None = None,
) -> Manifest:
    """A checked manifest with its id; native artifacts are sorted: the order of a directory walk does not count.

    Raises StoreFault for a wrong type or for what JSON cannot hold.
    """
    document = Manifest(
        id="0" * 64,
        cache_key=cache_key,
        components=components,
        request=request,
        complete=complete,
        phases=tuple(phases),
        rank_classes=tuple(rank_classes),
        artifacts=tuple(sorted(artifacts, key=lambda item: (item.store, item.path))),
        environment=environment,
        versions=versions,
        created=created,
        host=host,
        extra=dict(extra or {}),
    ).to_json()
    document["id"] = manifest_id(document)
    return Manifest.from_json(document)


def check_relative_path(path: str) -> str:
    """`path` itself when it is a plain relative POSIX path; StoreFault for anything that could leave a directory."""
    if _USUAL_PATH.fullmatch(path):
        return path
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or not path.isprintable() or "\\" in path:
        raise StoreFault(f"an artifact's path must stay inside its store: {path!r}", hint=_DAMAGED)
    # isprintable() has refused surrogates and control characters, so this encodes.
    if any(len(part.encode()) > 255 for part in parts) or len(path.encode()) > 3000:
        raise StoreFault(f"an artifact's path is longer than file systems take: {path[:80]!r}...", hint=_DAMAGED)
    return path


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _digest(document: Mapping[str, Any]) -> str:
    try:
        return digest(document)
    except (TypeError, ValueError, RecursionError) as error:  # rfc8785's own errors are ValueErrors
        raise StoreFault(f"a record holds what JSON cannot: {error}") from error


def _seal_of(document: Mapping[str, Any]) -> str:
    return _digest({name: value for name, value in document.items() if name != "seal"})


def _plain(record: Any) -> dict[str, Any]:
    """Known fields by name, unknown ones beside them as they came."""
    return {**record.extra, **{name: _value(getattr(record, name)) for name in _known(record.__class__)}}


@functools.cache
def _known(kind: type) -> dict[str, None]:
    """The names of the fields of a record in their order, without `extra`."""
    return {item.name: None for item in fields(kind) if item.name != "extra"}


def _value(value: Any) -> Any:
    if type(value) is str or type(value) is int:
        return value
    if isinstance(value, (Artifact, RankClass)):
        return value.to_json()
    if isinstance(value, (tuple, list)):
        return [_value(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _value(item) for name, item in value.items()}
    return value


def _opened(document: object, kind: type) -> dict[str, Any]:
    """The fields of `document` with unknown ones under "extra", its schema and seal checked and taken off."""
    if not isinstance(document, Mapping):
        raise Damaged(f"a {kind.__name__} must be a JSON object, not {type(document).__name__}", hint=_DAMAGED)
    # The seal first: a flipped bit in `schema` is damage, not a newer version. A missing seal is allowed, because the
    # documented format can be written by others.
    if getattr(kind, "sealed", False) and "seal" in document and document["seal"] != _seal_of(document):
        raise Damaged(f"a {kind.__name__} does not match its seal", hint=_DAMAGED)
    schema = document.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        raise StoreFault(
            f"a {kind.__name__} has schema {schema!r}; this version of neffcache reads schema {SCHEMA}",
            hint="upgrade neffcache, or warm again into another store",
            details={"schema": schema if isinstance(schema, (int, str)) else None},
        )
    return _lift({name: value for name, value in document.items() if name not in ("schema", "seal")}, kind)


def _lift(document: Mapping[str, Any], kind: type) -> dict[str, Any]:
    known = _known(kind)
    lifted = {name: value for name, value in document.items() if name in known}
    lifted["extra"] = {} if len(lifted) == len(document) else {n: v for n, v in document.items() if n not in known}
    return lifted


def _artifact(document: object) -> dict[str, Any]:
    if type(document) is not dict and not isinstance(document, Mapping):
        raise Damaged(f"an Artifact must be a JSON object, not {type(document).__name__}", hint=_DAMAGED)
    return _lift(document, Artifact)


def _with_artifacts(own: dict[str, Any]) -> dict[str, Any]:
    artifacts = own.get("artifacts")
    if isinstance(artifacts, list):
        own["artifacts"] = [_artifact(item) for item in artifacts]
    return own


def _convert(own: dict[str, Any], kind: type[T]) -> T:
    try:
        made = msgspec.convert(own, kind)
        if isinstance(made, Manifest):
            _check_manifest(made)
    except msgspec.ValidationError as error:
        raise Damaged(f"a {kind.__name__} is malformed: {error}", hint=_DAMAGED) from error
    except StoreFault as error:
        raise Damaged(error.message, hint=error.hint, details=error.details) from error
    return made


def _check_manifest(made: Manifest) -> None:
    for item in made.rank_classes:
        ranges(item.ranks)
    for name, component in made.components.items():
        if not re.fullmatch(r"[0-9a-f]{64}", str(component.get("sha256")), re.ASCII):
            raise StoreFault(f"component {name!r} of a Manifest has no SHA-256", hint=_DAMAGED)
