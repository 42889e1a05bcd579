"""What the client leaves out of botocore's work, and what it must not."""

from __future__ import annotations

import json
import os
from datetime import datetime

import botocore.loaders
import botocore.session
import pytest

from neffcache.key.canonical import sha256_hex
from neffcache.remote.client import CHUNK
from neffcache.remote.send import send_blob
from neffcache.remote.session import ModelFiles
from neffcache.remote.tier import RemoteStore
from neffcache.store import layout
from neffcache.store.local import LocalStore
from neffcache.store.records import Damaged


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
    found = ModelFiles().load_file(f"{folder}/{name}")
    assert json.dumps(found) == json.dumps(expected)  # the order too


@pytest.mark.fast
def test_what_is_no_model_is_none() -> None:
    assert ModelFiles().load_file("/nowhere/at/all") is None


@pytest.mark.parametrize("probed", [False, True])
@pytest.mark.parametrize("left", [0, 10])
def test_a_blob_that_a_power_cut_has_shortened_is_damage_at_once(
    remote: RemoteStore, store: LocalStore, probed: bool, left: int
) -> None:
    """Sent as it is, the server would wait for the rest."""
    if probed:
        assert remote.conditional()
    sha256 = store.put_blob(b"x" * 1000)
    path = store.root / layout.blob_name(sha256)
    path.chmod(0o600)
    os.truncate(path, left)
    with pytest.raises(Damaged):
        send_blob(remote, store, sha256, 1000)
    assert not remote.exists(layout.blob_name(sha256))
    assert remote.client.faults().get("timed_out", 0) == 0


@pytest.mark.parametrize("size", [1000, 3 * CHUNK + 7])
@pytest.mark.parametrize("probed", [False, True])
def test_a_blob_that_proves_damaged_while_it_is_sent_is_never_there(
    remote: RemoteStore, store: LocalStore, size: int, probed: bool
) -> None:
    if probed:
        assert remote.conditional()
    assert remote.verifies is probed
    before = remote.client.requests()["put"]
    data = os.urandom(size)
    sha256 = store.put_blob(data)
    name = layout.blob_name(sha256)
    path = store.root / name
    path.chmod(0o600)
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(Damaged):
        send_blob(remote, store, sha256, size)
    assert not remote.exists(name)
    # Once when it is hashed here. Where the server is left to do that it is sent, refused, hashed and not sent again.
    assert remote.client.requests()["put"] - before == 1 + probed
    assert remote.client.faults().get("unreachable", 0) == probed
    assert not path.exists()
    store.put_blob(data)
    assert send_blob(remote, store, sha256, size)
    assert remote.get(name) == data
