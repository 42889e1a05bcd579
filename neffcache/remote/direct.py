"""GET of objects as botocore sends it, at less than half of the CPU time that botocore takes for each.

Where objects lie, how requests are signed and through which connections they go is seen from what botocore itself sends
first. Only what is plain goes this way (signatures of version 4 or none, no redirect); botocore does the rest.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

import botocore.exceptions as boto
import botocore.parsers
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest

SIGNED = re.compile(r"AWS4-HMAC-SHA256 Credential=[^/]+/[0-9]{8}/([^/]+)/s3/aws4_request,")
KEPT = ("User-Agent", "x-amz-request-payer")
"""Headers of botocore's request that every request carries; the others are of one object, or made anew."""
ELSEWHERE = frozenset({301, 302, 303, 307, 308, 400})
"""Answers after which botocore may ask in another region."""


class Body(Protocol):
    """What an answer's bytes are read from."""

    def read(self, amt: int | None = None, /) -> bytes: ...
    def close(self) -> None: ...


class Answer(NamedTuple):
    """How many bytes come (None: not said), the object's ETag ("": some stores give none), and where to read them."""

    size: int | None
    etag: str
    body: Body


class Way(NamedTuple):
    """How objects are asked for."""

    base: str
    """What an object's URL begins with."""
    region: str | None
    """What requests are signed for; None: they are not signed."""
    headers: dict[str, str]


class Reading:
    """GET in one bucket. Safe to use from several threads."""

    def __init__(self, session: Any, s3: Any, asked: Mapping[str, Any], *, again: Callable[[], None]) -> None:
        """`asked` are botocore's words for every request: Bucket, RequestPayer. `again` is told of a second request."""
        self._session, self._s3, self._asked, self._again = session, s3, dict(asked), again
        self._parser = botocore.parsers.create_parser("rest-xml")
        self._way: Way | None = None
        self._sent = threading.local()
        self._connections = connections(s3)
        s3.meta.events.register("before-send.s3.GetObject", self._remember)

    def get(self, key: str, *, extent: str | None = None, etag: str = "") -> Answer:
        """Ask for an object or a part of it (`extent`: bytes=0-9); with `etag` only when it has that one.

        Raises what botocore's get_object raises.
        """
        known = self._way
        if known is not None:
            headers = {**known.headers, **({"Range": extent} if extent else {}), **({"If-Match": etag} if etag else {})}
            answer = self._direct(known, key, headers)
            if answer is not None:
                return answer
            self._way = None
            self._again()
        words = {**({"Range": extent} if extent else {}), **({"IfMatch": etag} if etag else {})}
        found = self._s3.get_object(Key=key, **self._asked, **words)
        if self._connections is not None:
            self._way = way(key, *self._sent.last)
        return Answer(found.get("ContentLength"), found.get("ETag", ""), found["Body"])

    def _direct(self, known: Way, key: str, headers: dict[str, str]) -> Answer | None:
        """The answer, or None when it takes botocore to get one."""
        request = AWSRequest("GET", known.base + _quoted(key), headers=headers, stream_output=True)
        if known.region is not None:
            # Asked for each time, as by botocore: they may have been renewed.
            S3SigV4Auth(self._session.get_credentials().get_frozen_credentials(), "s3", known.region).add_auth(request)
        answer = self._connections.send(request.prepare())
        if answer.status_code in (200, 206):
            size = answer.headers.get("Content-Length")
            return Answer(None if size is None else int(size), answer.headers.get("ETag", ""), answer.raw)
        body = answer.content
        if answer.status_code in ELSEWHERE:
            return None
        said = {"status_code": answer.status_code, "headers": dict(answer.headers.items()), "body": body}
        raise boto.ClientError(self._parser.parse(said, None), "GetObject")

    def _remember(self, request: Any, **_: Any) -> None:
        self._sent.last = (request.url, request.headers)  # of a redirect the last


def connections(s3: Any) -> Any:
    """The connections of a client of botocore, with its proxies, certificates and time-outs.

    The one private thing of botocore that is used (of 1.36 and later); None where it is not there.
    """
    found = getattr(getattr(s3, "_endpoint", None), "http_session", None)
    return found if hasattr(found, "send") else None


def _quoted(key: str) -> str:
    return quote(key, safe="/~")


def way(key: str, url: str, headers: Mapping[str, str | bytes]) -> Way | None:
    """How to ask as botocore asked for that key, None when that was not plain."""
    said = {name: value.decode() if isinstance(value, bytes) else value for name, value in headers.items()}
    if not url.endswith(f"/{_quoted(key)}"):
        return None
    signed = None
    if "Authorization" in said:
        signed = SIGNED.match(said["Authorization"])
        if signed is None:
            return None
    kept = {name: said[name] for name in KEPT if name in said}
    return Way(url.removesuffix(_quoted(key)), signed[1] if signed else None, kept)
