"""What must not leave a machine: its paths and its name. Records are semantic; this makes sure of it."""

from __future__ import annotations

import os
import re
import socket
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from neffcache.errors import Usage

PLAIN = frozenset({"localhost", "", "/", *(f"/{name}" for name in ("root", "home", "tmp", "usr", "var", "opt"))})


def refuse_private(what: str, document: object, store_root: str, environ: Mapping[str, str]) -> None:
    """Raises Usage, naming the field, when a text in a JSON document holds a path or the name of this machine."""
    own = [os.path.abspath(store_root), tempfile.gettempdir(), os.getcwd(), environ.get("HOME", "")]
    paths = sorted({path.rstrip("/") for path in own} - PLAIN)
    host = socket.gethostname()
    words = [re.escape(path) + r"(?=/|$|\W)" for path in paths]
    if len(host) >= 4 and host not in PLAIN:
        words.append(rf"(?<![\w.-]){re.escape(host)}(?![\w-])")
    words.append(r"(?<![\w/])/(?:home|Users)/[^/\s]+/")
    pattern = re.compile("|".join(words))
    for path, text in _texts(document):
        if found := pattern.search(text):
            raise Usage(
                f"{what} is not sent: its field {path} holds {found[0]!r}, which belongs to this machine",
                hint="leave such a --set out and give it to the trainer behind `run CONFIG --` instead",
                details={"field": path},
            )


def _texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield path, str(name)
            yield from _texts(item, f"{path}.{name}" if path else str(name))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _texts(item, f"{path}[{number}]")
