"""Where things are: option > environment (NEFFCACHE_*) > neffcache.toml > default; each value knows its origin."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neffcache.errors import Usage

FILE = "neffcache.toml"
KNOWN = {
    "dir": "NEFFCACHE_DIR",
    "jobs": "NEFFCACHE_JOBS",
    "warmers": "NEFFCACHE_WARMERS",
    "resolve_cache": "NEFFCACHE_RESOLVE_CACHE",
}


@dataclass(frozen=True)
class Setting:
    """A value and where it came from: `--dir`, `NEFFCACHE_DIR`, the settings file, or `default`."""

    name: str
    value: str
    origin: str

    @property
    def given(self) -> bool:
        return self.origin != "default"


def read_file(directory: Path) -> dict[str, Any]:
    """The settings file of `directory`, {} when there is none; Usage for one that is not understood."""
    path = directory / FILE
    try:
        document = tomllib.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as fault:
        raise Usage(f"{FILE} cannot be read: {fault}") from None
    unknown = sorted(set(document) - set(KNOWN))
    if unknown:
        raise Usage(f"{FILE} has unknown settings: {', '.join(unknown)}", hint="known: " + ", ".join(sorted(KNOWN)))
    return document


def setting(
    name: str, option: object, environ: Mapping[str, str], default: str, *, directory: Path | None = None
) -> Setting:
    """One setting by its precedence."""
    variable = KNOWN[name]
    if option is not None:
        return Setting(name, str(option), f"--{name}")
    if environ.get(variable):
        return Setting(name, environ[variable], variable)
    document = read_file(directory or Path.cwd())
    if name in document:
        return Setting(name, str(document[name]), FILE)
    return Setting(name, default, "default")


def store_root(option: object, environ: Mapping[str, str]) -> Setting:
    """The local root; default `$XDG_CACHE_HOME/neffcache`."""
    return setting("dir", option, environ, str(_caches(environ) / "neffcache"))


def host_cache(environ: Mapping[str, str]) -> Path:
    """A user's own directory for what holds on this host only. No store lies in it and nothing of it travels."""
    return _caches(environ) / "neffcache-host"


def _caches(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or Path.home(), ".cache"))
