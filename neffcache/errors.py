"""Everything that can go wrong, as classes with an exit code, a sentence for the user and a hint.

Raised where the fault is known, printed in one place (`cli`). Exit codes are the contract and never change meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar


class NeffcacheError(Exception):
    """Base of all errors that reach a user.

    `message` is one sentence; `hint` is the next thing to do; `details` is JSON for `--json` readers.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "", details: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details: dict[str, Any] = dict(details or {})

    def to_json(self) -> dict[str, Any]:
        return {
            "error": type(self).__name__,
            "message": self.message,
            "hint": self.hint,
            "exit_code": self.exit_code,
            **({"details": self.details} if self.details else {}),
        }


class Bug(NeffcacheError):
    """neffcache itself is wrong."""

    exit_code = 1


class Usage(NeffcacheError):
    """What was asked for contradicts itself or does not exist."""

    exit_code = 2


class Miss(NeffcacheError):
    """Something that was asked for is not in the cache: a miss, partial or unknown."""

    exit_code = 3


class RemoteFault(NeffcacheError):
    """The remote tier is unreachable, denied, throttled, or there is no such bucket; never counted as a miss."""

    exit_code = 4


class Mismatch(NeffcacheError):
    """LNC, target, world size, toolchain, workload or signature is not what the manifest was made for."""

    exit_code = 5


class CompileFailed(NeffcacheError):
    """At least one graph did not compile; what could be kept is kept."""

    exit_code = 6


class StoreFault(NeffcacheError):
    """The local store is damaged and not healable, not writable, full, or not ours."""

    exit_code = 7


class Unsupported(NeffcacheError):
    """A configuration or a library version that neffcache cannot handle."""

    exit_code = 8


class CommandFailed(NeffcacheError):
    """The launched command failed by itself; its own status is in the JSON."""

    exit_code = 9


def revive(document: Mapping[str, Any]) -> NeffcacheError:
    """The error that `NeffcacheError.to_json` wrote down; a class unknown here by its exit code."""
    kind = globals().get(str(document.get("error")))
    if not (isinstance(kind, type) and issubclass(kind, NeffcacheError)):
        code = document.get("exit_code")
        kind = next((each for each in NeffcacheError.__subclasses__() if each.exit_code == code), Bug)
    return kind(document["message"], hint=document.get("hint", ""), details=document.get("details"))
