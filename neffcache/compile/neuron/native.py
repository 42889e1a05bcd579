"""`native_store` of the Neuron stacks: which files of their caches are results, and what their processes count.

TorchNeuron, below TORCH_NEURONX_NEFF_CACHE_DIR: `ab/cd/<32 hex>.neff`, bare files, written as `.tmp.XXXXXX` beside it
and renamed; locks in a directory of their own. The layouts of the lowering cache and of NKI's caches are not
documented: what is no lock, log or temporary is kept there.
libneuronxla, below NEURON_COMPILE_CACHE_URL: `neuronxcc-<version>/MODULE_<graph>+<flags>/` with `model.done` as the
mark of success; a failure leaves `model.log` in its place.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath

from neffcache.compile.neuron import internals
from neffcache.compile.neuron.environment import (
    DIRECTORIES,
    METRICS,
    OFF_SWITCHES,
    XLA_URL,
    Places,
    lock_timeout,
)
from neffcache.compile.neuron.installation import Stack
from neffcache.compile.toolchain import Counters
from neffcache.errors import Unsupported, Usage
from neffcache.store.native import Rules, Verdict

_TRANSIENT = re.compile(r"(?:^|/)\.[^/]*$|\.(?:tmp|lock|log)(?:\.[^/]*)?$|(?:^|/)(?:tmp|locks)/")


def _transient(path: str) -> bool:
    return bool(_TRANSIENT.search(path))


class NeffRules:
    """TorchNeuron's NEFFs: two levels of folders, named by the on-disk key."""

    name = "neff"
    _artifact = re.compile(r"([0-9a-f]{2})/([0-9a-f]{2})/(\1\2[0-9a-f]{28})\.neff")

    def verdict(self, path: str, names: Collection[str]) -> Verdict:
        if self._artifact.fullmatch(path):
            return "artifact"
        return "transient" if _transient(path) else "foreign"

    def locks(self, path: str) -> Sequence[str]:
        return ()  # they lie in a host-local directory of their own, and results appear by rename

    def graph(self, path: str) -> str | None:
        match = self._artifact.fullmatch(path)
        return None if match is None else match[3]


class OpaqueRules:
    """A cache whose layout nobody documents."""

    def __init__(self, name: str) -> None:
        self.name = name

    def verdict(self, path: str, names: Collection[str]) -> Verdict:
        return "transient" if _transient(path) else "artifact"

    def locks(self, path: str) -> Sequence[str]:
        return (f"{path}.lock",)

    def graph(self, path: str) -> str | None:
        return None


class ModuleRules:
    """libneuronxla's entries: directories whose files belong together."""

    name = "xla"
    _entry = re.compile(r"(neuronxcc-[^/]+/MODULE_[^/]+)/([^/]+)")
    results = ("model.neff", "model.hlo_module.pb", "model.hlo.pb", "compile_flags.json")
    markers = ("model.done", "compile_flags.txt")  # compile_flags.txt may be empty

    def verdict(self, path: str, names: Collection[str]) -> Verdict:
        match = self._entry.fullmatch(path)
        if match is None:
            return "transient" if _transient(path) else "foreign"
        entry, file = match[1], match[2]
        if file != "model.log" and _transient(file):
            return "transient"
        if f"{entry}/model.done" not in names or f"{entry}/model.neff" not in names:
            return "incomplete"
        if file in self.markers:
            return "marker"
        return "artifact" if file in self.results else "transient" if file == "model.log" else "foreign"

    def locks(self, path: str) -> Sequence[str]:
        return ()  # a lock here is a file's existence and outlives its owner: `model.done` says what is finished

    def graph(self, path: str) -> str | None:
        match = self._entry.fullmatch(path)
        return None if match is None else PurePosixPath(match[1]).name


class TorchNeuronStore:
    """The caches of native TorchNeuron."""

    stack: Stack = "native"
    rules: Sequence[Rules] = (NeffRules(), OpaqueRules("hlo"), OpaqueRules("nki"))
    overlay = False  # locks lie elsewhere, and a result that is there is not written again
    refuses_compilers = False

    def __init__(self) -> None:
        self._disk: dict[str, str | None] = {}

    def environment(self, stores: Path, private: Path) -> dict[str, str]:
        return {**Places(stores, private).variables(self.stack), **lock_timeout(os.environ)}

    def check_environment(self, environ: Mapping[str, str]) -> None:
        for name in OFF_SWITCHES:
            if environ.get(name):
                raise Usage(f"{name}={environ[name]} switches the cache off", hint=f"unset {name}")
        if environ.get(METRICS, "1") != "1":
            raise Usage(
                f"{METRICS}={environ[METRICS]} keeps the counters at zero, so nothing can be proved",
                hint=f"unset {METRICS}",
            )
        _refuse_remote(environ, self.stack)

    def counters(self) -> Counters:
        """The documented counters, once torch_neuronx has been imported; pending compiles are not waited for."""
        if not internals.loaded():
            return Counters(0, 0, 0)
        found = internals.stats()
        hits = found["persistent_hits"] + found["in_memory_hits"]
        misses = found["persistent_misses"] + found["in_memory_misses"]
        return Counters(found["total_compilations"], hits, misses, self._keys(), 0, found)

    def _keys(self) -> frozenset[str] | None:
        """The on-disk keys that this process used, None when the installed version does not tell."""
        try:
            for key in internals.memory_keys() - self._disk.keys():
                self._disk[key] = internals.disk_key(key)
        except Unsupported:
            return None
        return frozenset(key for key in self._disk.values() if key is not None)


class LibneuronxlaStore:
    """The Neuron Persistent Cache of the PyTorch/XLA stack. It counts nothing, so new entries are counted."""

    stack: Stack = "xla"
    rules: Sequence[Rules] = (ModuleRules(),)
    overlay = True  # it makes a lock beside each entry that it reads
    refuses_compilers = False

    def __init__(self) -> None:
        self._at_start: frozenset[str] | None = None

    def environment(self, stores: Path, private: Path) -> dict[str, str]:
        return Places(stores, private).variables(self.stack)

    def check_environment(self, environ: Mapping[str, str]) -> None:
        flags = environ.get("NEURON_CC_FLAGS", "")
        for option in ("--cache_dir", "--no_cache"):
            if option in flags:
                raise Usage(
                    f"{option} in NEURON_CC_FLAGS beats {XLA_URL}: the view would not be used",
                    hint=f"take {option} out of NEURON_CC_FLAGS",
                )
        _refuse_remote(environ, self.stack)

    def counters(self) -> Counters:
        """`compiles` are entries that appeared in the directory since the first call, by whichever rank of the node."""
        names = _entries(Path(os.environ.get(XLA_URL, "")))
        if self._at_start is None:
            self._at_start = names
        fresh = names - self._at_start
        failed = {name for name in fresh if name.endswith("/model.log")}
        return Counters(len({name.rpartition("/")[0] for name in fresh}), 0, 0, None, len(failed))


def _entries(root: Path) -> frozenset[str]:
    """The files that say that a compile began or ended, by path below the cache's root."""
    if not root.is_absolute():
        return frozenset()
    return frozenset(
        path.relative_to(root).as_posix()
        for pattern in ("model.done", "model.log", "model.hlo_module.pb", "model.hlo.pb")
        for path in root.glob(f"neuronxcc-*/MODULE_*/{pattern}")
    )


def _refuse_remote(environ: Mapping[str, str], stack: Stack) -> None:
    for name in DIRECTORIES[stack]:
        if environ.get(name, "").startswith("s3://"):
            raise Usage(
                f"{name} is {environ[name]}: a run reads its view, not a bucket",
                hint=f"unset {name}; S3 is reached with --remote",
            )
