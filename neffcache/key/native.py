"""Keys that other caches give to one compiled graph, so that their entries can be found, fed and imported.

Recipes: TorchNeuron's C++ and older Python path as a public snapshot of its source has them; libneuronxla's directory
names. Whether an installed version still does so is asked of it at run time, never assumed. No function here reads the
environment; text is UTF-8.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from neffcache.key.canonical import xxh3_128_hex
from neffcache.key.option_table import DEFAULT_OPTLEVEL, Mode

# What TorchNeuron itself puts in front of the user's options, for eager operators and compiled graphs alike.
TORCHNEURON_ARGUMENTS = "--model-type transformer --auto-cast=none"

_DISK_KEY = re.compile(r"[0-9a-f]{32}")


def torchneuron_arguments(neuron_cc_flags: str | None) -> str:
    """The argument text of a compile; None: `NEURON_CC_FLAGS` is not set.

    Set but empty is not the same: it leaves a space at the end, and with it another key.
    """
    return TORCHNEURON_ARGUMENTS if neuron_cc_flags is None else f"{TORCHNEURON_ARGUMENTS} {neuron_cc_flags}"


def torchneuron_level(mode: Mode, neuron_compiler_opt_level: str | None = None) -> str:
    """`-O1` for eager operators, `-O2` for compiled graphs, unless `NEURON_COMPILER_OPT_LEVEL` is set (None: not)."""
    return f"-O{DEFAULT_OPTLEVEL[mode]}" if neuron_compiler_opt_level is None else neuron_compiler_opt_level


def torchneuron_memory_key(base: str, target: str, lnc: int | str, level: str, arguments: str) -> str:
    """TorchNeuron's in-memory key `<base>_<target>_<lnc>_<level>_<arguments>`.

    One leading dash of the level goes; every space of the arguments becomes `_` and every `=` becomes `-`. Nothing is
    sorted, so two orders of the same options are two keys.
    """
    text = arguments.replace(" ", "_").replace("=", "-")
    return f"{base}_{target}_{lnc}_{level.removeprefix('-')}" + (f"_{text}" if text else "")


def torchneuron_disk_key(memory_key: str, ir: bytes) -> str:
    """TorchNeuron's on-disk key: XXH3-128 (seed 0) of the in-memory key followed by the IR, as 32 hex digits.

    Nothing at all gives 32 zeros there, not the hash of no bytes.
    """
    data = memory_key.encode() + ir
    return xxh3_128_hex(data) if data else "0" * 32


def torchneuron_path(disk_key: str) -> PurePosixPath:
    """Where a NEFF lies below `TORCH_NEURONX_NEFF_CACHE_DIR`: `ab/cd/abcd....neff`.

    Raises ValueError for anything but 32 lower-case hex digits: the name becomes a path.
    """
    if not _DISK_KEY.fullmatch(disk_key):
        raise ValueError(f"not an on-disk key of TorchNeuron: {disk_key!r}")
    return PurePosixPath(disk_key[:2], disk_key[2:4], f"{disk_key}.neff")


def torchneuron_python_key(
    hlo: bytes,
    *,
    target: str,
    model_type: str,
    level: str,
    auto_cast: str,
    framework: str,
    lnc: str,
    compiler_version: str,
    flags: Sequence[str],
) -> str:
    """The key of TorchNeuron's older Python path, as 64 hex digits.

    SHA-256 of `<SHA-256 of the HLO>:<SHA-256 of the settings>`, the settings joined by `|` with the flags sorted.
    """
    settings = "|".join((target, model_type, level, auto_cast, framework, lnc, compiler_version, *sorted(flags)))
    hashes = (hashlib.sha256(data).hexdigest() for data in (hlo, settings.encode()))
    return hashlib.sha256(":".join(hashes).encode()).hexdigest()


def libneuronxla_flags_hash(flags_text: str) -> str:
    """Eight hex digits after the plus of a MODULE directory: the MD5 of the flag text as the entry keeps it.

    `d41d8cd9` is the empty text.
    """
    return hashlib.md5(flags_text.encode(), usedforsecurity=False).hexdigest()[:8]


def libneuronxla_flags_text(flags: Sequence[str], *, as_json: bool = True) -> str:
    """The flag text of `compile_flags.json` (newer entries) or `compile_flags.txt` (older ones, joined by a space)."""
    return json.dumps(list(flags)) if as_json else " ".join(flags)


def libneuronxla_directory(compiler_version: str, graph_hash: str, flags_text: str) -> PurePosixPath:
    """Where an entry lies below the cache root: `neuronxcc-<version>+<commit>/MODULE_<graph hash>+<flags hash>`.

    `compiler_version` includes the commit, as in `2.21.18209.0+043b1bf7`.
    """
    for part in (compiler_version, graph_hash):
        if not part or "/" in part or part.startswith("."):
            raise ValueError(f"not part of a cache entry's name: {part!r}")
    return PurePosixPath(f"neuronxcc-{compiler_version}", f"MODULE_{graph_hash}+{libneuronxla_flags_hash(flags_text)}")
