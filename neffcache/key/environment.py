"""Which environment variables count for a graph.

A variable with a known prefix counts unless a table below says why it does not.
Sources: the TorchNeuron and Neuron runtime documentation (2026-08 to 2026-10).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from neffcache.key.target import LNC_VARIABLES, TARGET_VARIABLE

# Everything that starts so counts until it is declared neutral.
PREFIXES = ("NEURON_", "NEURONX_", "TORCH_NEURONX_", "NKI_", "XLA_")


@dataclass(frozen=True)
class Variable:
    """A variable (or a class of them, with `*`) and the reason for its place. `only`: just for these values."""

    name: str
    reason: str
    only: tuple[str, ...] = ()

    def covers(self, name: str, value: str) -> bool:
        return fnmatchcase(name, self.name) and (not self.only or value in self.only)


# Known to change graphs or their lowering. Those with a prefix would count without the table; it is here to be read.
SEMANTIC: tuple[Variable, ...] = (
    Variable("COLLECTIVE_BUCKETSIZE_IN_MB", "Size of the buckets that collectives are joined into."),
    Variable("COLLECTIVE_MIN_BUCKETS", "Number of the buckets that collectives are joined into."),
    Variable("NEURON_USE_SPLIT_ALLGATHER", "Another lowering of all-gather."),
    Variable("NEURON_USE_SPLIT_REDUCE_SCATTER", "Another lowering of reduce-scatter."),
    Variable("NEURON_USE_NKI_ALLTOALLV", "A kernel in place of an operator."),
    Variable("NEURON_SCRATCHPAD_PAGE_SIZE", "Memory layout that the compiler plans with."),
    Variable("NEURON_COMPILER_OPT_LEVEL", "Overrides the default -O of eager operators and compiled graphs."),
    Variable("TORCH_NEURONX_COMPLEX_DECOMPOSE", "Decomposition of complex operators."),
    Variable("TORCH_NEURONX_SPMD_DISABLE", "Another partitioning of graphs."),
    Variable("TORCH_NEURONX_MLIR_ATEN_OPS", "Which operators are lowered through MLIR."),
    Variable("TORCH_NEURONX_ENABLE_CONCATENATION", "Joins graphs."),
    Variable("TORCH_NEURONX_ENABLE_PROLOGUE", "Moves work in front of a graph."),
    Variable("TORCH_NEURONX_ENABLE_NKI_SDPA", "A kernel in place of attention."),
    Variable("XLA_IR_DEBUG", "Writes source locations into the IR."),
    Variable("XLA_HLO_DEBUG", "Writes source locations into the IR."),
    Variable("NKI_DEBUG_INFO", "Writes source locations into kernels."),
)

# Read elsewhere, as a component of its own, so that one meaning has one place in the key.
ELSEWHERE: tuple[Variable, ...] = (
    Variable("NEURON_CC_FLAGS", "The component `options`."),
    *(Variable(name, "The component `lnc`.") for name in LNC_VARIABLES),
    Variable(TARGET_VARIABLE, "The component `target`."),
)

_PLACE = "Where something is kept, not what."
_CACHE = "Whether and how results are kept; a kept result is the one that would be computed."

NEUTRAL: tuple[Variable, ...] = (
    Variable("NEURON_RT_*", "The runtime loads what was compiled; LNC and core size are read by the component `lnc`."),
    # --- caches
    Variable("TORCH_NEURONX_NEFF_CACHE_DIR", _PLACE),
    Variable("TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR", _PLACE),
    Variable("TORCH_NEURONX_HLO_CACHE_DIR", _PLACE),
    Variable("NKI_TRACE_CACHE_URL", _PLACE),
    Variable("NKI_COMPILE_CACHE_URL", _PLACE),
    Variable("NEURON_COMPILE_CACHE_URL", _PLACE),
    Variable("NEURON_COMPILE_CACHE_URI", "Nothing reads it: a misspelling of NEURON_COMPILE_CACHE_URL."),
    Variable("NEURON_LIBTORCH_REMOTE_CACHE", _PLACE),
    Variable("TORCH_NEURONX_NEFF_CACHE_LOCK_TIMEOUT", _CACHE),
    Variable("TORCH_NEURONX_DISABLE_NEFF_CACHE", _CACHE),
    Variable("TORCH_NEURONX_NEFF_DISABLE_CACHE", _CACHE),
    Variable("TORCH_NEURONX_HLO_COMPILE_CACHE", _CACHE),
    # Importing torch_neuronx sets it to 1, so 1 cannot be told from unset. Any other value was meant and counts.
    Variable("NKI_ENABLE_TRACE_CACHE", "1 is what importing torch_neuronx sets by itself.", only=("1",)),
    # --- reports and dumps
    Variable("TORCH_NEURONX_DEBUG_DIR", _PLACE),
    Variable("TORCH_NEURONX_PRESERVE_COMPILATION_ARTIFACTS", "Keeps copies of graphs and NEFFs."),
    Variable("TORCH_NEURONX_METRICS_ENABLED", "Counts."),
    # --- how a warm and a run differ on purpose
    Variable("TORCH_NEURONX_COMPILE_ONLY", "A warm compiles the graphs that a run executes."),
    Variable("TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION", "What happens after a failed compile."),
)


def neutral_reason(name: str, value: str) -> str | None:
    """Why a variable is left out of the key, or None when it counts or is not one of ours."""
    if any(variable.covers(name, value) for variable in SEMANTIC):
        return None
    return next((v.reason for v in (*ELSEWHERE, *NEUTRAL) if v.covers(name, value)), None)


def graph_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of `environ` that count, by name, each with its value as it is.

    A variable set to the empty string is not the same as one that is not set.
    """
    known = {variable.name for variable in SEMANTIC}
    return {
        name: environ[name]
        for name in sorted(environ)
        if (name in known or name.startswith(PREFIXES)) and neutral_reason(name, environ[name]) is None
    }
