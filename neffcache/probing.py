"""Look for private names of a library before they are used: what has moved is named, never met as an AttributeError.

Each room that touches a library's private functions lists them in one module, with the version it was checked on.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from neffcache.errors import Unsupported


def find(module: str, path: str, *, library: str, version: str, checked: str) -> Any:
    """The object at the dotted `path` in `module`; Unsupported (exit 8) naming it when `library` has no such thing."""
    try:
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError):
        raise missing(f"{module}.{path}", library=library, version=version, checked=checked) from None
    return found


def require(touched: Iterable[tuple[str, str]], *, library: str, version: str, checked: str) -> None:
    """Find every (module, path) of `touched`; raises Unsupported with the first that is missing."""
    for module, path in touched:
        find(module, path, library=library, version=version, checked=checked)


def missing(name: str, *, library: str, version: str, checked: str) -> Unsupported:
    return Unsupported(
        f"{library} {version} has no {name}, which neffcache needs",
        hint=f"neffcache was checked on {library} {checked}",
        details={"missing": name, "checked": checked},
    )
