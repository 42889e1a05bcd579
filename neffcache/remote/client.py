"""S3 below one prefix, through botocore (what boto3 calls, at half the time to import): every request is retried,
counted, and its fault named.

Names are those of the layout; nothing is ever asked for outside `<prefix>/v1/`.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import botocore.config
import botocore.exceptions as boto
import urllib3.exceptions

from neffcache import __version__
from neffcache.errors import NeffcacheError, Usage
from neffcache.remote import errors
from neffcache.remote.direct import Reading
from neffcache.remote.patience import Patience
from neffcache.remote.session import quick_session, times_as_text
from neffcache.remote.url import Url

T = TypeVar("T")

CHUNK = 1 << 20
CONNECT_TIMEOUT = 10.0  # seconds
READ_TIMEOUT = 60.0

TIMEOUTS = (boto.ConnectTimeoutError, boto.ReadTimeoutError, urllib3.exceptions.TimeoutError, TimeoutError)
CREDENTIALS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.TokenRetrievalError,
    boto.ProfileNotFound,
)
BROKEN = (
    boto.ConnectionError,
    boto.HTTPClientError,
    boto.IncompleteReadError,
    boto.ResponseStreamingError,
    urllib3.exceptions.HTTPError,
    ConnectionError,
)
DIGEST_REFUSED = frozenset({"BadDigest", "XAmzContentChecksumMismatch"})  # what S3 and SeaweedFS say, and MinIO
FAILURES = (boto.BotoCoreError, boto.ClientError, urllib3.exceptions.HTTPError, OSError)


@dataclass(frozen=True)
class Access:
    """How a remote is spoken to. What is None is left to botocore (environment, profile, instance role)."""

    region: str | None = None
    endpoint_url: str | None = None
    anonymous: bool = False
    path_style: bool = False
    sse: str | None = None
    """AES256 or aws:kms, sent with everything that is written."""
    kms_key: str | None = None
    requester_pays: bool = False
    timeout: float = 60.0
    """Seconds without a sign of life after which an operation is given up."""
    transfers: int = 8
    """Requests at once."""


class Head(NamedTuple):
    size: int
    etag: str


class Item(NamedTuple):
    """One row of a listing."""

    name: str
    size: int
    etag: str = ""


class Readable(Protocol):
    """What a request's body is read from; `read` may raise an error of ours, which ends the request."""

    def read(self, size: int = -1, /) -> bytes: ...
    def seek(self, offset: int, whence: int = 0, /) -> int: ...
    def tell(self) -> int: ...


Opened = Callable[[], AbstractContextManager[Readable]]


class _Blocks:
    """A file that is read in blocks of `CHUNK` bytes; urllib3 asks for 16 kB, at a system call or two each."""

    def __init__(self, file: Readable) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell
        self.fault: NeffcacheError | None = None

    def read(self, size: int = -1) -> bytes:
        try:
            return self._file.read(size if size < 0 else max(size, CHUNK))
        except NeffcacheError as fault:
            self.fault = fault
            raise


@contextlib.contextmanager
def _body(opened: Opened) -> Iterator[_Blocks]:
    """A body for one attempt. What reading it raises comes out as it is, not as botocore's error of a connection."""
    with opened() as file:
        blocks = _Blocks(file)
        try:
            yield blocks
        except boto.HTTPClientError:
            if blocks.fault is not None:
                raise blocks.fault from None
            raise


class Client:
    """One bucket below one prefix. Safe to use from several threads."""

    def __init__(self, url: Url, access: Access) -> None:
        if access.kms_key and access.sse not in (None, "aws:kms"):
            raise Usage(f"a KMS key is of no use with {access.sse}", hint="--sse aws:kms")
        self.url = url
        self.access = access
        self.counts: Counter[str] = Counter()
        self.patience = Patience(access.timeout)
        self._lock = threading.Lock()
        self._session = quick_session()
        self._s3 = self._make()
        pays = {"RequestPayer": "requester"} if access.requester_pays else {}
        self._reading: dict[str, Any] = {"Bucket": url.bucket, **pays}
        self._objects = Reading(self._session, self._s3, self._reading, again=functools.partial(self.count, "get"))
        sse = "aws:kms" if access.kms_key else access.sse
        self._writing: dict[str, Any] = {
            **self._reading,
            **({"ServerSideEncryption": sse} if sse else {}),
            **({"SSEKMSKeyId": access.kms_key} if access.kms_key else {}),
        }

    def _make(self) -> Any:
        access = self.access
        with self._naming("the settings"), times_as_text(self._session):
            return self._session.create_client(
                "s3",
                region_name=access.region,
                endpoint_url=access.endpoint_url,
                config=botocore.config.Config(
                    signature_version=botocore.UNSIGNED if access.anonymous else None,
                    connect_timeout=min(CONNECT_TIMEOUT, access.timeout),
                    read_timeout=min(READ_TIMEOUT, access.timeout),
                    retries={"total_max_attempts": 1},  # ours count, jitter and end
                    max_pool_connections=access.transfers + 2,
                    # Bodies carry their SHA-256 in a signed header: signing need not hash them again.
                    s3={"addressing_style": "path" if access.path_style else "auto", "payload_signing_enabled": False},
                    request_checksum_calculation="when_required",
                    response_checksum_validation="when_required",
                    user_agent_extra=f"neffcache/{__version__}",
                ),
            )

    @property
    def where(self) -> str:
        return str(self.url)

    # Reading

    def read(self, name: str) -> tuple[bytes, str] | None:
        """(content, ETag) of a small object, or None when there is none. Raises Fault."""

        def get() -> tuple[bytes, str]:
            size, etag, body = self._objects.get(self.url.key(name))
            data = body.read()
            self.count("bytes_received", len(data))
            if size is not None and len(data) != size:
                raise ConnectionError(f"the body ended {size - len(data)} bytes too early")
            return data, etag

        return self._absent_is_none(lambda: self._call("get", f"reading {name}", get))

    def chunks(self, name: str, start: int = 0, length: int | None = None, *, etag: str = "") -> Iterator[bytes]:
        """The bytes of an object, or `length` of them from `start`; a stream that breaks goes on where it broke.

        Raises Incomplete when there is no such object, Precondition when it has another ETag than the one given, Fault.
        The content is not checked.
        """
        at, end = start, None if length is None else start + length
        counted = at
        trying = self.patience.trying()
        while end is None or at < end:
            try:
                extent = None if at == 0 and end is None else f"bytes={at}-{'' if end is None else end - 1}"
                self.count("get")
                size, etag, body = self._objects.get(self.url.key(name), extent=extent, etag=etag)
                if end is None:
                    if size is None:
                        raise ConnectionError("the answer does not say how long it is")
                    end = at + size
                with contextlib.closing(body):
                    while at < end:
                        chunk = body.read(min(CHUNK, end - at))
                        if not chunk:
                            raise ConnectionError(f"the body ended {end - at} bytes too early")
                        at += len(chunk)
                        trying.progress()
                        yield chunk
            except FAILURES as error:
                fault = self._fault(error, f"reading {name}")
                if fault is None:
                    raise errors.incomplete(self.where, "a reader", [name]) from error
                trying.again(fault)
            finally:
                self.count("bytes_received", at - counted)
                counted = at

    def head(self, name: str) -> Head | None:
        """Size and ETag, or None when there is none. Raises Fault."""

        def head() -> Head:
            answer = self._s3.head_object(Key=self.url.key(name), **self._reading)
            return Head(int(answer["ContentLength"]), answer.get("ETag", ""))

        return self._absent_is_none(lambda: self._call("head", f"looking for {name}", head, explain=name))

    def names(self, folder: str) -> Iterator[Item]:
        """Every object below a folder of the layout (""; all), page by page, in the order of their keys.

        Raises Fault, also for a later page.
        """
        prefix = f"{self.url.key(folder)}/" if folder else self.url.top
        asked: dict[str, Any] = {**({"Prefix": prefix} if prefix else {}), **self._reading}
        doing = f"listing {folder or self.where}"
        while True:
            page = self._call("list", doing, functools.partial(self._s3.list_objects_v2, **asked))
            for item in page.get("Contents", ()):
                name = self.url.name(item["Key"])
                if name is not None:
                    yield Item(name, int(item["Size"]), item.get("ETag", ""))
            if not page.get("IsTruncated"):
                return
            asked["ContinuationToken"] = page["NextContinuationToken"]

    # Writing

    def put(
        self,
        name: str,
        body: bytes | bytearray | Opened,
        sha256: str,
        *,
        size: int,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> str | None:
        """Write an object whose SHA-256 is known (S3 checks it too); its ETag, or None when the condition fails.

        `body` may be a function that opens it anew for every attempt. Raises Fault, and what reading the body raises:
        then nothing is written, as a request that ends too early is none.
        """
        condition: dict[str, Any] = {"IfNoneMatch": "*"} if if_absent else {"IfMatch": if_match} if if_match else {}
        checksum = base64.b64encode(bytes.fromhex(sha256)).decode()

        def put() -> str:
            with contextlib.ExitStack() as stack:
                content = body if isinstance(body, (bytes, bytearray)) else stack.enter_context(_body(body))
                answer = self._s3.put_object(
                    Key=self.url.key(name),
                    Body=content,
                    ContentLength=size,
                    ChecksumSHA256=checksum,
                    **condition,
                    **self._writing,
                )
            if answer.get("ChecksumSHA256") not in (None, checksum):
                raise ConnectionError("the server's SHA-256 is not that of what was sent")
            self.count("bytes_sent", size)
            return str(answer.get("ETag", ""))

        try:
            return self._call("put", f"writing {name}", put)
        except errors.Precondition:
            if not condition:
                raise
            return None

    def refuses_another_digest(self, name: str) -> bool:
        """Whether this store checks the SHA-256 that it is given: an object is sent with one that it has not.

        One attempt; whatever is no clear answer is a no.
        """
        self.count("put")
        checksum = base64.b64encode(hashlib.sha256(b"another").digest()).decode()
        try:
            self._s3.put_object(Key=self.url.key(name), Body=b"neffcache\n", ChecksumSHA256=checksum, **self._writing)
        except boto.ClientError as error:
            return error.response.get("Error", {}).get("Code") in DIGEST_REFUSED
        except FAILURES:
            return False
        return False

    def multipart(
        self,
        name: str,
        parts: Sequence[tuple[Opened, str, int]],
        each: Callable[[list[Any]], list[Any]],
        *,
        if_match: str | None = None,
    ) -> bool:
        """Write a large object in parts (how to open, SHA-256, size), unless its name is taken (with `if_match`: has
        another ETag); whether this call did.

        `each` runs functions at once and gives their results. What is not finished is aborted and was never visible.
        Raises Fault, also when the composite checksum is not that of the parts.
        """
        key = self.url.key(name)
        doing = f"writing {name}"
        condition = {"IfMatch": if_match} if if_match else {"IfNoneMatch": "*"}
        upload = self._call(
            "put",
            doing,
            lambda: self._s3.create_multipart_upload(Key=key, ChecksumAlgorithm="SHA256", **self._writing)["UploadId"],
        )
        try:
            done = each([lambda n=n, p=p: self._part(key, doing, upload, n, *p) for n, p in enumerate(parts, 1)])
            answer = self._call(
                "put",
                doing,
                lambda: self._s3.complete_multipart_upload(
                    Key=key, UploadId=upload, MultipartUpload={"Parts": done}, **condition, **self._reading
                ),
            )
        except errors.Precondition:
            self._abort(key, upload)
            return False
        except errors.Refused as fault:
            # The answer to a completion that worked may have been lost.
            if fault.details.get("code") == "NoSuchUpload" and self.head(name) is not None:
                return True
            self._abort(key, upload)
            raise
        except BaseException:
            self._abort(key, upload)
            raise
        said = answer.get("ChecksumSHA256")
        if said is not None and said != composite([sha256 for _, sha256, _ in parts]):
            raise errors.corrupt(self.where, name)
        return True

    def _part(
        self, key: str, doing: str, upload: str, number: int, opened: Opened, sha256: str, size: int
    ) -> dict[str, Any]:
        checksum = base64.b64encode(bytes.fromhex(sha256)).decode()

        def put() -> str:
            with _body(opened) as content:
                answer = self._s3.upload_part(
                    Key=key, UploadId=upload, PartNumber=number, Body=content, ContentLength=size,
                    ChecksumSHA256=checksum, **self._reading,
                )  # fmt: skip
            self.count("bytes_sent", size)
            return str(answer["ETag"])

        return {"PartNumber": number, "ETag": self._call("put", doing, put), "ChecksumSHA256": checksum}

    def _abort(self, key: str, upload: str) -> None:
        with contextlib.suppress(*FAILURES):  # what cannot be aborted is swept by the bucket's lifecycle rule
            self._s3.abort_multipart_upload(Key=key, UploadId=upload, **self._reading)

    def delete(self, name: str) -> None:
        """Remove an object if it is there. Raises Fault."""
        self._call(
            "delete", f"removing {name}", lambda: self._s3.delete_object(Key=self.url.key(name), **self._reading)
        )

    # Accounts

    def count(self, what: str, by: int = 1) -> None:
        with self._lock:
            self.counts[what] += by

    def requests(self) -> dict[str, int]:
        """Requests by verb, retries included, and their sum."""
        verbs = {verb: self.counts[verb] for verb in ("get", "head", "list", "put", "delete")}
        return {**verbs, "total": sum(verbs.values())}

    def faults(self) -> dict[str, int]:
        """Answers that were faults, by counter; also those that a retry healed."""
        return {kind.counter: self.counts[kind.counter] for kind in errors.ALL if self.counts[kind.counter]}

    def principal(self) -> dict[str, str | None]:
        """Who the credentials are of, as far as it is known without asking a service."""
        if self.access.anonymous:
            return {"method": "anonymous", "access_key": None}
        with self._naming("asking for credentials"):
            found = self._session.get_credentials()
            if found is None:
                return {"method": None, "access_key": None}
            key = found.get_frozen_credentials().access_key
        return {"method": found.method, "access_key": f"{key[:4]}...{key[-4:]}" if len(key) > 12 else "..."}

    # Inside

    def _call(self, verb: str, doing: str, request: Callable[[], T], *, explain: str | None = None) -> T:
        trying = self.patience.trying()
        while True:
            self.count(verb)
            try:
                result = request()
                self.patience.succeeded()
                return result
            except FAILURES as error:
                fault = self._fault(error, doing, explain=explain)
                if fault is None:
                    self.patience.succeeded()
                    raise _Absent from error
            trying.again(fault)

    def _fault(self, error: BaseException, doing: str, *, explain: str | None = None) -> errors.Fault | None:
        """The named and counted fault, None when the answer is that the object does not exist."""
        fault = self._named(error, doing, explain=explain)
        if fault is not None:
            self.count(fault.counter)
            fault.__cause__ = error
        return fault

    def _named(self, error: BaseException, doing: str, *, explain: str | None = None) -> errors.Fault | None:
        if isinstance(error, boto.ClientError):
            code = str(error.response.get("Error", {}).get("Code", ""))
            if code in errors.ABSENT:
                return None
            if explain is not None and code in ("400", "403", "301"):
                return self._explained(explain, doing)
            return errors.of_answer(error.response, doing, self.where)
        if isinstance(error, CREDENTIALS):
            return errors.no_credentials(doing, self.where, str(error))
        if isinstance(error, boto.NoRegionError):
            return errors.of_answer({"Error": {"Code": "301"}}, doing, self.where)
        if isinstance(error, TIMEOUTS):
            return errors.timed_out(doing, self.where, str(error))
        if isinstance(error, BROKEN):
            return errors.unreachable(doing, self.where, str(error))
        if isinstance(error, (boto.BotoCoreError, ValueError)):
            return errors.Refused(
                f"{doing} of {self.where} cannot be asked for: {error}", hint="check the AWS settings"
            )
        raise error

    def _explained(self, name: str, doing: str) -> errors.Fault | None:
        """A HEAD has no error document: ask with a GET of one byte why."""
        self.count("get")
        try:
            self._s3.get_object(Key=self.url.key(name), Range="bytes=0-0", **self._reading)["Body"].close()
        except FAILURES as error:
            return self._named(error, doing)
        return errors.Denied(f"{doing} is denied in {self.where}", hint="ask for s3:GetObject under the prefix")

    def _absent_is_none(self, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except _Absent:
            return None

    @contextlib.contextmanager
    def _naming(self, doing: str) -> Iterator[None]:
        try:
            yield
        except (boto.BotoCoreError, ValueError) as error:
            fault = self._named(error, doing)
            assert fault is not None
            raise fault from error


class _Absent(Exception):
    """The object does not exist."""


def composite(parts: Sequence[str]) -> str:
    """S3's checksum of a multipart object: that of the parts' SHA-256 digests, and how many there are."""
    whole = hashlib.sha256(b"".join(bytes.fromhex(sha256) for sha256 in parts)).digest()
    return f"{base64.b64encode(whole).decode()}-{len(parts)}"


def merged(counts: Sequence[Mapping[str, int]]) -> Counter[str]:
    """The sum of several clients' counts."""
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return total
