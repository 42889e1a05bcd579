"""The two keys: what names a job (five components, no tracing) and what names one compiled graph.

XXH3-128 is a name, not a proof: whoever compares two keys compares the SHA-256 of the components (`compare.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from neffcache.errors import Mismatch, Usage
from neffcache.key.canonical import canonical_json, digest, from_plain, to_plain, xxh3_128_hex

# The recipe of a job key. workload.py, target.py (target and lnc), the toolchain and options.py give the values.
COMPONENTS = ("workload", "target", "lnc", "toolchain", "options")

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Component:
    """One part of a job key: its name, the SHA-256 of its canonical JSON, and that JSON to read."""

    name: str
    sha256: str
    value: Any

    @classmethod
    def of(cls, name: str, value: Any) -> Component:
        return cls(name, digest(value), value)


@dataclass(frozen=True)
class JobKey:
    """A job's key (32 hex digits) and its five components by name."""

    cache_key: str
    components: Mapping[str, Component]

    def to_json(self) -> dict[str, Any]:
        """The contract's document of `neffcache key`."""
        return {
            "cache_key": self.cache_key,
            "components": {
                name: {"sha256": part.sha256, "value": to_plain(part.value)} for name, part in self.components.items()
            },
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> JobKey:
        """Read `to_json` back.

        Raises Usage when it is not such a document, Mismatch when a digest or the key is not that of what it names.
        """
        entries = document.get("components")
        if not isinstance(entries, Mapping) or set(entries) != set(COMPONENTS):
            raise Usage(
                "This is not the JSON of a job key: its components are not " + ", ".join(COMPONENTS) + ".",
                hint="Write one with `neffcache key CONFIG --json`.",
            )
        components: dict[str, Component] = {}
        for name in COMPONENTS:
            entry = entries[name]
            if not isinstance(entry, Mapping) or "sha256" not in entry or "value" not in entry:
                raise Usage(
                    f"The component {name} lacks its sha256 or its value.",
                    hint="Write the document again with `neffcache key CONFIG --json`.",
                )
            components[name] = Component.of(name, from_plain(entry["value"]))
            if components[name].sha256 != entry["sha256"]:
                raise Mismatch(
                    f"The digest of the component {name} is not that of its value: the document was changed.",
                    hint="Write the document again with `neffcache key CONFIG --json`.",
                )
        key = cls(_cache_key(components), components)
        if key.cache_key != document.get("cache_key"):
            raise Mismatch(
                f"The key {document.get('cache_key')} is not that of its components, which is {key.cache_key}.",
                hint="Write the document again with `neffcache key CONFIG --json`.",
            )
        return key


def _cache_key(components: Mapping[str, Component]) -> str:
    return xxh3_128_hex(canonical_json({name: components[name].sha256 for name in COMPONENTS}))


def job_key(*, workload: Any, target: Any, lnc: Any, toolchain: Any, options: Any) -> JobKey:
    """The key of a job: XXH3-128 of the RFC 8785 JSON of the SHA-256 of each component.

    Every value is JSON; raises TypeError for anything else.
    """
    values = {"workload": workload, "target": target, "lnc": lnc, "toolchain": toolchain, "options": options}
    components = {name: Component.of(name, values[name]) for name in COMPONENTS}
    return JobKey(_cache_key(components), components)


@dataclass(frozen=True)
class CompileComponents:
    """SHA-256 of all that reaches the compiler of one graph; None: this compiler never sees it.

    None and any digest are different keys, so a host artifact (target, lnc, options None) is never taken for a NEFF.
    """

    text: str
    toolchain: str
    env: str
    target: str | None = None
    lnc: str | None = None
    options: str | None = None

    def __post_init__(self) -> None:
        for name, value in self.to_json().items():
            required = name in ("text", "toolchain", "env")
            if (value is None and required) or (value is not None and not _SHA256.fullmatch(value)):
                # An empty or shortened digest would let two different things share a key.
                raise ValueError(f"the component {name} of a compile key must be a SHA-256 in hex, not {value!r}")

    def to_json(self) -> dict[str, str | None]:
        """The `components` of a graph record."""
        return asdict(self)


def compile_key(components: CompileComponents) -> str:
    """The key of one compiled graph: XXH3-128 of the RFC 8785 JSON of its components, as 32 hex digits."""
    return xxh3_128_hex(canonical_json(components.to_json()))
