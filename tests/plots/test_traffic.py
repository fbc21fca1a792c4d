"""Bytes: who sent how many to whom and when, worked out by hand, and the figure of it."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pytest

from labkit.errors.exceptions import LabError
from labkit.plots.flows import flows_of, over_time
from labkit.plots.traffic import OTHERS, _cell, sent_mb, traffic
from labkit.recording.operations import OTHER, SEND, Traffic, methods, type_of

from synthetic import ALONE, MS, Book, alone, data_parallel, made, model_parallel, remote_calls  # isort: skip

UNCOUNTED = (Traffic.TOGETHER, Traffic.SECOND_END)  # which no figure of traffic shows


def collective(name, sizes, *, root=-1):
    """One collective of 1 ms, with the bytes that each rank records; of those without, the rank takes no part."""
    given = [{} if nbytes is None else {"nbytes": nbytes, "root": root} for nbytes in sizes]
    return made(*([(name, 0, 1, None, values)] if values else [] for values in given))


def ring(each):
    return [[0, each, 0, 0], [0, 0, each, 0], [0, 0, 0, each], [each, 0, 0, 0]]


@pytest.mark.parametrize(
    ("name", "sizes", "matrix"),
    [
        ("all_reduce", [1000] * 4, ring(1500)),
        ("all_reduce_coalesced", [1000] * 4, ring(1500)),
        ("all_gather", [1000] * 4, ring(750)),
        ("all_gather_into_tensor", [1000] * 4, ring(750)),
        ("reduce_scatter_tensor", [1000] * 4, ring(750)),
        ("all_reduce", [None, 1000, None, 1000], [[0] * 4, [0, 0, 0, 1000], [0] * 4, [0, 1000, 0, 0]]),  # the ring of the group
        ("all_to_all_single", [900] * 3, [[0, 300, 300], [300, 0, 300], [300, 300, 0]]),
        ("barrier", [0, 0], [[0, 0], [0, 0]]),
    ],
)
def test_a_collective_of_equal_ranks(name, sizes, matrix):
    assert flows_of(collective(name, sizes)).matrix().tolist() == matrix


@pytest.mark.parametrize(
    ("name", "sizes", "matrix"),
    [
        ("broadcast", [100, 100, 100], [[0, 0, 0], [100, 0, 100], [0, 0, 0]]),
        ("scatter", [100, 300, 100], [[0, 0, 0], [100, 0, 100], [0, 0, 0]]),  # the root has all parts
        ("reduce", [100, 100, 100], [[0, 100, 0], [0, 0, 0], [0, 100, 0]]),
        ("gather", [100, 300, 100], [[0, 100, 0], [0, 0, 0], [0, 100, 0]]),
        ("gather", [None, 200, 100], [[0, 0, 0], [0, 0, 0], [0, 100, 0]]),  # rank 0 takes no part
    ],
)
def test_a_root_sends_to_each_other_rank_or_receives_from_it(name, sizes, matrix):
    flows = flows_of(collective(name, sizes, root=1))
    assert flows.matrix().tolist() == matrix
    assert (flows.count, flows.rings, flows.roots) == ((1,), False, True)


def partly_of_unknown_size():
    """A gradient of 1000 bytes is reduced, a loss of unknown size too, and a tensor of unknown size is sent."""
    reduced = [("all_reduce", 0, 1, None, {"nbytes": 1000}), ("all_reduce", 1, 2, None, {"sized": False})]
    ends = [("send", 2, 3, None, {"sized": False, "peer": 1}), ("recv", 2, 3, None, {"sized": False, "peer": 0})]
    return made(*([*reduced, end] for end in ends))


def test_operations_of_unknown_size_are_named_and_missing_from_the_bytes():
    flows = flows_of(partly_of_unknown_size())
    assert flows.matrix().sum() == 2000
    assert flows.unsized == (("all_reduce", 1), ("send", 1))
    assert flows_of(collective("barrier", [0, 0])).unsized == ()
    ax = traffic(partly_of_unknown_size())
    assert "at least 2.00 kB" in ax.get_title(loc="left")
    assert legend(ax)[-1] == "not counted, as of unknown size: 1 × all_reduce, 1 × send"
    assert "at least" not in traffic(collective("all_reduce", [1000] * 2)).get_title(loc="left")
    with pytest.raises(LabError, match="1 × send"):
        traffic(made([("send", 2, 3, None, {"sized": False, "peer": 1})], []))


def test_each_collective_has_its_own_root():
    casts = [("broadcast", number, number + 1, None, {"nbytes": 10, "root": root}) for number, root in enumerate((0, 2, 2))]
    assert flows_of(made(*[casts] * 3)).matrix().tolist() == [[0, 10, 10], [0, 0, 0], [20, 20, 0]]


def test_a_message_is_counted_once():
    flows = flows_of(model_parallel(2))
    assert flows.matrix().tolist() == [[0, 2 << 20], [2 << 20, 0]]
    assert (flows.name, flows.count, flows.rings) == (("send",), (4,), False)


def test_calls_and_replies_go_both_ways_and_arguments_travel_before_they_are_served():
    flows = flows_of(remote_calls())
    assert flows.matrix().tolist() == [[0, 400_000, 400_000], [80_000, 0, 0], [80_000, 0, 0]]
    assert flows.name == ("rpc_async shard", "reply shard")
    calls = flows.operation == 0
    assert ((flows.end_ns - flows.start_ns)[calls] / MS).tolist() == pytest.approx([0.7] * 4, abs=1e-5)


def test_a_fetched_value_comes_from_its_owner():
    fetched = ("to_here", 0, 1, None, {"nbytes": 70, "peer": 2} | ALONE)
    assert flows_of(made([], [fetched], [])).matrix()[2, 1] == 70


def test_operations_are_counted_once_for_all_their_ranks_and_where_they_completed():
    trace = data_parallel(4, 3)
    flows = flows_of(trace)
    assert (flows.count, flows.rings) == ((9,), True)
    assert sum(flows_of(trace.step(i)).matrix().sum() for i in range(3)) == pytest.approx(flows.matrix().sum())


def test_bytes_are_spread_over_the_time_they_travel():
    at_once = ("send", 2.5, 2.5, None, {"nbytes": 100, "peer": 1} | ALONE)
    received = ("recv", 4, 6, None, {"nbytes": 4000, "peer": 0})  # both are ready from 4 on
    sent = [("send", 2, 6, None, {"nbytes": 4000, "peer": 1}), ("send", 8, 9, None, {"nbytes": 500, "peer": 0} | ALONE)]
    edges = (np.arange(0, 11) * MS).astype(np.int64)
    moved = over_time(flows_of(made([sent[0], at_once], [received, sent[1]], end_ms=10)), edges).sum(axis=0)
    assert moved.tolist() == pytest.approx([0, 0, 100, 0, 2000, 2000, 0, 0, 500, 0], abs=0.1)


def test_nothing_is_lost_between_bins():
    trace = data_parallel(4, 3)
    flows = flows_of(trace)
    edges = np.linspace(trace.start_ns, trace.end_ns, 151).astype(np.int64)
    assert over_time(flows, edges).sum() == pytest.approx(flows.nbytes.sum(), rel=1e-6)


def matrix_of(ax):
    return ax.figure.axes[1]


def legend(ax):
    return [t.get_text() for t in ax.get_legend().get_texts()]


def test_the_figure_states_its_units_and_its_counting_rule():
    ax = traffic(data_parallel())
    assert ax.get_xlabel() == "time since the first rank began the run [ms]"
    assert ax.get_ylabel() == "sent by all ranks [GB/s],\nmean of each operation"
    assert legend(ax) == ["all_reduce: 9 ×, 132 MB"]
    assert ax.get_title(loc="left") == "What travelled  ·  4 ranks, 3 steps, 67.7 ms, 132 MB in all"
    beside = matrix_of(ax)
    assert beside.get_title(loc="left") == "from rank to rank [MB]"
    assert "counts as a ring" in beside.get_xlabel()
    assert [t.get_text() for t in beside.texts].count("33.0") == 4
    assert "ring" not in matrix_of(traffic(model_parallel())).get_xlabel()
    beside = matrix_of(traffic(collective("broadcast", [8, 8], root=1)))
    assert beside.get_xlabel() == "to rank\n(a collective counts as its root's messages)"


@pytest.mark.parametrize(
    ("nbytes", "reported", "narrow"),
    [
        (5_000_000, "5.0", ()), (4_400_000, "4.4", ()), (16_040_000, "16.0", ()), (144_000_000, "144", ()),
        (120_000, "0.12", ()), (12_000, "12.0 kB", ()), (73_700, "0.07", (8,)), (32, "<.01", (8,)), (3_300_000, "3.3", (8,)),
    ],
)  # fmt: skip
def test_numbers_of_one_unit_have_the_same_digits_and_in_a_narrow_cell_no_unit_of_their_own(nbytes, reported, narrow):
    assert _cell(nbytes, 1e6, *narrow) == reported
    assert _cell(8, 1) == "8"


def test_ranks_have_their_names():
    beside = matrix_of(traffic(remote_calls()))
    assert [t.get_text() for t in beside.get_yticklabels()] == ["master", "worker1", "worker2"]
    assert beside.get_xlabel() == "to"


def test_the_smallest_operations_are_combined_and_many_ranks_have_a_scale():
    book = Book()
    for number in range(11):
        for rank in range(12):
            book.travel(rank, f"rpc_sync f{number}", number, number + 1, nbytes=1000 * (11 - number), peer=(rank + 1) % 12)
    ax = traffic(book.trace(12))
    assert legend(ax)[-1] == "3 others: 72.0 kB"
    assert len(legend(ax)) == 9
    assert not matrix_of(ax).texts
    assert len(ax.figure.axes) == 3


@pytest.mark.parametrize(
    ("sizes", "shown"),
    [
        ([980, 11, 11, 8], ["a", "b", "c", "d"]),  # of 1,010 bytes: only the last is below a hundredth
        ([1990, 10, 9, 8], ["a", "3 others"]),
        ([1990, 10], ["a", "b"]),  # no name covers another
    ],
)
def test_operations_with_few_bytes_are_among_the_others(sizes, shown):
    book = Book()
    for number, (name, nbytes) in enumerate(zip("abcd", sizes, strict=False)):
        book.travel(0, name, number, number + 1, nbytes=nbytes, peer=1)
    assert [text.partition(":")[0] for text in legend(traffic(book.trace(2)))] == shown


def colour_of(name):
    return type_of(name).colour


def looks_of(names):
    """Colour and texture of calls, each smaller than the one before, by their names in the legend."""
    book = Book()
    for number, name in enumerate(names):
        book.travel(0, name, number, number + 1, nbytes=1000 - number, peer=1)
    handles = zip(*traffic(book.trace(2)).get_legend_handles_labels(), strict=True)
    return {text.partition(":")[0]: (handle.get_facecolor(), handle.get_hatch()) for handle, text in handles}


def test_an_operation_has_the_same_colour_in_every_figure():
    names = ["send", "rpc_async Shard.forward", "rpc_sync fetch", "remote Shard", "reply fetch", "gossip", "all_to_all"]
    together = looks_of(names)
    assert together == looks_of(reversed(names))
    for name in names:
        assert [colour for colour, _ in looks_of([name]).values()] == [together[name][0]]


def test_the_forms_of_an_operation_have_its_colour_and_textures_of_their_own():
    assert colour_of("reduce_scatter_tensor_coalesced") == colour_of("reduce_scatter") != colour_of("reduce")
    assert colour_of("all_gather_into_tensor") == colour_of("all_gather") != colour_of("gather")
    assert colour_of("rpc_async Net.forward") == colour_of("rpc_sync f") != colour_of("reply Net.forward")
    assert len({colour_of("CollectiveReduceV2"), colour_of("gossip"), SEND.colour, OTHERS}) == 3
    found = looks_of(["rpc_sync b", "rpc_sync a", "rpc_async c", "send"])
    assert len({colour for colour, _ in found.values()}) == 2
    assert len(set(found.values())) == 4
    assert not found["send"][1]


def test_every_operation_of_torch_has_a_colour_of_its_own():
    colours = [kind.colour for kind in {kind for kind, _ in methods().values()} if kind.traffic not in UNCOUNTED]
    assert len({*colours, OTHER.colour}) == len(colours) + 1


def test_given_axes_are_divided():
    figure, axes = plt.subplots(2)
    ax = traffic(data_parallel(), ax=axes[0], step=1)
    assert ax is axes[0]
    assert "step 1 " in ax.get_title(loc="left")
    figure.canvas.draw()
    left, right = (a.get_window_extent() for a in (ax, figure.axes[-1]))
    assert left.x1 < right.x0


def test_a_step_has_the_operations_of_each_ranks_own_step():
    """Rank 1 is a little later: when rank 0 begins a step, rank 1 is still in the operation before it."""

    def of_rank(late):
        ends = [(10 * number + late, {"nbytes": nbytes, "match": number}) for number, nbytes in enumerate((4000, 1000, 300))]
        reduced = [("all_reduce", end - 3, end - 0.5, None, more) for end, more in ends]
        return reduced + [("step", end - 10, end) for end, _ in ends[1:]]

    titles = [traffic(made(of_rank(0), of_rank(1)), step=step).get_title(loc="left") for step in (0, 1, range(2))]
    sums = [" ".join(title.split()).rpartition(", ")[2] for title in titles]
    assert sums == ["2.00 kB in all", "600 B in all", "2.60 kB in all"]


def test_in_a_step_a_rank_without_steps_counts_by_the_window():
    sent = [("send", 10 * n + 4, 10 * n + 6, None, {"nbytes": 500 + n, "peer": 0} | ALONE) for n in (0, 1)]
    trace = made([("step", 0, 10), ("step", 10, 20)], sent)
    assert matrix_of(traffic(trace, step=1)).texts[1].get_text() == "501"


def test_without_traffic_the_figure_says_so():
    with pytest.raises(LabError, match="labkit recorded no bytes between ranks"):
        traffic(alone())


# Devices of ranks


def reduced_by_devices(ranks, *, across):
    """Each rank has two of TensorFlow's devices; they reduce 1000 bytes among themselves, or those of all ranks
    together."""
    operations = []
    for rank in range(ranks):
        key = {"nbytes": 1000, "group": "all" if across else f"of rank {rank}"}
        operations.append([("all_reduce", 0, 1, None, key | {"device": device}) for device in ("CPU:0", "CPU:1")])
    return made(*operations)


def test_devices_of_one_rank_send_to_one_another():
    flows = flows_of(reduced_by_devices(1, across=False))
    assert flows.ends == ("CPU:0", "CPU:1")
    assert flows.matrix().tolist() == [[0, 1000], [1000, 0]]
    assert flows.between_ranks() == 0


def test_devices_of_several_ranks_are_one_ring():
    flows = flows_of(reduced_by_devices(2, across=True))
    assert flows.ends == ("rank 0 CPU:0", "rank 0 CPU:1", "rank 1 CPU:0", "rank 1 CPU:1")
    assert flows.matrix().tolist() == [[0, 1500, 0, 0], [0, 0, 1500, 0], [0, 0, 0, 1500], [1500, 0, 0, 0]]
    assert flows.between_ranks() == 3000
    apart = flows_of(reduced_by_devices(2, across=False))
    assert apart.matrix().tolist() == [[0, 1000, 0, 0], [1000, 0, 0, 0], [0, 0, 0, 1000], [0, 0, 1000, 0]]
    assert apart.between_ranks() == 0


def test_messages_go_from_device_to_device():
    def end(name, device="cpu", **more):
        return name, 0, 1, None, {"peer": 0, "device": device} | more

    copy, other = {"nbytes": 70, "group": "copies"}, {"nbytes": 5, "group": "messages", "match": 1}
    copies = [(end("send", "CPU:0", **copy), end("recv", f"CPU:{n}", **copy)) for n in (2, 1)]  # one tensor, under one number
    first = [*copies[0], *copies[1], end("recv", "CPU:2", **other | {"peer": -1})]
    # Of the last message, the receiving device is not recorded.
    flows = flows_of(made(first, [end("send", **other), end("send", **other | {"nbytes": 3, "match": 2})]))
    assert flows.ends == ("rank 0", "rank 0 CPU:0", "rank 0 CPU:1", "rank 0 CPU:2", "rank 1")
    found = {(flows.ends[a], flows.ends[b]): n for (a, b), n in np.ndenumerate(flows.matrix()) if n}
    own, other = "rank 0 CPU:", "rank 1"
    assert found == {(f"{own}0", f"{own}1"): 70, (f"{own}0", f"{own}2"): 70, (other, f"{own}2"): 5, (other, "rank 0"): 3}


def test_a_broadcast_comes_from_the_roots_first_device():
    cast = [("broadcast", 0, 1, None, {"nbytes": 10, "root": 0, "device": device}) for device in ("CPU:0", "CPU:1")]
    assert flows_of(made(cast, cast)).matrix().tolist() == [[0, 10, 10, 10], [0] * 4, [0] * 4, [0] * 4]


def test_the_figure_of_devices_names_devices():
    ax = traffic(reduced_by_devices(1, across=False))
    beside = matrix_of(ax)
    assert beside.get_title(loc="left") == "from device to device [kB]"
    assert beside.get_xlabel() == "to device\n(a collective counts as a ring of its devices)"
    assert ax.get_ylabel() == "sent by all devices [MB/s],\nmean of each operation"
    assert ax.get_title(loc="left").endswith("2.00 kB in all")
    several = traffic(reduced_by_devices(2, across=True))
    assert several.get_title(loc="left").endswith("6.00 kB in all, 3.00 kB between ranks")


def test_the_nodes_of_a_network():
    """Four ranks on two nodes: of the ring's four arrows, two lead from node to node."""
    trace = collective("all_reduce", [1000] * 4)
    assert "between nodes" not in traffic(trace).get_title(loc="left")
    trace.nodes = (0, 0, 1, 1)
    flows = flows_of(trace)
    assert flows.node.tolist() == [0, 0, 1, 1]
    assert flows.between_nodes() == 3000
    ax = traffic(trace)
    assert ax.get_title(loc="left").endswith("6.00 kB in all, 3.00 kB between nodes")
    assert len(matrix_of(ax).lines) == 2
    assert [text.get_text() for text in matrix_of(ax).texts if text.get_text().startswith("node")] == ["node 0", "node 1"]
    assert trace.between(trace.start_ns, trace.end_ns).nodes == trace.filter(rank=0).nodes == (0, 0, 1, 1)
    trace.nodes = (0, 0, 0, 0)
    assert "between nodes" not in traffic(trace).get_title(loc="left")


def test_where_sizes_are_unknown_nothing_is_said_to_be_zero():
    sent = [("send", 0, 1, None, {"nbytes": 1000, "peer": 1})]
    unknown = [("send", 2, 3, None, {"sized": False, "peer": 0})]
    texts = [[t.get_text() for t in matrix_of(traffic(made(sent, other))).texts] for other in ([], unknown)]
    assert texts == [["1.0", "0"], ["1.0", "?"]]


def test_the_operations_of_a_mesh_are_counted_by_axis():
    book = Book()
    for row, column in ((0, 0), (0, 1), (1, 0), (1, 1)):
        rank = 2 * row + column
        along = {"tp": [2 * row, 2 * row + 1], "dp": [column, column + 2]}
        for i, (axis, nbytes) in enumerate((("tp", 3000), ("dp", 1000), ("tp", 3000))):
            group = f"group {axis} mesh_{axis} of ranks {','.join(map(str, along[axis]))}"
            book.travel(rank, "all_reduce", 2 * i, 2 * i + 1, nbytes=nbytes, group=group, match=i)
    trace = book.trace(4, start_ns=0, end_ns=10 * MS)
    flows = flows_of(trace)
    assert (flows.name, flows.count) == (("all_reduce tp", "all_reduce dp"), (4, 2))
    assert flows.by_operation().tolist() == [24000, 4000]  # in a ring of two, each rank sends as many bytes as there are
    assert flows.matrix()[0].tolist() == [0, 6000, 1000, 0]
    assert legend(traffic(trace)) == ["all_reduce tp: 4 ×, 24.0 kB", "all_reduce dp: 2 ×, 4.00 kB"]


# As one number


def sending(steps):
    """In each step an all-reduce of 4 MB on four ranks; after the last step another one."""
    nbytes = {"nbytes": 4_000_000}
    reduced = [("all_reduce", 20 * n + 2, 20 * n + 5, None, nbytes) for n in range(steps)]
    marks = [("step", 20 * n, 20 * n + 20) for n in range(steps)]
    return made(*[[*marks, *reduced, ("all_reduce", 101, 105, None, nbytes)]] * 4)


def test_bytes_are_those_of_a_step():
    assert sent_mb(sending(3)) == pytest.approx(6)  # 2·3/4 of 4 MB; not the all-reduce after the last step
    assert sent_mb(sending(3), rank=2) == pytest.approx(6)
    assert sent_mb(sending(0)) == pytest.approx(6)  # without steps, everything
    with pytest.raises(ValueError, match=r"sent_mb\(rank=4\): expected a rank from 0 to 3"):
        sent_mb(sending(1), rank=4)


def test_a_broadcast_counts_at_its_root():
    trace = collective("broadcast", [1_000_000] * 4, root=0)
    assert [sent_mb(trace, rank=rank) for rank in range(4)] == pytest.approx([3, 0, 0, 0])
    assert sent_mb(trace) == pytest.approx(0.75)


def test_what_a_late_rank_sends_before_its_first_step_does_not_count():
    """When rank 0 begins its first step, rank 1 still receives the model."""

    def of_rank(late):
        received = ("broadcast", 1, 6 + late, None, {"nbytes": 8_000_000, "match": 1, "root": 0})
        reduced = ("all_reduce", 8 + late, 12 + late, None, {"nbytes": 1_000_000, "match": 2})
        return [received, ("step", 7 + late, 17 + late), reduced]

    assert sent_mb(made(of_rank(0), of_rank(3))) == pytest.approx(1)


def test_what_is_sent_in_operations_of_unknown_size_is_no_number():
    def of_rank(rank, *more):
        copied = ("copy", 2, 3, None, {"sized": False, "peer": rank} | ALONE)  # within a rank
        return [("all_reduce", 0, 1, None, {"nbytes": 100}), *more, copied]

    gathered = ("all_gather", 1, 2, None, {"sized": False})
    with pytest.raises(LabError, match=r"sent_mb: the sizes of 1 × all_gather are unknown; lab\.traffic draws"):
        sent_mb(made(of_rank(0, gathered), of_rank(1, gathered)))
    assert sent_mb(made(of_rank(0), of_rank(1))) == pytest.approx(1e-4)
