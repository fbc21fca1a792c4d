"""Small traces whose replay can be worked out by hand; all times in milliseconds."""

from labkit.costs.link import Link
from labkit.costs.network import Network
from labkit.tracing.replaying.replay import replay
from labkit.tracing.trace import Trace

from synthetic import in_steps, made  # isort: skip

ONE_GBIT = Link(gbit_per_s=1, latency_us=0)
MB10 = 1_250_000  # bytes that take 10 ms at 1 Gbit/s
FIRST, SECOND = ({"group": "world", "match": match, "nbytes": MB10} for match in (1, 2))


def blocking() -> Trace:
    """Two ranks: forward takes 5 and 8, the all-reduce 2 after the later, the optimizer 1."""
    return in_steps(1, ("forward", (5, 8)), ("all_reduce", 2), ("optimizer", 1), nbytes=MB10)


def beside() -> Trace:
    """Two ranks: backward takes 20; two all-reduces of 3 run beside it from 5 and from 10; nobody waits for them."""
    reduced = [("all_reduce", 5, 8, None, FIRST), ("all_reduce", 10, 13, None, SECOND)]
    return made(*[[("backward", 0, 20), *reduced, ("optimizer", 20, 22), ("step", 0, 22)]] * 2)


def waited() -> Trace:
    """The same, but each rank waits at 20 for the second all-reduce, which took from 10 to 24 with the first."""
    reduced = [("all_reduce", 5, 14, None, FIRST), ("all_reduce", 10, 24, (20, 24), SECOND)]
    return made(*[[("backward", 0, 24), *reduced, ("optimizer", 24, 26), ("step", 0, 26)]] * 2)


def waited_over(link: Link | Network) -> Trace:
    """`waited` over a link, in a run that did not record how long the backend took."""
    trace = replay(waited(), link=link)
    trace.columns.data["backend_ns"] = 0
    return trace


def tensor_parallel() -> Trace:
    """Two ranks, four steps: forward and backward take 9 each, of which an all-reduce in their middle takes 4.5."""
    spans = []
    for at in range(0, 72, 18):
        spans.append(("step", at, at + 18))
        for name, begin in (("forward", at), ("backward", at + 9)):
            spans.append((name, begin, begin + 9))
            spans.append(("all_reduce", begin + 3, begin + 7.5, (begin + 3, begin + 7.5), {"nbytes": MB10}))
    return made(spans, spans)


def sent_afterwards() -> Trace:
    """Two ranks: forward takes 2, backward 5; then two all-reduces take 6 each, and the optimizer takes 1."""
    return in_steps(4, ("forward", 2), ("backward", 5), *[("all_reduce", 6)] * 2, ("optimizer", 1), nbytes=MB10)
