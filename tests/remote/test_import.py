"""Import of a cache that lies below a prefix of a bucket, and collections on their way through a remote."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import botocore.session
import pytest

from neffcache.flows import collections
from neffcache.flows.importing import Imported, import_cache
from neffcache.flows.origins import Bucket, Directory
from neffcache.flows.pull import in_channel, pull
from neffcache.flows.push import push
from neffcache.flows.pushable import of_collection
from neffcache.remote import errors
from neffcache.remote.client import Access, Client, Item
from neffcache.remote.tier import RemoteStore
from neffcache.remote.url import parse
from neffcache.store.local import LocalStore
from scripts.seaweedfs import Server
from tests.flows.caches import Tree, below, everything, module, place_of, stub_neff, torchneuron, vllm, without, written
from tests.remote.conftest import BUCKET, READER
from tests.remote.proxy import Proxy, cuts

Put = Callable[[Mapping[str, bytes]], None]


@pytest.fixture
def put(server: Server, credentials: None, prefix: str) -> Put:
    """Writes objects below the prefix, as another program would."""
    s3 = botocore.session.get_session().create_client("s3", region_name="us-east-1", endpoint_url=server.endpoint)

    def write(tree: Mapping[str, bytes]) -> None:
        for name, data in tree.items():
            s3.put_object(Bucket=BUCKET, Key=f"{prefix}/{name}", Body=data)

    return write


@pytest.fixture
def load(front: Proxy, url: str, store: LocalStore) -> Iterator[Callable[[], tuple[Imported, Client]]]:
    opened: list[Bucket] = []

    def run() -> tuple[Imported, Client]:
        client = Client(parse(url).plain(), Access(timeout=20.0, transfers=4))
        opened.append(Bucket(client, store))
        done = import_cache(opened[-1], store, "fleet")
        for tally in (done.entries, done.files):
            assert tally.found == tally.imported + tally.present + tally.left_out.total()
        return done, client

    yield run
    for item in opened:
        item.close()


Load = Callable[[], tuple[Imported, Client]]


def held(store: LocalStore) -> Tree:
    found = (item for part in collections.find(store, "fleet") for item in part.manifest.artifacts)
    return {item.path: store.read_blob(item.sha256) for item in found}


def test_a_prefix_is_read_as_a_directory_and_a_copy_or_a_second_import_fetches_nothing(
    put: Put, load: Load, store: LocalStore
) -> None:
    tree = everything("a")
    cut = below(place_of(module("cut")), {"model.neff": stub_neff("cut")[:-1], "model.done": b""})
    failed = below(place_of(module("failed")), {"model.log": b"error", "model.hlo_module.pb": b"hlo"})
    put(below("r0", tree) | below("r1", tree) | cut | failed | {"r0/": b"", "notes.txt": b"?"})
    done, client = load()
    assert (done.entries.imported, done.entries.present, done.folded) == (5, 5, 5)
    assert dict(done.entries.left_out) == {"truncated": 1, "failed": 1}
    assert done.files.left_out["foreign"] == 1
    assert held(store) == tree
    assert client.counts["list"] == 1
    assert client.counts["get"] == sum(map(bool, tree.values())) + 1, (
        "one a file of the first copy, one for what is cut"
    )
    again, client = load()
    assert (again.copied, again.entries.imported, again.entries.present) == (0, 0, 10)
    assert client.counts["get"] == 1, "what is cut has no place in the store"
    [first, *_] = again.kept
    assert first.manifest == done.kept[0].manifest


def test_an_object_that_changes_is_fetched_again_and_the_first_content_stays(
    put: Put, load: Load, store: LocalStore
) -> None:
    put(torchneuron("a"))
    load()
    put(dict.fromkeys(torchneuron("a"), stub_neff("b")))
    done, client = load()
    assert (dict(done.entries.left_out), client.counts["get"]) == ({"differs": 1}, 1)
    assert held(store) == torchneuron("a")


def test_an_import_that_was_cut_off_fetches_only_the_rest(
    put: Put, load: Load, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from neffcache.flows import importing

    tree = module("a") | module("b") | module("c")
    put(tree)
    monkeypatch.setattr(importing, "BATCH_FILES", 5)
    copied, batches = Bucket.copied, 0

    def cut(self: Bucket) -> None:
        nonlocal batches
        copied(self)
        batches += 1
        if batches == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Bucket, "copied", cut)
    with pytest.raises(KeyboardInterrupt):
        load()
    assert collections.find(store, "fleet") == []
    monkeypatch.setattr(Bucket, "copied", copied)
    done, client = load()
    assert done.entries.imported == 3
    assert client.counts["get"] == 4, "the files of one module that are not empty"
    assert held(store) == tree


def test_a_stream_that_breaks_goes_on(put: Put, load: Load, store: LocalStore, front: Proxy) -> None:
    tree = torchneuron("a")
    put(tree)
    front.on(cuts, "GET", next(iter(tree)), times=1)
    done, _ = load()
    assert (done.entries.imported, held(store)) == (1, tree)


def test_names_that_leave_the_prefix_are_left_out(
    put: Put, load: Load, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(module("good"))
    names = Client.names
    tricks = [*(f"../{path}" for path in torchneuron("a")), *(f"x//{path}" for path in torchneuron("b")), "a\nb"]

    def tricked(self: Client, folder: str) -> Iterator[Item]:
        yield from names(self, folder)
        yield from (Item(name, 2_000, "") for name in tricks)

    monkeypatch.setattr(Client, "names", tricked)
    done, client = load()
    assert done.entries.imported == 1
    assert done.files.left_out == {"name": 3}
    assert all(example.isprintable() for example in done.examples["name"])
    assert client.counts["get"] == 4, "the files of the module that are not empty"


def test_the_right_to_list_is_asked_for_by_name(
    put: Put, load: Load, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(module("a"))
    for name, value in server.environment(READER).items():
        if name != "AWS_ENDPOINT_URL":
            monkeypatch.setenv(name, value)
    with pytest.raises(errors.Denied, match="listing") as denied:
        load()
    assert "s3:ListBucket" in denied.value.hint


def test_a_collection_travels_like_any_manifest(
    connect: Callable[..., RemoteStore], store: LocalStore, other: LocalStore, tmp_path: Path
) -> None:
    tree = module("a") | vllm("a")
    import_cache(
        Directory(written(tmp_path / "cache", tree | without(module("b"), "model.done")), store), store, "fleet"
    )
    sources = of_collection(store, "fleet")
    pushed = push(connect(), store, sources)
    assert pushed.fault() is None
    assert pushed.tally.adds_up
    remote = connect()
    targets = in_channel(remote, collections.CHANNEL, "fleet")
    assert len(targets) == len(sources) == 2
    assert in_channel(remote, collections.CHANNEL, "other") == []
    assert pull(remote, other, targets).complete
    assert held(other) == held(store) == tree
    # Another machine adds an entry to the same collection: the pointer comes to name both.
    import_cache(Directory(written(tmp_path / "more", module("c")), other), other, "fleet")
    assert push(connect(), other, of_collection(other, "fleet")).fault() is None
    import_cache(Directory(written(tmp_path / "else", module("d")), store), store, "fleet")
    assert push(connect(), store, of_collection(store, "fleet")).fault() is None
    [key] = {item.manifest.cache_key for item in collections.find(store, "fleet") if item.part.layout == "libneuronxla"}
    pointer = connect().pointer(key)
    assert pointer is not None
    union = connect().get_manifest(pointer.manifest)
    assert union is not None
    assert {item.path for item in union.artifacts} == {*module("a"), *module("c"), *module("d")}
