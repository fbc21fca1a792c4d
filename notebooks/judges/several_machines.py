"""The exercises of lesson 09b: bytes on the cables, work once per machine, an all-reduce of two levels."""

from __future__ import annotations

import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.recording.schema import Span
from labkit.teaching.exercises.comparisons import expect, expect_numbers, listing, wrong_if
from labkit.teaching.exercises.exercise import Results, exercise
from labkit.tracing.trace import Trace

LESSON = "09b_several_machines"


@exercise(
    LESSON,
    "A ring of all ranks sends nearly 2n over each cable; two levels send the same as a ring of one rank per "
    "machine.",
    # The first two cases tell all mistakes apart.
    [(n, *of, two) for n, of in ((12e6, (3, 4)), (1e6, (2, 2)), (8e6, (4, 1)), (8e6, (1, 4)))
     for two in (False, True)],
    other=lambda random: (
        random.uniform(1e6, 9e7), random.randint(2, 6), random.randint(2, 8), random.choice([False, True])
    ),
)
def crossing_bytes(answer: Any, nbytes: float, machines: int, per_machine: int, two_level: bool) -> None:
    """crossing_bytes(nbytes, machines, per_machine, two_level) returns how many bytes leave each machine over
    its cable in one all-reduce of `nbytes` bytes: of a ring over all ranks, or of two levels."""
    ranks = machines * per_machine
    ring, levels = 2 * (ranks - 1) / ranks * nbytes, 2 * (machines - 1) / machines * nbytes
    right = 0.0 if machines == 1 else levels if two_level else ring
    mistakes: list[tuple[Any, ...]] = []
    if machines == 1:
        mistakes = [(ring, "a single machine sends nothing over its cable")]
    elif per_machine > 1:
        mistakes = [
            (per_machine * ring,
             "that is what all ranks of a machine send together; most of it goes to the next rank of the "
             "same machine", "one rank of each machine has its neighbour on another one"),
            (per_machine * levels, "here every rank sends the whole of x to the other machine",
             "after the reduce-scatter inside its machine, a rank has 1/k of it"),
            (levels / per_machine,
             "that is what one of the machine's ranks sends: the others share the cable with it",
             "each of the k ranks all-reduces 1/k of x with its partners on the other machines"),
            (2 * right, "this is twice as much: count what leaves a machine, not what arrives as well"),
            (right / 2, "half is missing: an all-reduce is a reduce-scatter and an all-gather",
             "2(p − 1) pieces, not p − 1"),
            (ring if two_level else levels, "that is the other kind of all-reduce", "look at `two_level`"),
            (2 * nbytes, "that is 2n, however many take part", "the last piece need not be sent: 2(p − 1)/p"),
        ]
    otherwise = (
        "in a ring, each rank sends 2(p − 1)/p · n to the next one",
        "only one rank of each machine has its neighbour on another machine; count what it sends",
    )
    if two_level:
        otherwise = (
            "inside the machines nothing crosses; between them, each of the k ranks takes part in an "
            "all-reduce of 1/k of x", "the k rings share the cable",
        )
    expect_numbers(answer(nbytes, machines, per_machine, two_level), right, mistakes, *otherwise)


MAKING_S = 0.3  # that `make` takes: who does not wait for it finds nothing


def _once_on_rank(answer: Callable[..., Any], counts: Sequence[int], folder: str) -> tuple[int, bool]:
    """Return this rank called `make`, and whether the file was there when the answer returned."""
    rank = dist.get_rank()
    machine, local = _place(counts)[rank]
    made, calls = Path(folder) / str(machine), []
    os.environ |= {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(counts[machine]),
                   "GROUP_RANK": str(machine)}

    def make() -> None:
        calls.append(rank)
        time.sleep(MAKING_S)
        made.touch()

    answer(make)
    return len(calls), made.exists()


def _call_in_words(counts: Sequence[int]) -> str:
    machines = f"{len(counts)} machine{'s' if len(counts) > 1 else ''}"
    return f"once_per_machine(make) with {' + '.join(map(str, counts))} ranks on {machines}"


@exercise(
    LESSON, "Each machine got its file once, whatever the number of its ranks, and all ranks waited for it.",
    [((2, 2),), ((1, 3),), ((3, 1),), ((4,),)],  # the number of ranks on each machine
    call=_call_in_words,
)
def once_per_machine(answer: Any, counts: Sequence[int]) -> None:
    """once_per_machine(make) runs on every rank. Call make() on one rank of each machine, for instance to
    write a file there; on every rank, return only when the file of its machine exists. torchrun's variable
    LOCAL_RANK is set."""
    with tempfile.TemporaryDirectory() as folder:
        seen = answer.on(sum(counts), _once_on_rank, answer, counts, folder)
    calls: list[list[int]] = [[] for _ in counts]
    for (n, _), (machine, _) in zip(seen, _place(counts), strict=True):
        calls[machine].append(n)
    callers = [f"machine {machine}: make was called by {_callers(n)}" for machine, n in enumerate(calls)]
    of_ranks = [n for n, _ in seen]
    wrong_if(not any(of_ranks), "nobody called make()",
             'LOCAL_RANK is text in os.environ: "0", not 0', *callers)
    wrong_if(all(of_ranks) and len(seen) > len(counts), "every rank called make(): one per machine is enough",
             "which number of a rank begins again on each machine?", *callers)
    wrong_if(not all(map(sum, calls)), "on one machine, no rank called make()",
             "rank 0 is on the first machine only; LOCAL_RANK is 0 on each. It is text in os.environ: "
             '"0", not 0',
             *callers)
    wrong_if(any(sum(n) > 1 for n in calls), "make() was called more than once on a machine",
             "which number of a rank occurs once on each machine, whatever the number of its ranks?", *callers)
    late = [rank for rank, (_, there) in enumerate(seen) if not there]
    wrong_if(late, f"{_ranks(late)} returned before the file was there",
             "which collective of lesson 01 makes every rank wait until all have arrived?", *callers)


def _callers(calls: Sequence[int]) -> str:
    return _ranks([rank for rank, n in enumerate(calls) if n], "local rank") if sum(calls) else "nobody"


def _ranks(numbers: Sequence[int], name: str = "rank") -> str:
    return f"{name}{'s' if len(numbers) > 1 else ''} {listing(list(map(str, numbers)))}"


def _place(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the machine and the local rank of each rank."""
    return [(machine, local) for machine, count in enumerate(counts) for local in range(count)]


COUNTS = [3, 1, 2], [2, 2], [1, 1, 1], [3]
LENGTH = 6


def _x(rank: int) -> Tensor:
    x: Tensor = torch.arange(LENGTH, dtype=torch.float64) + 10**rank
    return x


def _reduce_on_rank(answer: Callable[..., Any], counts: list[int]) -> tuple[Tensor, int]:
    """Return the sum, and how often the rank called `dist.new_group`."""
    x = _x(dist.get_rank())
    with mock.patch.object(dist, "new_group", side_effect=dist.new_group) as new_group:
        answer(x, counts)
    return x, new_group.call_count


@exercise(
    LESSON,
    "The sum on every rank, also where machines have different numbers of ranks, and one rank of each used "
    "the cable.",
    [(counts,) for counts in COUNTS], on_ranks=_reduce_on_rank, ranks=sum,
    call="hierarchical_all_reduce(x, {counts})",
    errors=dict.fromkeys(["is out of range", "rank should be within"],  # the second: before torch 2.13
                         ("a group has a rank that does not exist",
                          "machines differ in size: the first rank of machine m is sum(counts[:m])")),
)
def hierarchical_all_reduce(results: Results, counts: list[int]) -> None:
    """hierarchical_all_reduce(x, counts) runs on every rank: put the sum of all ranks' x into x. `counts` has
    the number of ranks on each machine, consecutive ranks together. Only the first rank of each machine may
    exchange data with other machines."""
    _judge_sums([x for x, _ in results], counts)
    _judge_crossing(results.trace, counts)
    calls = [count for _, count in results]
    fewer = [rank for rank, count in enumerate(calls) if count < max(calls)]  # a later group of theirs hangs
    wrong_if(fewer, "not every rank called dist.new_group for every group",
             "call it for each group on every rank, in the same order, even for those that the rank is not "
             "in",
             f"{max(calls)} calls, but {_ranks(fewer)} made fewer")


def _judge_sums(given: list[Tensor], counts: Sequence[int]) -> None:
    places = _place(counts)
    xs = [_x(rank) for rank in range(len(places))]
    total = torch.stack(xs).sum(0)
    of_machine = [
        torch.stack([x for x, (at, _) in zip(xs, places, strict=True) if at == m]).sum(0) for m, _ in places
    ]
    leaders = torch.stack([x for x, (_, local) in zip(xs, places, strict=True) if local == 0]).sum(0)

    def with_others(others: list[Tensor]) -> list[Tensor]:
        """The first ranks have the sum."""
        return [total if local == 0 else x for x, (_, local) in zip(others, places, strict=True)]

    several = len(counts) > 1 and max(counts) > 1
    expect(given, [total] * len(places), [
        (xs, "x is unchanged", "the collectives work in place, so do not work on a copy"),
        (of_machine, "those are the sums within each machine", "the first ranks still have to add up theirs"),
        (with_others(of_machine),
         "the first ranks have the sum, the others still have the sum of their machine",
         "who has the sum on each machine, and who still needs it?"),
        (with_others(xs), "the first ranks have the sum, the others their own x",
         "who has the sum on each machine, and who still needs it?"),
        ([leaders] * len(places), "those are the sums of the first ranks alone",
         "add up inside each machine before"),
    ] if several else [], "that is not the sum of all ranks' x", "three steps: inside, between, inside",
       "\n".join(f"rank {rank} has {_sum_in_words(x)}" for rank, x in enumerate(given)))


def _sum_in_words(x: Tensor) -> str:
    """Say which ranks' x are in a sum, as its first number tells: rank r has 10^r there."""
    digits = f"{float(x[0]):.0f}"[::-1]
    if not digits.isdecimal() or len(digits) > sum(max(COUNTS, key=sum)) + 1:
        return f"{float(x[0]):g} in its first place"
    parts = [
        f"{'' if digit == '1' else digit + ' · '}x of rank {rank}"
        for rank, digit in enumerate(digits) if digit != "0"
    ]
    return " + ".join(parts) or "nothing"


def _judge_crossing(trace: Trace, counts: Sequence[int]) -> None:
    """Check that only first ranks took part in operations with ranks of several machines."""
    places = _place(counts)
    taking_part: dict[tuple[str, int], list[Span]] = defaultdict(list)
    for span in trace.filter(kind="communication"):
        if span.nbytes:
            taking_part[span.group, span.match].append(span)
    for spans in taking_part.values():
        ranks = sorted({span.rank for span in spans})
        others = [rank for rank in ranks if places[rank][1] > 0]
        wrong_if(others and len({places[rank][0] for rank in ranks}) > 1,
                 "data crosses between machines from or to a rank that is not the first of its machine",
                 "make a group for each machine and one of the first ranks, with dist.new_group, on every "
                 "rank",
                 f"{spans[0].name} of {_ranks(ranks)}: not the first of their machine: {_ranks(others)}")
