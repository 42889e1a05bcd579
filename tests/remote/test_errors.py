"""Every fault of a remote has its own class, sentence, hint, counter and exit code; none is a miss."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from email.utils import format_datetime
from unittest.mock import ANY

import pytest

from neffcache.key.canonical import sha256_hex, xxh3_128_hex
from neffcache.remote import errors
from neffcache.remote.client import Access
from neffcache.remote.patience import Patience, Trying
from neffcache.remote.tier import RemoteStore
from scripts.seaweedfs import Identity, Server
from tests.remote.conftest import READER
from tests.remote.proxy import Action, Handler, Proxy, delays, resets, says

Connect = Callable[..., RemoteStore]
KEY = xxh3_128_hex(b"job")


def skewed(minutes: float) -> Action:
    """A server whose clock is so far behind ours."""

    def answer(handler: Handler, path: str, body: bytes) -> None:
        theirs = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=minutes)
        handler.answer(403, "RequestTimeTooSkewed", {"Date": format_datetime(theirs, usegmt=True)})

    return answer


CASES = {
    "denied": (says(403, "AccessDenied"), errors.Denied, "denied"),
    "no such bucket": (says(404, "NoSuchBucket"), errors.NoSuchBucket, "no bucket"),
    "wrong region": (
        says(301, "PermanentRedirect", {"x-amz-bucket-region": "eu-west-1"}),
        errors.WrongRegion,
        "is in eu-west-1",
    ),
    "region in the document": (
        says(400, "AuthorizationHeaderMalformed", more="<Region>eu-central-1</Region>"),
        errors.WrongRegion,
        "is in eu-central-1",
    ),
    "expired": (says(400, "ExpiredToken"), errors.ExpiredCredentials, "expired"),
    "unknown key": (says(403, "InvalidAccessKeyId"), errors.NoCredentials, "credentials"),
    "clock ahead": (skewed(22), errors.ClockSkew, "22 minutes ahead"),
    "clock behind": (skewed(-17), errors.ClockSkew, "17 minutes behind"),
    "throttled": (says(503, "SlowDown", {"Retry-After": "3600"}), errors.Throttled, "slow down"),
    "reset": (resets, errors.Unreachable, "no connection"),
    "5xx": (says(500, "InternalError", {"Retry-After": "3600"}), errors.Unreachable, "the server answers"),
    "other": (says(400, "InvalidRequest"), errors.Refused, "InvalidRequest"),
}


@pytest.mark.parametrize(
    ("verb", "case"),
    # A HEAD of a bucket that does not exist is a plain 404; every command reads something first.
    [
        (verb, case)
        for verb in ("get", "get again", "head", "put")
        for case in CASES
        if (verb, case) != ("head", "no such bucket")
    ],
)
def test_an_answer_is_named_counted_and_has_exit_code_4(connect: Connect, front: Proxy, verb: str, case: str) -> None:
    action, kind, said = CASES[case]
    remote = connect(timeout=1.0 if action is resets else 60.0)
    if verb == "get again":  # from the second on, objects are read in another way
        remote.client.put("probe", b"x", sha256_hex(b"x"), size=1)
        assert remote.client.read("probe") == (b"x", ANY)
    front.on(action)
    call: dict[str, Callable[[], object]] = {
        "get": lambda: remote.pointer(KEY),
        "get again": lambda: remote.pointer(KEY),
        "head": lambda: remote.exists(f"keys/{KEY}.json"),
        "put": lambda: remote.client.put("probe", b"x", sha256_hex(b"x"), size=1),
    }
    with pytest.raises(errors.Fault) as fault:
        call[verb]()
    assert type(fault.value) is kind
    assert fault.value.exit_code == 4
    assert said in fault.value.message
    assert fault.value.hint
    assert remote.client.faults()[kind.counter] >= 1


def test_the_set_is_closed_and_each_has_its_own_counter() -> None:
    counters = [kind.counter for kind in errors.ALL]
    assert len(set(counters)) == len(counters) == 13
    assert set(errors.ALL) == set(errors.Fault.__subclasses__())
    assert [kind.exit_code for kind in errors.ALL if kind.exit_code != 4] == [7]


def test_no_answer_in_time_is_a_time_out(connect: Connect, front: Proxy) -> None:
    front.on(delays(5))
    with pytest.raises(errors.TimedOut):
        connect(timeout=0.4).pointer(KEY)


def test_nobody_listening_is_unreachable(credentials: None, url: str) -> None:
    with pytest.raises(errors.Unreachable):
        RemoteStore.open(url, Access(endpoint_url="http://127.0.0.1:1", timeout=0.3)).pointer(KEY)


def test_no_credentials_at_all(url: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    remote = RemoteStore.open(url, Access(timeout=30, region="us-east-1"))
    with pytest.raises(errors.NoCredentials, match="no usable credentials"):
        remote.pointer(KEY)
    assert remote.client.principal() == {"method": None, "access_key": None}


def test_wrong_credentials_at_a_real_server(url: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment(Identity("stranger")).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(errors.NoCredentials):
        RemoteStore.open(url, Access(timeout=30)).pointer(KEY)


def test_a_bucket_that_does_not_exist_at_a_real_server(credentials: None, server: Server) -> None:
    with pytest.raises(errors.NoSuchBucket):
        RemoteStore.open("s3://nowhere-at-all/p", Access(timeout=30)).pointer(KEY)


def test_who_may_only_read_is_denied_writing_and_reads_on(
    url: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server.environment(READER).items():
        monkeypatch.setenv(name, value)
    remote = RemoteStore.open(url, Access(timeout=30))
    with pytest.raises(errors.Denied):
        remote.conditional()
    assert remote.client.counts["put"] == 1, "it was tried again"
    with pytest.raises(errors.Denied):
        list(remote.names("key"))
    assert remote.pointer(KEY) is None


def test_a_fault_that_no_retry_heals_is_not_retried(connect: Connect, front: Proxy) -> None:
    front.on(says(403, "AccessDenied"))
    with pytest.raises(errors.Denied):
        connect().pointer(KEY)
    assert len(front.seen) == 1


def test_retry_after_is_honoured(connect: Connect, front: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(Patience, "sleep", lambda self, seconds: slept.append(seconds))
    front.on(says(503, "SlowDown", {"Retry-After": "7"}), times=2)
    assert connect(timeout=60).pointer(KEY) is None
    assert [seconds >= 7 for seconds in slept] == [True, True]


def test_a_retry_after_beyond_the_cap_ends_at_once(connect: Connect, front: Proxy) -> None:
    front.on(says(503, "SlowDown", {"Retry-After": "3600"}))
    with pytest.raises(errors.Throttled):
        connect(timeout=60).pointer(KEY)
    assert len(front.seen) == 1


@pytest.mark.fast
def test_pauses_are_drawn_from_the_whole_range_and_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[float, float]] = []
    monkeypatch.setattr("random.uniform", lambda low, high: drawn.append((low, high)) or high)
    monkeypatch.setattr(Patience, "sleep", lambda self, seconds: None)
    trying = Patience(1000).trying()
    for _ in range(12):
        trying.again(errors.unreachable("reading", "s3://b", ""))
    assert {low for low, _ in drawn} == {0}
    highs = [high for _, high in drawn]
    assert highs == sorted(highs)
    assert (highs[0], highs[1], highs[-1]) == (0.1, 0.2, 20.0)


def lose_patience(trying: Trying, meanwhile: Callable[[], None] = lambda: None) -> None:
    while True:
        meanwhile()
        trying.again(errors.unreachable("reading", "s3://b", ""))


@pytest.mark.fast
def test_a_remote_that_is_gone_is_given_up_by_all_at_once() -> None:
    patience = Patience(0.2)
    first, second = patience.trying(), patience.trying()
    with pytest.raises(errors.Unreachable):
        lose_patience(first)
    patience.check()
    with pytest.raises(errors.Unreachable):
        lose_patience(second)
    start = time.monotonic()
    with pytest.raises(errors.Unreachable):
        patience.sleep(60)
    with pytest.raises(errors.Unreachable):
        patience.trying()
    assert time.monotonic() - start < 30


@pytest.mark.fast
def test_one_that_fails_alone_does_not_end_the_others() -> None:
    patience = Patience(0.2)
    lone, fine = patience.trying(), patience.trying()
    with pytest.raises(errors.Unreachable):
        lose_patience(lone, meanwhile=fine.progress)
    patience.check()


@pytest.mark.fast
@pytest.mark.parametrize(("header", "seconds"), [("3", 3.0), ("-1", 0.0), ("", None), ("soon", None), (None, None)])
def test_retry_after_as_a_number(header: str | None, seconds: float | None) -> None:
    assert errors.retry_after(header) == seconds


@pytest.mark.fast
def test_retry_after_as_a_date() -> None:
    now = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    header = format_datetime(now + datetime.timedelta(seconds=90), usegmt=True)
    assert errors.retry_after(header, now) == 90
