"""Single IR files (StableHLO or HLO), whoever dumped them, to NEFFs in the store: `neffcache compile FILE...`.

A file's compile key counts its bytes, the compiler, target, LNC, options and environment. It names no job: the NEFF is
found again by this command, not by a training process.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neffcache.compile.neuron import driver
from neffcache.compile.pool import Event
from neffcache.compile.toolchain import Compiled, CompileRequest, Identity
from neffcache.errors import NeffcacheError, Unsupported, Usage
from neffcache.flows.compiling import How, Tally, Unit, check_executor, compile_units
from neffcache.flows.shards import Shard
from neffcache.flows.workers import scratch
from neffcache.key.canonical import digest, sha256_hex
from neffcache.key.environment import graph_environment
from neffcache.key.job import CompileComponents, compile_key
from neffcache.key.options import Options
from neffcache.key.target import Placement, resolve_placement
from neffcache.store.local import LocalStore
from neffcache.store.records import Artifact, Damaged, GraphRecord

KIND = "ir"
BYTES_PER_OPERATION = 64
"""How many bytes of a binary IR count as one operation, so that sizes can be compared with those of text."""

BYTECODE = b"ML\xefR"


@dataclass(frozen=True)
class IrFile:
    """One IR file and what its compile key is made of. `nodes` is its number of operations (binary: a guess)."""

    path: Path
    name: str
    text: str
    components: CompileComponents
    key: str
    nodes: int


@dataclass
class CompiledFiles:
    """What came of all files; total = hit + compiled + failed + skipped, counted once a different graph."""

    files: Sequence[IrFile]
    identity: Identity
    placement: Placement
    options: Options
    hits: set[str] = field(default_factory=set)
    others: int = 0
    tally: Tally = field(default_factory=Tally)
    records: dict[str, GraphRecord] = field(default_factory=dict)
    total_seconds: float = 0.0
    shard: Shard | None = None

    @property
    def total(self) -> int:
        return len({file.key for file in self.files})

    @property
    def fault(self) -> NeffcacheError | None:
        return self.tally.fault("these files", self.total)

    def counts(self) -> dict[str, int]:
        return {
            "total": self.total,
            "hit": len(self.hits),
            "compiled": self.tally.compiled,
            "failed": self.tally.failed,
            "skipped": self.tally.skipped + self.others,
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "toolchain": self.identity.name,
            "toolchain_id": self.identity.id,
            "compiler": self.identity.versions["compiler"],
            "target": self.placement.target,
            "lnc": self.placement.lnc,
            "options": list(self.options.tokens),
            "dropped_options": [item.to_json() for item in self.options.dropped],
            "graphs": self.counts(),
            "seconds": {"compile": round(self.tally.seconds, 3), "total": round(self.total_seconds, 3)},
            "peak_rss_bytes": self.tally.peak_bytes,
            "workers": self.tally.workers,
            "retries": self.tally.retries,
            "remembered": self.tally.remembered,
            "adopted": self.tally.adopted,
            "shard": None if self.shard is None else str(self.shard),
            "files": [self._file(item) for item in self.files],
            "stopped": None if self.tally.stopped is None else self.tally.stopped.to_json(),
            "failures": [fault.to_json() for fault in self.tally.failures],
        }

    def state(self, key: str) -> str:
        if key in self.hits:
            return "hit"
        if key in self.records:
            return "compiled"
        return "failed" if any(f.details.get("compile_key") == key for f in self.tally.failures) else "skipped"

    def _file(self, item: IrFile) -> dict[str, Any]:
        record = self.records.get(item.key)
        neff = None if record is None else {"sha256": record.artifacts[0].sha256, "bytes": record.artifacts[0].size}
        return {
            "file": str(item.path),
            "compile_key": item.key,
            "state": self.state(item.key),
            "seconds": None if record is None else record.seconds,
            "peak_bytes": None if record is None else record.peak_bytes,
            "neff": neff,
            "log": None if record is None else record.extra.get("log"),
        }


def compile_files(
    paths: Sequence[Path],
    store: LocalStore,
    environ: Mapping[str, str],
    *,
    target: str | None = None,
    lnc: int | None = None,
    options: Sequence[str] = (),
    how: How | None = None,
    shard: Shard | None = None,
    out: Path | None = None,
    begin: Callable[[Iterable[IrFile], set[str]], None] = lambda files, hits: None,
    event: Callable[[Event], None] = lambda _: None,
) -> CompiledFiles:
    """Compile the files that have no record yet; `out` gets a copy of every NEFF, named after its file.

    Raises Usage for a file that is no IR, Unsupported without a compiler; a file that fails is in the result.
    """
    how = how or How()
    check_executor(how.executor)
    started = time.monotonic()
    flags = environ.get("NEURON_CC_FLAGS")
    parsed = Options.parse([*([flags] if flags else []), *options])
    placement = resolve_placement(
        target=target, lnc=lnc, world_size=1, environ=environ, option_lnc=parsed.lnc, option_target=parsed.target
    )
    if placement.target == "cpu":
        raise Unsupported("neuronx-cc makes nothing for a CPU", hint="--target trn1, trn2 or trn3")
    final = parsed.for_placement(placement.target, placement.lnc)
    identity = driver.identity(environ)
    files = [ir_file(path, identity, placement, final, environ) for path in _distinct(paths)]
    result = CompiledFiles(files, identity, placement, final, shard=shard)
    by_key = {item.key: item for item in files}
    for key in by_key:
        if (record := usable_record(store, key)) is not None:
            result.hits.add(key)
            result.records[key] = record
    begin(by_key.values(), result.hits)
    missing = [item for key, item in by_key.items() if key not in result.hits]
    if shard is not None:
        mine = shard.mine({key: item.nodes for key, item in by_key.items()})
        result.others = sum(item.key not in mine for item in missing)
        missing = [item for item in missing if item.key in mine]
    with scratch(store.root / "tmp") as place:
        component = final.graph_component(environ)
        units = [_unit(item, result, store, component, place) for item in missing]
        result.tally = compile_units(
            units,
            store,
            how,
            family="neuron",
            toolchain_id=identity.id,
            environment={},
            compiler=driver.COMPILER,
            place=place,
            event=event,
        )
    if out is not None:
        _copy_out(result, store, out)
    result.total_seconds = time.monotonic() - started
    return result


def ir_file(
    path: Path, identity: Identity, placement: Placement, options: Options, environ: Mapping[str, str]
) -> IrFile:
    """Read one file. Raises Usage when it cannot be read or is empty."""
    try:
        data = path.read_bytes()
    except OSError as fault:
        raise Usage(f"{path} cannot be read: {fault.strerror}", hint="give files of StableHLO or HLO") from None
    if not data.strip():
        raise Usage(f"{path} is empty", hint="give files of StableHLO or HLO")
    components = CompileComponents(
        text=sha256_hex(data),
        toolchain=identity.id,
        env=digest(graph_environment(environ)),
        target=digest(placement.target_component()),
        # One graph: how many ranks the job has does not reach its compiler.
        lnc=digest({"lnc": placement.lnc}),
        options=digest(options.graph_component(environ)),
    )
    return IrFile(path, path.name, components.text, components, compile_key(components), operations(data))


def operations(data: bytes) -> int:
    """How many operations IR has: lines with an assignment in a text, else guessed from the size of a binary."""
    text = b"\0" not in data[:4096] and not data.startswith(BYTECODE)
    return max(1, data.count(b" = ") if text else len(data) // BYTES_PER_OPERATION)


def usable_record(store: LocalStore, key: str) -> GraphRecord | None:
    """The record of a key with all its files, or None; what is damaged goes to quarantine."""
    try:
        record = store.get_graph(key)
        whole = record is not None and all(store.check_blob(item.sha256) for item in record.artifacts)
        return record if whole else None
    except Damaged:
        return None


def _unit(item: IrFile, result: CompiledFiles, store: LocalStore, component: Mapping[str, Any], place: Path) -> Unit:
    """What is compiled is a copy that is checked against the key: the file may be written to meanwhile."""
    data = item.path.read_bytes()
    if sha256_hex(data) != item.text:
        raise Usage(f"{item.path} changed while it was read", hint="wait for whoever writes it")
    copy = place / "ir" / item.key
    copy.parent.mkdir(exist_ok=True)
    copy.write_bytes(data)
    level = [] if "optlevel" not in component else [f"--optlevel={component['optlevel']}"]
    arguments = driver.arguments(result.placement.target, result.placement.lnc, [*level, *component["options"]])
    request = CompileRequest(
        item.key,
        item.name,
        copy,
        {"arguments": arguments, "suffix": "".join(item.path.suffixes[-2:]) or ".mlir"},
        result.identity.value,
    )

    def keep(compiled: Compiled) -> GraphRecord:
        result.records[item.key] = _record(store, item, copy, compiled)
        return result.records[item.key]

    def adopt(record: GraphRecord) -> None:
        result.records[item.key] = record
        result.hits.add(item.key)

    return Unit(request, item.nodes, keep, adopt)


def _record(store: LocalStore, item: IrFile, copy: Path, compiled: Compiled) -> GraphRecord:
    with store.batch() as batch:
        text = batch.put_file(copy)
        said = {} if compiled.log is None else {"log": batch.put_file(compiled.log)}
        artifacts = tuple(
            Artifact(made.store, made.path, batch.put_file(made.source), made.source.stat().st_size, made.mode)
            for made in compiled.products
        )
    return store.put_graph(
        GraphRecord(
            compile_key=item.key,
            components=item.components.to_json(),
            kind=KIND,
            name=item.name,
            nodes=item.nodes,
            inputs=0,
            text=text,
            artifacts=artifacts,
            seconds=compiled.seconds,
            peak_bytes=compiled.peak_bytes,
            extra=said,
        )
    )


def _distinct(paths: Sequence[Path]) -> list[Path]:
    """The files, once each, and those of folders that were given, in order."""
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            found.update(dict.fromkeys(sorted(each for each in path.rglob("*") if each.is_file())))
        else:
            found[path] = None
    if not found:
        raise Usage("there are no files in what was given", hint="neffcache compile graphs/*.mlir")
    return list(found)


def _copy_out(result: CompiledFiles, store: LocalStore, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    taken: set[str] = set()
    for item in result.files:
        record = result.records.get(item.key)
        if record is None:
            continue
        name = f"{item.path.name.split('.')[0] or item.path.name}.neff"
        if name in taken:
            name = f"{name.removesuffix('.neff')}-{item.key[:12]}.neff"
        taken.add(name)
        temporary = out / f".{name}.tmp"
        shutil.copyfile(store.blob_path(record.artifacts[0].sha256), temporary)
        temporary.replace(out / name)
