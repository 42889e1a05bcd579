"""Objects are read as botocore would read them, and by botocore where that is not plain."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from botocore.awsrequest import AWSResponse, HeadersDict

from neffcache.key.canonical import sha256_hex
from neffcache.remote import errors
from neffcache.remote.client import CHUNK, Access, Client
from neffcache.remote.direct import connections, way
from neffcache.remote.tier import RemoteStore
from neffcache.remote.url import Url
from tests.remote.proxy import Proxy, cuts, resets, says

Connect = Callable[..., RemoteStore]

SESSION = b"""<CreateSessionResult><Credentials><SessionToken>t</SessionToken><SecretAccessKey>s</SecretAccessKey>
<AccessKeyId>AKIASESSION</AccessKeyId><Expiration>2099-01-01T00:00:00Z</Expiration></Credentials></CreateSessionResult>
"""


class Content(io.BytesIO):
    """What an answer of urllib3 has beside `read` and `close`."""

    def stream(self, *_: object) -> list[bytes]:
        return [self.read()]


@dataclass
class Service:
    """Stands where the connections of a client are, and answers every request."""

    sent: list[Any] = field(default_factory=list)

    def send(self, request: Any) -> AWSResponse:
        self.sent.append(request)
        body = SESSION if "?session" in request.url else b"content"
        return AWSResponse(request.url, 200, HeadersDict({"Content-Length": str(len(body))}), Content(body))


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The AWS settings of a machine with nothing but keys and a region; the file of its profile."""
    for name in ("AWS_ENDPOINT_URL", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    profile = tmp_path / "config"
    monkeypatch.setenv("AWS_CONFIG_FILE", str(profile))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    return profile


def reads(url: Url, access: Access, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, Client]:
    """What is sent for the same object by botocore and by us, and the client."""
    client = Client(url, access)
    service = Service()
    monkeypatch.setattr(client._s3._endpoint, "http_session", service)
    monkeypatch.setattr(client._objects, "_connections", service)
    assert client.read("probe") == (b"content", "")
    theirs = service.sent[-1]
    assert client.read("probe") == (b"content", "")
    return theirs, service.sent[-1], client


def said(request: Any, name: str) -> str:
    value = request.headers.get(name, "")
    return value.decode() if isinstance(value, bytes) else str(value)


PLAIN = Url("bucket", "a team/über~x+y")


@pytest.mark.fast
@pytest.mark.parametrize(
    ("url", "access", "profile", "begin"),
    [
        (PLAIN, Access(), "", "https://bucket.s3.eu-west-1.amazonaws.com/a%20team/%C3%BCber~x%2By/v1/probe"),
        (PLAIN, Access(region="us-east-1"), "", "https://bucket.s3.amazonaws.com/"),
        (PLAIN, Access(region="cn-north-1"), "", "https://bucket.s3.cn-north-1.amazonaws.com.cn/"),
        (PLAIN, Access(path_style=True), "", "https://s3.eu-west-1.amazonaws.com/bucket/"),
        (Url("with.dots", ""), Access(), "", "https://s3.eu-west-1.amazonaws.com/with.dots/"),
        (PLAIN, Access(anonymous=True), "", "https://bucket.s3.eu-west-1.amazonaws.com/"),
        (PLAIN, Access(requester_pays=True), "", "https://bucket.s3.eu-west-1.amazonaws.com/"),
        (PLAIN, Access(endpoint_url="http://10.0.0.1:9000"), "", "http://10.0.0.1:9000/bucket/"),
        (PLAIN, Access(), "use_fips_endpoint = true", "https://bucket.s3-fips.eu-west-1.amazonaws.com/"),
        (PLAIN, Access(), "use_dualstack_endpoint = true", "https://bucket.s3.dualstack.eu-west-1.amazonaws.com/"),
        (PLAIN, Access(), "s3 =\n  use_accelerate_endpoint = true", "https://bucket.s3-accelerate.amazonaws.com/"),
    ],
)
def test_a_request_is_the_one_that_botocore_sends(
    url: Url, access: Access, profile: str, begin: str, settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token")
    settings.write_text(f"[default]\n{profile}\n")
    theirs, ours, client = reads(url, access, monkeypatch)
    assert client._objects._way is not None
    assert theirs.url.startswith(begin)
    assert ours.url == theirs.url
    assert ours.method == theirs.method == "GET"
    for name in ("x-amz-request-payer", "x-amz-security-token", "User-Agent"):
        assert said(ours, name) == said(theirs, name)
    assert bool(said(ours, "x-amz-request-payer")) is access.requester_pays
    assert said(ours, "Authorization").partition(",")[0] == said(theirs, "Authorization").partition(",")[0]
    assert ("Authorization" in ours.headers) is not access.anonymous


@pytest.mark.fast
def test_a_bucket_with_sessions_is_left_to_botocore(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours, client = reads(Url("bucket--euw1-az1--x-s3", ""), Access(), monkeypatch)
    assert client._objects._way is None
    assert "Credential=AKIASESSION/" in said(ours, "Authorization")


@pytest.mark.fast
@pytest.mark.parametrize(
    ("url", "headers"),
    [
        ("https://b.s3.amazonaws.com/v1/probe", {"Authorization": "AWS AKIAEXAMPLE:c2lnbmF0dXJl"}),
        ("https://b.s3.amazonaws.com/v1/probe", {"Authorization": b"AWS4-ECDSA-P256-SHA256 Credential=A/20260101/s3/"}),
        ("https://b.s3.amazonaws.com/v1/probe?X-Amz-Signature=0", {}),
        ("https://b.s3.amazonaws.com/elsewhere/probe", {}),
    ],
    ids=["version 2", "version 4a", "in the URL", "another object"],
)
def test_what_is_signed_or_named_otherwise_is_left_to_botocore(url: str, headers: dict[str, str | bytes]) -> None:
    assert way("v1/probe", url, headers) is None


@pytest.mark.fast
def test_credentials_that_were_renewed_are_used(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours, client = reads(PLAIN, Access(), monkeypatch)
    assert "Credential=AKIAEXAMPLE/" in said(ours, "Authorization")
    client._session.set_credentials("AKIARENEWED", "another")
    client.read("probe")
    assert "Credential=AKIARENEWED/" in said(client._objects._connections.sent[-1], "Authorization")


def held(remote: RemoteStore, data: bytes = b"x", name: str = "probe") -> Client:
    """A client that has read one object, so that it knows the way."""
    remote.client.put(name, data, sha256_hex(data), size=len(data))
    remote.client.read(name)
    assert connections(remote.client._s3) is not None, "botocore keeps its connections elsewhere now"
    assert remote.client._objects._way is not None
    return remote.client


def test_botocore_is_asked_once_and_the_rest_is_read_without_it(
    remote: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(range(256)) * (CHUNK // 128)
    client = held(remote, data)
    monkeypatch.setattr(client._s3, "get_object", None)
    assert client.read("probe") is not None
    assert b"".join(client.chunks("probe")) == data
    assert b"".join(client.chunks("probe", 5, 700)) == data[5:705]
    assert client.read("keys/none") is None


def test_after_a_redirect_botocore_finds_the_new_place(connect: Connect, front: Proxy) -> None:
    client = held(connect())
    front.on(says(307, "TemporaryRedirect"), "GET", times=1)
    before = client.requests()["get"]
    assert client.read("probe") is not None
    assert client.requests()["get"] - before == 2, "both requests count"
    assert client._objects._way is not None, "the way is known again"


@pytest.mark.parametrize("fault", [resets, cuts, says(503, "SlowDown"), says(500, "InternalError")])
def test_what_a_retry_heals_is_healed(connect: Connect, front: Proxy, fault: Any) -> None:
    data = b"0123456789" * 1000
    client = held(connect(), data)
    front.on(fault, "GET", times=1)
    found = client.read("probe")
    assert found is not None
    assert found[0] == data
    front.on(fault, "GET", times=1)
    assert b"".join(client.chunks("probe")) == data
    assert sum(client.faults().values()) == 2


def test_the_version_that_is_asked_for_is_the_one_that_comes(remote: RemoteStore) -> None:
    client = held(remote, b"1" * 100)
    found = client.read("probe")
    assert found is not None
    assert b"".join(client.chunks("probe", etag=found[1])) == found[0]
    client.put("probe", b"2" * 100, sha256_hex(b"2" * 100), size=100)
    with pytest.raises(errors.Precondition):
        list(client.chunks("probe", etag=found[1]))
