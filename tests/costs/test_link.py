"""A link's numbers, and the times of operations on it: arithmetic, without ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

import labkit as lab
from labkit.costs.link import rounds_and_share
from labkit.costs.shared_link import ENTRIES, SHARED_LINK_BYTES, LinkCost, SharedLink
from labkit.ipc.pickling import shared_memory
from labkit.recording.operations import methods

SLOW = lab.Link(gbit_per_s=0.008, latency_us=1000)  # a million bytes per second, a millisecond

Books = tuple[SharedLink, SharedLink]


@pytest.fixture
def books() -> Iterator[Books]:
    """The same shared link as two ranks see it."""
    fd = shared_memory(SHARED_LINK_BYTES)
    both = SharedLink(fd), SharedLink(os.dup(fd))
    yield both
    for book in both:
        book.close()


def everybody(cost_ns: int, *ranks: int) -> LinkCost:
    return LinkCost(cost_ns, cost_ns, ranks, ranks, len(ranks))


def message(source: int, destination: int, cost_ns: int, busy_ns: int) -> LinkCost:
    return LinkCost(cost_ns, busy_ns, [source], [destination], 2)


@pytest.mark.parametrize(
    ("operation", "ranks", "nbytes", "ms"),
    [  # worked by hand: rounds × 1 ms + share × kB
        ("send", 2, 5000, 1 + 5),
        ("recv", 4, 5000, 1 + 5),
        ("all_reduce", 2, 8000, 2 + 8),
        ("all_reduce", 4, 8000, 6 + 12),
        ("all_reduce_coalesced", 4, 8000, 6 + 12),
        ("all_gather", 4, 8000, 3 + 6),
        ("all_gather_into_tensor_coalesced", 4, 8000, 3 + 6),
        ("reduce_scatter_tensor", 4, 8000, 3 + 6),
        ("all_to_all_single", 4, 8000, 3 + 6),
        ("broadcast", 4, 8000, 2 + 16),
        ("broadcast", 5, 8000, 3 + 24),
        ("reduce", 2, 8000, 1 + 8),
        ("gather", 4, 8000, 2 + 6),
        ("scatter", 3, 9000, 2 + 6),
        ("barrier", 8, 0, 3),
        ("monitored_barrier", 8, 0, 2),
        ("all_reduce", 1, 8000, 0),
        ("broadcast", 1, 8000, 0),
        ("monitored_barrier", 1, 0, 0),
    ],
)
def test_the_cost_of_an_operation(operation: str, ranks: int, nbytes: int, ms: float) -> None:
    assert SLOW.seconds(operation, nbytes, ranks) == pytest.approx(ms / 1e3)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    for ranks in range(1, 40):
        parts = [rounds_and_share(name, ranks) for name in ("reduce_scatter", "all_gather")]
        assert rounds_and_share("all_reduce", ranks) == pytest.approx([sum(part) for part in zip(*parts, strict=True)])


def test_every_recorded_collective_has_a_cost() -> None:
    assert all(SLOW.seconds(form.name, 1000, 4) > 0 for _, form in methods().values())
    with pytest.raises(ValueError, match="'shout' is not an operation with a known cost; expected send, recv, rpc, all_reduce"):
        SLOW.seconds("shout", 1)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (("send", -1), ValueError, "nbytes=-1: expected a number from 0"),
        (("send", float("nan")), ValueError, "nbytes=nan: expected a number from 0"),
        (("send", float("inf")), ValueError, "nbytes=inf: expected a number from 0"),
        (("send", "4 MB"), TypeError, "nbytes='4 MB': expected a number from 0"),
        (("send", True), TypeError, "nbytes=True"),
        (("all_reduce", 1, 0), ValueError, "ranks=0: expected a whole number from 1"),
        (("send", 1, -2), ValueError, "ranks=-2: expected a whole number from 1"),
        (("all_reduce", 1, 2.5), TypeError, r"ranks=2\.5: expected a whole number from 1"),
        ((None, 1), TypeError, "operation=None: expected the name of one, such as 'all_reduce'"),
    ],
)
def test_a_cost_with_invalid_arguments(arguments: tuple[Any, ...], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        SLOW.seconds(*arguments)


@pytest.mark.parametrize(
    ("name", "value", "error", "says"),
    [
        ("gbit_per_s", 0, ValueError, r"=0\): expected a number above 0, in 10⁹ bits per second"),
        ("gbit_per_s", -1, ValueError, r"=-1\)"),
        ("gbit_per_s", float("nan"), ValueError, r"=nan\)"),
        ("gbit_per_s", float("inf"), ValueError, r"=inf\)"),
        ("gbit_per_s", "1", TypeError, r"='1'\)"),
        ("gbit_per_s", True, TypeError, r"=True\)"),
        ("latency_us", -5, ValueError, r"=-5\): expected a number of at least 0, in micro"),
        ("latency_us", None, TypeError, r"=None\)"),
    ],
)
def test_an_impossible_link(name: str, value: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=rf"Link\({name}{says}"):
        lab.Link(**{"gbit_per_s": 1, "latency_us": 1, name: value})


def test_links_by_name() -> None:
    assert str(lab.Link.ethernet_1g) == "ethernet_1g (1 Gbit/s, 50 µs)"
    assert lab.Link.ethernet_1g == lab.Link(gbit_per_s=1, latency_us=50)
    assert lab.Link.nvlink4.bytes_per_s == 450e9
    assert lab.Link.pcie4.bytes_per_s == pytest.approx(31.5e9, rel=0.001)
    named = [value for value in vars(lab.Link).values() if isinstance(value, lab.Link)]
    assert len(named) == 9
    assert all("the latency is assumed" in link.source for link in named)


def test_an_operation_begins_when_its_last_rank_has_arrived(books: Books) -> None:
    first, second = books
    first.arrive("world", 1, 1000, everybody(50, 0, 1))
    assert first.due_ns("world", 1) == 1050  # as far as anybody knows
    second.arrive("world", 1, 4000, everybody(50, 0, 1))
    assert first.due_ns("world", 1) == second.due_ns("world", 1) == 4050


def both_arrive(books: Books, group: str, match: int, cost: LinkCost, at_ns: int = 1000) -> None:
    for book in books:
        book.arrive(group, match, at_ns, cost)


def test_operations_queue_for_the_links_of_their_ranks(books: Books) -> None:
    both_arrive(books, "world", 1, everybody(50, 0, 1))
    both_arrive(books, "world", 2, everybody(50, 0, 1))
    both_arrive(books, "of two others", 1, everybody(50, 2, 3))
    both_arrive(books, "of some", 1, everybody(50, 1, 2))
    both_arrive(books, "world", 3, everybody(50, 0, 1), at_ns=9000)  # the link is idle: at once
    dues = [books[0].due_ns(*key) for key in (("world", 1), ("world", 2), ("of two others", 1), ("of some", 1), ("world", 3))]
    assert dues == [1050, 1100, 1050, 1150, 9050]


def test_both_directions_work_at_once_and_latencies_overlap(books: Books) -> None:
    for number in (1, 2):
        both_arrive(books, "0>1", number, message(0, 1, cost_ns=300, busy_ns=50))
        both_arrive(books, "1>0", number, message(1, 0, cost_ns=300, busy_ns=50))
    dues = [books[0].due_ns(pair, number) for number in (1, 2) for pair in ("0>1", "1>0")]
    assert dues == [1300, 1300, 1350, 1350]


def test_if_ranks_disagree_the_largest_value_counts(books: Books) -> None:
    books[0].arrive("world", 1, 1000, everybody(70, 0, 1))
    books[1].arrive("world", 1, 1000, everybody(50, 0, 1))
    assert books[0].due_ns("world", 1) == 1070


def test_a_refused_operation_does_not_count(books: Books) -> None:
    books[0].arrive("world", 1, 1000, everybody(50, 0, 1))
    books[0].withdraw("world", 1)
    books[1].arrive("world", 1, 2000, everybody(50, 0, 1))
    books[0].arrive("world", 1, 7000, everybody(50, 0, 1))
    assert books[1].due_ns("world", 1) == 7050


def test_an_entry_is_reused_by_a_later_operation(books: Books) -> None:
    for number in (1, 1 + ENTRIES):
        both_arrive(books, "world", number, everybody(50, 0, 1), at_ns=1000 * number)
    assert books[0].due_ns("world", 1) == 0
    assert books[0].due_ns("world", 1 + ENTRIES) == 1000 * (1 + ENTRIES) + 50
    assert books[0].due_ns("nobody's", 1) == 0


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"link": 1}, TypeError, r"link=1: expected a Link, as in link=lab.Link\(gbit_per_s=1, latency_us=50\)"),
        ({"link": lab.Link}, TypeError, "expected a Link"),
        ({"link": SLOW, "runtime": "bare"}, ValueError, "expected runtime='torch' or 'rpc', given 'bare'"),
        ({"link": SLOW, "runtime": "tensorflow"}, ValueError, "given 'tensorflow'"),
    ],
)
@pytest.mark.processes
def test_a_group_that_cannot_have_a_link(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        lab.Group(2, **options)


@pytest.mark.processes
def test_a_group_names_its_link() -> None:
    with lab.Group(4, link=lab.Link.ethernet_1g) as group:
        assert repr(group) == "<Group of 4 torch ranks over ethernet_1g (1 Gbit/s, 50 µs)>"
    assert repr(group) == "<Group of 4 torch ranks over ethernet_1g (1 Gbit/s, 50 µs), closed>"
