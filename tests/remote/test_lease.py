"""Leases: who may compile now, on a remote that is a dictionary with S3's conditions and no network."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from neffcache.remote import errors
from neffcache.remote.lease import STALE, Leases
from neffcache.store import layout

pytestmark = pytest.mark.fast

KEY = "a" * 32
NAME = layout.lease_name(KEY)


@dataclass
class Objects:
    """Content by name; `fail` is raised instead of an answer, `lose` answers that it failed though it did not."""

    content: dict[str, bytes] = field(default_factory=dict)
    writes: int = 0
    fail: Exception | None = None
    lose: bool = False

    def etag(self, name: str) -> str:
        return hashlib.md5(self.content[name]).hexdigest()

    def put(self, name: str, body: bytes, sha256: str, *, size: int, if_absent: bool, if_match: str | None) -> Any:
        if self.fail is not None:
            raise self.fail
        assert if_absent != (if_match is not None), "every write of a lease has a condition"
        if (name in self.content) if if_absent else (name not in self.content or self.etag(name) != if_match):
            return None
        self.content[name], self.writes = body, self.writes + 1
        if self.lose:
            self.lose = False
            return None
        return self.etag(name)

    def read(self, name: str) -> tuple[bytes, str] | None:
        if self.fail is not None:
            raise self.fail
        return (self.content[name], self.etag(name)) if name in self.content else None


@dataclass
class Remote:
    client: Objects


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def objects() -> Objects:
    return Objects()


def leases(objects: Objects, clock: Clock | None = None) -> Leases:
    # An hour: in these tests nobody beats unless he is told.
    return Leases(Remote(objects), heartbeat=3600.0, clock=clock or Clock())  # type: ignore[arg-type]


def test_one_of_two_has_it_until_it_is_given_back_and_it_is_never_deleted(objects: Objects) -> None:
    one, two = leases(objects), leases(objects)
    assert one.acquire(KEY)
    assert not two.acquire(KEY)
    one.release(KEY)
    assert json.loads(objects.content[NAME])["state"] == "released"
    assert two.acquire(KEY)
    assert not one.acquire(KEY)
    two.close()
    assert json.loads(objects.content[NAME])["state"] == "released"


def test_a_holder_that_stands_still_for_three_heartbeats_is_taken_over_once(objects: Objects) -> None:
    holder, clock = leases(objects), Clock()
    assert holder.acquire(KEY)
    two, three = leases(objects, clock), leases(objects, clock)
    assert not two.acquire(KEY)
    assert not three.acquire(KEY)
    clock.now += 3600.0 * STALE - 1
    assert not two.acquire(KEY)
    clock.now += 2
    assert two.acquire(KEY)
    assert not three.acquire(KEY), "the other waiter sees a new ETag and begins to wait anew"
    assert two.taken_over == {KEY}
    holder.beat(KEY)
    assert holder.lost == {KEY}
    holder.release(KEY)
    assert json.loads(objects.content[NAME])["holder"] == two.holder, "who lost it gives nothing back"


def test_a_sign_of_life_starts_the_wait_anew(objects: Objects) -> None:
    holder, clock = leases(objects), Clock()
    assert holder.acquire(KEY)
    waiter = leases(objects, clock)
    for _ in range(5):
        assert not waiter.acquire(KEY)
        clock.now += 3600.0 * (STALE - 1)
        assert not waiter.acquire(KEY)
        holder.beat(KEY)
    assert holder.lost == set()


def test_a_slow_holder_s_own_heartbeat_counts(objects: Objects) -> None:
    holder, clock = leases(objects), Clock()
    assert holder.acquire(KEY)
    hasty = Leases(Remote(objects), heartbeat=0.001, clock=clock)  # type: ignore[arg-type]
    assert not hasty.acquire(KEY)
    clock.now += 3600.0 * STALE - 1
    assert not hasty.acquire(KEY)


def test_no_clock_of_another_machine_counts(objects: Objects) -> None:
    assert leases(objects).acquire(KEY)
    assert set(json.loads(objects.content[NAME])) == {
        "schema", "compile_key", "holder", "state", "beat", "heartbeat", "nonce",
    }  # fmt: skip


def test_an_answer_that_was_lost_on_the_way_costs_nothing(objects: Objects) -> None:
    holder = leases(objects)
    objects.lose = True
    assert holder.acquire(KEY)
    objects.lose = True
    holder.beat(KEY)
    assert holder.lost == set()
    holder.beat(KEY)
    holder.release(KEY)
    assert json.loads(objects.content[NAME])["state"] == "released"


def test_a_fault_between_two_heartbeats_does_not_lose_the_lease(objects: Objects) -> None:
    holder = leases(objects)
    assert holder.acquire(KEY)
    objects.fail = errors.Unreachable("no network")
    holder.beat(KEY)
    objects.fail = None
    holder.beat(KEY)
    assert holder.lost == set()
    assert json.loads(objects.content[NAME])["beat"] == 1


def test_what_is_no_lease_can_be_taken(objects: Objects) -> None:
    objects.content[NAME] = b"rubbish"
    assert leases(objects).acquire(KEY)


def test_two_writes_of_one_lease_never_have_the_same_etag(objects: Objects) -> None:
    one = leases(objects)
    seen = set()
    for _ in range(5):
        assert one.acquire(KEY)
        seen.add(objects.etag(NAME))
        one.release(KEY)
        seen.add(objects.etag(NAME))
    assert len(seen) == 10
