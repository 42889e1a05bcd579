"""Where a remote is: `s3://bucket/prefix`, in the one spelling that its object keys are made of."""

from __future__ import annotations

import re
from dataclasses import dataclass

from neffcache.errors import Usage

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
VERSION = "v1"
"""The layout's version: every object of ours lies under `<prefix>/v1/`."""


@dataclass(frozen=True, slots=True)
class Url:
    """`prefix` has no slash at either end and no empty part; it may be empty.

    `version` is the folder of our layout; "" below a prefix that others have filled.
    """

    bucket: str
    prefix: str
    version: str = VERSION

    def __str__(self) -> str:
        return f"s3://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")

    def key(self, name: str) -> str:
        """The object key of a name in the layout; never begins with `/`, never holds `//`."""
        return "/".join(part for part in (self.prefix, self.version, name) if part)

    def plain(self) -> Url:
        """The same place, for what others keep there."""
        return Url(self.bucket, self.prefix, "")

    @property
    def top(self) -> str:
        """What every object key below this remote begins with."""
        return f"{top}/" if (top := self.key("")) else ""

    def name(self, key: str) -> str | None:
        """The name in the layout of an object key, or None for an object that is not below this remote."""
        top = self.top
        return key.removeprefix(top) if key.startswith(top) else None


def parse(text: str) -> Url:
    """The remote that `s3://bucket`, `s3://bucket/`, `s3://bucket//prefix/`... means. Raises Usage."""
    scheme, separator, rest = text.strip().partition("://")
    if not separator or scheme.lower() != "s3":
        raise Usage(f"{text!r} is not a remote", hint="a remote looks like s3://bucket/prefix")
    bucket, _, path = rest.partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise Usage(f"{bucket!r} in {text!r} cannot be the name of a bucket", hint="s3://bucket/prefix")
    parts = [part for part in path.split("/") if part]
    if any(part in (".", "..") or not part.isprintable() for part in parts):
        raise Usage(f"the prefix of {text!r} holds a part that is not a plain name", hint="s3://bucket/prefix")
    prefix = "/".join(parts)
    if len(prefix.encode()) > 800:
        raise Usage(f"the prefix of {text[:80]!r}... is longer than object keys may be", hint="1,024 bytes in all")
    return Url(bucket, prefix)
