"""Parts for the tests of the commands: small stores made by hand, and the command line in this process."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from neffcache.cli.main import main
from neffcache.flows.request import Request, make_request
from neffcache.flows.resolve import Job
from neffcache.key.canonical import digest, sha256_hex, xxh3_128_hex
from neffcache.key.job import job_key
from neffcache.key.target import Mesh
from neffcache.store.local import LocalStore
from neffcache.store.records import Artifact, GraphRecord, Manifest, RankClass, Ref, manifest
from tests.store.conftest import child as child  # a fixture

CONFIG = "llama3_debugmodel"
VERSIONS = {"torch": "2.14.1", "torchtitan": "0.3.0", "compiler": "g++ 12"}
SAID = [word for name, text in VERSIONS.items() for word in ("--version-of", f"{name}={text}")]
"""The words that say by ref what the jobs here were warmed with."""
BY_REF = ["--toolchain", "host", *SAID]


@dataclass(frozen=True)
class Answer:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Stdout as one JSON document; anything else on it fails."""
        return json.loads(self.out)


@pytest.fixture
def neffcache(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answer]:
    """Run the command line in this process, as its entry point does."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def run(*words: str | Path) -> Answer:
        capsys.readouterr()
        with pytest.raises(SystemExit) as done:
            main([str(word) for word in words])
        said = capsys.readouterr()
        code = done.value.code
        assert isinstance(code, int)
        return Answer(code, said.out, said.err)

    return run


@pytest.fixture(autouse=True)
def no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def request_of(config: str = CONFIG, **given: Any) -> Request:
    """The request that the command line makes without options on a machine without Neuron."""
    return make_request(config, toolchain="host", environ={}, **given)


def job_of(request: Request, config: dict[str, Any] | None = None, *, threads: int = 1) -> Job:
    """A job as TorchTitan could have resolved it; `config` is the configuration in its workload."""
    config = {"training": {"seq_len": 256}, "compile": {"components": ["model"]}} if config is None else config
    key = job_key(
        workload={"config": config, "sources": {}, "environment": {}, "torchtitan": "0.3.0"},
        target=request.placement.target_component(),
        lnc=request.placement.lnc_component(),
        toolchain={"name": "host", "threads": threads},
        options=request.options.component(),
    )
    return Job(
        request=request,
        key=key,
        arguments=("--module", "llama3", "--config", request.config),
        mesh=Mesh(dp_shard=2, tp=2),
        replaced=({"what": "tokenizer", "by": "none", "changes_meaning": False},),
        warnings=(),
        environment={"OMP_NUM_THREADS": str(threads)},
        versions={"torch": "2.14.1", "torchtitan": "0.3.0", "compiler": "g++ 12"},
        option_values={"training.seq_len": "256", "compile.components": "['model']"},
    )


def put_graph(store: LocalStore, word: str, *, text: str = "", seconds: float = 12.0, nodes: int = 100) -> GraphRecord:
    """A graph record with two artifacts, all named after a word."""
    code = sha256_hex(word.encode()).encode() * 30
    text = text or f"neffcache graph 1\ninputs 1\n%0 = input {word}\n"
    key = xxh3_128_hex(word.encode())
    with store.batch() as batch:
        text_blob, code_blob = batch.put(text.encode()), batch.put(code)
    artifacts = (Artifact("host", f"graphs/{key}/code", code_blob, len(code), 0o444),)
    components = {"text": text_blob, "toolchain": "a" * 64, "env": "b" * 64, "lnc": None}
    return store.put_graph(
        GraphRecord(key, components, "forward", word, nodes, 1, text_blob, artifacts, seconds, 700_000_000)
    )


def put_job(
    store: LocalStore,
    job: Job,
    *words: str,
    complete: bool = True,
    known: bool = True,
    created: str = "2026-01-02T03:04:05+00:00",
    serial: int = 7,
) -> Manifest:
    """The manifest of a job with a graph a word, its pointer and its ref. With `known` false no graph has a record."""
    keys = [put_graph(store, word).compile_key if known else xxh3_128_hex(word.encode()) for word in words]
    made = store.put_manifest(
        manifest(
            cache_key=job.key.cache_key,
            components={name: {"sha256": c.sha256, "value": c.value} for name, c in job.key.components.items()},
            request=job.request.to_json(),
            complete=complete,
            phases=["first_step"],
            rank_classes=[RankClass("0-3", {"first_step": tuple(keys)})],
            artifacts=(),
            environment=job.environment,
            versions=job.versions,
            created=created,
            host={"system": "Linux"},
        )
    )
    store.set_pointer(job.key.cache_key, made.id)
    name, named = job.request.config, job.request.named(job.versions)
    store.put_ref("current", name, digest(named), Ref(named, job.key.cache_key, made.id, name, serial))
    return made


def damage(path: Path) -> None:
    """Flip one bit in place, as a bad disk would; size and mode stay."""
    mode = path.stat().st_mode
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(bytes(data))
    path.chmod(mode)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore.open(tmp_path / "store", writable=True, given=True)


@pytest.fixture
def warmed(store: LocalStore) -> Manifest:
    """The debug model's manifest of two graphs, in the store."""
    return put_job(store, job_of(request_of()), "one", "two")
