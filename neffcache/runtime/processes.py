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

QUERIES = frozenset(
    {"--version", "-v", "-V", "--help", "-dumpversion", "-dumpmachine", "-dumpspecs", "-E", "-M", "-MM", "-###"}
)
"""Arguments with which such a program answers a question or preprocesses."""

QUERY_PREFIXES = ("-print-", "--print-", "-dump", "--help=")
_NOT_QUERIES_WITH = ("-c", "-o", "-S", "-shared", "compile")


def is_compile(arguments: Sequence[str]) -> bool:
    """Whether this command line compiles, assembles or links something."""
    words = [os.fsdecode(word) for word in arguments]
    while words and os.path.basename(words[0]) in ("env", "nice", "ccache", "sccache", "sh", "bash", "dash"):
        shell = os.path.basename(words[0]) in ("sh", "bash", "dash")
        words = words[1:]
        if shell and words and words[0] == "-c" and len(words) > 1:
            words = _words(words[1])
        while words and (words[0].startswith("-") or "=" in words[0]):
            words = words[1:]
    if not words or not COMPILERS.match(os.path.basename(words[0])):
        return False
    given = words[1:]
    preprocesses = "-E" in given or "-M" in given or "-MM" in given
    if preprocesses:
        return False
    asks = any(word in QUERIES or word.startswith(QUERY_PREFIXES) for word in given)
    works = any(word in _NOT_QUERIES_WITH for word in given)
    return bool(given) and (works or not asks)


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()


def watch(seen: Callable[[list[str], bool], None]) -> None:
    """Call `seen(command line, is a compile)` for every process that this one starts, from now on and for good."""

    def hook(event: str, args: tuple[object, ...]) -> None:
        words: object
        if event == "subprocess.Popen" or event in ("os.posix_spawn", "os.exec"):
            executable, words = args[0], args[1]
        elif event == "os.system":
            executable, words = None, args[0]
        else:
            return
        if isinstance(words, (str, bytes)):
            line = _words(os.fsdecode(words))
        elif isinstance(words, (list, tuple)):
            line = [os.fsdecode(word) if isinstance(word, (str, bytes, os.PathLike)) else str(word) for word in words]
        else:
            line = [str(executable)]
        seen(line, is_compile(line))

    sys.addaudithook(hook)
