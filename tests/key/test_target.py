"""Target, LNC, world size and mesh."""

from __future__ import annotations

from typing import Any

import pytest

from neffcache.errors import Usage
from neffcache.key.target import (
    INSTANCES,
    TARGETS,
    Mesh,
    default_lnc,
    normal_target,
    placement_warnings,
    resolve_mesh,
    resolve_placement,
)

pytestmark = pytest.mark.fast


def test_nothing_named_is_one_trn2_48xlarge_with_64_ranks() -> None:
    placement = resolve_placement()
    assert (placement.target, placement.lnc, placement.instance) == ("trn2", 2, "trn2.48xlarge")
    assert (placement.nodes, placement.world_size, placement.logical_cores_per_device) == (1, 64, 4)


@pytest.mark.parametrize(
    ("instance", "lnc", "target", "world", "per_device"),
    [
        ("trn2.48xlarge", 1, "trn2", 128, 8),
        ("trn2.48xlarge", 2, "trn2", 64, 4),
        ("trn2u.48xlarge", 2, "trn2", 64, 4),
        ("trn2.3xlarge", 2, "trn2", 4, 4),
        ("trn2.3xlarge", 1, "trn2", 8, 8),
        ("trn1.32xlarge", 1, "trn1", 32, 2),
        ("trn1n.32xlarge", 1, "trn1n", 32, 2),
        ("trn1.2xlarge", 1, "trn1", 2, 2),
    ],
)
def test_an_instance_gives_target_ranks_and_cores(
    instance: str, lnc: int, target: str, world: int, per_device: int
) -> None:
    placement = resolve_placement(instance=instance, lnc=lnc)
    assert (placement.target, placement.world_size, placement.logical_cores_per_device) == (target, world, per_device)


def test_lnc_and_world_size_are_in_the_key_and_nodes_and_instance_are_not() -> None:
    spread = resolve_placement(instance="trn2.3xlarge", nodes=2, lnc=2)
    dense = resolve_placement(instance="trn2.48xlarge", world_size=8, lnc=2)
    assert spread.lnc_component() == dense.lnc_component() == {"lnc": 2, "world_size": 8}
    assert spread.target_component() == dense.target_component() == {"target": "trn2"}
    assert resolve_placement(world_size=8, lnc=1).lnc_component() != dense.lnc_component()
    assert resolve_placement(world_size=4, lnc=2).lnc_component() != dense.lnc_component()


def test_default_lnc_is_2_on_trn2_and_trn3_only() -> None:
    assert {target: default_lnc(target) for target in TARGETS} == {
        "trn1": 1, "trn1n": 1, "inf2": 1, "trn2": 2, "trn3": 2, "cpu": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "normal"),
    [("trn2n", "trn2"), ("trn2u", "trn2"), ("trn3u", "trn3"), ("TRN2", "trn2"), ("trn3-rev2", "trn3-rev2"),
     ("trn3u-rev2", "trn3-rev2"), ("trn1n", "trn1n")],
)  # fmt: skip
def test_names_of_one_target_are_one_target_and_a_revision_stays(given: str, normal: str) -> None:
    assert normal_target(given) == normal


def test_a_revision_says_more_than_the_plain_target_and_two_revisions_contradict() -> None:
    override = {"NEURON_PLATFORM_TARGET_OVERRIDE": "trn3-rev2"}
    assert resolve_placement(target="trn3", world_size=4, environ=override).target == "trn3-rev2"
    with pytest.raises(Usage, match="contradict"):
        resolve_placement(target="trn3-rev1", world_size=4, environ=override)


@pytest.mark.parametrize("target", ["trn9", "", "trn2-rev", "gpu"])
def test_an_unknown_target_is_refused_by_its_origin(target: str) -> None:
    with pytest.raises(Usage, match="--target"):
        resolve_placement(target=target)


LNC_ORIGINS: dict[str, dict[str, Any]] = {
    "--lnc": {"lnc": 2},
    "NEURON_LOGICAL_NC_CONFIG": {"environ": {"NEURON_LOGICAL_NC_CONFIG": "2"}},
    "NEURON_RT_VIRTUAL_CORE_SIZE": {"environ": {"NEURON_RT_VIRTUAL_CORE_SIZE": "2"}},
    "the LNC in the compiler options": {"option_lnc": 2},
}


@pytest.mark.parametrize("origin", LNC_ORIGINS)
def test_each_origin_of_an_lnc_is_heard_and_checked_against_the_target(origin: str) -> None:
    assert resolve_placement(target="trn2", **LNC_ORIGINS[origin]).lnc == 2
    for target in ("trn1", "trn1n", "inf2", "cpu"):
        with pytest.raises(Usage, match="NCC_EARG001") as refused:
            resolve_placement(target=target, world_size=2, **LNC_ORIGINS[origin])
        assert origin in refused.value.message


@pytest.mark.parametrize("first", LNC_ORIGINS)
@pytest.mark.parametrize("second", LNC_ORIGINS)
def test_two_origins_that_contradict_are_both_named_with_their_values(first: str, second: str) -> None:
    if first == second:
        return
    one = {**LNC_ORIGINS[second]}
    if "environ" in one:
        one["environ"] = {second: "1"}
    else:
        one = dict.fromkeys(one, 1)
    arguments = {**LNC_ORIGINS[first], **one}
    arguments["environ"] = {**LNC_ORIGINS[first].get("environ", {}), **one.get("environ", {})}
    with pytest.raises(Usage) as refused:
        resolve_placement(**arguments)
    assert refused.value.exit_code == 2
    assert f"{first} = 2" in refused.value.message
    assert f"{second} = 1" in refused.value.message


@pytest.mark.parametrize("value", ["3", "0", "two", "1.0"])
def test_an_lnc_that_is_not_1_or_2_is_refused_by_its_origin(value: str) -> None:
    with pytest.raises(Usage, match="NEURON_LOGICAL_NC_CONFIG"):
        resolve_placement(environ={"NEURON_LOGICAL_NC_CONFIG": value})


def test_an_empty_variable_is_unset() -> None:
    environ = {"NEURON_LOGICAL_NC_CONFIG": "", "NEURON_PLATFORM_TARGET_OVERRIDE": ""}
    assert resolve_placement(environ=environ) == resolve_placement()


@pytest.mark.parametrize(
    "arguments",
    [
        {"target": "trn1", "instance": "trn2.48xlarge"},
        {"target": "trn1", "environ": {"NEURON_PLATFORM_TARGET_OVERRIDE": "trn2"}},
        {"target": "trn2", "option_target": "trn1"},
        {"instance": "trn2.48xlarge", "option_target": "trn3"},
    ],
)
def test_targets_that_contradict_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(Usage, match="contradict"):
        resolve_placement(**arguments)


def test_a_world_that_does_not_fit_its_nodes_is_refused() -> None:
    wrong: tuple[tuple[int, int | None], ...] = ((65, 1), (65, None), (5, 2))
    for world_size, nodes in wrong:
        with pytest.raises(Usage):
            resolve_placement(world_size=world_size, nodes=nodes)
    zeros: tuple[dict[str, Any], ...] = ({"world_size": 0}, {"nodes": 0}, {"world_size": -1})
    for zero in zeros:
        with pytest.raises(Usage, match="at least 1"):
            resolve_placement(**zero)
    assert resolve_placement(world_size=128).nodes == 2


def test_without_a_known_number_of_cores_a_world_size_is_asked_for() -> None:
    without: tuple[dict[str, Any], ...] = ({"target": "cpu"}, {"instance": "trn3.48xlarge"}, {"target": "trn3"})
    for arguments in without:
        with pytest.raises(Usage, match="world size"):
            resolve_placement(**arguments)
    assert resolve_placement(target="cpu", world_size=4).ranks_per_node == 4


def test_an_unknown_instance_is_refused_with_the_known_ones() -> None:
    with pytest.raises(Usage) as refused:
        resolve_placement(instance="p5.48xlarge")
    assert "trn2.48xlarge" in refused.value.hint


def test_no_unconfirmed_instance_has_a_made_up_number_of_devices() -> None:
    assert [row.name for row in INSTANCES.values() if row.devices is None] == ["trn3.48xlarge"]
    assert not INSTANCES["trn3.48xlarge"].confirmed
    assert all(row.source and row.target in TARGETS for row in INSTANCES.values())


def test_a_shard_degree_of_minus_one_takes_the_rest() -> None:
    assert resolve_mesh(Mesh(tp=4), 64) == Mesh(dp_shard=16, tp=4)
    assert resolve_mesh(Mesh(pp=2, dp_replicate=2, cp=2, tp=4, ep=8), 64) == Mesh(2, 2, 2, 2, 4, 8)


@pytest.mark.parametrize(
    "mesh",
    [Mesh(tp=3), Mesh(dp_shard=4, tp=4), Mesh(dp_shard=0), Mesh(dp_shard=-2), Mesh(tp=128), Mesh(ep=3), Mesh(pp=0)],
)
def test_a_mesh_that_does_not_multiply_to_the_world_is_refused(mesh: Mesh) -> None:
    with pytest.raises(Usage):
        resolve_mesh(mesh, 64)


def test_a_tensor_parallel_group_that_leaves_its_device_is_warned_of() -> None:
    trn2 = resolve_placement()
    assert placement_warnings(resolve_mesh(Mesh(tp=4), 64), trn2) == []
    assert "4 logical cores" in placement_warnings(resolve_mesh(Mesh(tp=8), 64), trn2)[0]
    assert placement_warnings(resolve_mesh(Mesh(tp=8), 128), resolve_placement(lnc=1)) == []
    cpu = resolve_placement(target="cpu", world_size=8)
    assert placement_warnings(resolve_mesh(Mesh(tp=8), 8), cpu) == []


def test_a_tensor_parallel_group_that_leaves_its_node_is_warned_of() -> None:
    small = resolve_placement(instance="trn2.3xlarge", nodes=2)
    assert "network" in placement_warnings(resolve_mesh(Mesh(tp=8), 8), small)[0]
