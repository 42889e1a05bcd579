"""What is known about the options of `neuronx-cc compile`, as data (Neuron documentation, 2026-08 to 2026-10).

A default is listed only where leaving the option out gives the compiler the same command line in effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

# choice: one word. words: one word, or several of a fixed list. flag: no value. text: any string, dashes inside.
Kind = Literal["choice", "words", "flag", "text"]
Mode = Literal["compile", "eager"]


@dataclass(frozen=True)
class Known:
    """An option that reaches the NEFF.

    `spellings` are all its names, the canonical one first. `defaults` mean the same as not giving it, `synonyms` are
    other names of a value. For a flag, `state` is what it switches and `spellings` are those of one side only.
    """

    spellings: tuple[str, ...]
    kind: Kind
    defaults: tuple[str, ...] = ()
    synonyms: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    state: str = ""

    @property
    def name(self) -> str:
        return self.spellings[0]

    @property
    def slot(self) -> str:
        """Options of one slot override each other: the right-most wins."""
        return self.state or self.name


def _pair(state: str, *, default: str = "") -> tuple[Known, Known]:
    """`--enable-X` and `--disable-X`; `default` is the side that equals giving neither.

    Only mixed-precision accumulation has a documented `--disable-`. For the others it is read as the opposite all the
    same: if the compiler takes it, the order of the two decides, and two orders must not share a form. It is then kept
    as it stands, never dropped.
    """
    return (
        Known((f"--enable-{state}",), "flag", ("enable",) if default == "enable" else (), state=state),
        Known((f"--disable-{state}",), "flag", ("disable",) if default == "disable" else (), state=state),
    )


LNC = "--lnc"
TARGET = "--target"
OPTLEVEL = "--optlevel"
AUTO_CAST = "--auto-cast"
AUTO_CAST_TYPE = "--auto-cast-type"

# In the order in which the canonical form writes them.
KNOWN: tuple[Known, ...] = (
    Known(("--framework",), "choice", ("XLA",)),
    Known((TARGET,), "choice"),
    # No default here: the compiler's is generic, but TorchNeuron itself passes transformer before the user's options.
    Known(("--model-type",), "choice"),
    Known((AUTO_CAST,), "choice", ("none",)),
    Known((AUTO_CAST_TYPE,), "choice", ("bf16",)),
    Known(("--native-int64",), "choice", ("default", "disabled")),
    Known(("--implicit-integer-downcast",), "words", ("default", "all")),
    Known(("--distribution-strategy",), "choice", ("generic",), MappingProxyType({"NEMO": "llm-training"})),
    # No default: it depends on the target. `Options.for_placement` takes it out where the job key says it already.
    Known((LNC, "-lnc", "--logical-nc-config"), "choice"),
    # No default: one text reaches eager operators (-O1 by default) and compiled graphs (-O2 by default) alike, so for a
    # whole job no level means the same as giving none. `Options.graph_component` resolves it for one graph.
    Known((OPTLEVEL, "-O"), "choice"),
    *_pair("mixed-precision-accumulation", default="enable"),
    *_pair("saturate-infinity"),
    *_pair("fast-context-switch"),
    *_pair("fast-loading-neuron-binaries"),
    Known(("--tensorizer-options",), "text"),
    Known(("--hbm-scratchpad-page-size",), "text"),
    Known(("--cc-pipeline-tiling-factor",), "text"),
)
DEFAULT_OPTLEVEL: Mapping[Mode, str] = MappingProxyType({"eager": "1", "compile": "2"})
DEPRECATED_O1 = ("--enable-experimental-O1", "enable-experimental-O1")
DOWNCAST_WORDS = frozenset({"dot", "scatter", "all_reduce", "reduce_scatter", "pow"})


@dataclass(frozen=True)
class Idle:
    """An option that reaches no NEFF; `valued` when it takes a value."""

    name: str
    kind: Literal["neutral", "wrapper"]
    valued: bool
    reason: str


IDLE: tuple[Idle, ...] = (
    Idle("--logfile", "neutral", True, "says where the compiler logs"),
    Idle("--output", "neutral", True, "says where the NEFF is written"),
    Idle("--verbose", "neutral", True, "says how much the compiler logs"),
    Idle("--cache_dir", "wrapper", True, "is read by the older cache wrapper and never reaches the compiler"),
    Idle("--no_cache", "wrapper", False, "is read by the older cache wrapper and never reaches the compiler"),
    Idle("--retry_failed_compilation", "wrapper", False, "is read by the older cache wrapper, never by the compiler"),
    Idle("--log_level", "wrapper", True, "is read by the older cache wrapper and never reaches the compiler"),
)

KNOWN_BY_SPELLING: Mapping[str, Known] = {spelling: known for known in KNOWN for spelling in known.spellings}
IDLE_BY_NAME: Mapping[str, Idle] = {idle.name: idle for idle in IDLE}
ORDER: Mapping[str, int] = {known.slot: index for index, known in reversed(list(enumerate(KNOWN)))}


def _plain(name: str) -> str:
    return name.lstrip("-").lower().replace("_", "-").removeprefix("no-")


_PLAIN_NAMES: tuple[tuple[str, str], ...] = (
    *((_plain(spelling), known.slot) for spelling, known in KNOWN_BY_SPELLING.items()),
    *((_plain(name), OPTLEVEL) for name in DEPRECATED_O1),
    *((_plain(idle.name), idle.name) for idle in IDLE),
)


def resembles(name: str) -> frozenset[str]:
    """The options that an unknown name may be another spelling of: an abbreviation, other dashes or case, a `no-` form.

    Option parsers accept some of these. Whether this compiler does is not documented.
    """
    plain = _plain(name)
    found = {slot for known, slot in _PLAIN_NAMES if known.startswith(plain)}
    return frozenset(found | ({LNC} if plain.startswith("lnc") else set()))
