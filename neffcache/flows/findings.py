"""One thing that the doctor found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from neffcache.errors import NeffcacheError

State = Literal["ok", "note", "warning", "error"]
T = TypeVar("T")


@dataclass(frozen=True)
class Finding:
    """One line of the report. `code` is the exit code that a command would end with because of an error."""

    area: str
    state: State
    said: str
    hint: str = ""
    code: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "area": self.area,
            "state": self.state,
            "said": self.said,
            **({"hint": self.hint} if self.hint else {}),
            **({"exit_code": self.code} if self.code else {}),
        }


def of_fault(area: str, fault: NeffcacheError, about: str = "") -> Finding:
    """What a command would end with, as a finding."""
    return Finding(area, "error", f"{about}{fault.message}", fault.hint, fault.exit_code)


def tried(findings: list[Finding], area: str, call: Callable[[], T]) -> T | None:
    """What `call` gives; its fault becomes a finding, and None the answer."""
    try:
        return call()
    except NeffcacheError as fault:
        findings.append(of_fault(area, fault))
        return None
