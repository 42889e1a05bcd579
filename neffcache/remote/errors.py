"""What can go wrong with a remote: a closed set. Each class has a sentence, a hint, a counter and an exit code.

A fault is never a miss: that an object does not exist is said by None, not by one of these.
"""

from __future__ import annotations

import datetime
import email.utils
from collections.abc import Mapping
from typing import Any, ClassVar

from neffcache.errors import RemoteFault


class Fault(RemoteFault):
    """Base of the set. `counter` is the name under which it is counted, `passing` says that a retry may help."""

    counter: ClassVar[str]
    passing: bool = False
    retry_after: float | None = None
    """Seconds that the server asked to wait."""


class Denied(Fault):
    """403: the identity may not do this here."""

    counter = "denied"


class NoSuchBucket(Fault):
    """The bucket does not exist."""

    counter = "no_such_bucket"


class WrongRegion(Fault):
    """The bucket is in another region, or the region is unknown."""

    counter = "wrong_region"


class ExpiredCredentials(Fault):
    """The session token has run out."""

    counter = "expired_credentials"


class NoCredentials(Fault):
    """There are none, or the server does not know them."""

    counter = "no_credentials"


class ClockSkew(Fault):
    """This machine's clock is too far from the server's."""

    counter = "clock_skew"


class Throttled(Fault):
    """503 SlowDown or 429, until the patience ended."""

    counter = "throttled"
    passing = True


class TimedOut(Fault):
    """No answer in time."""

    counter = "timed_out"
    passing = True


class Unreachable(Fault):
    """No connection, a connection that breaks, or a server that answers 5xx."""

    counter = "unreachable"
    passing = True


class Precondition(Fault):
    """412 or 409: somebody else wrote first. Callers of a conditional write handle it."""

    counter = "precondition"


class Refused(Fault):
    """Any other answer that is not a success."""

    counter = "refused"


class Incomplete(Fault):
    """The remote has a manifest or a record and lacks what it names, or a transfer did not get all."""

    counter = "incomplete"


class Corrupt(Fault):
    """What the remote holds is not what was put there, and no other copy heals it."""

    counter = "corrupt"
    exit_code = 7


ALL: tuple[type[Fault], ...] = (
    *(Denied, NoSuchBucket, WrongRegion, ExpiredCredentials, NoCredentials, ClockSkew, Throttled, TimedOut),
    *(Unreachable, Precondition, Refused, Incomplete, Corrupt),
)

_CODES: dict[str, type[Fault]] = {
    "AccessDenied": Denied,
    "AllAccessDisabled": Denied,
    "AccountProblem": Denied,
    "KMS.AccessDeniedException": Denied,
    "403": Denied,
    "NoSuchBucket": NoSuchBucket,
    "PermanentRedirect": WrongRegion,
    "TemporaryRedirect": WrongRegion,
    "AuthorizationHeaderMalformed": WrongRegion,
    "IllegalLocationConstraintException": WrongRegion,
    "301": WrongRegion,
    "ExpiredToken": ExpiredCredentials,
    "ExpiredTokenException": ExpiredCredentials,
    "RequestExpired": ExpiredCredentials,
    "TokenRefreshRequired": ExpiredCredentials,
    "InvalidAccessKeyId": NoCredentials,
    "InvalidToken": NoCredentials,
    "SignatureDoesNotMatch": NoCredentials,
    "RequestTimeTooSkewed": ClockSkew,
    "SlowDown": Throttled,
    "Throttling": Throttled,
    "ThrottlingException": Throttled,
    "RequestLimitExceeded": Throttled,
    "TooManyRequests": Throttled,
    "ServiceUnavailable": Throttled,
    "RequestTimeout": TimedOut,
    "PreconditionFailed": Precondition,
    "ConditionalRequestConflict": Precondition,
    "OperationAborted": Precondition,
    # What arrived at the server is not what we sent: send it again.
    "BadDigest": Unreachable,
    "XAmzContentChecksumMismatch": Unreachable,
    "IncompleteBody": Unreachable,
    "InternalError": Unreachable,
}
_STATUS: dict[int, type[Fault]] = {
    301: WrongRegion,
    307: WrongRegion,
    403: Denied,
    408: TimedOut,
    409: Precondition,
    412: Precondition,
    429: Throttled,
    503: Throttled,
    504: TimedOut,
}
ABSENT = frozenset({"NoSuchKey", "404", "NotFound"})


def of_answer(answer: Mapping[str, Any], doing: str, where: str, *, now: datetime.datetime | None = None) -> Fault:
    """The fault that an error document of S3 means (`ClientError.response` of botocore). `doing`: "reading x"."""
    error, meta = answer.get("Error", {}), answer.get("ResponseMetadata", {})
    code, said = str(error.get("Code", "")), str(error.get("Message", ""))
    status = int(meta.get("HTTPStatusCode") or 0)
    headers = {name.lower(): value for name, value in meta.get("HTTPHeaders", {}).items()}
    kind = _CODES.get(code) or _STATUS.get(status) or (Unreachable if status >= 500 else Refused)
    fault = _made(kind, doing, where, code=code or str(status), said=said, error=error, headers=headers, now=now)
    fault.details |= {"code": code, "status": status, "request_id": meta.get("RequestId", "")}
    fault.retry_after = retry_after(headers.get("retry-after"), now)
    if status == 409 and kind is Precondition:
        fault.passing = True  # two conditional writes at once: the server asks to send this one again
    return fault


def timed_out(doing: str, where: str, why: str) -> TimedOut:
    return TimedOut(
        f"{doing} of {where} timed out", hint="check the network, or give more time with --remote-timeout",
        details={"cause": why},
    )  # fmt: skip


def unreachable(doing: str, where: str, why: str) -> Unreachable:
    return Unreachable(
        f"{doing} of {where} failed: no connection that holds",
        hint="check network, proxy, region and AWS_ENDPOINT_URL",
        details={"cause": why},
    )


def no_credentials(doing: str, where: str, why: str) -> NoCredentials:
    return NoCredentials(
        f"there are no usable credentials for {where}: {why}",
        hint="boto3's own chain is asked (environment, profile, container or instance role); --anonymous goes without",
        details={"doing": doing},
    )


def incomplete(where: str, what: str, lacking: list[str]) -> Incomplete:
    """`lacking` are names in the layout."""
    more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
    return Incomplete(
        f"{what} needs {lacking[0]}{more}, which {where} does not have",
        hint="push it again from a store that has it (push --repair), or warm it again",
        details={"missing": lacking},
    )


def corrupt(where: str, what: str) -> Corrupt:
    return Corrupt(
        f"{what} in {where} is damaged: its bytes do not have its digest",
        hint="push --repair from a store that has it, or warm it again",
        details={"damaged": what},
    )


def retry_after(header: str | None, now: datetime.datetime | None = None) -> float | None:
    """Seconds of a Retry-After header, which is a number or a date (RFC 9110, 10.2.3)."""
    if not header:
        return None
    try:
        return max(0.0, float(header))
    except ValueError:
        moment = date(header)
        return None if moment is None else max(0.0, (moment - (now or _now())).total_seconds())


def date(header: str | None) -> datetime.datetime | None:
    """The moment of an HTTP Date header, None when it is none."""
    try:
        moment = email.utils.parsedate_to_datetime(header or "")
    except (TypeError, ValueError):
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _made(
    kind: type[Fault],
    doing: str,
    where: str,
    *,
    code: str,
    said: str,
    error: Mapping[str, Any],
    headers: Mapping[str, str],
    now: datetime.datetime | None,
) -> Fault:
    if kind is Denied:
        return Denied(
            f"{doing} is denied in {where}",
            hint="ask for the right; without s3:ListBucket S3 also answers so for what does not exist",
        )
    if kind is NoSuchBucket:
        return NoSuchBucket(f"there is no bucket of {where}", hint="check the URL, the account and AWS_ENDPOINT_URL")
    if kind is WrongRegion:
        region = error.get("Region") or headers.get("x-amz-bucket-region")
        is_in = f"is in {region}" if region else "is in another region, or none is set"
        return WrongRegion(
            f"the bucket of {where} {is_in}: {doing} went to the wrong place",
            hint=f"AWS_REGION={region}" if region else "set AWS_REGION, or region in the AWS profile",
            details={"region": region},
        )
    if kind is ExpiredCredentials:
        return ExpiredCredentials(f"the credentials for {where} have expired", hint="renew the session token")
    if kind is NoCredentials:
        return no_credentials(doing, where, f"the server answers {code}")
    if kind is ClockSkew:
        theirs = date(headers.get("date"))
        away = None if theirs is None else ((now or _now()) - theirs).total_seconds() / 60
        minutes = "more than 15 minutes" if away is None else f"{abs(away):.0f} minutes"
        direction = "" if away is None else (" ahead" if away > 0 else " behind")
        return ClockSkew(
            f"this machine's clock is {minutes}{direction} of {where}'s" if direction else
            f"this machine's clock is {minutes} away from that of {where}",
            hint="set the clock (chrony, NTP)", details={"minutes": None if away is None else round(away, 1)},
        )  # fmt: skip
    if kind is Throttled:
        return Throttled(f"{where} asks to slow down ({code})", hint="fewer --transfers, or more --remote-timeout")
    if kind is TimedOut:
        return timed_out(doing, where, code)
    if kind is Precondition:
        return Precondition(f"{doing} in {where}: somebody else wrote first", hint="run the command again")
    if kind is Unreachable:
        return Unreachable(f"{doing} of {where} failed: the server answers {code} {said}".rstrip(), hint="try later")
    return Refused(f"{where} refuses {doing}: {code} {said}".rstrip(), hint="see the S3 error code")
