"""Where things are: option > environment (NEFFCACHE_*) > neffcache.toml > default; each value knows its origin."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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
    "versions": "NEFFCACHE_VERSIONS",
    "require_signature": "NEFFCACHE_REQUIRE_SIGNATURE",
    "remote": "NEFFCACHE_REMOTE",
    "channel": "NEFFCACHE_CHANNEL",
    "on_remote_error": "NEFFCACHE_ON_REMOTE_ERROR",
    "remote_timeout": "NEFFCACHE_REMOTE_TIMEOUT",
    "transfers": "NEFFCACHE_TRANSFERS",
    "region": "NEFFCACHE_REGION",
    "endpoint_url": "NEFFCACHE_ENDPOINT_URL",
    "path_style": "NEFFCACHE_PATH_STYLE",
    "anonymous": "NEFFCACHE_ANONYMOUS",
    "requester_pays": "NEFFCACHE_REQUESTER_PAYS",
    "sse": "NEFFCACHE_SSE",
    "kms_key": "NEFFCACHE_KMS_KEY",
}
"""Name in the settings file -> variable; what is about S3 and not said here is boto3's own business."""

READ_BY_OPTIONS = {
    "NEFFCACHE_EXECUTOR": "`--executor`",
    "NEFFCACHE_TIME_LIMIT": "`--time-limit`",
    "NEFFCACHE_SHARE": "`--share`",
    "NEFFCACHE_MIN_SERIAL": "`--min-serial`",
    "NEFFCACHE_SHARDS": "How many shards a Kubernetes Indexed Job has.",
    "NEFFCACHE_LEASE_HEARTBEAT": "Seconds between two signs of life of a lease (20).",
}
"""Variable that has no name in the settings file -> the option that it stands for, or what it means."""


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
        text = path.read_text()
        import tomllib  # here: most commands find no file

        document = tomllib.loads(text)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as fault:
        raise Usage(f"{FILE} cannot be read: {fault}", hint='a setting is a line: name = "value"') from None
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
        return Setting(name, str(option), f"--{name.replace('_', '-')}")
    if environ.get(variable):
        return Setting(name, environ[variable], variable)
    document = read_file(directory or Path.cwd())
    if name in document:
        value = document[name]
        return Setting(name, "\n".join(map(str, value)) if isinstance(value, list) else str(value), FILE)
    return Setting(name, default, "default")


def several(name: str, given: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """A setting of many values: those of a repeated option, else those of the variable or the settings file, which
    stand there one a line or with semicolons between them (a version may hold commas)."""
    if given:
        return list(given)
    text = setting(name, None, environ, "").value
    return [part.strip() for part in re.split(r"[;\n]", text) if part.strip()]


def store_root(option: object, environ: Mapping[str, str]) -> Setting:
    """The local root; default `$XDG_CACHE_HOME/neffcache`."""
    return setting("dir", option, environ, str(_caches(environ) / "neffcache"))


def host_cache(environ: Mapping[str, str]) -> Path:
    """A user's own directory for what holds on this host only. No store lies in it and nothing of it travels."""
    return _caches(environ) / "neffcache-host"


def _caches(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or Path.home(), ".cache"))
