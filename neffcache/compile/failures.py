"""What a failed compile was, from its exit status and its log; and what follows from that.

Only a refusal says something about the graph, so only a refusal is remembered. All other classes say something about
this moment on this machine: they are tried again, now or in the next run.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neffcache.errors import CompileFailed, NeffcacheError, StoreFault

LOG_KEPT = 1_000_000
"""Characters of a log that are kept: its first third and its end."""


@dataclass(frozen=True)
class Policy:
    """What follows from a class of failure.

    `attempts`: how often a compile is tried in one run. `alone`: the next try has the machine for itself.
    `remembered`: replayed in the next run. `stops`: the others would fail the same way, so they are not started.
    """

    attempts: int = 1
    alone: bool = False
    remembered: bool = False
    stops: bool = False


POLICIES: Mapping[str, Policy] = {
    "refused": Policy(remembered=True),
    "killed": Policy(attempts=2, alone=True),
    "time-out": Policy(),
    "no-artifact": Policy(attempts=2),
    "flaky": Policy(attempts=3),
    "io": Policy(stops=True),
    "failed": Policy(),
}
"""Classes that are not here (a bug, another toolchain, an unreadable graph) are neither retried nor remembered."""

_CODE = re.compile(r"\bNCC_[A-Z]+[0-9]+\b")
_ERROR_LINE = re.compile(r"\b(?:error|fatal|exception|assert\w*|traceback)\b", re.IGNORECASE)
_IO = re.compile(
    r"No space left on device|Disk quota exceeded|Input/output error|Stale file handle|Read-only file system|"
    r"Transport endpoint is not connected"
)
# Also said by the way, by compilers that then go on: only where no code of the compiler's own says more.
_SETUP = re.compile(r"error while loading shared libraries|cannot open shared object file|Too many open files")
_FULL = re.compile(r"No space left on device|Disk quota exceeded")
_MEMORY = re.compile(
    r"std::bad_alloc|\bMemoryError\b|Cannot allocate memory|Killed signal terminated program|"
    r"\bSIGKILL\b|\bsignal:? 9\b|Out of memory: Kill",
)

FLAKY_STATUS = 70
"""neuronx-cc's exit status that comes and goes under load, when no code stands in the log."""

NOT_OF_THE_GRAPH = frozenset({"NCC_EVRF059"})
"""Codes that speak of the host (a kernel file that is not there): never remembered."""


def policy(fault: NeffcacheError) -> Policy:
    return POLICIES.get(str(fault.details.get("class", "")), Policy())


def failure(kind: str, message: str, *, hint: str = "", **details: Any) -> NeffcacheError:
    """A failed compile of a class. A full disk is the store's own error, with its exit code."""
    made = StoreFault if details.pop("full", False) else CompileFailed
    return made(message, hint=hint, details={"class": kind, **details})


def of_exit(key: str, name: str, status: int, log: str, *, starved: bool = False) -> NeffcacheError:
    """The failure of a compiler that ended with `status` (negative: by that signal) and left `log`.

    `starved`: the kernel killed something for want of memory meanwhile.
    """
    about: dict[str, Any] = {"compile_key": key, "name": name, "status": status, "log": shortened(log)}
    first = first_error(log)
    if fault := of_text(key, name, log, **about):
        return fault
    if starved or status < 0:
        ended = f"signal {signal_name(-status)}" if status < 0 else "the kernel, for want of memory"
        return failure(
            "killed",
            f"the compiler of {name} was killed by {ended}; likely the host ran out of memory",
            hint="give it more memory or fewer workers (--jobs); nothing is remembered, the next run tries again",
            **about,
        )
    if code := code_of(log):
        of_the_host = code in NOT_OF_THE_GRAPH or _SETUP.search(log) is not None
        kind = "failed" if of_the_host else "refused"
        told = first if code in first else f"{code}: {first}"
        return failure(kind, f"the compiler refuses {name}: {told}", **{**about, "code": code})
    if status == FLAKY_STATUS:
        return failure(
            "flaky",
            f"the compiler of {name} gave up with status 70 and no code, which comes and goes: {first}",
            **about,
        )
    return failure("failed", f"the compiler of {name} ended with status {status}: {first}", **about)


def of_text(key: str, name: str, text: str, /, **about: Any) -> NeffcacheError | None:
    """The failure that a log or a message tells of by itself: a fault of the place, or too little memory."""
    about = {"compile_key": key, "name": name, **about}
    found = _IO.search(text) or (None if code_of(text) else _SETUP.search(text))
    if found:
        return failure(
            "io",
            f"compiling stopped at {name}: {_line_with(text, found.start())}",
            hint="this is a fault of the machine, not of the graph: mend it and run the same command again",
            full=bool(_FULL.search(text)),
            **about,
        )
    if found := _MEMORY.search(text):
        return failure(
            "killed",
            f"the compiler of {name} ran out of memory: {_line_with(text, found.start())}",
            hint="give it more memory or fewer workers (--jobs); nothing is remembered, the next run tries again",
            **about,
        )
    return None


def code_of(log: str) -> str | None:
    """The first error code of neuronx-cc in a log, on a line that speaks of an error if there is one."""
    found = [(match, _line_with(log, match.start())) for match in _CODE.finditer(log)]
    errors = [match[0] for match, line in found if _ERROR_LINE.search(line)]
    return errors[0] if errors else (found[0][0][0] if found else None)


def first_error(log: str) -> str:
    """The first line that speaks of an error, not what followed from it; else the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    coded = (line for line in lines if _CODE.search(line) and _ERROR_LINE.search(line))
    spoken = (line for line in lines if _ERROR_LINE.search(line))
    found = next(coded, None) or next(spoken, None) or (lines[-1] if lines else "it said nothing")
    return found[:300]


def shortened(log: str) -> str:
    """A log of at most `LOG_KEPT` characters: its beginning and its end."""
    if len(log) <= LOG_KEPT:
        return log
    head = LOG_KEPT // 3
    return f"{log[:head]}\n[... {len(log) - LOG_KEPT} characters left out ...]\n{log[-(LOG_KEPT - head) :]}"


def signal_name(number: int) -> str:
    try:
        return f"{number} ({signal.Signals(number).name})"
    except ValueError:
        return str(number)


def _line_with(text: str, at: int) -> str:
    start = text.rfind("\n", 0, at) + 1
    end = text.find("\n", at)
    return text[start : end if end >= 0 else len(text)].strip()[:300]
