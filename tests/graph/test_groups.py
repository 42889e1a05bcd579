"""Process groups and meshes by membership relative to the lowest rank."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neffcache.graph.groups import group_text, mesh_text
from neffcache.graph.text import Uncacheable, canonical_text
from tests.graph.building import Build, mesh, opaque, resolve, write

c10d = torch.ops._c10d_functional


@pytest.mark.fast
@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([7], "1:0"),
        ([0, 1, 2, 3], "4:1"),
        ([5, 9, 13], "3:4"),
        (range(0, 64, 4), "16:4"),
        ([0, 1, 16, 17], "2:16*2:1"),
        ([0, 2, 1, 3], "2:1*2:2"),
        ([0, 1, 3], "[0,1,3]"),
        ([3, 2, 1, 0], "[3,2,1,0]"),
        ([10, 8, 9], "[2,0,1]"),
    ],
)
def test_the_form_of_a_group(ranks: list[int], text: str) -> None:
    assert group_text(ranks) == text


@pytest.mark.fast
def test_no_two_orders_of_members_share_a_form() -> None:
    sequences = [
        sequence for size in range(1, 6) for sequence in itertools.permutations(range(6), size) if min(sequence) == 0
    ]
    assert len({group_text(sequence) for sequence in sequences}) == len(sequences)


@given(st.lists(st.integers(0, 500), min_size=1, max_size=12, unique=True), st.integers(0, 1000))
def test_a_group_that_is_shifted_keeps_its_form(ranks: list[int], shift: int) -> None:
    assert group_text(ranks) == group_text([rank + shift for rank in ranks])


@pytest.mark.fast
@pytest.mark.parametrize("ranks", [[], [1, 1]])
def test_what_is_no_group_is_refused(ranks: list[int]) -> None:
    with pytest.raises(ValueError):
        group_text(ranks)


@pytest.mark.fast
def test_the_form_of_a_mesh() -> None:
    assert mesh_text(mesh([[8, 9], [10, 11]], ("dp", "tp"))) == 'mesh("cpu",["dp","tp"],2*2,4:1)'
    assert mesh_text(mesh([[0, 2], [1, 3]])) == 'mesh("cpu",unnamed,2*2,2:1*2:2)'


def reduced(*names: str) -> str:
    """The text of a chain of all-reduces over the groups of these names."""
    build = Build()
    x = build.input()
    for name in names:
        x = build.call(c10d.all_reduce.default, x, "sum", name)
    return write(build.output(x)).text


@pytest.mark.fast
def test_a_group_counts_by_members_and_not_by_name() -> None:
    assert reduced("tp") == reduced("tp_again") == reduced("tp_next")
    assert len({reduced("tp"), reduced("dp"), reduced("0")}) == 3
    assert '"tp"' not in reduced("tp")


@pytest.mark.fast
def test_two_groups_of_one_shape_are_not_one_group() -> None:
    assert reduced("tp", "tp_next") != reduced("tp", "tp")
    assert reduced("tp", "tp_next") == reduced("tp_next", "tp")
    assert reduced("tp", "tp_again") == reduced("tp", "tp")


@pytest.mark.fast
def test_the_groups_of_a_graph_are_listed_with_their_slots() -> None:
    build = Build()
    x = build.call(c10d.all_reduce.default, build.input(), "sum", "tp_next")
    x = build.call(c10d.all_gather_into_tensor.default, x, 2, group_name="dp")
    uses = write(build.output(x)).groups
    assert [(use.name, use.ranks, use.slot, use.text) for use in uses] == [
        ("tp_next", (0, 1, 2, 3), 0, "pg0(4:1)"),
        ("dp", (0, 4), 1, "pg1(2:4)"),
    ]


@pytest.mark.fast
def test_an_unknown_group_is_refused_with_its_node() -> None:
    build = Build()
    gm = build.output(build.call(c10d.all_reduce.default, build.input(), "sum", "stranger"))
    with pytest.raises(Uncacheable, match="stranger") as refusal:
        write(gm)
    assert refusal.value.node == "all_reduce_default"
    with pytest.raises(Uncacheable, match="stranger"):
        canonical_text(gm)


@pytest.mark.fast
def test_a_group_inside_a_higher_order_call_is_found() -> None:
    def inside(name: str) -> str:
        build = Build()
        x = build.input()
        higher = torch.ops.higher_order
        by_keyword = build.call(
            higher.auto_functionalized, c10d.all_reduce_.default, input=x, reduce_op="sum", group_name=name
        )
        token = build.call(higher.with_effects, x, c10d.all_reduce.default, x, "sum", name)
        return write(build.output(by_keyword, token)).text

    assert inside("tp") == inside("tp_next") != inside("dp")
    assert inside("tp").count("pg0(4:1)") == 2


@pytest.mark.fast
def test_renaming_groups_in_a_graph_reaches_exactly_what_the_text_shows() -> None:
    from neffcache.graph.ops import map_group_names

    build = Build()
    x = build.input()
    higher = torch.ops.higher_order
    nodes = [
        build.call(c10d.all_reduce.default, x, "tp", "tp"),
        build.call(c10d.broadcast.default, x, 0, group_name="tp"),
        build.call(higher.with_effects, x, c10d.all_reduce.default, x, "tp", "tp"),
    ]
    renamed = [map_group_names(node, str.upper) for node in nodes]
    assert renamed[0] == ((x, "tp", "TP"), {})
    assert renamed[1] == ((x, 0), {"group_name": "TP"})
    assert renamed[2] == ((x, c10d.all_reduce.default, x, "tp", "TP"), {})
    assert resolve("tp") == (0, 1, 2, 3)


@pytest.mark.fast
def test_a_mesh_that_is_read_counts_and_one_that_only_takes_a_place_does_not() -> None:
    def text(ranks: list[int], *, used: bool) -> str:
        build = Build()
        x, opaque_input = build.input(), build.input(opaque(mesh(ranks)), name="m")
        return write(build.output(build.call(torch.ops.aten.neg.default, x, *([opaque_input] if used else [])))).text

    assert text([0, 1, 2], used=True) != text([0, 2, 1], used=True)
    assert text([0, 1, 2], used=True) == text([3, 4, 5], used=True)
    assert text([0, 1, 2], used=False) == text([0, 2, 1], used=False)
    assert "input unused" in text([0, 1, 2], used=False)


ON_A_RANK = """
import sys
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.distributed.device_mesh import init_device_mesh
from neffcache.graph.text import canonical_text
from tests.graph.building import Build, opaque

rank = int(sys.argv[1])
dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
for dim in ("tp", "dp"):
    build = Build()
    x, m = build.input(), build.input(opaque(mesh[dim]), name="m")
    x = build.call(torch.ops._c10d_functional.all_reduce.default, x, "sum", mesh.get_group(dim).group_name)
    x = build.call(torch.ops._c10d_functional.all_reduce.default, x, mesh.get_group(dim), m)
    print(canonical_text(build.output(x)).text, end="end\\n")
"""


@pytest.mark.integration
def test_ranks_0_and_5_of_8_write_the_same_text_for_groups_of_one_shape() -> None:
    root = Path(__file__).parents[2]

    def on(rank: int) -> list[str]:
        command = [sys.executable, "-c", ON_A_RANK, str(rank)]
        environment = os.environ | {"PYTHONPATH": str(root)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.split("end\n")[:-1]

    tp, dp = on(0)
    assert "pg0(4:1)" in tp
    assert 'mesh0("cpu",["tp"],4,4:1)' in tp
    assert "pg0(2:4)" in dp
    assert [tp, dp] == on(5)
