"""The remote of the settings: its URL, how it is spoken to, and what to do when it fails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neffcache.errors import Usage
from neffcache.flows.settings import Setting, setting

if TYPE_CHECKING:
    from neffcache.remote.client import Access, Client
    from neffcache.remote.tier import RemoteStore

ON_ERROR = ("fail", "stale-ok", "compile")
"""What a fault of the remote does: end the command (exit code 4); go on when the local store has a complete manifest;
go on in any case, so that what lacks is a miss."""

TRUE, FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


@dataclass(frozen=True)
class RemoteOptions:
    """The options of a command line; None: not said there."""

    remote: str | None = None
    channel: str | None = None
    on_remote_error: str | None = None
    remote_timeout: float | None = None
    transfers: int | None = None
    region: str | None = None
    endpoint_url: str | None = None
    path_style: bool | None = None
    anonymous: bool | None = None
    requester_pays: bool | None = None
    sse: str | None = None
    kms_key: str | None = None


DEFAULTS = {"channel": "current", "on_remote_error": "fail", "remote_timeout": "60", "transfers": "8"}


@dataclass(frozen=True)
class RemoteSettings:
    """Every setting with its origin."""

    values: Mapping[str, Setting]

    @classmethod
    def read(
        cls, options: RemoteOptions, environ: Mapping[str, str], *, directory: Path | None = None
    ) -> RemoteSettings:
        """Raises Usage for a value that is not understood."""
        found = {
            item.name: setting(
                item.name, getattr(options, item.name), environ, DEFAULTS.get(item.name, ""), directory=directory
            )
            for item in fields(RemoteOptions)
        }
        settings = cls(found)
        if settings.on_remote_error not in ON_ERROR:
            raise settings.wrong("on_remote_error", "fail, stale-ok or compile")
        if settings.values["sse"].value not in ("", "AES256", "aws:kms"):
            raise settings.wrong("sse", "AES256 or aws:kms")
        return settings

    @property
    def remote(self) -> str | None:
        return self.values["remote"].value or None

    @property
    def channel(self) -> str:
        return self.values["channel"].value

    @property
    def on_remote_error(self) -> str:
        return self.values["on_remote_error"].value

    def open(self) -> RemoteStore:
        """The remote; no request is made. Raises Usage when none is named."""
        from neffcache.remote.tier import RemoteStore

        if self.remote is None:
            raise Usage(
                "no remote is named", hint="--remote s3://bucket/prefix, NEFFCACHE_REMOTE, or remote in neffcache.toml"
            )
        return RemoteStore.open(self.remote, self.access())

    def access(self) -> Access:
        """How S3 is spoken to, whatever the place. Raises Usage for a value that is not understood."""
        from neffcache.remote.client import Access

        text = {name: item.value or None for name, item in self.values.items()}
        return Access(
            region=text["region"],
            endpoint_url=text["endpoint_url"],
            anonymous=self._flag("anonymous"),
            path_style=self._flag("path_style"),
            sse=text["sse"],
            kms_key=text["kms_key"],
            requester_pays=self._flag("requester_pays"),
            timeout=self._number("remote_timeout", 0.1),
            transfers=int(self._number("transfers", 1)),
        )

    def wrong(self, name: str, wanted: str) -> Usage:
        item = self.values[name]
        return Usage(f"{item.origin} is {item.value!r}", hint=f"it is {wanted}")

    def _flag(self, name: str) -> bool:
        value = self.values[name].value.lower()
        if value not in TRUE + FALSE:
            raise self.wrong(name, "true or false")
        return value in TRUE

    def _number(self, name: str, least: float) -> float:
        try:
            value = float(self.values[name].value)
        except ValueError:
            value = float("nan")
        if not least <= value < float("inf"):
            raise self.wrong(name, f"a number, at least {least:g}")
        return value


def accounts(remote: RemoteStore) -> dict[str, Any]:
    """What a command spent on a remote, for its JSON."""
    return {"remote": remote.where, **accounts_of(remote.client)}


def accounts_of(client: Client) -> dict[str, Any]:
    """The requests and faults of one place."""
    return {"requests": client.requests(), "faults": client.faults()}
