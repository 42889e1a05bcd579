"""One verb for several configurations: what fails for one does not stop the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from neffcache.errors import NeffcacheError


@dataclass
class Several:
    """The document and the lines of each configuration, in order, and the first fault."""

    documents: list[dict[str, Any]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    fault: NeffcacheError | None = None


def for_each(configs: Sequence[str], work: Callable[[str], tuple[dict[str, Any], list[str]]]) -> Several:
    """`work` of every configuration. With only one its fault is raised; else it is that configuration's document."""
    done = Several()
    for config in configs:
        try:
            document, lines = work(config)
        except NeffcacheError as fault:
            if len(configs) == 1:
                raise
            done.fault = done.fault or fault
            document, lines = {"config": config, **fault.to_json()}, [f"{config}: error: {fault.message}"]
        done.documents.append(document)
        done.lines += lines
    return done
