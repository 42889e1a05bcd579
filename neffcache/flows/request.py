"""A request: what somebody typed to choose a job, before TorchTitan is asked what it means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from neffcache.errors import Usage
from neffcache.flows.warmers import WarmerRun, find
from neffcache.key.canonical import canonical_json, digest
from neffcache.key.options import Options
from neffcache.key.target import Placement, resolve_placement

CHANNEL = "current"
"""Where refs go and are looked up unless another channel is said."""

UNCOMPARED = frozenset({"python"})
"""Versions that a request by ref does not name: a patch release of Python is in no key, its ABI is in the toolchain."""


@dataclass(frozen=True)
class Request:
    """`settings` are TorchTitan options by dotted path or a callable's arguments; `options` the compiler's, canonical.

    `kind` is `torchtitan` or `callable`, "" where the module that is named tells; a ref does not name it.

    `native`: the compiler's own cache is kept and served, where the toolchain could do either.
    `versions` are those of TorchTitan and the toolchain, said by whoever asks by ref; by key TorchTitan is asked.
    """

    config: str
    module: str
    function: str
    settings: Mapping[str, Any]
    placement: Placement
    toolchain: str
    options: Options
    dropped: tuple[str, ...] = field(default=())
    native: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)
    kind: str = "torchtitan"

    def to_json(self) -> dict[str, Any]:
        """The semantic fields only: this document names a ref and may leave the machine."""
        return {
            "config": self.config,
            "module": self.module,
            "function": self.function,
            "set": {name: setting_text(value) for name, value in self.settings.items()},
            "target": self.placement.target,
            "lnc": self.placement.lnc,
            "world_size": self.placement.world_size,
            "toolchain": self.toolchain,
            "options": list(self.options.tokens),
            **({"native": True} if self.native else {}),
        }

    def named(self, versions: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The whole request, as a ref holds it and as its digest names it: with the versions, by default those said."""
        said = self.versions if versions is None else versions
        return {**self.to_json(), "versions": {name: said[name] for name in sorted(said) if name not in UNCOMPARED}}

    @property
    def digest(self) -> str:
        """The name of the ref that whoever says this asks for."""
        return digest(self.named())

    def means(self, named: Mapping[str, Any]) -> bool:
        """Whether the request of a ref is this one, in everything that was said here."""
        mine = self.named()
        unsaid = {name for name in ("toolchain", "versions") if not mine[name]}
        names = (mine.keys() | named.keys()) - unsaid
        return all(canonical_json(mine.get(name)) == canonical_json(named.get(name)) for name in names)

    @property
    def unsaid(self) -> list[str]:
        """What a request by ref must say and this one does not."""
        return [
            *([] if self.toolchain else ["--toolchain"]),
            *([] if self.versions else ["--version-of torchtitan=... and of the toolchain"]),
        ]


def words(named: Mapping[str, Any]) -> list[str]:
    """The arguments that make the request of a ref again, on a machine without TorchTitan."""
    return [
        str(named["config"]),
        *("--target", str(named["target"]), "--lnc", str(named["lnc"]), "--world-size", str(named["world_size"])),
        *("--toolchain", str(named["toolchain"])),
        *(["--native"] if named.get("native") else []),
        *(word for name, value in named.get("set", {}).items() for word in ("--set", f"{name}={value}")),
        *(f"--option={token}" for token in named.get("options", ())),
        *(word for name, text in named.get("versions", {}).items() for word in ("--version-of", f"{name}={text}")),
    ]


def parse_versions(pairs: Sequence[str]) -> dict[str, str]:
    """`--version-of name=version` options; later ones win. Usage for one without a name or a version."""
    versions: dict[str, str] = {}
    for pair in pairs:
        name, _, version = (part.strip() for part in pair.partition("="))
        if not name or not version:
            raise Usage(f"--version-of takes name=version, not {pair!r}", hint="--version-of torchtitan=0.3.0")
        versions[name] = version
    return versions


def parse_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """`--set a.b=value` options; later ones win. Usage for one without a name or a value."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise Usage(f"--set takes name=value, not {pair!r}", hint="--set training.seq_len=4096")
        settings[name.strip().replace("-", "_")] = value
    return settings


def setting_text(value: Any) -> str:
    """A TorchTitan option's value as `--set NAME=` takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return ",".join(setting_text(item) for item in value)
    return str(value)


def make_request(
    config: str,
    *,
    sets: Sequence[str] = (),
    target: str | None = None,
    lnc: int | None = None,
    instance: str | None = None,
    nodes: int | None = None,
    world_size: int | None = None,
    toolchain: str = "host",
    options: Sequence[str] = (),
    native: bool = False,
    versions: Sequence[str] = (),
    environ: Mapping[str, str],
) -> Request:
    """The request of these options, on top of the warmer's run of that name.

    Said placement replaces the warmer's: an instance or a target of one's own drops what the warmer says about place.
    Raises Usage for contradictions.
    """
    run: WarmerRun = find(config, environ)
    given = {"target": target, "lnc": lnc, "instance": instance, "nodes": nodes, "world_size": world_size}
    said = {name: value for name, value in given.items() if value is not None}
    default = dict(run.placement)
    if "instance" in said or "target" in said:
        for name in ("instance", "target", "world_size", "nodes", "lnc"):
            default.pop(name, None)
    if "world_size" in said or "nodes" in said:
        default.pop("world_size", None)
        default.pop("nodes", None)
    parsed = Options.parse([*([environ["NEURON_CC_FLAGS"]] if environ.get("NEURON_CC_FLAGS") else []), *options])
    placed: dict[str, Any] = {**default, **said}
    placement = resolve_placement(**placed, environ=environ, option_lnc=parsed.lnc, option_target=parsed.target)
    final = parsed.for_placement(placement.target, placement.lnc)
    return Request(
        config=config,
        module=run.module,
        function=run.config,
        settings={**run.settings, **parse_settings(sets)},
        placement=placement,
        toolchain=toolchain,
        options=final,
        dropped=tuple(f"{entry.option}: {entry.reason}" for entry in final.dropped),
        # A compiler that always owns its cache is asked the same with and without the flag.
        native=native and toolchain == "host",
        versions=parse_versions(versions),
        kind=run.kind,
    )
