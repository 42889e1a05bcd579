"""What the repository promises about itself: one version, a wheel with its data, documents that say what is so."""

from __future__ import annotations

import importlib.metadata
import os
import pwd
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import neffcache
from neffcache import errors

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
CLI = [sys.executable, "-c", "import sys; from neffcache.cli.main import main; sys.exit(main())"]


def tree() -> list[Path]:
    """Every file that is or would be committed."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLI, *arguments], cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def shell_commands(document: str) -> Iterator[list[str]]:
    """The commands of the sh and console blocks of a Markdown document, continued lines joined."""
    for block in re.findall(r"^```(?:sh|bash|shell|console)\n(.*?)^```", document, flags=re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                del words[0]
            if words:
                yield words


@pytest.mark.fast
def test_the_version_has_one_source() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" in project["dynamic"]
    assert importlib.metadata.version("neffcache") == neffcache.__version__
    assert f"[{neffcache.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    assert neffcache.__version__ in run_cli("--version").stdout


@pytest.mark.fast
@pytest.mark.parametrize("option", ["--help", "--version"])
def test_starting_the_command_line_imports_nothing_heavy(option: str) -> None:
    code = (
        "import sys; sys.argv = ['neffcache', sys.argv[1]]; from neffcache.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as done: assert not done.code\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, option], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stderr.split())
    assert "click" in loaded
    assert not loaded & {"torch", "torchtitan", "botocore", "rich", "diskcache", "numpy"}


@pytest.mark.integration
def test_a_wheel_holds_the_warmers_and_no_tests(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--disable-pip-version-check", "--no-build-isolation"]
    done = subprocess.run([*command, "--wheel-dir", tmp_path, str(ROOT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = tmp_path.glob("*.whl")
    assert wheel.name == f"neffcache-{neffcache.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = archive.read(f"neffcache-{neffcache.__version__}.dist-info/entry_points.txt").decode()
    packaged = {name.removeprefix("neffcache/_warmers/") for name in names if name.startswith("neffcache/_warmers/")}
    warmers = ROOT / "warmers"
    assert packaged == {str(path.relative_to(warmers)) for path in tree() if path.is_relative_to(warmers)}
    assert "llama3.toml" in packaged
    assert {name.partition("/")[0] for name in names} == {"neffcache", f"neffcache-{neffcache.__version__}.dist-info"}
    assert {"neffcache/py.typed", "neffcache/cli/main.py"} <= names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    for group in ("console_scripts", "torch.backends", "torch_dynamo_backends"):
        assert f"[{group}]\nneffcache = " in entry_points


@pytest.mark.fast
def test_every_entry_point_exists() -> None:
    mine = importlib.metadata.distribution("neffcache").entry_points
    assert {point.group for point in mine} == {"console_scripts", "torch.backends", "torch_dynamo_backends"}
    for point in mine:
        source = ROOT.joinpath(*point.module.split(".")).with_suffix(".py").read_text()
        assert re.search(rf"^(?:async )?(?:def|class) {point.attr}\b|^{point.attr}\b.*=", source, flags=re.MULTILINE)


@pytest.mark.fast
def test_no_file_names_a_place_on_the_machine_where_it_was_written() -> None:
    home = pwd.getpwuid(os.getuid()).pw_dir
    places = {"/" + name for name in ("work", "farm", "root")} | {str(ROOT), home} - {"/"}
    # Not inside a longer path or word: `a/work`, `$HOME/work` and `}/root` are other things.
    names = "|".join(re.escape(place) for place in sorted(places))
    pattern = re.compile(rf"(?<![\w.}}\])*>-])(?:{names})(?![\w-])")
    assert pattern.search(f"x = '{ROOT}/y'")
    wrong = []
    for path in tree():
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
            if pattern.search(line):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert wrong == []


@pytest.mark.fast
@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_of_a_document_exists(document: str) -> None:
    for words in shell_commands((ROOT / document).read_text()):
        program = words[0]
        if "/" in program:
            assert os.access(ROOT / program, os.X_OK) or program.startswith(".venv"), f"{program} is not to be run"
        if program in ("neffcache", ".venv/bin/neffcache") and len(words) > 1 and not words[1].startswith("-"):
            done = run_cli(words[1], "--help")
            assert done.returncode == 0, f"neffcache {words[1]}: {done.stderr}"


@pytest.mark.fast
def test_the_readme_shows_commands() -> None:
    programs = {words[0] for words in shell_commands((ROOT / "README.md").read_text())}
    assert {"./scripts/quickstart", "neffcache"} <= {program.removeprefix(".venv/bin/") for program in programs}


@pytest.mark.fast
def test_every_local_link_of_the_documents_leads_somewhere() -> None:
    broken = []
    for path in [ROOT / "CHANGELOG.md", *(ROOT / document for document in DOCUMENTS)]:
        for target in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
            if "://" not in target and not (path.parent / target).exists():
                broken.append(f"{path.relative_to(ROOT)} -> {target}")
    assert broken == []


@pytest.mark.fast
def test_the_table_of_exit_codes_is_that_of_the_errors() -> None:
    text = (ROOT / "docs/reference/exit-codes.md").read_text()
    documented = {int(code): name for code, name in re.findall(r"^\| (\d+) \| `(\w+)` \|", text, flags=re.MULTILINE)}
    classes = {kind.exit_code: kind.__name__ for kind in errors.NeffcacheError.__subclasses__()}
    assert len(classes) == len(errors.NeffcacheError.__subclasses__()), "two errors share an exit code"
    assert documented == classes
    for code in (0, 130, 143):
        assert re.search(rf"^\| {code} \| \|", text, flags=re.MULTILINE), f"exit code {code} is missing"


@pytest.mark.fast
def test_the_licence_is_the_one_that_the_package_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


@pytest.mark.fast
def test_no_setting_of_the_user_reaches_a_test() -> None:
    left = {name for name in os.environ if name.startswith(("NEURON_", "NKI_", "NEFFCACHE_"))}
    assert left == {"NEFFCACHE_DIR"}
    assert [name for name in os.environ if name.startswith("AWS_")] == ["AWS_EC2_METADATA_DISABLED"]
    real = pwd.getpwuid(os.getuid()).pw_dir
    for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "NEFFCACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert Path(os.environ[name]).parent.name.startswith("nc-")
        assert os.environ[name] != real


@pytest.mark.fast
@pytest.mark.parametrize("script", ["scripts/setup", "scripts/test", "scripts/quickstart", "scripts/docs", ".ci/run"])
def test_every_script_can_be_run_and_parses(script: str) -> None:
    path = ROOT / script
    assert os.access(path, os.X_OK), f"{script} is not executable"
    if path.read_text().startswith("#!/usr/bin/env bash"):
        subprocess.run(["bash", "-n", path], check=True)
