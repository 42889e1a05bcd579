"""Compiles on a Dask cluster (`dask://host:port`): the same units, the same pool; Dask schedules and moves bytes.

Each unit runs in a process of its own beside its Dask worker (`unit`): the worker's threads and its environment do not
reach the compiler. When a worker is lost, Dask gives its units to another one.
Inputs and outputs travel by value; with `?through=store` the workers see this store's directory under the same path,
and only names travel. Checked on distributed 2026.8.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from neffcache import __version__
from neffcache.compile import unit as units
from neffcache.compile.failures import failure
from neffcache.compile.toolchain import Compiled, CompileRequest
from neffcache.errors import CompileFailed, Mismatch, NeffcacheError, Unsupported, Usage, revive

SCHEME = "dask"
CONNECT_SECONDS = 30


@dataclass(frozen=True)
class Address:
    """Where the scheduler listens, and whether files travel by value or lie in a store that all see."""

    host: str
    port: int
    through_store: bool

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises Usage unless it is `dask://host:port`, with or without `?through=value|store`."""
        parts = urlsplit(text)
        asked = parse_qs(parts.query)
        through = asked.pop("through", ["value"])[-1]
        try:
            port = parts.port
        except ValueError:
            port = None
        wrong = parts.scheme != SCHEME or not parts.hostname or port is None or parts.path not in ("", "/") or asked
        if wrong or through not in ("value", "store"):
            raise Usage(
                f"an executor is `local` or dask://host:port, not {text!r}",
                hint="dask://scheduler:8786, or dask://scheduler:8786?through=store where the workers share the store",
            )
        assert parts.hostname is not None
        assert port is not None
        return cls(parts.hostname, port, through == "store")

    def __str__(self) -> str:
        return f"{SCHEME}://{self.host}:{self.port}"


def remote_unit(unit: Mapping[str, Any], payload: bytes | None, place: str | None, topic: str) -> dict[str, Any]:
    """Runs in a thread of a Dask worker: one unit, by value (`payload`) or in the shared directory `place`.

    By value the result document holds `files`: name -> bytes.
    """
    from distributed import get_worker

    worker = get_worker()
    worker.log_event(topic, {"compile_key": unit["request"]["compile_key"], "worker": worker.address})
    mark = f"unit-{secrets.token_hex(12)}"
    if place is not None:
        shared = Path(place)
        if not (shared / "payload").is_file():
            return units.fault_document(
                CompileFailed(
                    f"the Dask worker {worker.address} does not see the store: there is no {shared}",
                    hint="mount the store there under the same path, or leave ?through=store out",
                    details={"class": "broken"},
                )
            )
        # A unit that Dask gives to a second worker starts anew, whatever the first has left.
        own = Path(tempfile.mkdtemp(prefix="unit-", dir=shared))
        os.link(shared / "payload", own / "payload")
        return {**units.run(unit, own, mark), "place": own.name}
    assert payload is not None
    with tempfile.TemporaryDirectory(prefix="neffcache-unit-", ignore_cleanup_errors=True) as name:
        own = Path(name)
        (own / "payload").write_bytes(payload)
        document = units.run(unit, own, mark)
        if "error" not in document:
            wanted = [source for _, _, source, _ in document["products"]]
            wanted += [] if document["log"] is None else [document["log"]]
            document["files"] = {each: (own / each).read_bytes() for each in wanted}
        return document


def _version() -> str:
    """On a worker: which neffcache it imports."""
    return __version__


@dataclass
class Cluster:
    """See `pool.Executor`. All requests are handed over at once, longest first; Dask keeps that order."""

    address: Address
    slots: int
    environment: Mapping[str, str]
    compiler: str
    shares_memory: bool = False
    lost: tuple[type[BaseException], ...] = (CancelledError,)
    workers: int = 0
    _client: Any = None
    _topic: str = field(default_factory=lambda: f"neffcache-{secrets.token_hex(6)}")
    _futures: dict[int, Any] = field(default_factory=dict)
    _keys: dict[str, str] = field(default_factory=dict)

    def connect(self) -> int:
        """Connect; how many compiles run at once there now. Raises Unsupported, CompileFailed."""
        try:
            from distributed import Client
            from distributed.scheduler import KilledWorker
        except ImportError:
            raise Unsupported("a Dask cluster needs the extra dask", hint="pip install 'neffcache[dask]'") from None
        self.lost = (CancelledError, KilledWorker)
        try:
            self._client = Client(  # type: ignore[no-untyped-call,unused-ignore]
                f"tcp://{self.address.host}:{self.address.port}", timeout=CONNECT_SECONDS, set_as_default=False
            )
        except (OSError, TimeoutError) as fault:
            raise CompileFailed(
                f"no Dask scheduler answers at {self.address}: {fault}", hint="start it with `dask scheduler`"
            ) from None
        try:
            return self._threads()
        except BaseException:
            self._client.close()
            raise

    def _threads(self) -> int:
        threads: Mapping[str, int] = self._client.nthreads()
        if not threads:
            raise CompileFailed(
                f"the Dask cluster at {self.address} has no workers", hint="start some with `dask worker`"
            )
        versions: Mapping[str, Any] = self._client.run(_version, on_error="return")
        for worker, version in versions.items():
            if version != __version__:
                raise Mismatch(
                    f"the Dask worker {worker} has neffcache {version}, here is {__version__}",
                    hint="install the same version for every worker",
                )
        self.workers = len(threads)
        return sum(threads.values())

    def open(self, started: Callable[[str, str], None]) -> None:
        if self._client is None:
            self.connect()

        def told(event: tuple[float, Mapping[str, str]]) -> None:
            _, message = event
            started(message["compile_key"], message["worker"])

        self._client.subscribe_topic(self._topic, told)

    def ready(self, slot: int) -> bool:
        return True

    def submit(self, slot: int, request: CompileRequest, into: Path) -> Future[Compiled | NeffcacheError]:
        into.mkdir(parents=True, exist_ok=True)
        unit = units.describe(request, self.compiler, self.environment)
        payload: bytes | None = None
        if self.address.through_store:
            try:
                os.link(request.payload, into / "payload")
            except OSError:
                shutil.copyfile(request.payload, into / "payload")
        else:
            payload = request.payload.read_bytes()
        place = os.fspath(into) if self.address.through_store else None
        future = self._client.submit(
            remote_unit,
            unit,
            payload,
            place,
            self._topic,
            key=f"{into.name}-{secrets.token_hex(4)}",
            pure=False,
            priority=-len(self._keys),  # in the order in which they are handed over
        )
        self._keys[into.name] = future.key
        self._futures[slot] = future
        outcome: Future[Compiled | NeffcacheError] = Future()
        future.add_done_callback(lambda done: _follow(done, outcome, request, into))
        return outcome

    def kill(self, slot: int) -> None:
        with contextlib.suppress(Exception):
            self._futures[slot].cancel(force=True)

    def last_words(self, slot: int) -> str:
        return f"this unit lost more than its Dask workers at {self.address}; their logs say more"

    def close(self, *, idle: bool) -> None:
        if self._client is None:
            return
        if not idle:
            with contextlib.suppress(Exception):
                self._client.cancel(list(self._futures.values()), force=True)
        with contextlib.suppress(Exception):
            self._client.close()


def _follow(future: Any, outcome: Future[Compiled | NeffcacheError], request: CompileRequest, into: Path) -> None:
    """Fetch what Dask's future holds, write its files, and settle ours; in a thread of Dask's."""
    try:
        outcome.set_result(_received(future.result(), request, into))
    except BaseException as fault:
        outcome.set_exception(fault)


def _received(document: Mapping[str, Any], request: CompileRequest, into: Path) -> Compiled | NeffcacheError:
    if "error" in document:
        return revive(document["error"])
    if "files" not in document:
        return units.compiled(document, into / document["place"])
    for name, data in document["files"].items():
        target = into / name
        if not target.resolve().is_relative_to(into.resolve()):
            return failure("broken", f"a Dask worker sent a file that leaves its place: {name}", name=request.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return units.compiled(document, into)
