"""A network of two levels: who is on which node, and the times of operations on it; arithmetic, without ranks."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from latex import evaluated

import labkit as lab
from labkit.costs.link import rounds_and_share
from labkit.costs.rounds import Round, rounds
from labkit.costs.shared_link import SHARED_LINK_BYTES, SharedLink, collective_cost, message_cost
from labkit.ipc.pickling import shared_memory
from labkit.recording.operations import OPERATION_TYPES

FAST = lab.Link(gbit_per_s=0.08, latency_us=100)  # ten million bytes per second, a tenth of a millisecond
SLOW = lab.Link(gbit_per_s=0.008, latency_us=1000)  # a million bytes per second, a millisecond
NETWORK = lab.Network(nodes=2, inside=FAST, between=SLOW)
FOUR = NETWORK.of(4)
COLLECTIVES = [kind.name for kind in OPERATION_TYPES if kind.cost is not None and kind.name not in ("send", "recv", "rpc")]


@pytest.fixture
def schedule() -> Iterator[SharedLink]:
    shared_link = SharedLink(shared_memory(SHARED_LINK_BYTES))
    yield shared_link
    shared_link.close()


def test_consecutive_ranks_share_a_node() -> None:
    assert [FOUR.node_of(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert [NETWORK.of(5).node_of(rank) for rank in range(5)] == [0, 0, 0, 1, 1]
    assert [lab.Network(nodes=3, inside=FAST, between=SLOW).of(8).node_of(rank) for rank in range(8)] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert [FOUR.ranks_of(node) for node in (0, 1)] == [[0, 1], [2, 3]]
    assert FOUR.link(0, 1) is FOUR.link(3, 2) is FAST
    assert FOUR.link(1, 2) is FOUR.link(0, 3) is SLOW


def test_it_is_a_value() -> None:
    assert pickle.loads(pickle.dumps(FOUR)) == FOUR != NETWORK
    assert NETWORK.of(4).of(4) is not None
    assert str(lab.Network(nodes=2, inside=lab.Link.nvlink4, between=lab.Link.ethernet_10g)) == (
        "2 nodes, nvlink4 (3600 Gbit/s, 2 µs) inside, ethernet_10g (10 Gbit/s, 30 µs) between"
    )
    assert eval(repr(FOUR), {"Network": lab.Network, "Link": lab.Link}) == FOUR


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: lab.Network(nodes=0, inside=FAST, between=SLOW), ValueError, r"Network\(nodes=0\): expected a whole"),
        (lambda: lab.Network(nodes=1.5, inside=FAST, between=SLOW), TypeError, r"Network\(nodes=1.5\): expected a whole"),  # type: ignore[arg-type]
        (lambda: lab.Network(nodes=2, inside=10, between=SLOW), TypeError, r"Network\(inside=10\): expected a Link"),  # type: ignore[arg-type]
        (lambda: lab.Network(nodes=2, inside=FAST, between="slow"), TypeError, r"Network\(between='slow'\)"),  # type: ignore[arg-type]
        (lambda: lab.Network(nodes=3, inside=FAST, between=SLOW, ranks=2), ValueError, "expected at least one rank for each"),
        (lambda: NETWORK.of(1), ValueError, r"Network\(nodes=2\) for 1 ranks"),
        (lambda: NETWORK.node_of(0), ValueError, "the number of ranks is unknown"),
        (lambda: FOUR.node_of(4), ValueError, "rank=4: expected a whole number from 0 to 3"),
        (lambda: FOUR.node_of("0"), TypeError, "rank='0': expected a whole number from 0 to 3"),  # type: ignore[arg-type]
        (lambda: FOUR.ranks_of(2), ValueError, "node=2: expected a whole number from 0 to 1"),
        (lambda: FOUR.link(0, -1), ValueError, "rank=-1"),
        (lambda: FOUR.of(8), ValueError, "ranks=8: this network has 4 ranks"),
        (lambda: FOUR.seconds("all_reduce", 1, [0, 0]), ValueError, r"ranks=\[0, 0\]: expected different ranks"),
        (lambda: FOUR.seconds("all_reduce", 1, []), ValueError, "at least one"),
        (lambda: FOUR.seconds("shout", 1), ValueError, "'shout' is not an operation"),
        (lambda: FOUR.seconds("send", -1), ValueError, "nbytes=-1"),
        (lambda: lab.Group(2, link=NETWORK.of(4)), ValueError, "this network has 4 ranks, and the group 2"),
        (lambda: lab.Group(1, link=NETWORK), ValueError, "expected at least one rank for each node"),
        (lambda: lab.Group(2, link=NETWORK, runtime="bare"), ValueError, "expected runtime='torch' or 'rpc', given 'bare'"),
    ],
)  # fmt: skip
def test_wrong_arguments(call: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call()


@pytest.mark.processes
def test_a_group_knows_its_network() -> None:
    with lab.Group(4, link=NETWORK) as group:
        assert group.link == FOUR
        assert repr(group) == f"<Group of 4 torch ranks over {NETWORK}>"


@pytest.mark.parametrize("name", [kind.name for kind in OPERATION_TYPES if kind.cost is not None])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
def test_on_one_level_the_rounds_take_the_time_of_the_closed_form(name: str, ranks: int) -> None:
    if name == "monitored_barrier" and ranks == 1:
        pytest.skip("nobody waits")
    count, share = rounds_and_share(name, ranks) if ranks > 1 else (0, 0)
    inside, between = rounds(name, (0,) * ranks), rounds(name, tuple(range(ranks)))
    for found, level in ((inside, 1), (between, 2)):
        assert sum(each.times for each in found) == count
        assert sum(each[level] or 0 for each in found) == pytest.approx(share)
        assert all(each[3 - level] is None for each in found)


@pytest.mark.parametrize(
    ("operation", "ms"),
    [  # 8000 bytes on four ranks, two per node; worked by hand
        ("all_reduce", 6 * (1 + 2)),
        ("all_gather", 3 * (1 + 2)),
        ("reduce_scatter", 3 * (1 + 2)),
        ("all_to_all", 3 * 1 + (1 + 2 + 1) * 2),  # one, two and one of the messages of a node's ranks leave it
        ("broadcast", 1 + 8 + 0.1 + 0.8),
        ("reduce", 1 + 8 + 0.1 + 0.8),
        ("gather", 1 + 4 + 0.1 + 0.2),
        ("scatter", 1 + 4 + 0.1 + 0.2),
        ("barrier", 2),
        ("monitored_barrier", 2),
    ],
)
def test_the_cost_of_a_collective_over_two_nodes(operation: str, ms: float) -> None:
    assert FOUR.seconds(operation, 8000) == pytest.approx(ms / 1e3)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_ranks_of_one_node_use_the_inner_link_and_ranks_of_all_nodes_the_outer(name: str) -> None:
    for members, link in (([0, 1], FAST), ([2, 3], FAST), ([0, 2], SLOW), ([3, 1], SLOW)):
        assert FOUR.seconds(name, 8000, members) == pytest.approx(link.seconds(name, 8000, 2))
        assert collective_cost(FOUR, name, 8000, members).cost_ns == round(link.seconds(name, 8000, 2) * 1e9)


def test_what_a_collective_occupies() -> None:
    assert collective_cost(FOUR, "all_reduce", 8000, [0, 1]).shared == []
    across = collective_cost(FOUR, "all_reduce", 8000, [0, 2])
    assert (across.cost_ns, across.shared_ns) == (10_000_000, 8_000_000)  # the latency does not occupy the connection
    assert not {0, 1, 2, 3} & {*across.senders, *across.receivers}  # so that the nodes' own links remain free
    everybody = collective_cost(FOUR, "all_reduce", 8000, [0, 1, 2, 3])
    assert {0, 1, 2, 3} < {*everybody.senders}
    assert len(everybody.shared) == 2


def due_ms(schedule: SharedLink, kind: str, match: int, *ranks: int, nbytes: int = 8000, at_ms: float = 0) -> float:
    """When an operation ends that all its ranks issue at a time."""
    for _ in range(2 if kind == "send" else len(ranks)):
        cost = message_cost(FOUR, *ranks, nbytes, 2) if kind == "send" else collective_cost(FOUR, kind, nbytes, ranks)  # type: ignore[call-arg,misc]
        schedule.arrive(f"{kind} {ranks}", match, round(at_ms * 1e6) + 1, cost)
    return (schedule.due_ns(f"{kind} {ranks}", match) - 1) / 1e6


def test_messages_take_the_link_of_the_pair(schedule: SharedLink) -> None:
    assert due_ms(schedule, "send", 1, 0, 1) == pytest.approx(0.1 + 0.8)
    assert due_ms(schedule, "send", 1, 1, 2) == pytest.approx(1 + 8)


def test_ranks_of_a_node_share_its_connection(schedule: SharedLink) -> None:
    assert due_ms(schedule, "send", 1, 0, 2) == pytest.approx(1 + 8)
    assert due_ms(schedule, "send", 1, 1, 3) == pytest.approx(1 + 16)  # latencies overlap, bytes queue
    assert due_ms(schedule, "send", 1, 2, 0) == pytest.approx(1 + 8)  # the other direction
    assert due_ms(schedule, "send", 1, 0, 1) == pytest.approx(0.9)  # and the other level


def test_collectives_between_nodes_share_the_connections_and_leave_the_inner_links_alone(schedule: SharedLink) -> None:
    assert due_ms(schedule, "all_reduce", 1, 0, 2) == pytest.approx(2 + 8)
    assert due_ms(schedule, "all_reduce", 1, 1, 3) == pytest.approx(8 + 2 + 8)
    assert due_ms(schedule, "all_reduce", 1, 0, 1) == pytest.approx(0.2 + 0.8)
    # The next collective of ranks 0 and 2 begins when their last has ended and the connections are free.
    assert due_ms(schedule, "all_reduce", 2, 0, 2) == pytest.approx(16 + 2 + 8)


def test_the_hierarchical_all_reduce_is_the_sum_of_its_collectives(schedule: SharedLink) -> None:
    predicted_ms = lab.predict.all_reduce(8000, 4, FOUR, algorithm="hierarchical") * 1e3
    inside = [due_ms(schedule, "reduce_scatter", 1, *pair) for pair in ((0, 1), (2, 3))]
    assert inside == pytest.approx([0.1 + 0.4] * 2)
    between = [due_ms(schedule, "all_reduce", 1, *pair, nbytes=4000, at_ms=inside[0]) for pair in ((0, 2), (1, 3))]
    last = [due_ms(schedule, "all_gather", 1, *pair, at_ms=max(between)) for pair in ((0, 1), (2, 3))]
    assert max(last) == pytest.approx(predicted_ms)


@pytest.mark.parametrize(("ranks", "nodes"), [(4, 2), (6, 2), (6, 3), (8, 2), (5, 2)])
def test_a_ring_of_messages_takes_the_time_of_the_formula(schedule: SharedLink, ranks: int, nodes: int) -> None:
    """Each rank sends a part to the next and receives one, and begins the next step when both have arrived."""
    network, nbytes = lab.Network(nodes=nodes, inside=FAST, between=SLOW).of(ranks), 8000
    ready_ns = [1] * ranks
    for step in range(2 * (ranks - 1)):
        for end in ("sent", "received"):
            for rank in range(ranks):
                to = (rank + 1) % ranks
                at_ns = ready_ns[rank] if end == "sent" else ready_ns[to]
                schedule.arrive(f"{rank}>{to}", step, at_ns, message_cost(network, rank, to, nbytes // ranks, 2))
        due_ns = [schedule.due_ns(f"{rank}>{(rank + 1) % ranks}", step) for rank in range(ranks)]
        ready_ns = [max(due_ns[rank], due_ns[rank - 1]) for rank in range(ranks)]
    assert max(ready_ns) / 1e9 == pytest.approx(lab.predict.all_reduce(nbytes // ranks * ranks, ranks, network), rel=1e-6)


def test_predictions_accept_a_network() -> None:
    predict: Any = lab.predict
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter"):
        for ranks in (2, 3, 4, 7, 8):
            assert getattr(predict, name)(8000, ranks, NETWORK) == pytest.approx(NETWORK.of(ranks).seconds(name, 8000))
        assert getattr(predict, name)(8000, [0, 1], FOUR) == pytest.approx(FAST.seconds(name, 8000, 2))
        assert getattr(predict, name)(8000, [1, 3], FOUR) == pytest.approx(SLOW.seconds(name, 8000, 2))
        whole = getattr(predict, name)(8000, 4, NETWORK)
        assert getattr(predict, name)(8000, np.int64(4), NETWORK) == whole  # as numpy counts
    assert predict.barrier(4, NETWORK) == pytest.approx(0.002)
    assert predict.message(8000, NETWORK) == pytest.approx(0.009)
    assert predict.message(8000, FOUR, ranks=(0, 1)) == pytest.approx(0.0009)
    assert predict.rpc(8000, 8000, NETWORK) == pytest.approx(0.018)
    assert predict.rpc(8000, 8000, FOUR, ranks=(2, 3), compute_s=0.001) == pytest.approx(0.0028)
    assert predict.broadcast(8000, 4, NETWORK, algorithm="scatter") == pytest.approx((1 + 4 + 0.1 + 0.2 + 3 * 3) / 1e3)


@pytest.mark.parametrize(
    ("algorithm", "ms"),
    [
        ("ring", 6 * (1 + 2)),
        ("tree", 2 * (1 + 8 + 0.1 + 0.8)),
        ("halving", 2 * (0.1 + 0.4) + 2 * (1 + 4)),  # both ranks of a node exchange a quarter with the other node
        ("hierarchical", 2 * (0.1 + 0.4) + 2 * (1 + 4)),
    ],
)
def test_the_algorithms_of_an_all_reduce(algorithm: str, ms: float) -> None:
    predicted = lab.predict.all_reduce(8000, 4, NETWORK, algorithm=algorithm)
    assert predicted == pytest.approx(ms / 1e3)
    assert lab.predict.all_reduce(8000, 4, FOUR, algorithm=algorithm) == predicted


def test_on_equal_levels_the_algorithms_take_the_times_of_one_link() -> None:
    for ranks in (2, 4, 8, 16):
        for algorithm in ("ring", "tree", "halving"):
            alone = lab.predict.all_reduce(8000, ranks, SLOW, algorithm=algorithm)
            each_apart = lab.Network(nodes=ranks, inside=FAST, between=SLOW)
            together = lab.Network(nodes=1, inside=SLOW, between=FAST)
            for network in (each_apart, together):
                assert lab.predict.all_reduce(8000, ranks, network, algorithm=algorithm) == pytest.approx(alone)
    apart = lab.Network(nodes=4, inside=FAST, between=SLOW)
    hierarchical = lab.predict.all_reduce(8000, 4, apart, algorithm="hierarchical")
    assert hierarchical == pytest.approx(lab.predict.all_reduce(8000, 4, SLOW))


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 16])
def test_the_crossover_of_ring_and_tree_over_one_link(ranks: int) -> None:
    deep = math.ceil(math.log2(ranks))
    by_hand = (ranks - 1 - deep) / (deep - (ranks - 1) / ranks) * SLOW.latency_s * SLOW.bytes_per_s
    assert lab.predict.all_reduce_crossover(ranks, SLOW) == pytest.approx(by_hand)


def test_the_crossover_over_a_network() -> None:
    # ring: 6·(1 ms + n/4 kB); tree: 2·(1 ms + 1 ms/kB·n + 0.1 ms + 0.1 ms/kB·n): 6 + 1.5 n = 2.2 + 2.2 n
    crossover = lab.predict.all_reduce_crossover(4, NETWORK)
    assert crossover == pytest.approx(3.8 / 0.7 * 1000)
    assert crossover.unit == "B"
    ring, tree = (lab.predict.all_reduce(crossover, 4, NETWORK, algorithm=name) for name in ("ring", "tree"))
    assert ring == pytest.approx(tree)
    assert r"\frac{6\,\text{ms} - 2.20\,\text{ms}}" in crossover.working
    hierarchical = lab.predict.all_reduce_crossover(8, NETWORK, large="hierarchical")
    times = [lab.predict.all_reduce(hierarchical, 8, NETWORK, algorithm=name) for name in ("tree", "hierarchical")]
    assert times[0] == pytest.approx(times[1])
    with pytest.raises(ValueError, match="small='hierarchical' takes at most as long as large='ring' at every size"):
        lab.predict.all_reduce_crossover(4, NETWORK, small="hierarchical")
    with pytest.raises(ValueError, match=r"expected a lab\.Network"):
        lab.predict.all_reduce_crossover(4, SLOW, large="hierarchical")


def test_groups_that_communicate_at_the_same_time_share_the_connections(schedule: SharedLink) -> None:
    columns = [[0, 2], [1, 3]]
    predicted = lab.predict.all_reduce(8000, columns, FOUR)
    last_ms = max(due_ms(schedule, "all_reduce", 1, *group) for group in columns)
    assert predicted * 1e3 == pytest.approx(last_ms) == pytest.approx(2 + 16)
    assert lab.predict.all_reduce(8000, [[0, 1], [2, 3]], FOUR) == pytest.approx(FAST.seconds("all_reduce", 8000, 2))
    step = lab.predict.data_parallel_step(0.01, 0.02, 8000, columns, FOUR, overlap=False)
    assert step == pytest.approx(0.03 + predicted)


def test_steps_accept_a_network() -> None:
    reduced = lab.predict.all_reduce(8000, 4, NETWORK)
    assert lab.predict.data_parallel_step(0.01, 0.02, 8000, 4, NETWORK, overlap=False) == pytest.approx(0.03 + reduced)
    inside = lab.predict.tensor_parallel_layer(2, 10, 50, [0, 1], FOUR, compute_s=0.03)
    assert inside == pytest.approx(lab.predict.tensor_parallel_layer(2, 10, 50, 2, FAST, compute_s=0.03))


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "gather"])
@pytest.mark.parametrize("ranks", [2, 4, 7])
def test_the_formula_shown_is_the_one_evaluated(name: str, ranks: int) -> None:
    predicted = getattr(lab.predict, name)(8000, ranks, NETWORK)
    values = {
        "p": ranks, "n": 8000, "alpha_inside": FAST.latency_s, "alpha_between": SLOW.latency_s,
        "B_inside": FAST.bytes_per_s, "B_between": SLOW.bytes_per_s,
    }  # fmt: skip
    assert evaluated(predicted.formula, values) == pytest.approx(predicted, rel=1e-3)
    hierarchical = lab.predict.all_reduce(8000, 8, NETWORK, algorithm="hierarchical")
    assert evaluated(hierarchical.formula, values | {"q": 4, "N": 2}) == pytest.approx(hierarchical)


def test_the_working_names_both_levels() -> None:
    working = lab.predict.broadcast(8000, 4, NETWORK).working
    assert working == (
        r"T &= 1\,\alpha_\text{between} + 1\,\frac{n}{B_\text{between}} + 1\,\alpha_\text{inside} + 1\,\frac{n}{B_\text{inside}} "
        r"\\ &= 1 \cdot 1\,\text{ms} + 1 \cdot \frac{8 \cdot 8\,\text{kB}}{8\,\text{Mbit/s}} + "
        r"1 \cdot 100\,\text{µs} + 1 \cdot \frac{8 \cdot 8\,\text{kB}}{80\,\text{Mbit/s}} \\ &= 9.90\,\text{ms}"
    )
    assert "BlueConnect" in lab.predict.all_reduce(8000, 4, NETWORK, algorithm="hierarchical").source


def test_a_level_is_the_slower_one_for_some_sizes_only() -> None:
    network = lab.Network(
        nodes=2, inside=lab.Link(gbit_per_s=0.008, latency_us=1), between=lab.Link(gbit_per_s=8, latency_us=1000)
    )
    each = Round(1, 1.0, 1.0)
    assert (network.slower(each, 10), network.slower(each, 1e6)) == ("between", "inside")
    assert math.isclose(network.rounds_s([each], 1e6), 1.000001)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: lab.predict.all_reduce(1, 2, FOUR), r"ranks=2: this network has 4 ranks; expected 4, or a list"),
        (lambda: lab.predict.all_reduce(1, [0, 1], NETWORK), "the number of ranks is unknown"),
        (lambda: lab.predict.all_reduce(1, 1, NETWORK), "expected at least one rank for each node"),
        (lambda: lab.predict.all_reduce(1, 5, NETWORK, algorithm="hierarchical"), r"\[3, 2\] ranks on the nodes"),
        (lambda: lab.predict.all_reduce(1, 6, NETWORK, algorithm="halving"), "holds for powers of two"),
        (lambda: lab.predict.all_reduce(1, 4, NETWORK, algorithm="star"), "expected 'ring', 'tree', 'halving' or 'hierarchical'"),
        (lambda: lab.predict.all_reduce(1, 4, SLOW, algorithm="hierarchical"), "expected a lab.Network"),
        (lambda: lab.predict.all_reduce(1, [[0, 2], [1]], FOUR), "equally many"),
        (lambda: lab.predict.all_reduce(1, [[0, 1], [1, 2]], FOUR), "equally many different ranks"),
        (lambda: lab.predict.all_reduce(1, [[0, 2], 1], FOUR), "equally many"),  # type: ignore[list-item]
        (lambda: lab.predict.all_reduce(1, [[0, 2], [1, 3]], FOUR, algorithm="tree"), "for the default algorithm only"),
        (lambda: lab.predict.message(1, SLOW, ranks=(0, 1)), "all ranks have the same link"),
        (lambda: lab.predict.message(1, FOUR, ranks=(0,)), r"expected two ranks, as in ranks=\(0, 1\)"),
    ],
)  # fmt: skip
def test_wrong_arguments_of_predictions(call: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()
