"""What the documentation advises for the error codes of neuronx-cc, as data (Neuron documentation, 2026-07 to 2026-10).

Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/compiler/error-codes/index.html
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

PAGE = "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/compiler/error-codes/index.html"

_SPLIT = "the graph makes more instructions than fit: split it with pipeline or tensor parallelism"
_HBM = "activations do not fit into HBM: a smaller batch or sequence, or more tensor or pipeline parallelism"
_CUSTOM = "an unknown custom call: use one of the targets that the compiler lists"
_OPERATOR = "an operator that is not supported: see `neuronx-cc list-operators --framework XLA`"
_FLOAT8 = "an 8-bit float type that is not supported: cast to float16 or a supported type"

ADVICE: Mapping[str, str] = MappingProxyType(
    {
        "NCC_EARG001": "this target has not that LNC: --lnc 1 on Trn1, 1 or 2 on Trn2 and Trn3",
        "NCC_EBIR023": "the intermediate size of the MLP kernel is over 4096: tile it, or more tensor parallelism",
        "NCC_EBVF030": _SPLIT,
        "NCC_EHCA005": _CUSTOM,
        "NCC_EMOD025": "a dynamic shape: compile with static shapes (dynamic=False)",
        "NCC_EOOM001": _HBM,
        "NCC_EOOM002": _HBM,
        "NCC_ESFH002": "a 64-bit unsigned constant that does not fit into 32 bits: use uint32, avoid large constants",
        "NCC_ESPP004": "a data type that code cannot be generated for: use a supported one",
        "NCC_ESPP047": _FLOAT8,
        "NCC_EUOC002": _OPERATOR,
        "NCC_EVRF001": _OPERATOR,
        "NCC_EVRF004": "complex types are not supported on the device: compute with real and imaginary parts",
        "NCC_EVRF005": _FLOAT8,
        "NCC_EVRF006": "only the default random generator is supported: choose no algorithm explicitly",
        "NCC_EVRF007": _SPLIT,
        "NCC_EVRF009": _HBM,
        "NCC_EVRF010": "use input dilation or kernel dilation, not both",
        "NCC_EVRF011": "a strided convolution with dilated input: do the two steps separately",
        "NCC_EVRF013": "TopK takes no integers: cast its input to a floating-point type",
        "NCC_EVRF015": _CUSTOM,
        "NCC_EVRF016": "scatter-reduce takes no integers or booleans: cast to a floating-point type",
        "NCC_EVRF017": "reduce-window takes no base dilation over 1",
        "NCC_EVRF018": "reduce-window takes no window dilation over 1",
        "NCC_EVRF019": "reduce-window takes two operands: split one with more",
        "NCC_EVRF022": "arithmetic shifts take 32-bit types: cast to int32, uint32 or float32",
        "NCC_EVRF031": "a scatter leaves its operand: the iota must have the size of the operand's dimension",
        "NCC_EVRF051": "this float8 type is not supported on this target: QuantizeMX needs Trn3 or later",
        "NCC_EVRF052": "use F8E4M3FN instead of F8E4M3 on this target",
        "NCC_EVRF056": "a gather leaves its operand: max_position_embeddings must be at least the sequence length",
        "NCC_EVRF059": "a kernel file that the graph names is not on this host: clear the NKI cache and trace again",
        "NCC_EVRF066": "an NKI kernel was made for another LNC than the compiler is told: make the two equal",
        "NCC_EXSP001": _HBM,
        "NCC_EXTP004": _SPLIT,
    }
)

_RANGES = (
    (60, 63, "a 64-bit integer does not fit into 32 bits: use 32-bit integers"),
    (36, 58, "an MX format (QuantizeMX, ScaledMatmul) is used in a way that is not supported"),
)


def advice(code: str) -> str:
    """What to do about a code; for one that is not documented here, where to look."""
    if code in ADVICE:
        return ADVICE[code]
    number = code.removeprefix("NCC_EVRF")
    if number != code and number.isdigit():
        for low, high, text in _RANGES:
            if low <= int(number) <= high:
                return text
    if code.startswith("NCC_I"):
        return "an internal error of the compiler: report it with its log, or try another compiler version or -O level"
    return f"see {PAGE}"
