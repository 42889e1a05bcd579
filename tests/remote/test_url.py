"""URLs of remotes: many spellings, one key."""

from __future__ import annotations

import pytest

from neffcache.errors import Usage
from neffcache.remote.url import Url, parse

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("s3://bucket", "v1/keys/a.json"),
        ("s3://bucket/", "v1/keys/a.json"),
        ("s3://bucket/p", "p/v1/keys/a.json"),
        ("s3://bucket/p/", "p/v1/keys/a.json"),
        ("s3://bucket//p", "p/v1/keys/a.json"),
        ("s3://bucket//p//q//", "p/q/v1/keys/a.json"),
        (" S3://bucket/p ", "p/v1/keys/a.json"),
        ("s3://bucket/my caches/größe", "my caches/größe/v1/keys/a.json"),
    ],
)
def test_every_spelling_gives_the_right_key(text: str, key: str) -> None:
    url = parse(text)
    assert (url.bucket, url.key("keys/a.json")) == ("bucket", key)
    assert not url.key("keys/a.json").startswith("/")
    assert "//" not in url.key("keys/a.json")
    assert url.name(key) == "keys/a.json"
    assert parse(str(url)) == url


@pytest.mark.parametrize("text", ["", "bucket/p", "s3:/bucket", "https://bucket/p", "s3://", "s3:///p", "s3://b/..",
                                  "s3://bucket/../p", "s3://bucket/./p", "s3://bucket/a\nb", "s3://bu cket/p",
                                  "s3://bucket/" + "x" * 900])  # fmt: skip
def test_what_is_no_remote_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(Usage) as refused:
        parse(text)
    assert refused.value.hint


def test_an_object_outside_of_the_prefix_has_no_name() -> None:
    assert Url("b", "p").name("other/v1/keys/a.json") is None
    assert Url("b", "p").name("pp/v1/keys/a.json") is None
    assert Url("b", "").name("v2/keys/a.json") is None
