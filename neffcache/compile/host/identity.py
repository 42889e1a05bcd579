"""What the host toolchain is: torch, its Inductor, the C++ compiler and the machine it compiles for.

Inductor compiles with `-march=native`, so the CPU is part of the compiler; generated code divides its loops among a
fixed number of threads, so the thread count is too.

Torch is imported only where an identity is asked for: commands ask this module for variables alone.
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neffcache.compile.host.native import NAME as STORE
from neffcache.compile.host.native import SETTINGS
from neffcache.compile.toolchain import Identity
from neffcache.errors import Unsupported
from neffcache.key.canonical import digest, sha256_hex

NAME = "host"

ARTIFACT = 2
"""Form of what `build` writes and `load` reads. An artifact of another form would be a hit that no rank can run."""

INSTRUCTION_SETS = frozenset(
    [
        "sse4_1",
        "sse4_2",
        "ssse3",
        "popcnt",
        "aes",
        "pclmulqdq",
        "avx",
        "avx2",
        "fma",
        "f16c",
        "bmi1",
        "bmi2",
        "lzcnt",
        "abm",
        "movbe",
        "rdrand",
        "rdseed",
        "adx",
        "sha_ni",
        "avx512f",
        "avx512bw",
        "avx512cd",
        "avx512dq",
        "avx512vl",
        "avx512ifma",
        "avx512vbmi",
        "avx512_vbmi2",
        "avx512_vnni",
        "avx512_bitalg",
        "avx512_vpopcntdq",
        "avx512_bf16",
        "avx512_fp16",
        "avx512_vp2intersect",
        "avx_vnni",
        "vaes",
        "vpclmulqdq",
        "gfni",
        "amx_tile",
        "amx_int8",
        "amx_bf16",
        "amx_fp16",
        "asimd",
        "asimdhp",
        "asimddp",
        "sve",
        "sve2",
        "svebf16",
        "bf16",
        "i8mm",
        "fphp",
    ]
)
"""Names in /proc/cpuinfo that a compiler for `-march=native` can turn into other instructions."""


def thread_count(environ: Mapping[str, str], world_size: int) -> int:
    """Threads of one rank: OMP_NUM_THREADS, else 1 with several ranks (as torchrun sets), else the CPUs we may use."""
    given = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if given:
        if not given.isdigit() or int(given) < 1:
            raise Unsupported(f"OMP_NUM_THREADS is {given!r}, not a number of threads")
        return int(given)
    return 1 if world_size > 1 else len(os.sched_getaffinity(0))


def environment(environ: Mapping[str, str], world_size: int, *, native: bool = False) -> dict[str, str]:
    """Variables under which workers compile and ranks run; they must be set before Python imports torch."""
    return {"OMP_NUM_THREADS": str(thread_count(environ, world_size)), **(SETTINGS if native else {})}


def identity(environ: Mapping[str, str], world_size: int, *, native: bool = False) -> Identity:
    """The identity on this machine, with Inductor's own cache when `native`.

    Unsupported when the compiler cannot be told.
    """
    return _identity(compiler(), thread_count(environ, world_size), native=native)


def identity_in_rank(recorded: Mapping[str, Any]) -> Identity:
    """The identity of a training process: its own torch, CPU, settings and threads.

    A rank compiles nothing, so it asks no compiler: that part is taken from the manifest's record.
    """
    import torch

    native = recorded.get("native_store") == STORE
    return _identity(dict(recorded.get("compiler") or {}), torch.get_num_threads(), native=native)


def native_parts() -> dict[str, Any]:
    """What else the names in Inductor's own cache hold: where torch and Python are installed, as a digest.

    They stand in the command line of every C++ library, and the command line in the library's name.
    """
    import torch

    places = [
        str(Path(torch.__file__).parent),
        str(sysconfig.get_path("include")),
        str(sysconfig.get_path("include", scheme="posix_prefix")),
        str(sysconfig.get_config_var("LIBDIR")),
        os.environ.get("CXX", ""),
    ]
    return {"native_store": STORE, "places": digest(places)}


def _identity(compiled_by: Mapping[str, Any], threads: int, *, native: bool = False) -> Identity:
    import torch
    from torch._functorch import config as functorch

    from neffcache.compile.host import torch_internals
    from neffcache.graph.settings import inductor_settings, numeric_switches

    value = {
        "name": NAME,
        "artifact": ARTIFACT,
        "torch": {
            "version": torch.__version__,
            # A build without its commit still counts by version and sources.
            "git": torch.version.git_version or "not recorded",
            "sources": torch_internals.source_digest(),
        },
        "python": _told("the binary interface of this Python", sysconfig.get_config_var("SOABI")),
        "libc": _told("the C library", "-".join(part for part in platform.libc_ver() if part)),
        "compiler": dict(compiled_by),
        "instruction_set": instruction_set(),
        "threads": threads,
        "settings": {
            "inductor": inductor_settings(),
            "functorch": {
                name: value
                for name, value in functorch.get_config_copy().items()
                if not name.startswith("_") and isinstance(value, (bool, int, float, str, type(None)))
            },
            # The thread count has a field of its own here: of a rank, not of the process that resolves.
            "switches": {name: value for name, value in numeric_switches().items() if name != "threads"},
        },
        "environment": {name: os.environ[name] for name in ("ATEN_CPU_CAPABILITY",) if name in os.environ},
        **(native_parts() if native else {}),
    }
    versions = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "compiler": str(compiled_by.get("version", "")),
    }
    return Identity(NAME, value, versions)


def _told(what: str, value: str | None) -> str:
    """`value`; Unsupported when it is empty: what cannot be told has no key."""
    if not value:
        raise Unsupported(f"{what} cannot be told on this machine, so its artifacts have no key")
    return value


def instruction_set() -> list[str]:
    """This CPU's instruction sets that a compiler can use, sorted; Unsupported when they cannot be told."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError as fault:
        raise Unsupported(f"the instruction sets of this CPU cannot be told: {fault}") from None
    for line in lines:
        name, _, flags = line.partition(":")
        if name.strip().lower() in ("flags", "features"):
            return sorted(INSTRUCTION_SETS.intersection(flags.split()))
    raise Unsupported("the instruction sets of this CPU cannot be told: /proc/cpuinfo lists none")


@functools.cache
def compiler() -> dict[str, Any]:
    """The C++ compiler that Inductor will call: version, content of its programs, and what `native` means to it.

    Unsupported when there is none, or when it does not answer: an unknown compiler has no key.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler

    name = get_cpp_compiler()
    path = shutil.which(name)
    if path is None:
        raise Unsupported(f"the C++ compiler {name} is not on PATH", hint="install g++, or set CXX")
    version = _answer(path, "--version").splitlines()[0]
    programs = {Path(path).name: _content(path)}
    for part in ("cc1plus", "as", "ld", "collect2"):
        found = _answer(path, f"-print-prog-name={part}", may_fail=True).strip()
        if found and os.path.sep not in found:
            found = next((str(Path(d) / found) for d in os.get_exec_path() if (Path(d) / found).exists()), "")
        if found and os.path.exists(found):
            programs[part] = _content(found)
    native = [
        word
        for line in _answer(path, "-march=native", "-E", "-v", "-x", "c++", os.devnull, errors=True).splitlines()
        if "cc1plus" in line
        for word in line.split()
        if word.startswith(("-m", "--param", "l1-", "l2-"))
    ]
    return {"version": version, "programs": programs, "native": digest(native)}


def _answer(path: str, *arguments: str, errors: bool = False, may_fail: bool = False) -> str:
    try:
        done = subprocess.run(
            [path, *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.SubprocessError) as fault:
        if may_fail:
            return ""
        raise Unsupported(
            f"the C++ compiler {Path(path).name} does not answer, so its version is unknown",
            hint="install g++, or set CXX to a compiler that works",
            details={"fault": str(fault)},
        ) from None
    return done.stderr if errors else done.stdout


def _content(path: str) -> str:
    return sha256_hex(Path(path).read_bytes())
