"""The environment contract: every variable that a Neuron process must see before Python starts, and who may differ.

TorchNeuron reads its variables once, most of them at `import torch`. A setting of the user that contradicts one of ours
is refused with both values: overriding it silently would warm one directory and train from another.
Sources: the TorchNeuron documentation (Neuron 2.33), and for the off switch and the lock time-out its public source.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from neffcache import variables
from neffcache.compile.neuron.installation import Stack
from neffcache.errors import Usage
from neffcache.key.environment import ELSEWHERE, NEUTRAL, PREFIXES, SEMANTIC, neutral_reason
from neffcache.key.option_table import DEFAULT_OPTLEVEL, Mode
from neffcache.key.options import Options
from neffcache.key.target import LNC_VARIABLES, TARGET_VARIABLE, normal_target

NEFF_DIR = "TORCH_NEURONX_NEFF_CACHE_DIR"
LOCAL_DIR = "TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR"
LOCK_TIMEOUT = "TORCH_NEURONX_NEFF_CACHE_LOCK_TIMEOUT"
HLO_DIR, HLO_SWITCH = "TORCH_NEURONX_HLO_CACHE_DIR", "TORCH_NEURONX_HLO_COMPILE_CACHE"
NKI_COMPILE, NKI_TRACE = "NKI_COMPILE_CACHE_URL", "NKI_TRACE_CACHE_URL"
XLA_URL = "NEURON_COMPILE_CACHE_URL"
COMPILE_ONLY = "TORCH_NEURONX_COMPILE_ONLY"
NO_FALLBACK = "TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION"
METRICS = "TORCH_NEURONX_METRICS_ENABLED"
OFF_SWITCHES = ("TORCH_NEURONX_DISABLE_NEFF_CACHE", "TORCH_NEURONX_NEFF_DISABLE_CACHE")
"""The documentation's spelling and the source's. Any value may switch the cache off, so neither may be set."""

FLAGS, LEVEL = "NEURON_CC_FLAGS", "NEURON_COMPILER_OPT_LEVEL"
CORES = "NEURON_RT_NUM_CORES"

LOCK_SECONDS = 6 * 3600
"""How long a rank waits for a sibling's compile at least. TorchNeuron's own limit is 1200 s, after which the waiter
removes the lock and compiles the same graph once more. The lock is the kernel's: a dead holder keeps nobody waiting."""

DIRECTORIES: Mapping[Stack, tuple[str, ...]] = {
    "native": (NEFF_DIR, LOCAL_DIR, HLO_DIR, NKI_COMPILE, NKI_TRACE),
    "xla": (XLA_URL,),
}
"""Where each stack keeps things. A value of the user other than ours is refused."""


@dataclass(frozen=True)
class Places:
    """The directories of one launch. `stores` holds neff/, hlo/, nki/, xla/; `private` is writable and on this host."""

    stores: Path
    private: Path

    def variables(self, stack: Stack) -> dict[str, str]:
        if stack == "xla":
            return {XLA_URL: str(self.stores / "xla")}
        return {
            NEFF_DIR: str(self.stores / "neff"),
            LOCAL_DIR: str(self.private / "neff-local"),
            HLO_DIR: str(self.stores / "hlo"),
            HLO_SWITCH: "1",
            NKI_COMPILE: str(self.stores / "nki" / "compile"),
            NKI_TRACE: str(self.stores / "nki" / "trace"),
        }


@dataclass(frozen=True)
class Contract:
    """`variables` are set, `cleared` are removed."""

    variables: Mapping[str, str]
    cleared: tuple[str, ...] = ()

    def applied(self, environ: Mapping[str, str]) -> dict[str, str]:
        """A whole environment for a process."""
        return {**{name: value for name, value in environ.items() if name not in self.cleared}, **self.variables}


def environment(
    environ: Mapping[str, str],
    *,
    options: Options,
    target: str,
    lnc: int,
    stack: Stack = "native",
    mode: Mode = "compile",
    places: Places | None = None,
    ranks_per_node: int | None = None,
    longest_compile: float = 0.0,
    compile_only: bool = False,
) -> Contract:
    """The contract of one job on top of `environ`, of which nothing is changed.

    `options` are the job's, LNC and target already out of them; `mode` is what the job mostly runs: compiled graphs or
    eager operators. Without `places` only what belongs to the job is there, not to a launch. `longest_compile` is in
    seconds. Raises Usage (exit 2) for each contradiction, with both values and where they came from.
    """
    if target == "cpu":
        raise Usage("cpu is no target of the neuron toolchain", hint="give --target or --instance, or --toolchain host")
    flags = options.canonical
    setting = {
        LNC_VARIABLES[0]: str(lnc),
        TARGET_VARIABLE: target,
        LEVEL: f"-O{_level(environ, options, mode)}",
        **({FLAGS: flags} if flags else {}),
    }
    if stack == "native":
        setting |= {METRICS: "1", NO_FALLBACK: "1"}
        if compile_only:
            setting[COMPILE_ONLY] = "1"
        elif ranks_per_node is not None:
            setting[CORES] = str(ranks_per_node)
    if places is not None:
        setting |= places.variables(stack)
        if stack == "native":
            setting |= lock_timeout(environ, longest_compile)
    _refuse(environ, setting, stack, launching=places is not None)
    # Set but empty is not unset: TorchNeuron would put a space into its keys.
    cleared = (*OFF_SWITCHES, *(() if flags else (FLAGS,)), *(() if compile_only else (COMPILE_ONLY,)))
    return Contract(setting, cleared)


def _level(environ: Mapping[str, str], options: Options, mode: Mode) -> str:
    """The optimisation level that is exported: said in the options, else in the environment, else the mode's default.

    Always explicit, so that no default of an installed version decides. One variable serves compiled graphs and eager
    operators alike.
    """
    said = environ.get(LEVEL, "").strip()
    given = said.removeprefix("-O").removeprefix("=").strip()
    if said and given not in ("0", "1", "2", "3"):
        raise Usage(f"{LEVEL} is {said!r}, not an optimisation level", hint="-O1, -O2 or -O3")
    if options.optlevel is not None and given and given != options.optlevel:
        raise _contradiction("optimisation level", "the compiler options", f"-O{options.optlevel}", LEVEL, said)
    return options.optlevel or given or DEFAULT_OPTLEVEL[mode]


def lock_timeout(environ: Mapping[str, str], longest: float = 0.0) -> dict[str, str]:
    """Above the longest known compile (seconds): a rank that gives up waiting compiles the same graph once more."""
    needed = max(LOCK_SECONDS, int(2 * longest) + 60)
    said = environ.get(LOCK_TIMEOUT, "").strip()
    if not said:
        return {LOCK_TIMEOUT: str(needed)}
    if not said.isdigit():
        raise Usage(f"{LOCK_TIMEOUT} is {said!r}, not a number of seconds", hint=f"unset {LOCK_TIMEOUT}")
    if int(said) <= longest:
        raise Usage(
            f"{LOCK_TIMEOUT} is {said} s, and a graph of this job has taken {longest:.0f} s to compile",
            hint=f"unset {LOCK_TIMEOUT}; {needed} s would be set",
        )
    return {LOCK_TIMEOUT: said}


def _refuse(environ: Mapping[str, str], setting: Mapping[str, str], stack: Stack, *, launching: bool) -> None:
    for name in LNC_VARIABLES:
        said = environ.get(name, "").strip()
        if said and said != setting[LNC_VARIABLES[0]]:
            raise _contradiction("LNC", "the job", setting[LNC_VARIABLES[0]], name, said)
    said = environ.get(TARGET_VARIABLE, "").strip()
    if said and normal_target(said, origin=TARGET_VARIABLE) != setting[TARGET_VARIABLE]:
        raise _contradiction("target", "the job", setting[TARGET_VARIABLE], TARGET_VARIABLE, said)
    for name in (METRICS, NO_FALLBACK, HLO_SWITCH, COMPILE_ONLY, CORES):
        said = environ.get(name, "").strip()
        wanted = setting.get(name, "0" if name == COMPILE_ONLY and stack == "native" else None)
        if said and wanted is not None and said.lower() not in _equal(wanted):
            raise _contradiction(_MEANING[name], "neffcache", wanted, name, said)
    for name in DIRECTORIES.get(stack, ()):
        said = environ.get(name, "").strip()
        if said.startswith("s3://") and name != XLA_URL:
            raise Usage(
                f"{name} is {said}, but TorchNeuron takes it for the name of a local directory",
                hint=f"unset {name}; S3 is reached with --remote",
            )
        if launching and said and said != setting[name]:
            raise _contradiction("cache directory", "the view", setting[name], name, said)


_MEANING: Mapping[str, str] = {
    METRICS: "switch of the counters, without which nothing can be proved,",
    NO_FALLBACK: "switch of the silent fall-back to eager execution",
    HLO_SWITCH: "switch of the lowering cache",
    COMPILE_ONLY: "compile-only mode",
    CORES: "number of cores",
}


def _equal(value: str) -> tuple[str, ...]:
    return {"1": ("1", "true", "yes"), "0": ("0", "false", "no")}.get(value, (value,))


def _contradiction(what: str, here: str, ours: str, name: str, theirs: str) -> Usage:
    return Usage(
        f"the {what} contradicts: {here} has {ours}, {name} has {theirs}",
        hint=f"unset {name}, or make them equal",
        details={here: ours, name: theirs},
    )


# --- variables that nothing reads ---------------------------------------------------------------------------------

READ_ELSEWHERE = (
    *("NEURON_RT_NUM_CORES", "NEURON_RT_VISIBLE_CORES", "NEURON_RT_LOG_LEVEL", "NEURON_RT_ROOT_COMM_ID"),
    *("NEURON_RT_EXEC_TIMEOUT", "NEURON_RT_INSPECT_ENABLE", "NEURON_RT_VIRTUAL_CORE_SIZE"),
    *("NKI_PRECISE_FP", "NKI_SIMULATOR", "XLA_FLAGS", "XLA_USE_BF16", "XLA_DOWNCAST_BF16"),
)
OURS = tuple(value for value in vars(variables).values() if isinstance(value, str) and value.startswith("NEFFCACHE_"))
OTHER_STACK: Mapping[str, tuple[Stack, str]] = {
    XLA_URL: ("xla", NEFF_DIR),
    NEFF_DIR: ("native", XLA_URL),
    HLO_DIR: ("native", XLA_URL),
}
"""Variable -> the only stack that reads it, and the other stack's own."""


def known_variables() -> frozenset[str]:
    """Every variable that somebody is known to read; misspellings listed in the tables are not among them."""
    tables = (variable.name for table in (SEMANTIC, ELSEWHERE, NEUTRAL) for variable in table)
    names = (name for name in tables if "*" not in name and name != "NEURON_COMPILE_CACHE_URI")
    return frozenset((*names, *READ_ELSEWHERE, *OURS))


def unread(
    environ: Mapping[str, str], stack: Stack | None = None, *, ours: Iterable[str] = ("NEFFCACHE_DIR",)
) -> Iterator[str]:
    """A warning for each variable of `environ` that nothing known reads, with the likely name.

    `ours` are the variables of neffcache's own settings.
    """
    known = known_variables() | set(ours)
    for name in sorted(environ):
        if not name.startswith((*PREFIXES, "NEFFCACHE_")):
            continue
        if name in OTHER_STACK and stack in ("native", "xla") and OTHER_STACK[name][0] != stack:
            other = OTHER_STACK[name][1]
            yield f"{name} is set, and the installed torch-neuronx does not read it: did you mean {other}?"
        elif name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            guess = f"did you mean {near[0]}?" if near else ""
            if name.startswith("NEURON_RT_") and not near:
                continue  # the runtime has many, and none of them reaches a graph
            aside = name.startswith("NEFFCACHE_") or neutral_reason(name, environ[name]) is not None
            counts = "" if aside else " (it counts in the job key all the same)"
            yield f"nothing that neffcache knows reads {name}{counts}" + (f": {guess}" if guess else "")
