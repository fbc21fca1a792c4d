"""Clusters, and the communication along the axes of a mesh."""

from __future__ import annotations

import pytest

import labkit as lab
from labkit.costs.cluster import MeshAxis
from labkit.costs.rounds import rounds

INSIDE, BETWEEN = lab.Link(gbit_per_s=8, latency_us=10), lab.Link(gbit_per_s=0.8, latency_us=100)
NETWORK = lab.Network(nodes=2, inside=INSIDE, between=BETWEEN, ranks=4)
DEVICE = lab.Device(tflop_per_s=1, gbyte_per_s=10, memory_gb=1)


def test_a_link_is_a_network_of_one_node() -> None:
    cluster = lab.Cluster(ranks=4, device=DEVICE, link=INSIDE)
    assert cluster.ranks_per_node == 4
    assert cluster.network.seconds("all_reduce", 1e6) == pytest.approx(INSIDE.seconds("all_reduce", 1e6, 4))


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"ranks": 0}, ValueError),
        ({"ranks": 3}, ValueError),
        ({"ranks": 10**6}, ValueError),
        ({"ranks": "4"}, TypeError),
        ({"device": "h100"}, TypeError),
        ({"link": 10}, TypeError),
    ],
)
def test_wrong_clusters_are_refused(wrong: dict[str, object], error: type[Exception]) -> None:
    network = lab.Network(nodes=2, inside=INSIDE, between=BETWEEN)
    with pytest.raises(error, match=f"{next(iter(wrong))}="):
        lab.Cluster(**{"ranks": 4, "device": DEVICE, "link": network, **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "stride", "groups", "level"),
    [
        (4, 1, [[0, 1, 2, 3]], "between"),
        (2, 1, [[0, 1]], "inside"),  # those of the other node do the same
        (2, 2, [[0, 2], [1, 3]], "between"),
    ],
)
def test_an_axis_has_groups_on_nodes(size: int, stride: int, groups: list[list[int]], level: str) -> None:
    axis = MeshAxis(NETWORK, size, stride)
    assert axis.groups.nodes() == tuple(NETWORK.node_of(rank) for group in groups for rank in group)
    assert axis.level == level


@pytest.mark.parametrize(("size", "stride"), [(2, 1), (4, 2), (2, 4), (3, 4), (6, 2), (4, 6), (3, 1), (24, 1)])
@pytest.mark.parametrize("nodes", [1, 2, 4, 6])
def test_some_groups_stand_for_all(size: int, stride: int, nodes: int) -> None:
    axis = MeshAxis(lab.Network(nodes=nodes, inside=INSIDE, between=BETWEEN, ranks=24), size, stride)
    firsts = [rank for rank in range(24) if rank // stride % size == 0]
    every = [(first + k * stride) * nodes // 24 for first in firsts for k in range(size)]
    assert set(axis.groups.nodes()) <= set(every)
    for operation in ("all_reduce", "all_gather"):
        both = axis.groups.nodes(), tuple(every)
        times = [axis.network.rounds_s(rounds(operation, given, len(given) // size), 1e6) for given in both]
        assert times[0] == times[1]


def test_another_number_of_ranks_keeps_the_ranks_of_a_node() -> None:
    cluster = lab.Cluster(ranks=16, device=DEVICE, link=lab.Network(nodes=2, inside=INSIDE, between=BETWEEN))
    assert [cluster.of(ranks).network.nodes for ranks in (2, 8, 16, 64)] == [1, 1, 2, 8]
    assert cluster.of(64).ranks_per_node == 8
    with pytest.raises(ValueError, match="ranks=20: expected whole numbers"):
        cluster.of(20)


def test_an_axis_of_one_rank_sends_nothing() -> None:
    assert MeshAxis(NETWORK, 1, 1).message_s(1e6) == 0


def test_messages_of_one_node_share_its_connection() -> None:
    inside_s, between_s = 10e-6 + 1e6 / 1e9, 100e-6 + 1e6 / 1e8
    assert MeshAxis(NETWORK, 2, 1).message_s(1e6) == pytest.approx(inside_s)
    assert MeshAxis(NETWORK, 4, 1).message_s(1e6) == pytest.approx(between_s)  # only rank 1 sends to the other node
    assert MeshAxis(NETWORK, 2, 2).message_s(1e6) == pytest.approx(100e-6 + 2e6 / 1e8)  # ranks 0 and 1 both do
