"""Inference workloads: found by name, built and called on fake tensors; the sibling of `titan` for callables.

What is traced is the callable's own doing: `neffcache.inference.World` says where it is, its module is called with the
inputs of each phase, once each in the first round and again until a round adds no graph.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from neffcache.errors import Unsupported, Usage
from neffcache.inference import Built, Workload, World, call
from neffcache.key.workload import CALLABLE, TORCHTITAN
from neffcache.trace import registries, torch_internals
from neffcache.trace.capture import CapturedGraph

MARK = "workload"
"""The decorator's name, by which a module that was not imported shows its workloads."""


def kind_of(module: str, function: str) -> str:
    """Whether `module:function` is a callable or a configuration of TorchTitan, by reading: nothing is run for it.

    Raises Usage when there is no such module, or when its function is neither.
    """
    known = registries.registered() if module else []
    if not module or any((module, function) == (entry.module, entry.function) for entry in known):
        return TORCHTITAN
    spec = _spec(module)
    if spec is None:
        if any(module == entry.module for entry in known):
            return TORCHTITAN
        raise _absent(module)
    if spec.origin is None or not spec.origin.endswith(".py"):
        return TORCHTITAN
    for node in ast.parse(Path(spec.origin).read_bytes()).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            if any(_last_name(entry) == MARK for entry in node.decorator_list):
                return CALLABLE
            if len(node.args.posonlyargs) + len(node.args.args) > len(node.args.defaults):
                raise _unmarked(module, function)
    return TORCHTITAN


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _spec(module: str) -> Any:
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None


def _absent(module: str) -> Usage:
    return Usage(
        f"there is no module {module}", hint="start in the directory that holds it, or name that in PYTHONPATH"
    )


def _unmarked(module: str, function: str) -> Usage:
    return Usage(
        f"{module}:{function} is not marked as a workload", hint="put @neffcache.inference.workload above the function"
    )


def find(module: str, function: str) -> Workload:
    """The workload `module:function`, imported. Raises Usage when it does not exist, Unsupported when it breaks."""
    if _spec(module) is None:
        raise _absent(module)
    try:
        found = importlib.import_module(module)
    except Exception as fault:
        raise _broken(f"the module {module} cannot be imported", fault) from fault
    made = getattr(found, function, None)
    if isinstance(made, Workload):
        return made
    if callable(made):
        raise _unmarked(module, function)
    known = [name for name, value in vars(found).items() if isinstance(value, Workload)]
    near = difflib.get_close_matches(function, known, n=1)
    raise Usage(
        f"the module {module} has no workload {function}",
        hint=f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}" if known else "see @workload",
    )


def load(words: Sequence[str]) -> tuple[Workload, dict[str, Any]]:
    """The workload of `Workload.words` and its arguments. Raises Usage, Unsupported."""
    module, _, function = words[0].partition(":")
    workload = find(module, function)
    return workload, workload.resolve(decoded(dict(word.split("=", 1) for word in words[2::2])))


def decoded(said: Mapping[str, str]) -> dict[str, Any]:
    """The values that `Workload.words` wrote down. Raises Usage."""
    try:
        return {name: msgspec.json.decode(text) for name, text in said.items()}
    except msgspec.DecodeError as fault:
        raise Usage(f"an argument is not JSON: {fault}", hint="text has quotes: --set 'mode=\"fast\"'") from None


def _broken(what: str, fault: Exception) -> Unsupported:
    first = next(iter(str(fault).strip().splitlines()), "")
    missing = fault.name if isinstance(fault, ModuleNotFoundError) else None
    return Unsupported(
        f"{what}: {type(fault).__name__}: {first[:300]}",
        hint=f"install {missing.partition('.')[0]}" if missing else "",
        details={
            "log": "".join(traceback.format_exception(fault))[-20000:],
            **({"package": missing.partition(".")[0]} if missing else {}),
        },
    )


@dataclass
class Inference:
    """A workload and its arguments, as something that can be traced."""

    workload: Workload
    arguments: Mapping[str, Any]
    rank: int
    world_size: int
    structure: list[str] = field(default_factory=list)

    @property
    def what(self) -> str:
        return f"the workload {self.workload.name}"

    def prepare(self, fake_mode: Any, *, alone: bool) -> None:
        torch.distributed.init_process_group("fake" if alone else "gloo", rank=self.rank, world_size=self.world_size)

    def build(self, fake_mode: Any) -> Built:
        """The module and its inputs, made of fake tensors; `structure` says what it is made of."""
        world = World(self.rank, 0, self.world_size, tracing=True)
        with torch_internals.meshes_stay_real(), fake_mode:
            built = self.workload(world, **self.arguments)
        self.structure = structure(built)
        return built

    def steps(self, built: Built, fake_mode: Any, enter: Callable[[str], None], steady: str) -> Iterator[None]:
        """Run every phase on fake tensors; yields after each round. The first enters each phase by its name."""
        module, phases = built

        def run(inputs: Any) -> None:
            with torch.no_grad(), fake_mode, torch_internals.meshes_stay_real():
                call(module, inputs)

        for name, inputs in phases.items():
            enter(name)
            run(inputs)
        yield
        while True:
            enter(steady)
            for inputs in phases.values():
                run(inputs)
            yield


def structure(built: Built) -> list[str]:
    """What every rank must have alike, a line each: modules, parameters and buffers, phases. No local shape."""
    from torch.distributed.tensor import DTensor

    module, phases = built
    lines = [f"module {name or '(root)'}: {type(part).__qualname__}" for name, part in module.named_modules()]
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        line = f"tensor {name}: {str(tensor.dtype).removeprefix('torch.')}"
        if isinstance(tensor, DTensor):
            line += f" {list(tensor.shape)} {list(map(str, tensor.placements))}"
        lines.append(line)
    return lines + [f"phase {name}: {len(list(tensors(inputs)))} tensors" for name, inputs in phases.items()]


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in inputs or outputs, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def require_graphs(name: str, calls: int, graphs: Iterable[CapturedGraph]) -> None:
    """Raise Unsupported for a workload that compiles nothing, or a graph whose shapes are not static."""
    symbolic = [graph.name for graph in graphs if graph.text.symbolic]
    if not calls:
        raise Unsupported(
            f"the workload {name} compiles nothing: no phase reached torch.compile",
            hint="compile in the callable: module.compile(backend=world.backend, dynamic=False), or each layer so",
        )
    if symbolic:
        raise Unsupported(
            f"the shapes of {symbolic[0]} in the workload {name} are not static",
            hint="compile with dynamic=False, mark no dimension as dynamic, and give each shape a phase of its own",
            details={"graphs": symbolic},
        )


# --- the code of a workload ---------------------------------------------------------------------------------------


def imports(module: str) -> tuple[set[str], set[str]]:
    """(packages with the workload's own code, packages that this code imports), by top-level name.

    Found by reading, wherever the import stands, so it does not matter what is imported when. Own code is the module's
    own package and whatever it imports that is not installed among the site packages; only own code is followed.
    """
    own, others = {module.partition(".")[0]}, set[str]()
    waiting, seen = [module], set[str]()
    while waiting:
        name = waiting.pop()
        top = name.partition(".")[0]
        if name in seen:
            continue
        seen.add(name)
        if top not in own:
            if not _is_own(top):
                others.add(top)
                continue
            own.add(top)
        path = _file(name)
        if path is not None:
            waiting += _imported(path, name)
    return own, {name for name in others - own if _spec(name) is not None}


FOREIGN = frozenset({"torch", "neffcache", "numpy", "torchtitan"}) | sys.stdlib_module_names
"""Never a workload's own code, wherever they are installed."""


def _is_own(top: str) -> bool:
    spec = None if top in FOREIGN else _spec(top)
    if spec is None:
        return False
    place = Path(spec.origin or next(iter(spec.submodule_search_locations or []), ""))
    return not {"site-packages", "dist-packages"} & set(place.parts)


def _file(name: str) -> Path | None:
    """The source file of a module, None when there is none: its parents are not imported for that."""
    top, *inside = name.split(".")
    spec = _spec(top)
    if spec is None:
        return None
    if not inside:
        return Path(spec.origin) if spec.origin is not None and spec.origin.endswith(".py") else None
    for root in spec.submodule_search_locations or []:
        base = Path(root, *inside)
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return path
    return None


def _imported(path: Path, module: str) -> Iterator[str]:
    """Every module that a file may import; a name of a `from` may be a module too."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    with contextlib.suppress(SyntaxError, OSError):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parents = package.split(".")
                    kept = parents[: len(parents) - node.level + 1]
                    base = ".".join([*kept, *([base] if base else [])])
                if base:
                    yield base
                    yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")
