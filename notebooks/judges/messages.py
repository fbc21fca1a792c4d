"""The exercises of lesson 01: a link from two times, a ring all-reduce and a tree broadcast over messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from labkit.errors.lists import counted
from labkit.exercises.calculations import Expected, judge_calculation
from labkit.exercises.comparisons import equal
from labkit.exercises.judging import AnswerError, Hint, OnRanks, exercise, explaining
from labkit.exercises.random_state import case_seed
from labkit.recording.operations import OTHER, RECV, SEND, type_of

LESSON = "01_messages_and_collectives"
FLOAT = 4  # bytes
DIFFERENCES = "in the difference of the two times, it cancels: divide the difference of the sizes by that"


@exercise(
    LESSON,
    "link_from_times(n1, t1, n2, t2): two messages of n1 and n2 bytes took t1 and t2 seconds over one link. Return its "
    "latency in seconds and its bandwidth in bytes per second.",
    "Two times of different sizes are enough to know a link.",
)
def _link_from_times(answer: Any, _: OnRanks) -> None:
    random = np.random.default_rng()
    drawn = random.uniform(1e-5, 1e-2), random.uniform(1e7, 1e9), 4096, int(random.integers(10**6, 10**7))
    for latency_s, rate, n1, n2 in ((0.005, 125e6, 1000, 1_000_000), (20e-6, 5e9, 100, 64_000_000), drawn):
        case = n1, latency_s + n1 / rate, n2, latency_s + n2 / rate
        judge_calculation(answer, "link_from_times", case, _link(latency_s, rate, *case), same=_same_link)


def _link(latency_s: float, rate: float, n1: int, t1: float, n2: int, t2: float) -> Expected:
    mistakes: dict[Hint, list[float | None]] = {  # None: with any latency
        "right, but in the other order: first the latency, then the bandwidth": [rate, latency_s],
        "the bandwidth is in bits per second; the sizes are in bytes, and so is the result": [None, 8 * rate],
        ("that is the time per byte, not the bandwidth", "the bandwidth is its inverse"): [None, 1 / rate],
        ("the bandwidth comes from the second time alone, and the latency is a part of it", DIFFERENCES): [None, n2 / t2],
        ("the bandwidth comes from the first time alone, and the latency is a part of it", DIFFERENCES): [None, n1 / t1],
    }

    def otherwise(given: list[float]) -> Hint:
        if equal(given[1], rate, within=1e-3):
            return (
                "the bandwidth is right, the latency is not",
                "the latency is what is left of a time when its bytes have been paid for",
            )
        return "two messages of one link give two equations, t = α + n/B, with the same α and B"

    form = "two numbers, latency in s and bandwidth in bytes/s"
    return Expected([latency_s, rate], mistakes, otherwise, form)


def _same_link(a: Sequence[float | None], b: Sequence[float | None]) -> bool:
    """Whether latency and bandwidth are equal; a latency that is None equals all others."""
    return all(None in (x, y) or equal(x, y, within=1e-3) for x, y in zip(a, b, strict=True))


class _Outcome(NamedTuple):
    """What one rank did.

    Args:
        result: its tensor afterwards.
        sent: receiving rank and number of elements of each message, in order.
        collectives: the names of the collectives that it called.
    """

    result: list[float]
    sent: list[tuple[int, int]]
    collectives: list[str]


def _tensor(rank: int, length: int) -> torch.Tensor:
    return torch.randint(-9, 10, (length,), generator=torch.Generator().manual_seed(case_seed(100 * length + rank))).float()


def _on_rank(answer: Callable[[torch.Tensor], object], length: int) -> list[float]:
    x = _tensor(dist.get_rank(), length)
    answer(x)
    return x.tolist()


def _run(answer: Any, on: OnRanks, ranks: int, length: int) -> list[_Outcome]:
    results = on(ranks, _on_rank, answer, length)
    outcomes = []
    for rank, result in enumerate(results):
        spans = sorted(results.trace.filter(rank=rank, kind="communication"), key=lambda span: span.start_ns)
        sent = [(span.peer, span.nbytes // FLOAT) for span in spans if type_of(span.name) is SEND]
        # A call to the store has a span only if it had to wait, and is judged by the messages that are missing.
        others = [span.name for span in spans if type_of(span.name) not in (SEND, RECV, OTHER)]
        outcomes.append(_Outcome(result, sent, others))
    return outcomes


ISEND = "dist.isend starts a message without waiting"


def _messages_of(answer: Any, on: OnRanks, ranks: int, length: int, case: str) -> list[_Outcome]:
    """Run the answer, which may only use messages."""
    try:
        outcomes = _run(answer, on, ranks, length)
    except AnswerError as error:
        if error.waits_in and {type_of(name) for name in error.waits_in} == {SEND}:
            hint = "every rank waits in send until its neighbour receives, and none does"
            raise AnswerError(f"{case}: {hint}", error.message, *error.details, cure=ISEND) from None
        raise
    used = sorted({name for outcome in outcomes for name in outcome.collectives})
    if used:
        raise AnswerError(f"{case}: {used[0]} does the work; write it with send, isend, recv and irecv")
    return outcomes


@exercise(
    LESSON,
    "ring_all_reduce(x) runs on every rank: with messages to the next rank only, put the sum of all ranks' x into x. It "
    "works for any length and any number of ranks, and sends one part of p in each round.",
    "The sum on every rank, for any length, and each rank sends 2(p-1) parts of p, to one neighbour.",
)
def _ring_all_reduce(answer: Any, on: OnRanks) -> None:
    for ranks, length in ((3, 12), (2, 2), (4, 13), (3, 2), (1, 5)):
        case = f"ring_all_reduce(x) on {counted(ranks, 'rank')}, {counted(length, 'number')}"
        with explaining({"": (f"{case}: {UNEVEN}", EVEN)} if length % ranks else {}):
            outcomes = _messages_of(answer, on, ranks, length, case)
        own = [_tensor(rank, length).tolist() for rank in range(ranks)]
        expected = [sum(values) for values in zip(*own, strict=True)]
        for rank, outcome in enumerate(outcomes):
            if outcome.result != expected:
                raise _wrong_sum(case, rank, outcomes, own, expected, even=length % ranks == 0)
        _check_ring(case, ranks, length, outcomes)


UNEVEN = (
    "the ranks do not divide the length: `chunk` may give parts of other sizes than you expect, or fewer than there are ranks"
)
EVEN = "`tensor_split(p)` always gives p parts, whose sizes differ by one at most"


def _wrong_sum(
    case: str, rank: int, outcomes: list[_Outcome], own: list[list[float]], expected: list[float], *, even: bool
) -> AnswerError:
    got = outcomes[rank].result
    details = (f"rank {rank} has {got}", f"expected    {expected}")
    if all(outcome.result == mine for outcome, mine in zip(outcomes, own, strict=True)):
        return AnswerError(f"{case}: x is unchanged; the sum must end up in x itself, as with dist.all_reduce", *details)
    if len(outcomes) > 1 and all(len(outcome.sent) < len(outcomes) for outcome in outcomes):
        cure = "after p-1 rounds of adding come p-1 rounds of copying"
        return AnswerError(f"{case}: only a part is complete on each rank", *details, cure=cure)
    if not even:
        return AnswerError(f"{case}: {UNEVEN}", *details, cure=EVEN)
    if len(outcomes) > 1 and np.allclose(np.multiply(got, len(outcomes)), expected):
        return AnswerError(f"{case}: that is the mean; all_reduce gives the sum", *details)
    if all(len(outcome.sent) == 2 * len(outcomes) - 2 for outcome in outcomes):
        cure = "in the second half, what arrives replaces the part and is not added"
        return AnswerError(f"{case}: some values are added more than once", *details, cure=cure)
    return AnswerError(f"{case}: the sums are wrong: write down for p = 3 which part each rank sends in each round", *details)


def _check_ring(case: str, ranks: int, length: int, outcomes: list[_Outcome]) -> None:
    """Check that each rank sends what a ring needs, and no more."""
    most, rounds = 2 * (ranks - 1) * -(-length // ranks), 2 * (ranks - 1)
    for rank, outcome in enumerate(outcomes):
        elements = sum(count for _, count in outcome.sent)
        sent = f"rank {rank} sent {counted(elements, 'number')} in {counted(len(outcome.sent), 'message')}"
        details = (f"{sent}; a ring needs at most {most} in {rounds}",)
        if elements > most:
            whole = any(count == length > 1 for _, count in outcome.sent)
            hint = "whole tensors go round: in each round, send one part of p" if whole else "more is sent than a ring needs"
            raise AnswerError(f"{case}: right, but {hint}", *details)
        if len(outcome.sent) > rounds:
            raise AnswerError(f"{case}: right, but there are too many messages: send a part in one message", *details)
        if len({peer for peer, _ in outcome.sent}) > 1:
            raise AnswerError(f"{case}: right, but no ring: each rank sends to the next rank only", *details)
    total = sum(count for outcome in outcomes for _, count in outcome.sent)
    least = 2 * (ranks - 1) * length  # each number is added up in p - 1 messages, and the sum copied in p - 1
    if total < least:
        raise AnswerError(
            f"{case}: right, but not by messages: a sum on all ranks needs more numbers sent than there were",
            f"all ranks together sent {counted(total, 'number')}; the least is {least}",
        )


@exercise(
    LESSON,
    "tree_broadcast(x) runs on every rank: with messages, put rank 0's x into every rank's x, in as few rounds as possible. "
    "In a round, each rank sends at most one message.",
    "Every rank has it after ⌈log₂ p⌉ rounds, in which the number of ranks that have it doubles.",
)
def _tree_broadcast(answer: Any, on: OnRanks) -> None:
    length = 6
    for ranks in (4, 2, 3, 5, 1):
        case = f"tree_broadcast(x) on {counted(ranks, 'rank')}"
        missing_ranks = f"{case}: {ranks} is not a power of two, and some receivers do not exist"
        is_power = ranks & (ranks - 1) == 0
        with explaining({} if is_power else {"": (missing_ranks, "send only to ranks below the world size")}):
            outcomes = _messages_of(answer, on, ranks, length, case)
        root = _tensor(0, length).tolist()
        missing = [rank for rank, outcome in enumerate(outcomes) if outcome.result != root]
        if missing:
            hint, cure = f"rank {missing[0]} does not have what rank 0 has", ""
            if len(missing) == ranks - 1:
                hint, cure = "no rank has in its x what rank 0 has", "receive into x itself"
            raise AnswerError(f"{case}: {hint}", f"given {outcomes[missing[0]].result}, expected {root}", cure=cure)
        _check_tree(case, ranks, length, outcomes)


def _check_tree(case: str, ranks: int, length: int, outcomes: list[_Outcome]) -> None:
    received = [peer for outcome in outcomes for peer, _ in outcome.sent]
    if len(received) > len(set(received)) or 0 in received:
        twice = next(peer for peer in received if received.count(peer) > 1 or peer == 0)
        raise AnswerError(
            f"{case}: right, but rank {twice} {'is the root' if twice == 0 else 'receives it twice'}; once is enough"
        )
    # A rank sends one message per round; what it receives in round r, it can pass on from round r + 1.
    rounds, order = {0: 0}, [0]
    for rank in order:
        for number, (peer, _) in enumerate(outcomes[rank].sent, 1):
            rounds[peer] = rounds[rank] + number
            order.append(peer)
    if len(rounds) < ranks or any(count < length for outcome in outcomes for _, count in outcome.sent):
        reached = f"from rank 0, whole messages reach {counted(len(rounds) - 1, 'rank')} of {ranks - 1}"
        raise AnswerError(f"{case}: right, but not by messages: each rank receives the whole x from a rank that has it", reached)
    needed, allowed = max(rounds.values()), math.ceil(math.log2(ranks))
    if needed > allowed:
        star = len(outcomes[0].sent) == ranks - 1
        hint = "rank 0 sends everything itself" if star else "it takes too many rounds"
        cure = "every rank that has the data can send in every round, from the next one on"
        raise AnswerError(f"{case}: right, but {hint}", f"given {needed} rounds, expected {allowed}", cure=cure)
