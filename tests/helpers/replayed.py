"""Small traces whose replay can be worked out by hand; all times in milliseconds."""

from labkit.costs.link import Link
from labkit.costs.network import Network
from labkit.tracing.replaying.replay import replay
from labkit.tracing.trace import Trace

from synthetic import Book, in_steps  # isort: skip

ONE_GBIT = Link(gbit_per_s=1, latency_us=0)
MB10 = 1_250_000  # bytes that take 10 ms at 1 Gbit/s


def all_reduce(book: Book, issued: list[float], end: float, match: int = 1, wait: list[float] | None = None) -> None:
    """An all-reduce of 10 ms at 1 Gbit/s; each rank waits from `wait` on, unless that is later than its end."""
    for rank, start in enumerate(issued):
        since = (wait or issued)[rank]
        blocked = (since, end) if since < end else None
        book.travel(rank, "all_reduce", start, end, group="world", match=match, nbytes=MB10, wait=blocked)


def blocking() -> Trace:
    """Two ranks: forward takes 5 and 8, the all-reduce 2 after the later, the optimizer 1."""
    return in_steps(1, ("forward", (5, 8)), ("all_reduce", 2), ("optimizer", 1), nbytes=MB10)


def beside() -> Trace:
    """Two ranks: backward takes 20; two all-reduces of 3 run beside it from 5 and from 10; nobody waits for them."""
    book = Book()
    for rank in range(2):
        book.compute(rank, "backward", 0, 20)
        book.compute(rank, "optimizer", 20, 22)
        book.whole(rank, "step", 0, 22)
    for match, issued in ((1, 5.0), (2, 10.0)):
        all_reduce(book, [issued] * 2, issued + 3, match=match, wait=[99, 99])
    return book.trace(2)


def waited() -> Trace:
    """The same, but each rank waits at 20 for the second all-reduce, which took from 10 to 24 with the first."""
    book = Book()
    for rank in range(2):
        book.compute(rank, "backward", 0, 24)
        book.compute(rank, "optimizer", 24, 26)
        book.whole(rank, "step", 0, 26)
    all_reduce(book, [5, 5], 14, match=1, wait=[99, 99])
    all_reduce(book, [10, 10], 24, match=2, wait=[20, 20])
    return book.trace(2)


def waited_over(link: Link | Network) -> Trace:
    """`waited` over a link, in a run that did not record how long the backend took."""
    trace = replay(waited(), link=link)
    trace.columns.data["backend_ns"] = 0
    return trace


def tensor_parallel(steps: int = 4) -> Trace:
    """Two ranks: forward and backward take 9 each, of which an all-reduce in their middle takes 4.5."""
    book, at, match = Book(), 0.0, 0
    for _ in range(steps):
        start = at
        for name in ("forward", "backward"):
            for rank in range(2):
                key = {"group": "tp", "match": match, "nbytes": MB10}
                book.compute(rank, name, at, at + 9)
                book.travel(rank, "all_reduce", at + 3, at + 7.5, wait=(at + 3, at + 7.5), **key)
            at, match = at + 9, match + 1
        for rank in range(2):
            book.whole(rank, "step", start, at)
    return book.trace(2)


def sent_afterwards() -> Trace:
    """Two ranks: forward takes 2, backward 5; then two all-reduces take 6 each, and the optimizer takes 1."""
    return in_steps(4, ("forward", 2), ("backward", 5), *[("all_reduce", 6)] * 2, ("optimizer", 1), nbytes=MB10)
