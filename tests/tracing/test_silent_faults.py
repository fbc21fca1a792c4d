"""Faults that a trace shows by itself, in traces made by hand; healthy ones of the same kind yield nothing."""

import math

import pytest
from synthetic import Book, data_parallel, master_and_workers, model_parallel

from labkit.recording.group_keys import of_ranks, pair_key
from labkit.recording.schema import COMMUNICATION
from labkit.tracing.load import load_trace
from labkit.tracing.silent_faults import FaultKind, faults_in

MB = 1 << 20


def kinds(trace):
    return [fault.kind for fault in faults_in(trace)]


def stepping(*counts, after=()):
    """Ranks whose optimizers step so often, in data-parallel training; then operations of all ranks of these sizes."""
    book = Book()
    most = max(counts)
    for rank, count in enumerate(counts):
        for step in range(most):
            book.compute(rank, "backward", 10 * step, 10 * step + 5)
            book.travel(rank, "all_reduce", 10 * step + 1, 10 * step + 4, nbytes=MB, group="world", match=step + 1)
            if step < count:
                book.compute(rank, "optimizer", 10 * step + 6, 10 * step + 8, line="cell 3, line 9")
        for number, (name, nbytes) in enumerate(after):
            at = 10 * most + number
            book.travel(rank, name, at, at + 1, nbytes=nbytes, group="world", match=most + number + 1)
        book.whole(rank, "call", 0, 10 * most + 10)
    return book.trace(len(counts))


@pytest.mark.parametrize("counts", [(5, 4), (5, 0), (0, 5), (3, 3, 2)])
def test_ranks_that_step_differently(counts):
    (fault,) = faults_in(stepping(*counts))
    assert (fault.kind, fault.line, fault.ranks) == (FaultKind.OPTIMIZER_STEPS, "cell 3, line 9", tuple(range(len(counts))))
    assert fault.certain
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


def by_hand(*counts, nbytes=MB):
    """Ranks that average gradients after the backward pass, by hand."""
    book = Book()
    for rank, count in enumerate(counts):
        for step in range(max(counts)):
            book.travel(rank, "all_reduce", 10 * step + 1, 10 * step + 4, nbytes=nbytes, group="world", match=step + 1)
            if step < count:
                book.compute(rank, "optimizer", 10 * step + 6, 10 * step + 8, line="cell 3, line 9")
        book.whole(rank, "call", 0, 10 * max(counts) + 10)
    return book


def test_ranks_that_average_by_hand_may_train_one_model():
    (fault,) = faults_in(by_hand(5, 4).trace(2))
    assert (fault.kind, fault.certain) == (FaultKind.OPTIMIZER_STEPS_BY_HAND, False)
    assert str(fault).startswith("Perhaps: The optimizer")
    assert kinds(by_hand(5, 4, nbytes=8).trace(2)) == [], "they average only losses, as in a search for a learning rate"
    book = by_hand(3, 3)
    for step in range(7):  # one rank has another optimizer beside the common one, as for a probe of the features
        book.compute(0, "optimizer", 40 + step, 40.5 + step, line="cell 3, line 9")
    assert kinds(book.trace(2)) == []


def test_one_rank_that_steps_may_send_the_others_what_it_has():
    book = Book()
    for rank in range(2):
        for step in range(3):
            book.travel(rank, "reduce", 10 * step, 10 * step + 2, nbytes=MB, group="world", match=2 * step + 1, root=0)
            if rank == 0:
                book.compute(0, "optimizer", 10 * step + 3, 10 * step + 4)
            book.travel(rank, "broadcast", 10 * step + 5, 10 * step + 7, nbytes=MB, group="world", match=2 * step + 2, root=0)
        book.whole(rank, "call", 0, 40)
    assert kinds(book.trace(2)) == []


def test_ranks_that_exchange_messages_may_have_different_tasks():
    book = Book()
    for rank, count in enumerate((5, 1)):
        for step in range(count):
            book.compute(rank, "optimizer", 10 * step, 10 * step + 1)
        book.travel(rank, ("send", "recv")[rank], 60, 61, nbytes=MB, peer=1 - rank, group=pair_key(0, 1, 0), match=1)
        book.whole(rank, "call", 0, 70)
    assert kinds(book.trace(2)) == []


def test_ranks_that_were_not_called():
    """Only rank 0 calls the function, the others serve."""
    book = Book()
    book.compute(0, "optimizer", 0, 1)
    book.travel(0, "all_reduce", 2, 3, nbytes=4, group=of_ranks("g", [0]), match=1)
    book.whole(0, "call", 0, 4)
    assert kinds(book.trace(3)) == []


def test_an_operation_that_nobody_waits_for():
    book = Book()
    for rank in range(3):
        waited = rank == 1
        book.travel(rank, "all_reduce", 0, 5, nbytes=MB, group="world", match=1, line="cell 2, line 4", waited=waited)
        book.travel(rank, "all_gather", 6, 9, nbytes=MB, group="world", match=2, line="cell 2, line 7", waited=False)
        book.whole(rank, "call", 0, 10)
    one, all_of_them = faults_in(book.trace(3))
    assert (one.kind, one.ranks, one.line, one.certain) == (FaultKind.NEVER_WAITED_FOR, (0, 2), "cell 2, line 4", True)
    assert "on rank 0 and rank 2" in one.sentence
    assert (all_of_them.ranks, all_of_them.line) == ((0, 1, 2), "cell 2, line 7")
    assert " on rank" not in all_of_them.sentence


def test_it_counts_neither_as_hidden_nor_as_exposed(tmp_path):
    book = Book()
    book.compute(0, "forward", 0, 10)
    for match, (start, end, waited) in enumerate(((2, 6, False), (7, 9, True), (10, 13, False)), 1):
        book.travel(0, "all_reduce", start, end, nbytes=MB, group="world", match=match, waited=waited)
    trace = book.trace(1)
    (share,) = trace.shares()
    assert (share.overlap_ns, share.exposed_ns, share.compute_ns) == (2_000_000, 0, 10_000_000)
    loaded = load_trace(trace.save(tmp_path / "x.json"))
    assert [span.waited for span in loaded.filter(kind="communication")] == [False, True, False]


def rooted(*calls):
    """Broadcasts in groups of ranks: for each call, the group's ranks, its root, and its line."""
    book = Book()
    for match, (members, root, line) in enumerate(calls):
        for rank in members:
            key = of_ranks(f"group {min(members)}", members)
            book.travel(rank, "broadcast", match, match + 0.5, nbytes=8, group=key, match=match + 1, root=root, line=line)
    return book.trace(4)


def test_a_root_at_another_place_of_a_sibling_group():
    (fault,) = faults_in(rooted(((0, 2), 0, "cell 1, line 3"), ((1, 3), 3, "cell 1, line 3")))
    assert (fault.kind, fault.line, fault.certain) == (FaultKind.OTHER_ROOT, "cell 1, line 3", False)
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
