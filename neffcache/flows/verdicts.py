"""Verdicts: what is known of every configuration of TorchTitan, as data that comes with neffcache for each version.

`traces`: traced on fake tensors at its default mesh. `compiles`: the host toolchain compiled all its graphs.
`trains`: a real run of several CPU ranks hit all of them. `unsupported`: not possible, and why. `unknown`: nobody
looked.
`scripts/verdicts` makes the data; no verdict says anything about a run on Trainium.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from neffcache.errors import StoreFault, Usage
from neffcache.flows import warmers
from neffcache.trace.registries import Registered, installed_version, registered

Kind = Literal["", "package", "hardware", "files", "titan", "trainer", "limit", "trace"]
"""Why something is unsupported: a package that is absent, a device that only some hosts have, files that do not come
with TorchTitan, TorchTitan's own refusal, no Trainer in it, a limit of time or memory, or a trace that failed.
"""
State = Literal["traces", "compiles", "trains", "unsupported", "unknown"]
RANK = ("unknown", "unsupported", "traces", "compiles", "trains")

OPTIONAL = {
    "fla": "flash-linear-attention",
    "torchvision": "torchvision",
    "transformers": "transformers",
    "torchao": "torchao",
}
"""Import name of a package that some configurations need -> what to install; together the extra `models`."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """One configuration. Ranks, mesh and graphs are those of its default placement; seconds and bytes of its trace.

    `needs` are optional packages by import name, `missing` the one that was not there; `files` are read from a hub, and
    shapes with them; `replaced` is what tracing on a CPU put in the place of something that matters. `graphs_digest`
    names the set of graphs.
    """

    family: str
    module: str
    config: str
    verdict: State
    reason: str = ""
    kind: Kind = ""
    run: str = ""
    mode: str = ""
    target: str = ""
    ranks: int | None = None
    ranks_at_lnc: dict[str, int] = {}
    mesh: dict[str, int] = {}
    needs: list[str] = []
    files: list[str] = []
    missing: str = ""
    neuron: list[dict[str, Any]] = []
    replaced: list[str] = []
    phases: list[str] = []
    graphs: int | None = None
    nodes: int | None = None
    dynamic: int = 0
    uncacheable: dict[str, str] = {}
    graphs_digest: str = ""
    seconds: float | None = None
    peak_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """The verdicts on one TorchTitan, and with which packages they were found."""

    schema: int = 1
    torchtitan: str
    packages: dict[str, str]
    configs: list[Verdict]


def folder() -> Path:
    return warmers.shipped() / "verdicts"


def load(path: Path) -> Sweep:
    """Read one sweep; StoreFault when it is not one."""
    try:
        return msgspec.convert(json.loads(path.read_bytes()), Sweep)
    except (OSError, ValueError) as fault:
        raise StoreFault(f"the verdicts in {path.name} cannot be read: {fault}") from None


def save(path: Path, sweep: Sweep) -> None:
    """Write a sweep, one configuration a line, by rename."""
    head = {"schema": sweep.schema, "torchtitan": sweep.torchtitan, "packages": dict(sorted(sweep.packages.items()))}
    rows = ",\n".join(json.dumps(each.to_json()) for each in sweep.configs)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(f'{json.dumps(head)[:-1]}, "configs": [\n{rows}\n]}}\n')
    temporary.replace(path)


def swept_versions() -> list[str]:
    """TorchTitan versions that verdicts come for, oldest first."""
    return sorted((path.stem for path in folder().glob("*.json")), key=_version_order)


def _version_order(text: str) -> tuple[Any, ...]:
    return tuple(int(part) if part.isdigit() else 0 for part in text.split("."))


def known(version: str | None = None) -> list[Verdict]:
    """The verdict on every configuration of the installed TorchTitan; what is new there is `unknown`.

    Without TorchTitan, or with another `version`, that of the data. Usage when there is none for it.
    """
    installed = installed_version()
    wanted = version or installed or next(iter(reversed(swept_versions())), "")
    path = folder() / f"{wanted}.json"
    swept = {(entry.module, entry.config): entry for entry in load(path).configs} if path.is_file() else {}
    if wanted != installed:
        if not swept:
            raise Usage(f"no verdicts come for TorchTitan {wanted}", hint=f"there are: {', '.join(swept_versions())}")
        return list(swept.values())
    found = []
    for entry in registered():
        verdict = swept.get((entry.module, entry.function))
        found.append(unknown(entry, wanted) if verdict is None else here(verdict))
    return found


def unknown(entry: Registered, version: str) -> Verdict:
    return Verdict(
        family=entry.family,
        module=entry.module,
        config=entry.function,
        verdict="unknown",
        reason=f"no verdict comes for it in TorchTitan {version}; neffcache configs --probe traces it",
    )


def here(verdict: Verdict) -> Verdict:
    """A verdict in this environment: a package that it needs may be absent."""
    absent = [name for name in verdict.needs if importlib.util.find_spec(name) is None]
    if not absent or verdict.verdict == "unsupported":
        return verdict
    names = ", ".join(OPTIONAL.get(name, name) for name in absent)
    return msgspec.structs.replace(
        verdict,
        verdict="unsupported",
        missing=absent[0],
        reason=f"needs {names}, not installed here (pip install 'neffcache[models]'); with it: {verdict.verdict}",
    )


def of_request(module: str, function: str, verdicts: Iterable[Verdict]) -> Verdict | None:
    """The verdict on a configuration by TorchTitan's names; a name without a module must be the only one."""
    found = [entry for entry in verdicts if entry.config == function and module in ("", entry.module)]
    return found[0] if len(found) == 1 else None


def merged(old: Verdict | None, new: Verdict) -> Verdict:
    """What a fresh trace says, keeping `compiles` or `trains` where the graphs are still those that were proved."""
    if old is None or new.verdict != "traces" or old.graphs_digest != new.graphs_digest:
        return new
    return msgspec.structs.replace(new, verdict=max(old.verdict, new.verdict, key=RANK.index))


def counts(verdicts: Iterable[Verdict]) -> Mapping[str, int]:
    """How many have which verdict, best first."""
    found = [entry.verdict for entry in verdicts]
    return {state: found.count(state) for state in reversed(RANK) if state in found}
