"""What the client leaves out of botocore's work, and what it must not."""

from __future__ import annotations

import json
from datetime import datetime

import botocore.loaders
import botocore.session
import pytest

from neffcache.key.canonical import sha256_hex
from neffcache.remote.client import _Files
from neffcache.remote.tier import RemoteStore


def test_no_time_of_an_object_is_parsed_but_those_of_other_clients_are(remote: RemoteStore) -> None:
    client = remote.client
    client.put("probe", b"x", sha256_hex(b"x"), size=1)
    key = client.url.key("probe")
    assert isinstance(client._s3.head_object(Bucket=client.url.bucket, Key=key)["LastModified"], str)
    other = client._session.create_client("s3", region_name="us-east-1", endpoint_url=client._s3.meta.endpoint_url)
    assert isinstance(other.head_object(Bucket=client.url.bucket, Key=key)["LastModified"], datetime)


@pytest.mark.fast
@pytest.mark.parametrize("name", ["endpoints", "partitions", "s3/2006-03-01/service-2", "sts/2011-06-15/service-2"])
def test_the_models_are_those_that_botocore_reads(name: str) -> None:
    folder = botocore.loaders.Loader.BUILTIN_DATA_PATH
    expected = botocore.loaders.JSONFileLoader().load_file(f"{folder}/{name}")
    found = _Files().load_file(f"{folder}/{name}")
    assert json.dumps(found) == json.dumps(expected)  # the order too


@pytest.mark.fast
def test_what_is_no_model_is_none() -> None:
    assert _Files().load_file("/nowhere/at/all") is None
