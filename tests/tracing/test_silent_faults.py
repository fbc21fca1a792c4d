"""Faults that a trace shows by itself, in traces made by hand; healthy ones of the same kind yield nothing."""

import math

import pytest
from synthetic import Book, data_parallel, made, master_and_workers, model_parallel

from labkit.recording.group_keys import of_ranks, pair_key
from labkit.recording.schema import COMMUNICATION
from labkit.tracing.load import load_trace
from labkit.tracing.silent_faults import FaultKind, faults_in

MB = 1 << 20


def kinds(trace):
    return [fault.kind for fault in faults_in(trace)]


LINE = "cell 3, line 9"


def stepping(*counts, after=(), passes=True, nbytes=MB, more=()):
    """Ranks whose optimizers step so often, in data-parallel training, without `passes` by hand; then operations of all
    ranks of these sizes, and `more` spans of rank 0."""
    most, ranks = max(counts), []
    for count in counts:
        backward = [("backward", 10 * step, 10 * step + 5) for step in range(most) if passes]
        reduced = [("all_reduce", 10 * step + 1, 10 * step + 4, None, {"nbytes": nbytes}) for step in range(most)]
        stepped = [("optimizer", 10 * step + 6, 10 * step + 8, {"line": LINE}) for step in range(count)]
        later = [(name, 10 * most + n, 10 * most + n + 1, None, {"nbytes": size}) for n, (name, size) in enumerate(after)]
        ranks.append([*backward, *reduced, *stepped, *later, ("call", 0, 10 * most + 10)])
    ranks[0] += more
    return made(*ranks)


@pytest.mark.parametrize("counts", [(5, 4), (5, 0), (0, 5), (3, 3, 2)])
def test_ranks_that_step_differently(counts):
    (fault,) = faults_in(stepping(*counts))
    assert (fault.kind, fault.line, fault.ranks) == (FaultKind.OPTIMIZER_STEPS, "cell 3, line 9", tuple(range(len(counts))))
    assert fault.kind.certain
    for rank, count in enumerate(counts):
        assert f"{count} times on rank {rank}" in fault.sentence


@pytest.mark.parametrize(
    ("after", "found"),
    [
        ([("all_reduce", 8), ("barrier", 0)], True),  # a mean of losses makes nothing equal
        # Parameters may be made equal later, as at the end of `Join`, even of a model with one weight, or in federated
        # averaging.
        *(([(name, MB)], False) for name in ("broadcast", "all_reduce", "all_gather", "scatter")),
        ([("broadcast", 4)], False),
    ],
)
def test_what_makes_parameters_equal_later(after, found):
    assert kinds(stepping(5, 4, after=after)) == [FaultKind.OPTIMIZER_STEPS] * found
    assert kinds(stepping(5, 5, 5)) == []


def test_ranks_that_average_by_hand_may_train_one_model():
    (fault,) = faults_in(stepping(5, 4, passes=False))
    assert (fault.kind, fault.kind.certain) == (FaultKind.OPTIMIZER_STEPS_BY_HAND, False)
    assert str(fault).startswith("Perhaps: The optimizer")
    # They average only losses, as in a search for a learning rate.
    assert kinds(stepping(5, 4, passes=False, nbytes=8)) == []
    # One rank has another optimizer beside the common one, as for a probe of the features.
    probe = [("optimizer", 40 + step, 40.5 + step, {"line": LINE}) for step in range(7)]
    assert kinds(stepping(3, 3, passes=False, more=probe)) == []


def rooted_at_0(name, start):
    return name, start, start + 2, None, {"nbytes": MB, "root": 0}


def of_one_rank(rank, count):
    """Steps of an optimizer, then a message between two ranks."""
    key = {"nbytes": MB, "peer": 1 - rank, "group": pair_key(0, 1, 0)}
    steps = [("optimizer", 10 * step, 10 * step + 1) for step in range(count)]
    return [*steps, (("send", "recv")[rank], 60, 61, None, key), ("call", 0, 70)]


SENT = [rooted_at_0(name, 10 * step + at) for step in range(3) for name, at in (("reduce", 0), ("broadcast", 5))]
ONE_RANK = [("optimizer", 0, 1), ("all_reduce", 2, 3, None, {"nbytes": 4, "group": of_ranks("g", [0])}), ("call", 0, 4)]


@pytest.mark.parametrize(
    "ranks",
    [
        [[*SENT, *(("optimizer", at, at + 1) for at in (3, 13, 23)), ("call", 0, 40)], [*SENT, ("call", 0, 40)]],
        [of_one_rank(0, 5), of_one_rank(1, 1)],
        [ONE_RANK, [], []],
    ],
    ids=["one sends the others what it has", "they exchange messages", "the others were not called, and serve"],
)
def test_ranks_that_may_step_differently(ranks):
    assert kinds(made(*ranks)) == []


def test_an_operation_that_nobody_waits_for():
    unwaited = ("all_gather", 6, 9, None, {"nbytes": MB, "line": "cell 2, line 7", "waited": False})
    reduced = [("all_reduce", 0, 5, None, {"nbytes": MB, "line": "cell 2, line 4", "waited": rank == 1}) for rank in range(3)]
    one, all_of_them = faults_in(made(*([own, unwaited, ("call", 0, 10)] for own in reduced)))
    assert (one.kind, one.ranks, one.line, one.kind.certain) == (FaultKind.NEVER_WAITED_FOR, (0, 2), "cell 2, line 4", True)
    assert "on rank 0 and rank 2" in one.sentence
    assert (all_of_them.ranks, all_of_them.line) == ((0, 1, 2), "cell 2, line 7")
    assert " on rank" not in all_of_them.sentence


def test_it_counts_neither_as_hidden_nor_as_exposed(tmp_path):
    times = ((2, 6, False), (7, 9, True), (10, 13, False))
    reduced = [("all_reduce", start, end, None, {"nbytes": MB, "waited": waited}) for start, end, waited in times]
    trace = made([("forward", 0, 10), *reduced])
    (share,) = trace.shares()
    assert (share.overlap_ns, share.exposed_ns, share.compute_ns) == (2_000_000, 0, 10_000_000)
    loaded = load_trace(trace.save(tmp_path / "x.json"))
    assert [span.waited for span in loaded.filter(kind="communication")] == [False, True, False]


def rooted(*calls):
    """Broadcasts in groups of four ranks: for each call, the group's ranks, its root, and its line."""
    ranks = [[], [], [], []]
    for number, (members, root, line) in enumerate(calls):
        key = {"nbytes": 8, "group": of_ranks(f"group {min(members)}", members), "root": root, "line": line}
        for rank in members:
            ranks[rank].append(("broadcast", number, number + 0.5, None, key | {"match": number + 1}))
    return made(*ranks)


def test_a_root_at_another_place_of_a_sibling_group():
    (fault,) = faults_in(rooted(((0, 2), 0, "cell 1, line 3"), ((1, 3), 3, "cell 1, line 3")))
    assert (fault.kind, fault.line, fault.kind.certain) == (FaultKind.OTHER_ROOT, "cell 1, line 3", False)
    assert "rank 0, number 0 of ranks 0 and 2" in fault.sentence
    assert "rank 3, number 1 of ranks 1 and 3" in fault.sentence


@pytest.mark.parametrize(
    "calls",
    [
        [((0, 2), 0, "cell 1, line 3"), ((1, 3), 1, "cell 1, line 3")],  # the first of each
        [((0, 2), 0, "cell 1, line 3"), ((1, 3), 3, "cell 1, line 5")],  # two calls
        [((0, 1, 2), 0, "cell 1, line 3"), ((1, 3), 3, "cell 1, line 3")],  # groups of different sizes
        [((0, 2), 0, "cell 1, line 3"), ((1, 3), 3, "cell 1, line 3"), ((1, 3), 1, "cell 1, line 3")],  # it changes
    ],
)
def test_roots_that_are_as_they_should_be(calls):
    assert faults_in(rooted(*calls)) == []


@pytest.mark.parametrize("make", [data_parallel, model_parallel, master_and_workers])
def test_healthy_traces(make):
    trace = make()
    assert (trace.columns.data["kind"] == COMMUNICATION).any()
    assert faults_in(trace) == []


def test_recorded_values_that_are_not_finite():
    book = Book()
    for rank in range(2):
        for step in range(4):
            book.whole(rank, "step", 10 * step, 10 * step + 10)
            book.scalar(rank, "loss", 10 * step + 9, math.nan if rank == 1 and step >= 2 else 0.5)
            book.scalar(rank, "accuracy", 10 * step + 9, 0.5)
        book.whole(rank, "call", 0, 40)
    (fault,) = faults_in(book.trace(2))
    assert (fault.kind, fault.ranks) == (FaultKind.RECORDED, (1,))
    assert fault.sentence == "The recorded loss was nan on rank 1 after 2 steps."
