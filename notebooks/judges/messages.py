"""The exercises of lesson 01: a link from two times, a ring all-reduce and a tree broadcast over messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from labkit.errors.lists import counted
from labkit.recording.operations import OTHER, RECV, SEND, type_of
from labkit.teaching.exercises.comparisons import Hint, equal, expect_numbers, wrong_if
from labkit.teaching.exercises.exercise import Results, exercise, messages_sent
from labkit.teaching.exercises.random_state import case_seed

LESSON = "01_messages_and_collectives"
FLOAT = 4  # bytes
DIFFERENCES = "in the difference of the two times, it cancels: divide the difference of the sizes by that"


def _links(random: Random) -> list[tuple[float, ...]]:
    drawn = random.uniform(1e-5, 1e-2), random.uniform(1e7, 1e9), 4096, random.randint(10**6, 10**7)
    links = (0.005, 125e6, 1000, 1_000_000), (20e-6, 5e9, 100, 64_000_000), drawn
    return [(n1, latency_s + n1 / rate, n2, latency_s + n2 / rate) for latency_s, rate, n1, n2 in links]


def _same_link(a: Sequence[float | None], b: Sequence[float | None]) -> bool:
    """Whether latency and bandwidth are equal; a latency that is None equals all others."""
    return all(None in (x, y) or equal(x, y, within=1e-3) for x, y in zip(a, b, strict=True))


@exercise(LESSON, "Two times of different sizes are enough to know a link.", _links)
def link_from_times(answer: Any, n1: int, t1: float, n2: int, t2: float) -> None:
    """link_from_times(n1, t1, n2, t2): two messages of n1 and n2 bytes took t1 and t2 seconds over one link.
    Return its latency in seconds and its bandwidth in bytes per second."""
    rate = (n2 - n1) / (t2 - t1)
    latency_s = t1 - n1 / rate

    def otherwise(given: list[float]) -> Hint:
        if equal(given[1], rate, within=1e-3):
            return ("the bandwidth is right, the latency is not",
                    "the latency is what is left of a time when its bytes have been paid for")
        return "two messages of one link give two equations, t = α + n/B, with the same α and B"

    expect_numbers(answer(n1, t1, n2, t2), [latency_s, rate], [  # None: with any latency
        ([rate, latency_s], "right, but in the other order: first the latency, then the bandwidth"),
        ([None, 8 * rate],
         "the bandwidth is in bits per second; the sizes are in bytes, and so is the result"),
        ([None, 1 / rate], "that is the time per byte, not the bandwidth", "the bandwidth is its inverse"),
        ([None, n2 / t2],
         "the bandwidth comes from the second time alone, and the latency is a part of it", DIFFERENCES),
        ([None, n1 / t1],
         "the bandwidth comes from the first time alone, and the latency is a part of it", DIFFERENCES),
    ], otherwise, form="two numbers, latency in s and bandwidth in bytes/s", same=_same_link)


def _tensor(rank: int, length: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(case_seed(100 * length + rank))
    return torch.randint(-9, 10, (length,), generator=random).float()


def _on_rank(answer: Callable[[torch.Tensor], object], length: int) -> list[float]:
    x = _tensor(dist.get_rank(), length)
    answer(x)
    return x.tolist()


def _sent(results: Results) -> list[list[tuple[int, int]]]:
    """Return receiving rank and number of elements of each message; the answer may use nothing else."""
    for name in sorted({span.name for span in results.trace.filter(kind="communication")}):
        wrong_if(type_of(name) not in (SEND, RECV, OTHER),
                 f"{name} does the work; write it with send, isend, recv and irecv")
    return messages_sent(results, FLOAT)


WAITING = {"deadlock in send": (
    "every rank waits in send until its neighbour receives, and none does",
    "dist.isend starts a message without waiting",
)}
UNEVEN = (
    "the ranks do not divide the length: `chunk` may give parts of other sizes than you expect, or fewer "
    "than there are ranks",
    "`tensor_split(p)` always gives p parts, whose sizes differ by one at most",
)


@exercise(
    LESSON, "The sum on every rank, for any length, and each rank sends 2(p-1) parts of p, to one neighbour.",
    [(3, 12), (2, 2), (4, 13), (3, 2), (1, 5)], on_ranks=_on_rank,
    call=lambda ranks, length: (
        f"ring_all_reduce(x) on {counted(ranks, 'rank')}, {counted(length, 'number')}"
    ),
    errors=lambda ranks, length: WAITING | ({"": UNEVEN} if length % ranks else {}),
)
def ring_all_reduce(results: Results, ranks: int, length: int) -> None:
    """ring_all_reduce(x) runs on every rank: with messages to the next rank only, put the sum of all ranks' x
    into x. It works for any length and any number of ranks, and sends one part of p in each round."""
    sent = _sent(results)
    own = [_tensor(rank, length).tolist() for rank in range(ranks)]
    right = [sum(values) for values in zip(*own, strict=True)]
    for rank, x in enumerate(results):
        if x == right:
            continue
        shown = f"rank {rank} has {x}", f"expected    {right}"
        wrong_if(results == own, "x is unchanged; the sum must end up in x itself, as with dist.all_reduce",
                 "", *shown)
        wrong_if(ranks > 1 and max(map(len, sent)) < ranks, "only a part is complete on each rank",
                 "after p-1 rounds of adding come p-1 rounds of copying", *shown)
        wrong_if(length % ranks, *UNEVEN, *shown)
        wrong_if(ranks > 1 and np.allclose(np.multiply(x, ranks), right),
                 "that is the mean; all_reduce gives the sum", "", *shown)
        wrong_if(all(len(messages) == 2 * ranks - 2 for messages in sent),
                 "some values are added more than once",
                 "in the second half, what arrives replaces the part and is not added", *shown)
        wrong_if(True, "the sums are wrong: write down for p = 3 which part each rank sends in each round",
                 "", *shown)
    # What a ring needs is sent, and no more.
    most, rounds = 2 * (ranks - 1) * -(-length // ranks), 2 * (ranks - 1)
    for rank, messages in enumerate(sent):
        elements = sum(count for _, count in messages)
        counts = (f"rank {rank} sent {counted(elements, 'number')} in {counted(len(messages), 'message')}; a "
                  f"ring needs at most {most} in {rounds}")
        wrong_if(elements > most and any(count == length > 1 for _, count in messages),
                 "right, but whole tensors go round: in each round, send one part of p", "", counts)
        wrong_if(elements > most, "right, but more is sent than a ring needs", "", counts)
        wrong_if(len(messages) > rounds, "right, but there are too many messages: send a part in one message",
                 "", counts)
        wrong_if(len({peer for peer, _ in messages}) > 1,
                 "right, but no ring: each rank sends to the next rank only", "", counts)
    total = sum(count for messages in sent for _, count in messages)
    least = 2 * (ranks - 1) * length  # each number is added up in p - 1 messages, and the sum copied in p - 1
    wrong_if(total < least,
             "right, but not by messages: a sum on all ranks needs more numbers sent than there were", "",
             f"all ranks together sent {counted(total, 'number')}; the least is {least}")


@exercise(
    LESSON, "Every rank has it after ⌈log₂ p⌉ rounds, in which the number of ranks that have it doubles.",
    [(4, 6), (2, 6), (3, 6), (5, 6), (1, 6)], on_ranks=_on_rank,
    call=lambda ranks, _: f"tree_broadcast(x) on {counted(ranks, 'rank')}",
    errors=lambda ranks, _: WAITING | ({} if ranks & (ranks - 1) == 0 else {"": (
        f"{ranks} is not a power of two, and some receivers do not exist",
        "send only to ranks below the world size",
    )}),
)
def tree_broadcast(results: Results, ranks: int, length: int) -> None:
    """tree_broadcast(x) runs on every rank: with messages, put rank 0's x into every rank's x, in as few
    rounds as possible. In a round, each rank sends at most one message."""
    sent = _sent(results)
    root = _tensor(0, length).tolist()
    missing = [rank for rank, x in enumerate(results) if x != root]
    for rank in missing:
        shown = f"given {results[rank]}, expected {root}"
        wrong_if(len(missing) == ranks - 1, "no rank has in its x what rank 0 has",
                 "receive into x itself", shown)
        wrong_if(True, f"rank {rank} does not have what rank 0 has", "", shown)
    for peer in (received := [peer for messages in sent for peer, _ in messages]):
        wrong_if(received.count(peer) > 1 or peer == 0, f"right, but rank {peer} "
                 f"{'is the root' if peer == 0 else 'receives it twice'}; once is enough")
    # A rank sends one message per round; what it receives in round r, it can pass on from round r + 1.
    rounds, order = {0: 0}, [0]
    for rank in order:
        for number, (peer, _) in enumerate(sent[rank], 1):
            rounds[peer] = rounds[rank] + number
            order.append(peer)
    wrong_if(len(rounds) < ranks or any(count < length for messages in sent for _, count in messages),
             "right, but not by messages: each rank receives the whole x from a rank that has it", "",
             f"from rank 0, whole messages reach {counted(len(rounds) - 1, 'rank')} of {ranks - 1}")
    needed, allowed = max(rounds.values()), math.ceil(math.log2(ranks))
    star = len(sent[0]) == ranks - 1
    wrong_if(needed > allowed,
             f"right, but {'rank 0 sends everything itself' if star else 'it takes too many rounds'}",
             "every rank that has the data can send in every round, from the next one on",
             f"given {needed} rounds, expected {allowed}")
