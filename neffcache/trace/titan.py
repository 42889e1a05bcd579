"""Every TorchTitan function that neffcache touches, checked on TorchTitan 0.3.0.

Configuration-level hooks where TorchTitan offers them (`--override.imports`, `comm.mode`, `model_spec.parallelize_fn`);
what is private or may move is listed in `TOUCHED` and probed: an unknown TorchTitan is Unsupported, by name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import importlib.metadata
import io
import itertools
import os
import re
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import wrapt
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from neffcache.errors import Unsupported, Usage
from neffcache.probing import require
from neffcache.trace import registries

CHECKED_ON = "0.3.0"
TOUCHED = (
    ("torchtitan.config", "ConfigManager"),
    ("torchtitan.config.override", "override"),
    ("torchtitan.config.override", "derive"),
    ("torchtitan.config.override", "format_cli_imports"),
    ("torchtitan.trainer", "Trainer.train_step"),
    ("torchtitan.trainer", "Trainer.forward_backward_step"),
    ("torchtitan.trainer", "Trainer.batch_generator"),
    ("torchtitan.trainer", "Trainer.Config"),
    ("torchtitan.components.validate", "Validator.validate"),
    ("torchtitan.components.validate", "Validator.post_dataloading_process"),
    ("torchtitan.components.metrics", "MetricsProcessor.log"),
    ("torchtitan.components.metrics", "MetricsProcessor.should_log"),
    ("torchtitan.models.common.attention", "FlexAttention.Config"),
    ("torchtitan.models.common.attention", "VarlenAttention.Config"),
    ("torchtitan.models.common.attention", "ScaledDotProductAttention.Config"),
    ("torchtitan.models.common.rope", "RoPE._precompute_cache"),
    ("torchtitan.tools.utils", "device_type"),
    ("torchtitan.tools.utils", "device_module"),
)
GRAPH_PASSES, MOVES_CONSTANTS = "torchtitan.experiments.graph_trainer.inductor_passes", "_migrate_cpu_get_attrs_to_cuda"
HARNESS = "neffcache.trace.harness"


def version() -> str:
    """The installed TorchTitan's version; Unsupported when there is none."""
    try:
        return importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        raise Unsupported(
            "TorchTitan is not installed, so this configuration cannot be resolved",
            hint="pip install 'neffcache[host]', or ask by ref: neffcache check CONFIG",
        ) from None


def probe() -> None:
    """Raise Unsupported naming the first thing that this TorchTitan does not have."""
    require(TOUCHED, library="TorchTitan", version=version(), checked=CHECKED_ON)


# --- the CPU as a TorchTitan device -------------------------------------------------------------------------------


class _CpuDevice(types.ModuleType):
    """torch.cpu and the few torch.cuda-style calls that TorchTitan makes on its device module."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self, device: Any = None) -> str:
        return "cpu"

    def get_device_properties(self, device: Any = None) -> Any:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return types.SimpleNamespace(name="cpu", total_memory=total)

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def set_device(self, device: Any) -> None: ...

    def reset_peak_memory_stats(self, *_: Any) -> None: ...

    def empty_cache(self) -> None: ...

    def memory_stats(self, *_: Any) -> dict[str, int]:
        return {}

    def synchronize(self, *_: Any) -> None: ...


def use_cpu(utils: Any = None) -> None:
    """Make the CPU TorchTitan's device: must come before any other module of TorchTitan reads it."""
    if utils is None:
        utils = importlib.import_module("torchtitan.tools.utils")
    utils.device_type = "cpu"
    utils.device_module = _CpuDevice("neffcache_cpu")
    wrapt.register_post_import_hook(leave_constants, GRAPH_PASSES)


def leave_constants(passes: Any) -> None:
    """The graph trainer moves a graph's constants to CUDA, whatever the device is."""
    require([(GRAPH_PASSES, MOVES_CONSTANTS)], library="TorchTitan", version=version(), checked=CHECKED_ON)
    setattr(passes, MOVES_CONSTANTS, lambda _: None)


# --- configuration ------------------------------------------------------------------------------------------------


_CHOICE = 4
"""Words that choose a configuration: --module M --config C. What fails with them alone is no fault of an option."""


def load_config(arguments: Sequence[str]) -> Any:
    """The Trainer.Config that TorchTitan's own command line would make of `arguments`; Usage when it refuses them."""
    from torchtitan.config import ConfigManager

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            return ConfigManager().parse_args(list(arguments))
    except SystemExit:
        raise Usage(
            f"TorchTitan refuses these options: {_refusal(said.getvalue())}",
            hint="neffcache key CONFIG --json shows every option of a configuration that it accepts",
        ) from None
    except (ValueError, AssertionError) as fault:
        own = len(arguments) <= _CHOICE and "not found" not in str(fault)
        raise (Unsupported if own else Usage)(f"TorchTitan refuses this configuration: {fault}") from None
    except ImportError as fault:
        package = absent_package(fault) or _absent_package(arguments)
        if package and not package.startswith("torchtitan"):
            raise needs(package) from None
        raise Usage(f"TorchTitan cannot find this configuration: {fault}") from None
    except Exception as fault:
        first = next(iter(str(fault).strip().splitlines()), "")
        raise Unsupported(
            f"TorchTitan cannot build this configuration: {type(fault).__name__}: {first[:300]}",
            details={"log": "".join(traceback.format_exception(fault))[-20000:]},
        ) from fault


def absent_package(fault: ImportError) -> str:
    """The package whose absence an ImportError, or what it was made of, tells of; "" when none says."""
    said = re.match(r"(\w+) is not installed", str(fault))
    if said or fault.name:
        return said[1] if said else fault.name or ""
    return absent_package(fault.__cause__) if isinstance(fault.__cause__, ImportError) else ""


def needs(package: str) -> Unsupported:
    return Unsupported(
        f"this configuration needs the package {package}, which is not installed",
        details={"package": package.partition(".")[0]},
    )


def _absent_package(arguments: Sequence[str]) -> str | None:
    """What a registry fails to import, "" unknown: TorchTitan tries several names and keeps the last failure only."""
    module = arguments[list(arguments).index("--module") + 1] if "--module" in arguments else ""
    for entry in registries.registered():
        if entry.module == module:
            try:
                importlib.import_module(f"{entry.path}.config_registry")
            except ModuleNotFoundError as fault:
                return fault.name
            except ImportError:
                return None
            return None
    return None


def require_trainer(config: Any) -> None:
    """Raise Unsupported for what is no Trainer.Config: a reinforcement-learning controller, for one."""
    from torchtitan.trainer import Trainer

    if not isinstance(config, Trainer.Config):
        kind = type(config)
        raise Unsupported(
            f"this configuration is a {kind.__module__}.{kind.__qualname__}, not one of a Trainer: "
            "what it compiles cannot be traced through train_step"
        )


def command_line(
    module: str, function: str, settings: Mapping[str, Any], *, cpu: bool
) -> tuple[Any, list[str], list[Replacement]]:
    """(Trainer.Config, TorchTitan's arguments, what the host harness replaces) of a configuration with these options.

    Raises Usage, Unsupported.
    """
    chosen = ["--module", module or find_module(function), "--config", function]
    base = load_config(chosen)
    require_trainer(base)
    settings = dict(settings)
    replaced: list[Replacement] = []
    if cpu:
        replaced = host_replacements(base, cp=_context_degree(base, settings))
        own = replacement_settings(base, replaced)
        settings = {**{name: value for name, value in own.items() if name not in settings}, **settings}
    arguments = [*chosen, *setting_arguments(base, settings)]
    return load_config(arguments), arguments, replaced


def execution_mode(config: Any) -> str:
    """How a configuration runs: per-block, simple_fsdp_jit, simple_fsdp_aot_fx_trace, or eager."""
    if not config.compile.enable:
        return "eager"
    if hasattr(config.compile, "mode"):
        return "eager" if config.compile.mode is None else f"simple_fsdp_{config.compile.mode}"
    return "per-block" if config.compile.components else "eager"


def _refusal(said: str) -> str:
    """The sentence in a box that tyro draws around an error, without its help text."""
    words = " ".join(re.sub(r"[─│╭╮╰╯]|-{4,}", " ", said).split())
    for after in ("Argument helptext:", "For full helptext"):
        words = words.partition(after)[0]
    return words.strip()[:500]


def setting_arguments(config: Any, settings: Mapping[str, Any]) -> list[str]:
    """Command-line arguments of TorchTitan for {"training.seq_len": 4096, ...}.

    `config` is the configuration before them; it tells flags from values. Usage for an option that does not exist.
    """
    arguments: list[str] = []
    last: list[str] = []
    for path, value in settings.items():
        current = _option(config, path)
        if path == CHECKPOINTING:
            last.append(f"{CHECKPOINTING.replace('_', '-')}:{_policy(value)}")
            continue
        if isinstance(current, bool):
            section, _, name = path.rpartition(".")
            prefix = f"{section}." if section else ""
            arguments.append(f"--{prefix}{name}" if _truth(path, value) else f"--{prefix}no-{name}")
        elif path == "override.imports":
            arguments += [f"--{path}", *(value if isinstance(value, (list, tuple)) else str(value).split())]
        elif isinstance(value, (list, tuple)):
            arguments += [f"--{path}", ",".join(str(item) for item in value)]
        else:
            arguments += [f"--{path}", str(value)]
    return arguments + last


CHECKPOINTING = "activation_checkpoint"
POLICIES = ("selective", "full", "memory-budget", "none")
"""TorchTitan's activation-checkpoint policies: subcommands of its command line, which come last."""


def _policy(value: Any) -> str:
    name = str(value).lower().replace("_", "-")
    if name not in POLICIES:
        raise Usage(f"--set {CHECKPOINTING} takes one of {', '.join(POLICIES)}, not {value!r}")
    return name


def _truth(path: str, value: Any) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    found = words.get(str(value).lower())
    if found is None:
        raise Usage(f"--set {path} takes true or false, not {value!r}")
    return found


def _option(config: Any, path: str) -> Any:
    node = config
    for name in path.split("."):
        known = [f.name for f in dataclasses.fields(node)] if dataclasses.is_dataclass(node) else []
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise Usage(
                f"TorchTitan has no option {path}",
                hint=f"did you mean {path.replace(name, near[0])}?" if near else "see neffcache key CONFIG --json",
            )
        node = getattr(node, name)
    return node


def option_values(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every option that can be set and its value, by dotted path (the model's own tree is not settable)."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name == "model_spec":
            continue
        if dataclasses.is_dataclass(value):
            yield from option_values(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value


def find_module(function: str) -> str:
    """The TorchTitan module whose registry has a configuration of this name; Usage when none or several have.

    Registries are read, not imported: an import of all of them would change the process that asks.
    """
    known = registries.registered()
    found = [entry.module for entry in known if entry.function == function]
    if len(found) == 1:
        return found[0]
    if found:
        raise Usage(
            f"several TorchTitan modules have a configuration {function}: {', '.join(found)}",
            hint=f"say which: {found[0]}:{function}",
        )
    near = difflib.get_close_matches(function, [entry.function for entry in known], n=1)
    raise Usage(
        f"TorchTitan {version()} has no configuration {function}",
        hint=f"did you mean {near[0]}?" if near else "module:config names one outside TorchTitan",
    )


def mesh_degrees(config: Any) -> dict[str, int]:
    """Parallelism degrees of a configuration by the field's short names; dp_shard may be -1 (the rest)."""
    parallelism = config.parallelism
    return {
        "pp": parallelism.pipeline_parallel_degree,
        "dp_replicate": parallelism.data_parallel_replicate_degree,
        "dp_shard": parallelism.data_parallel_shard_degree,
        "cp": parallelism.context_parallel_degree,
        "tp": parallelism.tensor_parallel_degree,
        "ep": parallelism.expert_parallel_degree,
    }


@dataclasses.dataclass(frozen=True)
class Replacement:
    """One thing that the host harness puts in the place of what a configuration names."""

    what: str
    by: str
    changes_meaning: bool
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    override: str = ""


GPU_OPTIMIZERS = ("DistMuon",)
"""Optimizers that refuse parameters on any other device."""

GPU_PASSES = ("cudagraph_pass", "joint_transformer_block_bucketing_reordering_pass")
"""Passes of TorchTitan's graph trainer that ask a GPU for its speed, or record for one."""


def _context_degree(config: Any, settings: Mapping[str, Any]) -> int:
    """The context-parallel degree of a configuration with these options; what TorchTitan will refuse counts as 1."""
    said = str(settings.get("parallelism.context_parallel_degree", config.parallelism.context_parallel_degree))
    return int(said) if said.isdigit() else 1


def host_replacements(config: Any, *, cp: int = 1) -> list[Replacement]:
    """What a run on CPUs replaces, chosen by the configuration: every entry is an ordinary TorchTitan option.

    With a context-parallel degree `cp` above 1 attention stays what it is: causal SDPA has no context-parallel form on
    a CPU, so nothing could be trained in its place, and what is traced should be the model that was asked for.
    """
    from torchtitan.components.validate import Validator
    from torchtitan.models.common.attention import FlexAttention, VarlenAttention

    model = config.model_spec.model
    vocab = getattr(model, "vocab_size", None)
    vocab = vocab if isinstance(vocab, int) else 2048
    multimodal = type(config.dataloader).__qualname__ == "MMDataLoader.Config"
    data = ("images and videos", "synthetic text", True) if multimodal else ("data loader", "synthetic tokens", False)
    found = [
        Replacement(*data, override=f'{HARNESS}.dataloader={{"vocab": {vocab}}}'),
        Replacement("tokenizer", "none (token ids are made)", False, override=f"{HARNESS}.tokenizer"),
        Replacement("CUDA graphs", "off", False, {"training.disable_cuda_graphs": True}),
        Replacement("checkpoints", "off", False, {"checkpoint.enable": False}),
        Replacement("profiler", "off", False, {"profiler.enable_profiling": False}),
        Replacement("structured log", "off", False, {"debug.enable_structured_logging": False}),
    ]
    if any(group.optimizer_name in GPU_OPTIMIZERS for group in config.optimizer.param_groups):
        found.append(Replacement("optimizer", "AdamW", True, override=f"{HARNESS}.adamw"))
    for kind, name in ((FlexAttention, "flex_to_sdpa"), (VarlenAttention, "varlen_to_sdpa")):
        if cp == 1 and any(True for _ in config.model_spec.traverse(kind.Config)):
            found.append(Replacement(kind.__name__, "causal SDPA", True, override=f"{HARNESS}.{name}"))
    if type(config.validator) is not Validator.Config:
        found.append(Replacement("validation", "off", True, {"validator.enable": False}))
    if hasattr(config.compile, "disable_passes"):
        off = list(dict.fromkeys([*config.compile.disable_passes, *GPU_PASSES]))
        found.append(Replacement("graph passes for GPUs", "off", False, {"compile.disable_passes": off}))
    return [
        entry
        for entry in found
        if not entry.settings or any(_option(config, path) != value for path, value in entry.settings.items())
    ]


def replacement_settings(config: Any, replacements: Sequence[Replacement]) -> dict[str, Any]:
    """The TorchTitan options that make these replacements, on top of the configuration's own overrides."""
    settings: dict[str, Any] = {}
    for entry in replacements:
        settings.update(entry.settings)
    from torchtitan.config.override import format_cli_imports

    imports = [*format_cli_imports(list(config.override.imports)), *(r.override for r in replacements if r.override)]
    return {**settings, "override.imports": imports} if imports else settings


def force_sum_reduction(config: Any) -> None:
    """gloo has no PREMUL_SUM: let FSDP divide after a plain sum (FSDPModule.set_force_sum_reduction_for_comms)."""

    def then(model: torch.nn.Module) -> torch.nn.Module:
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    _after_parallelize(config, then)


def _after_parallelize(config: Any, then: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
    inner = config.model_spec.parallelize_fn

    def parallelize(model: torch.nn.Module, **given: Any) -> torch.nn.Module:
        return then(inner(model, **given))

    config.model_spec = dataclasses.replace(config.model_spec, parallelize_fn=parallelize)


# --- tracing ------------------------------------------------------------------------------------------------------


def prepare_for_tracing(config: Any, fake_mode: Any, *, alone: bool = True) -> None:
    """Change a configuration so that one process stands for any world size: fake communication, fake parameters.

    Not `alone`: communication is left as it is, so all ranks must trace at the same time.

    The model's parameters become FakeTensors when TorchTitan materialises them; nothing is initialised, so the
    operators of initialisation are not seen.
    """
    if alone:
        config.comm.mode = "fake_backend"
    config.metrics.log_freq = 1 << 30
    config.metrics.enable_tensorboard = False
    config.metrics.enable_wandb = False
    config.debug.enable_structured_logging = False
    config.checkpoint.enable = False

    def then(model: torch.nn.Module) -> torch.nn.Module:
        materialise = model.to_empty

        def to_empty(*, device: Any, recurse: bool = True) -> torch.nn.Module:
            with fake_mode:
                return materialise(device=device, recurse=recurse)

        def init_weights(**_: Any) -> None:
            """Fake parameters have no values to set."""

        object.__setattr__(model, "to_empty", to_empty)
        object.__setattr__(model, "init_weights", init_weights)
        return model

    _after_parallelize(config, then)


@contextlib.contextmanager
def positions_computed_once() -> Iterator[None]:
    """In here layers of equal rotary embeddings do not each compute the same cache, where it has no values anyway."""
    rope = importlib.import_module("torchtitan.models.common.rope").RoPE
    own = {kind: kind._precompute_cache for kind in rope.__subclasses__() if "_precompute_cache" in vars(kind)}
    known: dict[str, torch.Tensor] = {}

    def once(kind: Any) -> Callable[[Any], torch.Tensor]:
        def precompute(self: Any) -> torch.Tensor:
            name = repr((type(self), self.config, torch.get_default_device()))
            if name in known:
                return torch.empty_like(known[name])
            made: torch.Tensor = own[kind](self)
            if made.is_meta:
                known[name] = made
            return made

        return precompute

    try:
        for kind in own:
            kind._precompute_cache = once(kind)
        yield
    finally:
        for kind, method in own.items():
            kind._precompute_cache = method


SHORT = "last_short_batch"
"""The phase of a batch that is smaller than the others; a run may end before it."""

VALIDATED = 2
"""Batches of a traced validation: its second has the graphs of all later ones."""

SEARCHED = 1000
"""Batches of a finite loader that are looked through for a shorter one."""


def run_fake_steps(trainer: Any, fake_mode: Any, enter: Callable[[str], None]) -> Iterator[None]:
    """Run TorchTitan's own train_step again and again on fake tensors; yields after each step.

    `enter` is told every phase when it begins: first_step, gradient_accumulation (its later microbatches), validation
    (after the first step, as TorchTitan does), last_short_batch where the loader ends in one, then steady_step for
    ever, on the first batch again and again.
    Only the forward and backward pass runs under the ambient fake mode: token counts and data stay real, the
    gradients, clipping and the optimizer see fake parameters.
    """
    inner = trainer.forward_backward_step
    passes = 0

    def forward_backward_step(**given: Any) -> Any:
        nonlocal passes
        passes += 1
        if passes == 2 and trainer.gradient_accumulation_steps > 1:
            enter("gradient_accumulation")
        given = {name: faked(value, fake_mode) for name, value in given.items()}
        with fake_mode:
            return inner(**given)

    trainer.forward_backward_step = forward_backward_step
    # The third microbatch of a step has the graphs of the second.
    trainer.gradient_accumulation_steps = min(trainer.gradient_accumulation_steps, 2)
    loader = trainer.batch_generator(trainer.dataloader)
    first = next(loader)
    batches = again(first)
    # Step 1 would log, which reads values that fake tensors do not have; its graphs are those of any first step.
    trainer.step = 2
    enter("first_step")
    trainer.train_step(batches)
    yield
    if trainer.config.validator.enable:
        enter("validation")
        validate_on_fakes(trainer, fake_mode)
        yield
    if (short := short_batch(trainer, first)) is not None:
        enter(SHORT)
        trainer.train_step(again(short))
        yield
    while True:
        trainer.step += 1
        enter("steady_step")
        trainer.train_step(batches)
        yield


Batch = tuple[dict[str, Any], Any]


def again(batch: Batch) -> Iterator[Batch]:
    """The same batch for ever; a step moves the tensors of the dictionary that it gets."""
    while True:
        yield dict(batch[0]), batch[1]


def faked(value: Any, fake_mode: Any) -> Any:
    """A batch with every tensor in it replaced by a fake one."""
    if isinstance(value, torch.Tensor):
        return fake_mode.from_tensor(value)
    if isinstance(value, Mapping):
        return {name: faked(item, fake_mode) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(faked(item, fake_mode) for item in value)
    return value


def short_batch(trainer: Any, first: Batch) -> Batch | None:
    """A batch of a finite loader that is smaller than the first, None when there is none."""
    if getattr(trainer.config.dataloader, "batches", None) is None:
        return None
    following = itertools.islice(iter(trainer.dataloader), SEARCHED)
    return next((batch for batch in following if len(batch[1]) < len(first[1])), None)


def validate_on_fakes(trainer: Any, fake_mode: Any) -> None:
    """Run TorchTitan's own validation; what it does with the loss afterwards reads values, and ends it.

    Raises Unsupported for a validation over endless data.
    """
    validator = trainer.validator
    if validator.config.steps == -1 and getattr(validator.dl_config, "batches", 1) is None:
        raise Unsupported(
            "validation over all of its data (validator.steps=-1) may end in a batch of another size, which is not "
            "known before the data is read",
            hint="--set validator.steps=10",
        )
    if validator.config.steps > VALIDATED:
        validator.config = dataclasses.replace(validator.config, steps=VALIDATED)
    process, context = validator.post_dataloading_process, validator.validation_context
    seen = 0

    def processed(*args: Any, **given: Any) -> Any:
        nonlocal seen
        seen += 1
        return faked(process(*args, **given), fake_mode)

    @contextlib.contextmanager
    def under_fakes() -> Iterator[None]:
        with context(), fake_mode:
            yield

    validator.post_dataloading_process, validator.validation_context = processed, under_fakes
    try:
        validator.validate(trainer.model_parts, 1)
    except (DataDependentOutputException, GuardOnDataDependentSymNode):
        if not seen:
            raise
    finally:
        validator.post_dataloading_process, validator.validation_context = process, context
        for model in trainer.model_parts:
            model.train()


# --- the training process -----------------------------------------------------------------------------------------


def wrap_trainer(trainer_module: Any, before: Callable[[Any], None], after: Callable[[Any], None]) -> None:
    """Call `before(config)` when a Trainer is about to be built and `after(trainer)` when it stands.

    Wraps `Trainer.__init__`: the only place that sees the Trainer.Config really received, whatever started it.
    """
    cls = trainer_module.Trainer
    build = cls.__init__

    def __init__(self: Any, config: Any, *args: Any, **given: Any) -> None:
        before(config)
        build(self, config, *args, **given)
        after(self)

    cls.__init__ = __init__


def watch_losses(trainer: Any, seen: Callable[[int, float], None]) -> None:
    """Call `seen(step, global average loss)` whenever this trainer logs its metrics."""
    processor = trainer.metrics_processor
    log = processor.log

    def logged(step: int, global_avg_loss: float, *args: Any, **given: Any) -> Any:
        seen(step, float(global_avg_loss))
        return log(step, global_avg_loss, *args, **given)

    processor.log = logged
