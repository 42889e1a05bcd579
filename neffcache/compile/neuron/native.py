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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from neffcache.compile.neuron import installation, internals, probes, shim
from neffcache.compile.neuron.environment import (
    COMPILE_ONLY,
    DIRECTORIES,
    METRICS,
    OFF_SWITCHES,
    XLA_URL,
    Places,
    lock_timeout,
)
from neffcache.compile.neuron.installation import Stack
from neffcache.compile.neuron.layouts import XLA_FILES, XLA_MARKERS
from neffcache.compile.neuron.notes import Notes
from neffcache.compile.neuron.operators import operator_of
from neffcache.compile.toolchain import Counters, Identity
from neffcache.errors import Unsupported, Usage
from neffcache.store.native import Rules, Verdict

_TRANSIENT = re.compile(r"(?:^|/)\.[^/]*$|\.(?:tmp|lock|log)(?:\.[^/]*)?$|(?:^|/)(?:tmp|locks)/")


def _transient(path: str) -> bool:
    return bool(_TRANSIENT.search(path))


class NeffRules:
    """TorchNeuron's NEFFs: two levels of folders, named by the on-disk key."""

    name = "neff"
    compiled = True
    _artifact = re.compile(r"([0-9a-f]{2})/([0-9a-f]{2})/(\1\2[0-9a-f]{28})\.neff")

    def verdict(self, path: str, names: Collection[str]) -> Verdict:
        if self._artifact.fullmatch(path):
            return "artifact"
        return "transient" if _transient(path) else "foreign"

    def locks(self, path: str) -> Sequence[str]:
        return ()  # they lie in a host-local directory of their own, and results appear by rename

    def whole(self, path: str, file: Path) -> bool:
        return True  # a NEFF's length is not in its name: what was renamed is taken as whole, and proved by the replay

    def graph(self, path: str) -> str | None:
        match = self._artifact.fullmatch(path)
        return None if match is None else match[3]


class OpaqueRules:
    """A cache whose layout nobody documents: of lowering, or of kernels, before a NEFF is compiled."""

    compiled = False

    def __init__(self, name: str) -> None:
        self.name = name

    def verdict(self, path: str, names: Collection[str]) -> Verdict:
        return "transient" if _transient(path) else "artifact"

    def locks(self, path: str) -> Sequence[str]:
        return (f"{path}.lock",)

    def whole(self, path: str, file: Path) -> bool:
        return True

    def graph(self, path: str) -> str | None:
        return None


class ModuleRules:
    """libneuronxla's entries: directories whose files belong together."""

    name = "xla"
    compiled = True
    _entry = re.compile(r"(neuronxcc-[^/]+/MODULE_[^/]+)/([^/]+)")
    results = XLA_FILES
    markers = XLA_MARKERS

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

    def whole(self, path: str, file: Path) -> bool:
        """An entry stands or falls as one: with an empty NEFF its other files are worth nothing."""
        try:
            return (file.parent / "model.neff").stat().st_size > 0
        except OSError:
            return False

    def graph(self, path: str) -> str | None:
        match = self._entry.fullmatch(path)
        return None if match is None else PurePosixPath(match[1]).name


class TorchNeuronStore:
    """The caches of native TorchNeuron."""

    stack: Stack = "native"
    rules: Sequence[Rules] = (NeffRules(), OpaqueRules("hlo"), OpaqueRules("nki"))
    overlay = False  # locks lie elsewhere, and a result that is there is not written again
    refuses_compilers = False
    misses_repeat = False  # a rank may wait for a sibling

    def __init__(self, toolchain: Mapping[str, Any] | None = None) -> None:
        self.identity = Identity("neuron", toolchain or {})
        self._disk: dict[str, str | None] = {}

    def environment(self, stores: Path, private: Path) -> dict[str, str]:
        known = Notes.of_host(os.environ).get("longest", self.identity.id) or {}
        return {
            **Places(stores, private).variables(self.stack),
            **lock_timeout(os.environ, float(known.get("seconds", 0.0))),
        }

    def measured(self, environ: Mapping[str, str], counts: Iterable[Mapping[str, int]]) -> None:
        """A rank's compiles together took at least as long as the longest of them: the lock must outlast it."""
        notes = Notes.of_host(environ)
        known = notes.get("longest", self.identity.id) or {}
        seconds = max((count.get("total_compilation_time_ms", 0) / 1000 for count in counts), default=0.0)
        if seconds > float(known.get("seconds", 0.0)):
            notes.put("longest", self.identity.id, {"seconds": seconds})

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

    def refusing(self, environ: Mapping[str, str], private: Path, mark: Path) -> dict[str, str]:
        real = installation.compiler_program(environ)
        return {} if real is None else shim.install(private, environ, real, mark)

    def refused(self, private: Path) -> list[str]:
        return shim.refused(private)

    def says(self, environ: Mapping[str, str]) -> str:
        answers = probes.known(self.identity, environ) or probes.UNASKED
        if answers.is_("shim_honoured", "yes"):
            return "before a compile begins: neuronx-cc on PATH refuses"
        asked = "is not known to start" if answers is probes.UNASKED else "does not start"
        return f"within a second of its counters: TorchNeuron {asked} the neuronx-cc on PATH, so one compile may begin"

    def apart(
        self, environ: Mapping[str, str], target: str, lnc: int, note: Callable[[str], None]
    ) -> dict[str, str] | None:
        answers = probes.ask(self.identity, environ, target=target, lnc=lnc, progress=note)
        if answers.is_("compile_only", "yes"):
            return {COMPILE_ONLY: "1"}
        if installation.hardware(environ).devices:
            return None
        why = answers.reasons.get("compile_only", "")
        raise Unsupported(
            "there is no Neuron device here, and the installed TorchNeuron does not compile without one",
            hint="warm on a host with devices, or see `neffcache doctor` for the probe compile_only",
            details={"probe": "compile_only", "outcome": answers.outcomes.get("compile_only", "unknown"), "why": why},
        )

    def counters(self, *, names: bool = True) -> Counters:
        """The documented counters, once torch_neuronx has been imported.

        With `names` compiles that were begun are waited for first: the counts of a step are whole.
        """
        if not internals.loaded():
            return Counters(0, 0, 0, frozenset() if names else None)
        keys = None
        if names:
            internals.synchronize()
            keys = self._keys()
        found = internals.stats()
        hits = found["persistent_hits"] + found["in_memory_hits"]
        misses = found["persistent_misses"] + found["in_memory_misses"]
        labels = {disk: operator_of(key) for key, disk in self._disk.items() if disk is not None} if names else {}
        return Counters(found["total_compilations"], hits, misses, keys, detail=found, labels=labels)

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
    misses_repeat = False

    def __init__(self, toolchain: Mapping[str, Any] | None = None) -> None:
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

    def refusing(self, environ: Mapping[str, str], private: Path, mark: Path) -> dict[str, str]:
        real = installation.compiler_program(environ)
        return {} if real is None else shim.install(private, environ, real, mark)

    def refused(self, private: Path) -> list[str]:
        return shim.refused(private)

    def says(self, environ: Mapping[str, str]) -> str:
        return "within a second of its directory: whether libneuronxla starts the neuronx-cc on PATH was never asked"

    def apart(
        self, environ: Mapping[str, str], target: str, lnc: int, note: Callable[[str], None]
    ) -> dict[str, str] | None:
        if not installation.hardware(environ).devices:
            raise Unsupported(
                "there is no Neuron device here, and the PyTorch/XLA stack is warmed by running the job",
                hint="warm on a host with devices",
            )
        return None

    def measured(self, environ: Mapping[str, str], counts: Iterable[Mapping[str, int]]) -> None: ...

    def counters(self, *, names: bool = True) -> Counters:
        """`compiles` are entries that appeared in the directory since the first call, by whichever rank of the node."""
        present = _entries(Path(os.environ.get(XLA_URL, "")))
        if self._at_start is None:
            self._at_start = present
        fresh = present - self._at_start
        failed = {name for name in fresh if name.endswith("/model.log")}
        return Counters(len({name.rpartition("/")[0] for name in fresh}), 0, 0, errors=len(failed))


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
