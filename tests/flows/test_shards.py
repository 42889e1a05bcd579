"""Which part of a job a process compiles, by what started it."""

from __future__ import annotations

import pytest

from neffcache.errors import Usage
from neffcache.flows.shards import Shard, choose, unsaid

pytestmark = pytest.mark.fast

SIZES = {f"{number:032x}": number * number for number in range(40)}


@pytest.mark.parametrize("count", [1, 2, 3, 7, 50])
def test_every_graph_is_in_exactly_one_shard_and_all_agree(count: int) -> None:
    parts = [Shard(index, count, "").mine(SIZES) for index in range(count)]
    assert sum(len(part) for part in parts) == len(SIZES)
    assert set().union(*parts) == set(SIZES)
    assert parts[0] == Shard(0, count, "other").mine(dict(reversed(SIZES.items()))), "the order of tracing is no matter"


def test_shards_are_about_equally_large() -> None:
    loads = [sum(SIZES[key] for key in Shard(index, 4, "").mine(SIZES)) for index in range(4)]
    assert max(loads) - min(loads) <= max(SIZES.values()) * 0.1


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"JOB_COMPLETION_INDEX": "2", "NEFFCACHE_SHARDS": "5"}, "2/5"),
        ({"JOB_COMPLETION_INDEX": "2"}, None),
        ({"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_MIN": "5"}, "2/4"),
        ({"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "4"}, "3/4"),
        (
            {
                "SLURM_ARRAY_TASK_ID": "8",
                "SLURM_ARRAY_TASK_COUNT": "4",
                "SLURM_ARRAY_TASK_MIN": "0",
                "SLURM_ARRAY_TASK_STEP": "4",
            },
            "2/4",
        ),
        ({"AWS_BATCH_JOB_ARRAY_INDEX": "0", "AWS_BATCH_JOB_ARRAY_SIZE": "3"}, "0/3"),
        ({"AWS_BATCH_JOB_ARRAY_INDEX": "1", "NEFFCACHE_SHARDS": "3"}, "1/3"),
        ({"AWS_BATCH_JOB_ARRAY_INDEX": "1"}, None),
    ],
)
def test_the_engine_says_which_shard(environ: dict[str, str], expected: str | None) -> None:
    found = choose(None, environ)
    assert (None if found is None else str(found)) == expected
    assert choose("none", environ) is None
    assert str(choose("1/2", environ)) == "1/2", "the option wins"


@pytest.mark.parametrize(
    ("option", "environ", "said"),
    [
        ("3/3", {}, "count from 0"),
        ("1", {}, "takes i/n"),
        ("-1/3", {}, "takes i/n"),
        ("0/0", {}, "no shard 0 of 0"),
        (None, {"JOB_COMPLETION_INDEX": "x", "NEFFCACHE_SHARDS": "5"}, "is not a number"),
        (None, {"JOB_COMPLETION_INDEX": "5", "NEFFCACHE_SHARDS": "5"}, "JOB_COMPLETION_INDEX"),
        (
            None,
            {"SLURM_ARRAY_TASK_ID": "9", "SLURM_ARRAY_TASK_COUNT": "3", "SLURM_ARRAY_TASK_MIN": "1"},
            "have gaps",
        ),
    ],
)
def test_what_is_no_shard_is_refused(option: str | None, environ: dict[str, str], said: str) -> None:
    with pytest.raises(Usage) as caught:
        choose(option, environ)
    assert said in caught.value.message + caught.value.hint


def test_an_index_without_a_count_is_said() -> None:
    assert "NEFFCACHE_SHARDS" in str(unsaid({"JOB_COMPLETION_INDEX": "0"}))
    assert unsaid({"JOB_COMPLETION_INDEX": "0", "NEFFCACHE_SHARDS": "2"}) is None
    assert unsaid({}) is None
