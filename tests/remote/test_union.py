"""Two manifests of one job, and two records of places: nothing that one of them knows is lost."""

from __future__ import annotations

import pytest

from neffcache.errors import Mismatch
from neffcache.key.canonical import xxh3_128_hex
from neffcache.remote.packs import FULL, Place, places, plain, spans, spread, with_places
from neffcache.remote.union import united
from neffcache.store.records import Damaged, Manifest, RankClass, manifest
from tests.remote.conftest import make_manifest

pytestmark = pytest.mark.fast


def keys(*words: str) -> tuple[str, ...]:
    return tuple(xxh3_128_hex(word.encode()) for word in words)


def with_classes(*classes: RankClass, **changed: object) -> Manifest:
    base = make_manifest("x")
    names = ("cache_key", "components", "request", "complete", "phases", "artifacts")
    names += ("environment", "versions", "created", "host")
    given = {**{name: getattr(base, name) for name in names}, "rank_classes": classes, **changed}
    return manifest(**given)  # type: ignore[arg-type]


def test_the_same_manifest_is_itself() -> None:
    made = make_manifest("one")
    assert united(made, made) is made


def test_the_larger_of_two_stays_what_it_is() -> None:
    small, large = make_manifest("one"), make_manifest("one", "two")
    assert united(small, large).id == large.id
    assert united(large, small).id == large.id


def test_two_that_each_know_more_give_both() -> None:
    left, right = make_manifest("one", "two"), make_manifest("one", "three")
    both = united(left, right)
    assert set(both.compile_keys()) == set(keys("one", "two", "three"))
    assert both.complete
    assert united(both, left).id == united(both, right).id == both.id


def test_a_complete_one_is_not_replaced_by_an_incomplete_one() -> None:
    whole, part = make_manifest("one"), make_manifest("one", "two", complete=False)
    assert united(whole, part).id == united(part, whole).id == whole.id


def test_classes_are_split_where_the_other_side_splits_them() -> None:
    left = with_classes(RankClass("0-3", {"first": keys("a")}), RankClass("4-7", {"first": keys("b")}))
    right = with_classes(RankClass("0-1", {"first": keys("a")}), RankClass("2-7", {"later": keys("c")}))
    both = united(left, right)
    found = {item.ranks: {phase: set(graphs) for phase, graphs in item.graphs.items()} for item in both.rank_classes}
    assert found == {
        "0-1": {"first": set(keys("a"))},
        "2-3": {"first": set(keys("a")), "later": set(keys("c"))},
        "4-7": {"first": set(keys("b")), "later": set(keys("c"))},
    }


def test_two_jobs_under_one_key_are_refused() -> None:
    other = with_classes(components={"workload": {"sha256": "c" * 64, "value": {}}})
    with pytest.raises(Mismatch):
        united(make_manifest("x"), other)


def test_places_do_not_count_in_an_id_and_survive_a_union() -> None:
    left, right = make_manifest("one"), make_manifest("two")
    first = {f"graphs/{keys('one')[0]}.json": Place("a" * 64, 0, 10)}
    second = {f"graphs/{keys('two')[0]}.json": Place("b" * 64, 5, 7)}
    placed = with_places(left, first)
    assert placed.id == left.id
    assert Manifest.from_json(placed.to_json()) == placed
    assert plain(placed) == left
    assert places(united(placed, with_places(right, second))) == {**first, **second}


@pytest.mark.parametrize(
    "packs",
    [{"a" * 64: [["graphs/x.json", 0, 1]]}, {"short": [[f"blobs/sha256/aa/{'a' * 64}", 0, 1]]}, [1], {"a" * 64: [[1]]},
     {"a" * 64: [[f"blobs/sha256/aa/{'a' * 64}", -1, 1]]}],
)  # fmt: skip
def test_places_that_are_malformed_are_damage(packs: object) -> None:
    made = make_manifest("one")
    damaged = Manifest.from_json({**made.to_json(), "packs": packs})
    with pytest.raises(Damaged):
        places(damaged)


def test_members_stay_together_and_packs_stay_small() -> None:
    groups = [[(f"{group}{item}", 1 << 20) for item in range(5)] for group in "abcdefgh"]
    packs = spread(groups)
    assert [name for pack in packs for name, _ in pack] == [name for group in groups for name, _ in group]
    assert all(sum(size for _, size in pack) <= FULL for pack in packs)
    assert all(len({name[0] for name, _ in pack}) == 3 for pack in packs[:-1])


def test_requests_cover_neighbours_and_no_more_than_is_asked_for() -> None:
    pack, other = "a" * 64, "b" * 64
    wanted = {"one": Place(pack, 0, 10), "two": Place(pack, 10, 10), "far": Place(pack, 1 << 20, 10),
              "elsewhere": Place(other, 0, 5)}  # fmt: skip
    found = [(item.pack, item.start, item.end, [name for name, _ in item.members]) for item in spans(wanted)]
    assert found == [
        (pack, 0, 20, ["one", "two"]),
        (pack, 1 << 20, (1 << 20) + 10, ["far"]),
        (other, 0, 5, ["elsewhere"]),
    ]
