"""Which room may import what: the contracts of pyproject.toml, and the rules that import-linter cannot say."""

from __future__ import annotations

import ast
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "neffcache"
CORE_ROOMS = ("errors", "lifetime", "variables", "probing", "key", "store", "remote", "flows", "cli")

# Imports every module named in argv in a Python where nothing but the standard library and the core dependencies exist.
IMPORT_WITHOUT_TORCH = """
import importlib, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "torchtitan", "numpy", "triton"):
            raise ModuleNotFoundError(f"{name} is not in a core install", name=name)

sys.meta_path.insert(0, Absent())
for name in sys.argv[1:]:
    importlib.import_module(name)
    print(name)
"""


def is_worker(name: str) -> bool:
    return name.startswith("neffcache.flows.worker_")


def core_modules() -> list[str]:
    names = ["neffcache"]
    for room in CORE_ROOMS:
        name = f"neffcache.{room}"
        names.append(name)
        if (PACKAGE / room).is_dir():
            names += [module.name for module in pkgutil.walk_packages([str(PACKAGE / room)], f"{name}.")]
    return sorted(name for name in names if not is_worker(name))


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Every absolute import of a module, wherever it stands, but for those that only type checkers read."""
    tree = ast.parse(path.read_text())
    unread = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in unread:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.fast
def test_the_contracts_of_the_layers_are_kept() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.mark.fast
@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("key/job.py", "from neffcache.store import records"),
        ("trace/one.py", "import neffcache.compile"),
        ("store/one.py", "def load():\n    import torch"),
        ("flows/one.py", "import botocore"),
    ],
)
def test_an_arrow_that_goes_up_breaks_a_contract(tmp_path: Path, module: str, line: str) -> None:
    for folder in [PACKAGE, *(path for path in PACKAGE.rglob("*") if path.is_dir() and path.name != "__pycache__")]:
        inside = tmp_path / folder.relative_to(ROOT)
        inside.mkdir(parents=True)
        (inside / "__init__.py").touch()
    for path in PACKAGE.glob("*.py"):
        (tmp_path / "neffcache" / path.name).touch()
    (tmp_path / "neffcache/store/records.py").touch()
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    assert lint_imports(tmp_path).returncode == 0
    (tmp_path / "neffcache" / module).write_text(f"{line}\n")
    assert lint_imports(tmp_path).returncode == 1


@pytest.mark.fast
def test_cli_and_flows_name_torch_only_in_workers_that_run_as_their_own_process() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for room in ("cli", "flows")
        for path in (PACKAGE / room).rglob("*.py")
        if not path.name.startswith("worker_")
        for line, name in imports_of(path)
        if name.partition(".")[0] in ("torch", "torchtitan")
    ]
    assert wrong == []


@pytest.mark.fast
def test_the_core_is_imported_where_torch_is_not_installed() -> None:
    modules = core_modules()
    command = [sys.executable, "-c", IMPORT_WITHOUT_TORCH, *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == modules


@pytest.mark.fast
def test_importing_the_package_imports_nothing_else() -> None:
    code = "import sys; before = set(sys.modules); import neffcache; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["neffcache"]


@pytest.mark.fast
def test_a_command_that_resolves_imports_no_torch_of_its_own() -> None:
    code = (
        "import sys; from neffcache.flows import check, env, explain, keys, lint, plan, request, resolve, run, warm; "
        "asked = [request.make_request('llama3_debugmodel', toolchain='host', native=n, environ={}) for n in (0, 1)]; "
        "[resolve.toolchain_of(one).environment({}, 4) for one in asked]; "
        "print(*{'torch', 'torchtitan', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
