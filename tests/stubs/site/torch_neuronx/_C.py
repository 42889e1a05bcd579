"""A stub of `torch_neuronx._C`: the compile cache as documented, in Python. See ../../README.md."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from pathlib import Path

import xxhash

_env = dict(os.environ)  # everything is read once
_neffs: dict[str, bytes] = {}
_disk: dict[str, str] = {}
_entries: dict[str, dict[str, object]] = {}
_counts = dict.fromkeys(("in_memory_hits", "in_memory_misses", "persistent_hits", "persistent_misses"), 0)
_compilations = 0
_milliseconds = 0


def _count(name: str) -> None:
    if _env.get("TORCH_NEURONX_METRICS_ENABLED") == "1":
        _counts[name] += 1


def _get_platform_target() -> str:
    return _env.get("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")


def _get_logical_neuron_cores() -> str:
    return _env.get("NEURON_LOGICAL_NC_CONFIG", "2" if _get_platform_target() in ("trn2", "trn3") else "1")


def _arguments() -> str:
    flags = _env.get("NEURON_CC_FLAGS")
    return "--model-type transformer --auto-cast=none" + ("" if flags is None else f" {flags}")


def _memory_key(base: str, level: str) -> str:
    text = _arguments().replace(" ", "_").replace("=", "-")
    return f"{base}_{_get_platform_target()}_{_get_logical_neuron_cores()}_{level.removeprefix('-')}_{text}"


def _disk_key(memory_key: str, ir: bytes) -> str:
    if _env.get("STUB_VERSION_IN_KEY") == "1":
        from neuronxcc.driver import VERSION

        memory_key += VERSION
    return xxhash.xxh3_128_hexdigest(memory_key.encode() + ir)


def _path(disk_key: str) -> Path | None:
    if _env.get("TORCH_NEURONX_NEFF_DISABLE_CACHE") == "1" or _env.get("TORCH_NEURONX_DISABLE_NEFF_CACHE") == "1":
        return None
    root = Path(_env.get("TORCH_NEURONX_NEFF_CACHE_DIR", "/tmp/neff_cache"))
    return root / disk_key[:2] / disk_key[2:4] / f"{disk_key}.neff"


def _persisted(path: Path | None) -> bytes | None:
    try:
        return (path.read_bytes() or None) if path is not None else None
    except FileNotFoundError:
        return None


def compile_graph(base_key: str, stablehlo_bytes: bytes, has_collectives: bool) -> str:
    return _compiled(base_key, stablehlo_bytes, _env.get("NEURON_COMPILER_OPT_LEVEL", "-O2"))


def stub_eager(operator: str, shape: str) -> str:
    """An eager operator of one shape: in TorchNeuron the dispatcher does this."""
    return _compiled(
        f"aten::{operator}|{shape}", f"{operator} {shape}".encode(), _env.get("NEURON_COMPILER_OPT_LEVEL", "-O1")
    )


def _compiled(base: str, ir: bytes, level: str) -> str:
    key = _memory_key(base, level)
    if key in _neffs:
        _count("in_memory_hits")
        return key
    _count("in_memory_misses")
    disk = _disk_key(key, ir)
    path = _path(disk)
    neff = _persisted(path)
    milliseconds = 0
    if neff is not None:
        _count("persistent_hits")
    else:
        _count("persistent_misses")
        locks = Path(_env.get("TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR", "/tmp/local_cache"), "locks")
        locks.mkdir(parents=True, exist_ok=True)
        with (locks / f"{disk}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            neff = _persisted(path)
            if neff is not None:  # a sibling compiled it meanwhile
                _count("persistent_hits")
            else:
                started = time.monotonic()
                neff = _run_compiler(ir, level)
                milliseconds = int(1000 * (time.monotonic() - started))
                _persist(path, neff)
    _neffs[key], _disk[key] = neff, disk
    _entries[key] = {
        "cache_key": key,
        "neff_size_bytes": len(neff),
        "access_count": 1,
        "compilation_time_ms": milliseconds,
    }
    return key


def _run_compiler(ir: bytes, level: str) -> bytes:
    global _compilations, _milliseconds
    with tempfile.TemporaryDirectory(prefix="stub-compile-") as place:
        source, output = Path(place, "graph.mlir"), Path(place, "file.neff")
        source.write_bytes(ir)
        program = _env.get("STUB_OWN_COMPILER", "neuronx-cc")
        command = [program, "compile", str(source), "--framework", "XLA", "--target", _get_platform_target()]
        command += ["--output", str(output), "--model-type", "transformer", "--auto-cast=none"]
        command += ["--lnc", _get_logical_neuron_cores(), level, *_env.get("NEURON_CC_FLAGS", "").split()]
        started = time.monotonic()
        # Not through `subprocess.Popen` in this interpreter: TorchNeuron starts it from C++, which no audit hook sees.
        status = os.spawnvpe(os.P_WAIT, "sh", ["sh", "-c", 'cd "$0" && exec "$@"', place, *command], _env)
        if status != 0:
            raise RuntimeError(f"neuronx-cc ended with status {status}")
        if _env.get("TORCH_NEURONX_METRICS_ENABLED") == "1":
            _compilations += 1
            _milliseconds += int(1000 * (time.monotonic() - started))
        return output.read_bytes()


def _persist(path: Path | None, neff: bytes) -> None:
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=".tmp.", dir=path.parent)
    except OSError:
        return  # persistence is silently off
    with os.fdopen(handle, "wb") as file:
        file.write(neff)
    os.replace(temporary, path)


def get_neff_info(memory_key: str) -> tuple[str, bytes]:
    return _disk[memory_key], _neffs[memory_key]


def get_neff_cache(key: str) -> bytes | None:
    return _neffs.get(key)


def put_neff_cache(key: str, data: bytes) -> None:
    _neffs[key] = data


def _get_all_cache_keys() -> set[str]:
    return set(_neffs)


def _get_compilation_cache_entries() -> list[dict[str, object]]:
    return list(_entries.values())


def _get_compilation_cache_stats() -> dict[str, object]:
    hits = _counts["in_memory_hits"] + _counts["persistent_hits"]
    misses = _counts["in_memory_misses"] + _counts["persistent_misses"]
    return {
        "total_entries": len(_neffs),
        **_counts,
        "cache_hits": hits,
        "cache_misses": misses,
        "hit_rate": hits / (hits + misses) if hits + misses else 0.0,
        "total_compilations": _compilations,
        "total_compilation_time_ms": _milliseconds,
        "memory_usage_bytes": sum(map(len, _neffs.values())),
        "evictions_performed": 0,
        "max_cache_size_bytes": 1 << 30,
        "max_cache_entries": 10000,
    }


if _env.get("STUB_NO_COUNTERS") == "1":
    del _get_compilation_cache_stats
