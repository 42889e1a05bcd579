"""The parts of docs/reference that are read off the code: between `<!-- generated: NAME -->` and `<!-- end -->`.

`scripts/docs reference` writes them; tests/test_site.py says when they are stale. Nothing of torch is imported.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from neffcache import errors, variables  # noqa: E402
from neffcache.cli.main import VERBS, neffcache  # noqa: E402
from neffcache.flows import warmers  # noqa: E402
from neffcache.flows.remote import DEFAULTS  # noqa: E402
from neffcache.flows.settings import KNOWN, READ_BY_OPTIONS  # noqa: E402
from neffcache.remote.errors import ALL as FAULTS  # noqa: E402

REFERENCE = ROOT / "docs" / "reference"
BLOCK = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

API: Mapping[str, tuple[str, ...]] = {
    "neffcache.flows.request": ("make_request", "Request"),
    "neffcache.flows.resolve": ("resolve", "Job"),
    "neffcache.flows.warm": ("warm", "WarmResult"),
    "neffcache.flows.check": ("check", "Checked"),
    "neffcache.flows.plan": ("plan",),
    "neffcache.flows.explain": ("explain",),
    "neffcache.flows.run": ("run",),
    "neffcache.flows.env": ("env",),
    "neffcache.flows.push": ("push",),
    "neffcache.flows.pull": ("pull",),
    "neffcache.flows.doctor": ("doctor", "Report"),
    "neffcache.flows.settings": ("setting", "store_root", "Setting"),
    "neffcache.key.job": ("job_key", "JobKey", "compile_key", "CompileComponents"),
    "neffcache.store.local": ("LocalStore",),
    "neffcache.store.records": ("Manifest", "GraphRecord", "Artifact", "RankClass", "Ref"),
    "neffcache.store.view": ("materialise", "View"),
    "neffcache.store.verify": ("verify",),
    "neffcache.remote.tier": ("RemoteStore",),
    "neffcache.errors": ("NeffcacheError", "revive"),
}
"""Module -> what of it a program may build on, in the order of the page."""


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; bars inside of cells are escaped."""
    lines = [list(head)]
    lines += [["---"] * len(lines[0]), *(list(row) for row in rows)]
    cells = (["".join((" ", cell.replace("|", "\\|"))) if cell else "" for cell in line] for line in lines)
    return "".join("|" + " |".join(line) + " |\n" for line in cells)


def plain(text: str) -> str:
    """A docstring or a help text as Markdown: nothing of it is HTML or emphasis; lines of a paragraph are joined."""
    paragraphs = re.split(r"\n\s*\n", text.strip())
    joined = (" ".join(paragraph.split()) for paragraph in paragraphs)
    # What stands between backticks is shown as it is.
    parts = ("".join(_escaped(part) if index % 2 == 0 else f"`{part}`" for index, part in enumerate(p.split("`")))
             for p in joined)  # fmt: skip
    return "\n\n".join(parts)


def _escaped(text: str) -> str:
    return re.sub(r"([*\\\[\]]|_(?=\w)|(?<=\w)_)", r"\\\1", text).replace("<", "&lt;")


# --- commands -----------------------------------------------------------------------------------------------------


def commands() -> str:
    """Every verb with its arguments and options, from the command line itself."""
    context = click.Context(neffcache, info_name="neffcache")
    parts = []
    for verb in VERBS:
        command = neffcache.get_command(context, verb)
        assert command is not None
        inner = click.Context(command, info_name=verb, parent=context)
        usage = " ".join(["neffcache", verb, *command.collect_usage_pieces(inner)])
        parts.append(f"## {verb}\n\n```text\n{usage}\n```\n\n{plain(command.help or '')}\n")
        rows = [_option(option, inner) for option in command.params if isinstance(option, click.Option)]
        parts.append(table(("option", "value", "default", "meaning"), rows))
    return "\n".join(parts)


def _option(option: click.Option, context: click.Context) -> tuple[str, str, str, str]:
    names = ", ".join(f"`{name}`" for name in sorted(option.opts + option.secondary_opts, key=len))
    if option.is_flag:
        value = ""
    elif isinstance(option.type, click.Choice):
        value = ", ".join(f"`{choice}`" for choice in option.type.choices)
    else:
        value = f"`{option.make_metavar(context)}`"
    default = f"`{option.default}`" if option.show_default and not option.is_flag else ""
    variable = f"; `${option.envvar}`" if isinstance(option.envvar, str) else ""
    repeated = "; repeatable" if option.multiple and "repeatable" not in (option.help or "") else ""
    return names, value, default, plain(option.help or "").rstrip(".") + variable + repeated


# --- exit codes and errors ----------------------------------------------------------------------------------------

ENDS = {0: "done, and everything asked for is there", 130: "interrupted (Ctrl-C)", 143: "terminated"}


def exit_codes() -> str:
    known = {kind.exit_code: (f"`{kind.__name__}`", _first(kind)) for kind in errors.NeffcacheError.__subclasses__()}
    rows = {**{code: ("", meaning) for code, meaning in ENDS.items()}, **known}
    return table(("code", "error", "meaning"), [(str(code), *rows[code]) for code in sorted(rows)])


def error_classes() -> str:
    """Every class below NeffcacheError, wherever it is defined, with what it is under."""
    _import_core()
    rows = []
    for kind, depth in _below(errors.NeffcacheError):
        counter = getattr(kind, "counter", "")
        indent = "&nbsp;&nbsp;" * depth
        code = kind.exit_code
        rows.append(
            (f"{indent}`{kind.__name__}`", str(code), f"`{kind.__module__}`", f"`{counter}`" if counter else "",
             _first(kind))
        )  # fmt: skip
    return table(("class", "exit code", "module", "counter", "meaning"), rows)


def _below(kind: type[Any], depth: int = 0) -> Iterator[tuple[type[Any], int]]:
    ordered = list(FAULTS)
    for inner in sorted(kind.__subclasses__(), key=lambda one: (one.exit_code, one in ordered and ordered.index(one))):
        if inner.__module__.startswith("neffcache."):
            yield inner, depth
            yield from _below(inner, depth + 1)


def _first(kind: type[Any]) -> str:
    text = plain(kind.__doc__ or "").partition("\n")[0].rstrip(".")
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]


def _import_core() -> None:
    """Import what defines errors: all modules that need no torch."""
    for room in ("remote", "store", "key"):
        package = importlib.import_module(f"neffcache.{room}")
        for module in pkgutil.iter_modules(package.__path__, f"neffcache.{room}."):
            importlib.import_module(module.name)
    importlib.import_module("neffcache.graph.uncacheable")


# --- settings -----------------------------------------------------------------------------------------------------


def settings() -> str:
    """neffcache.toml, its variables and the options that come before both."""
    helps = _helps()
    rows = []
    for name, variable in KNOWN.items():
        option = f"--{name.replace('_', '-')}"
        about = helps.get(option, SETTINGS_ONLY.get(name, ""))
        default = DEFAULTS.get(name, "$XDG_CACHE_HOME/neffcache" if name == "dir" else "")
        shown = f"`{option}`" if option in helps else ""
        rows.append((f"`{name}`", f"`{variable}`", shown, f"`{default}`" if default else "", about))
    return table(("in neffcache.toml", "variable", "option", "default", "meaning"), rows)


SETTINGS_ONLY = {
    "warmers": "Folders with warmers of your own, between colons",
    "resolve_cache": "0: ask TorchTitan every time what a configuration means",
    "versions": "What `--version-of` would say, one a line or between semicolons",
}


def _helps() -> dict[str, str]:
    """Option -> its help, of pull, warm or the first verb that has it."""
    context = click.Context(neffcache)
    found: dict[str, str] = {}
    for verb in dict.fromkeys(("pull", "warm", *VERBS)):
        command = neffcache.get_command(context, verb)
        assert command is not None
        for option in command.params:
            if isinstance(option, click.Option):
                for name in option.opts:
                    found.setdefault(name, re.sub(r"\s*\[[^]]*\]", "", plain(option.help or "")
                                                  .replace("\\[", "[").replace("\\]", "]")).rstrip("."))  # fmt: skip
    return found


def other_variables() -> str:
    return table(("variable", "stands for"), [(f"`{name}`", text) for name, text in READ_BY_OPTIONS.items()])


def rank_variables() -> str:
    """What `run` hands to the training processes, with the texts beside the names in neffcache/variables.py."""
    told = _texts_after(ROOT / "neffcache" / "variables.py")
    rows = [(f"`{getattr(variables, name)}`", plain(text).rstrip(".")) for name, text in told.items()
            if isinstance(getattr(variables, name), str)]  # fmt: skip
    return table(("variable", "meaning"), rows)


def _texts_after(path: Path) -> dict[str, str]:
    """Name -> the string that stands behind its assignment at the top of a module."""
    body = ast.parse(path.read_text()).body
    found = {}
    for node, after in itertools.pairwise(body):
        if isinstance(node, ast.Assign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            found[_text(node.targets[0])] = str(after.value.value)
    return found


def warmer_fields() -> str:
    """The schema of a warmer's TOML file, from the structs that read it."""
    rows = []
    tree = ast.parse(Path(warmers.__file__).read_text()).body
    for kind, where in ((warmers._Family, "top"), (warmers._RunEntry, "`[[run]]`")):
        body = next(node for node in tree if isinstance(node, ast.ClassDef) and node.name == kind.__name__).body
        annotations = {_text(node.target): node.annotation for node in body if isinstance(node, ast.AnnAssign)}
        for item in msgspec.structs.fields(kind):
            told = _text(annotations[item.name])
            default = item.default if item.default is not msgspec.NODEFAULT else None
            shown = "required" if item.required else "" if default in (None, "") else f"`{default!r}`"
            rows.append((where, f"`{item.name}`", f"`{told.replace('_RunEntry', '[[run]]')}`", shown))
    return table(("where", "field", "type", "default"), rows)


# --- Python -------------------------------------------------------------------------------------------------------


def api() -> str:
    """Signatures and docstrings of `API`, read from the sources."""
    parts = []
    for module, names in API.items():
        path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
        tree = {node.name: node for node in ast.parse(path.read_text()).body
                if isinstance(node, (ast.FunctionDef, ast.ClassDef))}  # fmt: skip
        parts.append(f"## {module}\n")
        for name in names:
            parts += _documented(tree[name], "###")
    return "\n".join(parts)


def _documented(node: ast.FunctionDef | ast.ClassDef, level: str) -> Iterator[str]:
    yield f"{level} {node.name.replace('_', chr(92) + '_')}\n"
    if isinstance(node, ast.FunctionDef):
        yield f"```python\n{_signature(node)}\n```\n"
        yield plain(ast.get_docstring(node) or "") + "\n"
        return
    yield plain(ast.get_docstring(node) or "") + "\n"
    fields = [f"{_text(item.target)}: {_text(item.annotation)}" for item in node.body
              if isinstance(item, ast.AnnAssign) and not _text(item.target).startswith("_")]  # fmt: skip
    if fields:
        yield "```python\n" + "\n".join(fields) + "\n```\n"
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and not item.name.startswith("_") and ast.get_docstring(item):
            yield f"**{item.name.replace('_', chr(92) + '_')}**\n\n```python\n{_signature(item)}\n```\n"
            yield plain(ast.get_docstring(item) or "") + "\n"


def _text(node: ast.AST) -> str:
    """The source of a node, in the quotes of this project: versions of Python differ in those that they choose."""
    text = ast.unparse(node)
    return text if '"' in text else text.replace("'", '"')


def _signature(node: ast.FunctionDef) -> str:
    """One line, or one parameter a line when that is longer than 100 characters."""
    marks = "".join(f"@{_text(mark)}\n" for mark in node.decorator_list)
    returns = f" -> {_text(node.returns)}" if node.returns else ""
    line = f"def {node.name}({_text(node.args)}){returns}"
    if len(line) > 100:
        line = f"def {node.name}(\n    " + ",\n    ".join(_parts(node.args)) + f",\n){returns}"
    return marks + line


def _parts(arguments: ast.arguments) -> list[str]:
    """The parameters one by one, as source."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    found = [_parameter(one, default) for one, default in zip(positional, defaults, strict=True)]
    if arguments.vararg is not None:
        found.append(f"*{_text(arguments.vararg)}")
    elif arguments.kwonlyargs:
        found.append("*")
    found += [
        _parameter(one, default) for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg is not None:
        found.append(f"**{_text(arguments.kwarg)}")
    return found


def _parameter(one: ast.arg, default: ast.expr | None) -> str:
    return _text(one) + (f" = {_text(default)}" if default is not None else "")


BLOCKS: Mapping[str, Callable[[], str]] = {
    "commands": commands,
    "exit-codes": exit_codes,
    "errors": error_classes,
    "settings": settings,
    "other-variables": other_variables,
    "rank-variables": rank_variables,
    "warmers": warmer_fields,
    "api": api,
}


def renewed(text: str) -> str:
    """A page with its generated parts as the code has them now."""
    return BLOCK.sub(lambda found: found[1] + "\n" + BLOCKS[found[2]]().strip() + "\n\n" + found[3], text)


def pages() -> list[Path]:
    return [path for path in sorted((ROOT / "docs").rglob("*.md")) if BLOCK.search(path.read_text())]


def stale() -> list[Path]:
    return [path for path in pages() if renewed(path.read_text()) != path.read_text()]


def write() -> list[Path]:
    """Write the generated parts; the pages that changed."""
    found = stale()
    for path in found:
        path.write_text(renewed(path.read_text()))
    return found
