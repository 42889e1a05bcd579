from __future__ import annotations

import json
import os
import pickle
import sqlite3
from contextlib import suppress
from pathlib import Path

import diskcache
import pytest

from neffcache.errors import StoreFault
from neffcache.store.index import Cost, Failure, Index, JsonDisk, Rejected
from neffcache.store.local import LocalStore

pytestmark = pytest.mark.fast

KEY = "a" * 32


class Trap:
    """Unpickling one of these creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    return tmp_path / "the pickle ran"


def plant(store: LocalStore, **row: object) -> None:
    columns = {"store_time": 0.0, "expire_time": None, "access_time": 0.0, "size": 0, "filename": None} | row
    with sqlite3.connect(store.root / "index" / "cache.db") as connection:
        marks = ", ".join("?" * len(columns))
        connection.execute(f"INSERT OR REPLACE INTO Cache ({', '.join(columns)}) VALUES ({marks})", [*columns.values()])
    connection.close()


def rows(store: LocalStore) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(store.root / "index" / "cache.db")
    try:
        return connection.execute("SELECT key, raw, mode, typeof(value), filename FROM Cache").fetchall()
    finally:
        connection.close()


def test_the_trap_works_on_the_disks_of_the_library(store: LocalStore, trap: Path) -> None:
    """Otherwise the tests below could not fail."""
    for disk in (diskcache.Disk, diskcache.JSONDisk):
        with suppress(TypeError):  # JSONDisk decompresses what came out of the pickle
            disk(str(store.root)).fetch(4, None, pickle.dumps(Trap(trap)), False)
        assert trap.exists()
        trap.unlink()


def test_what_is_remembered_is_found_by_the_next_process(store: LocalStore) -> None:
    failure = Failure("t" * 64, "NCC_EARG001", "refused", "", 1_700_000_000.0)
    with Index.open(store) as index:
        index.put_cost(KEY, Cost(12.5, 3_000_000, 40))
        index.put_cost("b" * 32, Cost(80.0, None, 400))
        index.put_failure(KEY, failure)
        index.touch("m" * 64, at=5.0)
    with Index.open(store) as index:
        assert index.cost(KEY) == Cost(12.5, 3_000_000, 40)
        assert index.cost("c" * 32) is None
        assert [index.cost_of_nodes(nodes) for nodes in (1, 219, 220, 9_000)] == [
            Cost(12.5, 3_000_000, 40),
            Cost(12.5, 3_000_000, 40),
            Cost(80.0, None, 400),
            Cost(80.0, None, 400),
        ]
        assert index.failure(KEY, "t" * 64) == failure
        assert index.failure(KEY, "another compiler") is None
        assert index.failures() == {KEY: failure}
        assert index.last_used("m" * 64) == 5.0
        index.forget_failure(KEY)
        assert index.failure(KEY, "t" * 64) is None
        assert (index.faults, index.rejected) == (0, 0)
    assert {(raw, mode, kind, name) for _, raw, mode, kind, name in rows(store)} == {(1, 1, "text", None)}


@pytest.mark.parametrize("mode", [0, 1, 2, 3, 4, 5, None])
@pytest.mark.parametrize("in_file", [False, True])
def test_a_planted_pickle_is_rejected_and_never_loaded(store: LocalStore, trap: Path, mode, in_file: bool) -> None:
    Index.open(store).close()
    poison = pickle.dumps(Trap(trap))
    (store.root / "index" / "poison").write_bytes(poison)
    row = {"filename": "poison", "value": None} if in_file else {"value": poison}
    plant(store, key=f"cost/{KEY}", raw=1, mode=mode, **row)
    with Index.open(store) as index:
        assert index.cost(KEY) is None
        assert index.rejected == 1
        index.put_cost(KEY, Cost(1.0, None, 3))
        assert index.cost(KEY) == Cost(1.0, None, 3)
    assert not trap.exists()


def test_a_planted_pickled_key_is_never_loaded(store: LocalStore, trap: Path) -> None:
    with Index.open(store) as index:
        index.put_failure(KEY, Failure("t", "c", "m", "", 1.0))
        index.put_cost(KEY, Cost(1.0, None, 3))
    for raw in (0, 1):
        plant(store, key=pickle.dumps(Trap(trap)), raw=raw, mode=1, value=b"{}")
        plant(store, key=f"nodes/{7:012d}", raw=0, mode=1, value=json.dumps({"seconds": 9.0}))
    with Index.open(store) as index:
        assert set(index.failures()) == {KEY}
        assert index.cost_of_nodes(3) == Cost(1.0, None, 3)
        with pytest.raises(Rejected):
            list(index._cache)  # even iterating it, as the library would
    assert not trap.exists()


def test_a_row_cannot_name_a_file_to_read_or_to_remove(store: LocalStore, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text(json.dumps({"seconds": 1.0, "peak_bytes": None, "nodes": 1}))
    Index.open(store).close()
    for mode in (1, 2, 3):
        plant(store, key=f"cost/{KEY}", raw=1, mode=mode, value=None, filename=str(victim))
        with Index.open(store) as index:
            assert index.cost(KEY) is None  # rejected, and deleted
            plant(store, key=f"cost/{KEY}", raw=1, mode=mode, value=None, filename=os.path.relpath(victim, store.root))
            index.put_cost(KEY, Cost(2.0, None, 3))  # replaced
    assert victim.exists()


@pytest.mark.parametrize(
    "value", ["", "{", "[1]", "null", '"x"', '{"seconds": "1", "peak_bytes": null, "nodes": 1}', "NaN"]
)
def test_json_of_another_shape_is_rejected(store: LocalStore, value: str) -> None:
    Index.open(store).close()
    plant(store, key=f"cost/{KEY}", raw=1, mode=1, value=value)
    with Index.open(store) as index:
        assert index.cost(KEY) is None


def test_the_disk_takes_no_other_keys_or_values(tmp_path: Path) -> None:
    disk = JsonDisk(str(tmp_path))
    for key in (b"x", 1, ("x",), None):
        with pytest.raises(TypeError):
            disk.put(key)
    with pytest.raises(TypeError):
        disk.store(Trap(tmp_path), False)
    with pytest.raises(TypeError):
        disk.store("x", True)
    with pytest.raises(ValueError):
        disk.store(float("nan"), False)


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT OR REPLACE INTO Settings VALUES ('_disk', 'x')",
        "INSERT OR REPLACE INTO Settings VALUES ('disk_min_file_size', 'x')",
        "INSERT OR REPLACE INTO Settings VALUES ('sqlite_x = 1; DROP TABLE Cache; --', 1)",
        "INSERT OR REPLACE INTO Settings VALUES ('count', 'x')",
        "CREATE TABLE Foreign_ (x)",
        "DROP TABLE Settings",
    ],
)
def test_a_database_with_foreign_settings_is_made_anew_or_mended(store: LocalStore, statement: str) -> None:
    with Index.open(store) as index:
        index.put_cost(KEY, Cost(1.0, None, 3))
    with sqlite3.connect(store.root / "index" / "cache.db") as connection:
        connection.execute(statement)
    connection.close()
    with Index.open(store) as index:
        index.put_cost("b" * 32, Cost(1.0, None, 3))
        assert index.cost("b" * 32) == Cost(1.0, None, 3)


@pytest.mark.parametrize("content", [b"", b"not a database" * 100, b"SQLite format 3\x00" + b"\xff" * 500])
def test_a_damaged_database_is_made_anew(store: LocalStore, content: bytes) -> None:
    with Index.open(store) as index:
        index.put_cost(KEY, Cost(1.0, None, 3))
    (store.root / "index" / "cache.db").write_bytes(content)
    with Index.open(store) as index:
        assert index.cost(KEY) is None
        index.put_cost(KEY, Cost(2.0, None, 3))
        assert index.cost(KEY) == Cost(2.0, None, 3)


def test_the_index_may_be_deleted_at_any_time(store: LocalStore) -> None:
    with Index.open(store) as index:
        index.put_cost(KEY, Cost(1.0, None, 3))
        for path in (store.root / "index").iterdir():
            path.unlink()
        (store.root / "index").rmdir()
        index.put_cost(KEY, Cost(1.0, None, 3))
        index.cost(KEY)
        assert index.cost_of_nodes(3) in (None, Cost(1.0, None, 3))
    with Index.open(store) as index:
        index.put_cost(KEY, Cost(1.0, None, 3))
        assert index.cost(KEY) == Cost(1.0, None, 3)


def test_an_index_that_cannot_be_opened_costs_only_what_was_remembered(store: LocalStore, monkeypatch) -> None:
    def broken(*_args: object, **_named: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(diskcache, "Cache", broken)
    with Index.open(store) as index:
        index.put_cost(KEY, Cost(1.0, None, 3))
        assert index.cost(KEY) is None
        assert index.cost_of_nodes(3) is None
        assert index.failures() == {}


def test_readers_do_not_open_it(store: LocalStore) -> None:
    with pytest.raises(StoreFault, match="read only"):
        Index.open(LocalStore.open(store.root, writable=False))
    assert not (store.root / "index").exists()


def test_one_that_somebody_is_just_making_is_not_made_anew(store: LocalStore, monkeypatch) -> None:
    monkeypatch.setattr("neffcache.store.index.TIMEOUT", 0.05)
    half = store.base.directory("index") / "cache.db"
    half.write_bytes(b"half a database")
    with store.base.lock("index"), Index.open(store) as index:
        index.put_cost(KEY, Cost(1.0, None, 3))
        assert index.cost(KEY) is None
        assert half.read_bytes() == b"half a database"
    with Index.open(store) as index:
        assert half.read_bytes() != b"half a database"
        index.put_cost(KEY, Cost(1.0, None, 3))
        assert index.cost(KEY) == Cost(1.0, None, 3)


def test_it_is_closed_also_when_somebody_holds_its_lock(store: LocalStore, monkeypatch) -> None:
    monkeypatch.setattr("neffcache.store.index.TIMEOUT", 0.05)
    closed: list[bool] = []
    whole = diskcache.Cache.close
    monkeypatch.setattr(diskcache.Cache, "close", lambda cache: closed.append(True) or whole(cache))
    index = Index.open(store)
    closed.clear()
    with store.base.lock("index"):
        index.close()
    assert closed == [True]
    assert index.faults == 0


@pytest.mark.parametrize("made", [True, False])
def test_several_writers_share_it(made: bool, store: LocalStore, child) -> None:
    def write(number: int) -> None:
        with Index.open(LocalStore.open(store.root, writable=True)) as index:
            for step in range(10):
                index.put_cost(f"{number:016d}{step:016d}", Cost(float(step), None, number * 100 + step))
            assert index.faults == 0

    if made:
        Index.open(store).close()
    children = [child(lambda number=number: write(number)) for number in range(4)]
    assert [item.wait() for item in children] == [0] * 4
    with Index.open(store) as index:
        found = [index.cost(f"{number:016d}{step:016d}") for number in range(4) for step in range(10)]
    assert found == [Cost(float(step), None, number * 100 + step) for number in range(4) for step in range(10)]
