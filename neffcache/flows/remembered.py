"""Answers of a worker that this host remembers, so that a command need not import torch to hear them again.

An answer is used again only in the same circumstances (interpreter, environment, working directory, CPU, boot of the
machine) and while every file that the worker read and every directory that it listed is what it was (`provenance`).
Any difference, and any doubt, asks anew. It lies in the user's own cache directory, never in a store, and never leaves
the host. No key depends on it alone: the training process computes everything again before it calls a run a hit.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import stat
import sys
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from neffcache import __version__
from neffcache.errors import Usage
from neffcache.flows.provenance import Provenance
from neffcache.flows.settings import host_cache, setting
from neffcache.flows.workers import call
from neffcache.key.canonical import digest
from neffcache.variables import without_rank

log = logging.getLogger("neffcache.flows")

SCHEMA = 1
KEPT = 64
"""Answers that are kept; the ones used longest ago go first."""

NEUTRAL_VARIABLES = (
    # The terminal and the session that somebody types in.
    *("PWD", "OLDPWD", "SHLVL", "_", "TERM", "TERM_*", "COLORTERM", "COLUMNS", "LINES", "LS_COLORS", "PS[1-4]"),
    *("HIST*", "SSH_*", "TMUX*", "STY", "WINDOWID", "DISPLAY", "XDG_SESSION_*", "XDG_RUNTIME_DIR", "DBUS_*", "MAIL"),
    # Where our own commands keep things, and how they reach them; a worker that resolves opens no store and no S3.
    *("NEFFCACHE_DIR", "NEFFCACHE_JOBS", "NEFFCACHE_REMOTE", "NEFFCACHE_WARMERS", "NEFFCACHE_RESOLVE_CACHE", "AWS_*"),
    # A job's number, and a test's name.
    *("SLURM_*", "PYTEST_CURRENT_TEST"),
)
"""Variables that no worker reads; all others count, known or not."""

CPU_FIELDS = frozenset(
    [
        "vendor_id",
        "cpu family",
        "model",
        "model name",
        "stepping",
        "cache size",
        "flags",
        "Features",
        "CPU implementer",
        "CPU architecture",
        "CPU variant",
        "CPU part",
        "CPU revision",
    ]
)


def ask(module: str, question: Mapping[str, Any], environ: Mapping[str, str], directory: Path) -> dict[str, Any]:
    """What `call` gives, or what this host remembers of it; "remembered" in the answer says which.

    The worker leaves a `Provenance` as "seen" in its answer. Raises what `call` raises, Usage for a bad setting.
    """
    place = _place(module, question, environ) if enabled(environ) else None
    if place is not None and (known := _recall(place)) is not None:
        return {**known, "remembered": True}
    answer = call(module, question, environ, directory)
    seen = answer.pop("seen", None)
    if place is not None and seen is not None:
        if seen["doubt"]:
            log.debug("what %s means is not remembered: %s", question.get("function"), seen["doubt"])
        else:
            _keep(place, {"seen": seen, "answer": answer})
    return {**answer, "remembered": False}


def enabled(environ: Mapping[str, str]) -> bool:
    """The setting `resolve_cache`. Raises Usage unless it is 0 or 1."""
    given = setting("resolve_cache", None, environ, "1")
    if given.value not in ("0", "1"):
        raise Usage(f"{given.origin} is {given.value!r}, and must be 0 or 1", hint="0 asks TorchTitan every time")
    return given.value == "1"


def circumstances(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """All that a worker's answer may depend on beside files; None where it cannot be told, as outside Linux.

    The boot id keeps two hosts apart that share a home directory and were made from one image.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
        devices = sorted(name for name in os.listdir("/dev") if name.startswith(("nvidia", "neuron", "kfd")))
        where = os.getcwd()
    except OSError:
        return None
    fields = (line.partition(":") for line in first.splitlines())
    return {
        "schema": SCHEMA,
        "neffcache": __version__,
        "boot": boot,
        "user": os.geteuid(),
        "python": [sys.executable, sys.version],
        "directory": where,
        "environment": _counted(environ),
        "cpu": {name.strip(): value.strip() for name, _, value in fields if name.strip() in CPU_FIELDS},
        "cpus": len(os.sched_getaffinity(0)),
        "devices": devices,
    }


def _counted(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in without_rank(environ).items()
        if not any(fnmatchcase(name, pattern) for pattern in NEUTRAL_VARIABLES)
    }


def _place(module: str, question: Mapping[str, Any], environ: Mapping[str, str]) -> Path | None:
    """Where the answer lies: only the digest of circumstances and question is written anywhere; None: nowhere safe."""
    around = circumstances(environ)
    if around is None:
        return None
    folder = host_cache(environ) / "resolved"
    try:
        folder.parent.parent.mkdir(parents=True, exist_ok=True)
        for path in (folder.parent, folder):
            path.mkdir(mode=0o700, exist_ok=True)
            status = os.lstat(path)
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
                log.debug("%s is not ours alone: nothing is remembered", path)
                return None
    except OSError as fault:
        log.debug("nothing is remembered: %s", fault)
        return None
    name = digest({"module": module, "question": dict(question), "circumstances": around})
    return folder / f"{name}.json"


def _recall(place: Path) -> dict[str, Any] | None:
    try:
        known = json.loads(place.read_bytes())
        different = Provenance.from_json(known["seen"]).changed()
        if different is not None:
            log.debug("resolved anew: %s is not what it was", different)
            return None
        answer: dict[str, Any] = known["answer"]
        os.utime(place)  # when it was used last
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as fault:
        log.debug("%s is not understood: %s", place, fault)
        return None
    return answer


def _keep(place: Path, document: Mapping[str, Any]) -> None:
    """Write by rename; what is wrong with the place costs only the memory."""
    temporary = place.with_suffix(f".{secrets.token_hex(8)}.tmp")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(document, file)
        os.replace(temporary, place)
        kept = sorted(place.parent.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for old in kept[KEPT:]:
            old.unlink(missing_ok=True)
    except OSError as fault:
        log.debug("nothing is remembered: %s", fault)
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
