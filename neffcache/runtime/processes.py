"""Which child processes of a training process are compilers: seen by an audit hook, whoever starts them.

A hit that still compiles something is a false hit; a counter of hits does not see it, the audit hook does.
Version queries and preprocessing (Inductor asks `g++ --version` and `g++ -E`) are not compiles.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence

COMPILERS = re.compile(
    r"^(?:[\w.-]+-)?(?:g\+\+|gcc|c\+\+|cc|clang|clang\+\+|icpx?|cc1|cc1plus|collect2|as|ld|lld|gold|ptxas|nvcc|hipcc"
    r"|neuronx-cc|neuron-cc|nki-cc)(?:-[\d.]+)?$"
)
"""Base names of programs that compile, assemble or link."""

DRIVERS = frozenset({"ninja", "make", "gmake", "cmake", "bazel"})
"""Programs that start compilers of their own, in processes that this one does not see."""

WRAPPERS = frozenset({"env", "nice", "ionice", "ccache", "sccache", "timeout", "time", "stdbuf", "nohup", "taskset"})
SHELLS = frozenset({"sh", "bash", "dash", "zsh"})
SEPARATORS = re.compile(r"&&|\|\||[;|&\n()]")

QUERIES = frozenset({"--version", "-v", "-V", "--help", "-dumpversion", "-dumpmachine", "-dumpspecs", "-###"})
"""Arguments with which a compiler answers a question."""

PREPROCESSES = frozenset({"-E", "-M", "-MM"})
QUERY_PREFIXES = ("-print-", "--print-", "-dump", "--help=")
_WORKS = ("-c", "-o", "-S", "-shared", "compile")


def is_compile(arguments: Sequence[str]) -> bool:
    """Whether this command line compiles, assembles or links something."""
    words = [os.fsdecode(word) for word in arguments]
    if not words:
        return False
    name, given = os.path.basename(words[0]), words[1:]
    if name in SHELLS:
        script = given[given.index("-c") + 1] if "-c" in given[:-1] else ""
        return any(is_compile(_words(part)) for part in SEPARATORS.split(script))
    if name in WRAPPERS:
        return any(is_compile(given[place:]) for place, word in enumerate(given) if _is_program(word))
    if name in DRIVERS:
        return "--version" not in given
    if not COMPILERS.match(name) or PREPROCESSES.intersection(given):
        return False
    asks = any(word in QUERIES or word.startswith(QUERY_PREFIXES) for word in given)
    return bool(given) and (any(word in _WORKS for word in given) or not asks)


def _is_program(word: str) -> bool:
    name = os.path.basename(word)
    return bool(COMPILERS.match(name)) or name in DRIVERS or name in SHELLS or name in WRAPPERS


def _words(line: str) -> list[str]:
    """The words of one shell command, without the assignments before it."""
    try:
        words = shlex.split(line)
    except ValueError:
        words = line.split()
    while words and re.match(r"\w+=", words[0]):
        words = words[1:]
    return words


def watch(seen: Callable[[list[str], bool], None]) -> None:
    """Call `seen(command line, is a compile)` for every process that this one starts, from now on and for good."""

    def hook(event: str, args: tuple[object, ...]) -> None:
        program: object
        words: object
        if event == "subprocess.Popen" or event in ("os.posix_spawn", "os.exec"):
            program, words = args[0], args[1]
        elif event == "os.system":
            program, words = None, args[0]
        else:
            return
        if isinstance(words, (str, bytes)):
            line = ["sh", "-c", os.fsdecode(words)]
        elif isinstance(words, (list, tuple)):
            line = [os.fsdecode(word) if isinstance(word, (str, bytes, os.PathLike)) else str(word) for word in words]
        else:
            line = [str(program)]
        # What runs is the program, whatever its first argument calls it.
        started = [os.fsdecode(program), *line[1:]] if isinstance(program, (str, bytes)) else line
        seen(line, is_compile(line) or is_compile(started))

    sys.addaudithook(hook)
