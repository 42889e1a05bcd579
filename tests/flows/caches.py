"""Caches as the Neuron packages leave them, with stub content: made by tests, of every layout that is imported."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from pathlib import Path

from neffcache.compile.neuron import neff

VERSION = "2.21.18209.0+043b1bf7"
Tree = dict[str, bytes]


def stub_neff(word: str, size: int = 200) -> bytes:
    """Bytes that begin as a NEFF does."""
    return neff.header(size) + word.encode().ljust(size, b".")[:size]


def key(word: str, digits: int = 32) -> str:
    return hashlib.sha256(word.encode()).hexdigest()[:digits]


def torchneuron(word: str) -> Tree:
    name = key(word)
    return {f"{name[:2]}/{name[2:4]}/{name}.neff": stub_neff(word)}


def older(word: str) -> Tree:
    return {f"{key(word, 64)}/{key(word, 64)}.neff": stub_neff(word)}


def module(word: str, *, version: str = VERSION, old: bool = False) -> Tree:
    """An entry of libneuronxla; `old`: the names of older versions, and a compressed HLO."""
    top = f"neuronxcc-{version}/MODULE_{int(key(word, 15), 16)}+d41d8cd9"
    files = {"model.neff": stub_neff(word), "model.done": b""}
    if old:
        files |= {"model.hlo.pb": gzip.compress(b"hlo " * 100 + word.encode(), mtime=0), "compile_flags.txt": b""}
    else:
        files |= {
            "model.hlo_module.pb": b"hlo " + word.encode(),
            "compile_flags.json": b'["--model-type=transformer"]',
            "wrapped_neff.hlo": b"stub " + word.encode(),
        }
    return {f"{top}/{name}": data for name, data in files.items()}


def vllm(word: str) -> Tree:
    name = key(word)
    data = stub_neff(word)
    files = {
        f"graph_{name}.neff": data,
        "graph.hlo": b"hlo " + word.encode(),
        ".artifact_metadata_v0.json": b'{"version": 0}',
        "command.txt": b"neuronx-cc compile graph.hlo",
        ".compilation_complete": f"completed:1.5\nneff_size:{len(data)}\n".encode(),
    }
    return {f"{name}/{file}": content for file, content in files.items()}


def everything(*words: str) -> Tree:
    """An entry of every layout for each word."""
    made: Tree = {}
    for word in words:
        made |= torchneuron(word) | older(f"older {word}") | module(word) | module(f"old {word}", old=True)
        made |= vllm(f"vllm {word}")
    return made


def below(folder: str, tree: Mapping[str, bytes]) -> Tree:
    return {f"{folder}/{path}": data for path, data in tree.items()}


def without(tree: Tree, *endings: str) -> Tree:
    return {path: data for path, data in tree.items() if not path.endswith(endings)}


def place_of(tree: Tree) -> str:
    """The folder of an entry's files."""
    return next(iter(tree)).rpartition("/")[0]


def written(root: Path, tree: Mapping[str, bytes]) -> Path:
    for path, data in tree.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    return root


def read(root: Path) -> Tree:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}
