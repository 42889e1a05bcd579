"""Which fields of a resolved TorchTitan configuration can change a graph: all of them, but for one declared table.

Checked against torchtitan 0.3.0 (`trainer.py`, `config/configs.py` and the `Config` of each component). Every entry
names one field: a field that a later TorchTitan adds, even next to neutral ones, counts until somebody declares it.
That the table is true is proved by tracing with every neutral field changed (`warm --lint`), not by this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from neffcache.errors import Usage

DOCUMENT_FIELDS = ("config", "sources", "environment", "torchtitan")
CALLABLE = "callable"
"""The kind of a document that is made of a callable and its arguments: all of it counts."""
TORCHTITAN = "torchtitan"
"""The other kind; its documents do not say it."""


@dataclass(frozen=True)
class Neutral:
    """A field that reaches no graph, and why.

    `path` is dotted from the root of `config`; `*` is one list index. What lies below the field goes with it.
    With `only`, the field is neutral just for these values; with `unless`, for every value but these.
    """

    path: str
    reason: str
    only: tuple[Any, ...] = ()
    unless: tuple[Any, ...] = ()

    def covers(self, path: tuple[str, ...], value: Any) -> bool:
        pattern = self.path.split(".")
        if len(pattern) != len(path) or any(want not in ("*", got) for want, got in zip(pattern, path, strict=True)):
            return False
        if self.only and not any(_is(value, allowed) for allowed in self.only):
            return False
        return not any(_is(value, counted) for counted in self.unless)


def _is(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)


def _each(prefix: str, names: str, reason: str) -> tuple[Neutral, ...]:
    return tuple(Neutral(f"{prefix}.{name}" if prefix else name, reason) for name in names.split())


_DATA = "Chooses the text, not its shape: every batch is local_batch_size x seq_len token ids."
_LOADER = "Works in the data loader's own processes and memory; the batch that reaches the model is the same."

NEUTRAL: tuple[Neutral, ...] = (
    # --- run
    Neutral("training.steps", "When training ends; the learning rate that it shapes is another at each step anyway."),
    *_each("training", "gc_freq gc_debug", "Python's garbage collection."),
    *_each("", "dump_folder", "Where outputs are written."),
    *_each("", "hf_assets_path", "Where tokenizer and weight files lie; the model's sizes come from model_spec."),
    # --- reports
    *_each(
        "metrics",
        "log_freq enable_tensorboard disable_color_printing save_tb_folder save_for_all_ranks enable_wandb",
        "What is reported, where and how often; the first step is always logged.",
    ),
    *_each(
        "profiler",
        "enable_profiling save_traces_folder profile_freq profiler_repeat profiler_skip_first profiler_skip_first_wait "
        "profiler_active profiler_warmup enable_memory_snapshot memory_snapshot_freq save_memory_snapshot_folder "
        "memory_snapshot_max_entries",
        "Watches the step from outside.",
    ),
    Neutral("profiler.trace_post_processor", "Called with the path of a written trace."),
    *_each("debug", "print_config save_config_file enable_structured_logging", "Printing and logging on the host."),
    Neutral("debug.seed", "Seeds the generators; a graph takes their state as an input."),
    # --- checkpoint: where and when. What a save or a load computes (enable, formats, dtypes) counts: it runs
    # eager operators, which the neuron toolchain compiles too.
    *_each("checkpoint", "folder interval keep_latest_k", "Where and how often a checkpoint is written."),
    *_each("checkpoint", "initial_load_path load_step", "Which checkpoint is read; its state has the same shapes."),
    Neutral("checkpoint.enable_first_step_checkpoint", "When a save happens; `enable` says whether one does."),
    # --- communication
    *_each("comm", "init_timeout_seconds train_timeout_seconds", "How long a collective may take."),
    *_each("comm", "trace_buf_size save_traces_folder save_traces_file_prefix", "The flight recorder."),
    # local_tensor and torchcomms replace the process groups themselves, so they count.
    Neutral(
        "comm.mode",
        "A fake process group traces the graphs of the real one: that is how a warm traces.",
        only=("default", "fake_backend"),
    ),
    # --- data. `infinite` and what shapes a sample (patch sizes, image budgets, packing) stay semantic: a data set that
    # ends gives a last short batch, which is another graph.
    *(
        neutral
        for loader in ("dataloader", "validator.dataloader")
        for neutral in (
            *_each(loader, "dataset dataset_path dataset_subset video_dir seed stopping_strategy", _DATA),
            Neutral(f"{loader}.load_dataset_kwargs", _DATA),
            *_each(f"{loader}.sources.*", "dataset dataset_path weight", _DATA),
            Neutral(f"{loader}.sources.*.load_dataset_kwargs", _DATA),
            *_each(loader, "num_workers persistent_workers pin_memory prefetch_factor", _LOADER),
            *_each(
                f"{loader}.sources.*",
                "num_workers persistent_workers pin_memory prefetch_factor",
                "The loader around the sources decides.",
            ),
        )
    ),
    # --- evaluation
    Neutral("validator.freq", "How often evaluation runs; it always runs at the first step."),
    Neutral("validator.steps", "How many equal batches it takes; -1 takes the last short one too.", unless=(-1,)),
)


class Split(NamedTuple):
    """A workload document without its neutral fields, and those by dotted path."""

    semantic: dict[str, Any]
    neutral: dict[str, Any]


def neutral_reason(path: str, value: Any) -> str | None:
    """Why the field at the dotted path is left out of the key, or None when it counts."""
    return _reason(tuple(path.split(".")), value)


def _reason(path: tuple[str, ...], value: Any) -> str | None:
    return next((neutral.reason for neutral in NEUTRAL if neutral.covers(path, value)), None)


def _filter(value: Any, path: tuple[str, ...], neutral: dict[str, Any]) -> Any:
    if isinstance(value, Mapping):
        kept: dict[str, Any] = {}
        for name, item in value.items():
            inner = (*path, name)
            if _reason(inner, item) is None:
                kept[name] = _filter(item, inner, neutral)
            else:
                neutral[".".join(inner)] = item
        return kept
    if isinstance(value, (list, tuple)):
        # Items are never taken out: how many there are counts.
        return [_filter(item, (*path, str(index)), neutral) for index, item in enumerate(value)]
    return value


def split(document: Mapping[str, Any]) -> Split:
    """Part a workload document `{"config", "sources", "environment", "torchtitan"}` into what counts and what does not.

    Only `config` is filtered; it holds nested mappings by field name. Nothing of a callable's document is: it has no
    field of which anybody declared something. Raises Usage when a part is missing.
    """
    called = document.get("kind") == CALLABLE
    missing = [name for name in DOCUMENT_FIELDS if name not in document and not (called and name == "torchtitan")]
    if missing or not isinstance(document["config"], Mapping):
        raise Usage(
            f"This is not a workload document: {', '.join(missing) or 'config'} is missing or not a mapping.",
            hint="Write it with `neffcache key CONFIG --json` where TorchTitan is installed.",
        )
    if called:
        return Split(dict(document), {})
    neutral: dict[str, Any] = {}
    config = _filter(document["config"], (), neutral)
    return Split({**document, "config": config}, neutral)


def workload_component(document: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of the job key's component `workload`: the document without neutral fields."""
    return split(document).semantic
