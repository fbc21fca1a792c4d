"""The exercises of lesson 13: a critical path, a straggler, a virtual speed-up, what pays, an exchange."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from random import Random
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.costs.link import Link
from labkit.teaching.exercises.answer_ranks import run_on_ranks
from labkit.teaching.exercises.comparisons import expect, expect_numbers, whole_numbers, wrong_if
from labkit.teaching.exercises.exercise import Results, exercise
from labkit.teaching.exercises.random_state import case_seed

LESSON = "13_find_the_bottleneck"

Tasks = list[tuple[float, list[int]]]  # of each task: its duration in ms, and the earlier tasks that it needs

# In the first, each mistake gives another list.
TASKS: Final[tuple[Tasks, ...]] = (
    [(8, []), (6, [0]), (9, [0]), (12, [1]), (7, [1]), (3, [2]), (8, [3, 5]), (9, [0]), (9, [4, 7, 6]),
     (30, []), (2, [7])],
    [(4, []), (5, []), (3, [0, 1]), (2, [2])],
    [(7, [])],
    [(1, []), (1, [0]), (1, [1]), (10, []), (2, [2, 3]), (20, [0]), (1, [4])],
)


def _ends(tasks: Tasks) -> list[float]:
    """Return when each task ends, if each begins when all that it needs have ended."""
    ends: list[float] = []
    for ms, needs in tasks:
        ends.append(ms + max((ends[need] for need in needs), default=0))
    return ends


def _back(tasks: Tasks, last: int, key: Callable[[int], float]) -> list[int]:
    """Return the tasks back from the last one, where `key` says which of the needed tasks to follow."""
    path = [last]
    while needs := tasks[path[0]][1]:
        path.insert(0, max(needs, key=key))
    return path


ENDS = "compute when each task ends: its duration, added to the latest end of those that it needs"


@exercise(
    LESSON, "Each task on the path had to wait for the one before it, and the last one ends last.",
    [(tasks,) for tasks in TASKS],
)
def longest_path(answer: Any, tasks: Tasks) -> None:
    """longest_path(tasks) returns the numbers of the tasks on the critical path, in order. `tasks[i]` is (ms,
    needs): the task's duration, and the numbers of the tasks that must have ended before it begins; these are
    smaller than i."""
    ends = _ends(tasks)
    last = max(range(len(tasks)), key=lambda task: ends[task])
    longest = max(range(len(tasks)), key=lambda task: tasks[task][0])
    right = _back(tasks, last, ends.__getitem__)
    given = whole_numbers(answer(tasks), "a list with the numbers of tasks")
    otherwise = "another path is longer"
    cure = "compute when each task ends, and go back from the last one to the need that ended last"
    for one, other in pairwise(given):
        if not 0 <= other < len(tasks) or one not in tasks[other][1]:
            otherwise, cure = f"task {other} does not need task {one}, so it never waited for it", ""
            break
    expect(given, right, [
        (right[::-1], "these are the right tasks, the last one first", "the path begins with the task that needs nothing"),
        (_back(tasks, longest, ends.__getitem__),
         "the path ends at the longest task, which need not be the one that ends last", ENDS),
        (_back(tasks, len(tasks) - 1, ends.__getitem__),
         "the path ends at the last task of the list, which need not be the one that ends last", ENDS),
        (_back(tasks, last, lambda need: tasks[need][0]),
         "where a task needs several, the path follows the longest of them: which one did the task wait for?",
         "the one that ended last, whatever its own duration"),
        (_back(tasks, last, lambda need: -need),
         "where a task needs several, the path follows the first of them: which one did the task wait for?",
         "the one that ended last"),
        ([*range(len(tasks))], "those are all tasks; most of them nobody waited for",
         "go back from the task that ends last"),
        (right[:-1], "the path leaves out the task that ends last", "the path ends with it"),
        (right[1:], "the path leaves out the task that begins it", "go on until a task needs nothing"),
    ], otherwise, cure, f"given {given}, expected {right}")


Spans = list[tuple[int, str, float, float]]  # rank, name, start and end in ms


def _spans(work: Sequence[Sequence[float]], transfer: float, own: Sequence[float]) -> Spans:
    """Return the spans of a program in which each rank computes, then takes part in an all-reduce.

    Args:
        work: for each step, how long each rank computes.
        transfer: how long an all-reduce takes, once all ranks have arrived.
        own: for each rank, how long its optimizer takes afterwards; 0: it has none.
    """
    free: list[float] = [0] * len(own)
    spans: Spans = []
    for of_step in work:
        arrived = [start + ms for start, ms in zip(free, of_step, strict=True)]
        end = max(arrived) + transfer
        for rank, ms in enumerate(of_step):
            spans.append((rank, "backward", free[rank], free[rank] + ms))
            spans.append((rank, "all_reduce", arrived[rank], end))
            if own[rank]:
                spans.append((rank, "optimizer", end, end + own[rank]))
        free = [end + ms for ms in own]
    return spans


# Rank 0 warms up for long, rank 2 is a little late in the next two steps, and rank 1 in the last one. Short,
# because a verdict shows it.
FIRST: Final = _spans([[90, 20, 20, 18], [20, 21, 30, 17], [20, 21, 31, 17], [20, 60, 30, 17]], 9, [0] * 4)
STRAGGLERS: Final = FIRST, _spans([[10, 14, 10]] * 4, 3, [1] * 3), _spans([[30, 10, 12, 11]] * 2, 5, [2] * 4)


def _work(random: Random) -> list[list[float]]:
    """Return what four ranks compute in five steps; one of them is late in at least three."""
    late = random.randrange(4)
    return [
        [random.uniform(10, 30) + 30 * (rank == late and step < 3) for rank in range(4)] for step in range(5)
    ]


@exercise(
    LESSON, "It arrives last in most all-reduces, so that the others wait for it there.",
    [(spans,) for spans in STRAGGLERS],
    other=lambda random: (_spans(_work(random), random.uniform(2, 9), [0, 0, 0, 0]),),
)
def straggler(answer: Any, spans: Spans) -> None:
    """straggler(spans) returns the rank that the others wait for in most all-reduces. `spans` lists (rank,
    name, start_ms, end_ms); each rank's k-th span named all_reduce belongs to the same all-reduce, and begins
    when the rank arrives."""
    ranks = range(1 + max(rank for rank, *_ in spans))
    arrived = [
        [start for rank, name, start, _ in spans if name == "all_reduce" and rank == one] for one in ranks
    ]
    lasts = [max(ranks, key=lambda one: arrived[one][k]) for k in range(len(arrived[0]))]

    def total(names: Sequence[str], rank: int) -> float:
        return sum(end - start for one, name, start, end in spans if one == rank and name in names)

    expect_numbers(answer(spans), statistics.mode(lasts), [
        (max(ranks, key=lambda one: total(["all_reduce"], one)),
         "that is the rank that spends the most time in all-reduces: it waits there. For whom?",
         "who arrives last does not wait"),
        (max(ranks, key=lambda one: total(["backward", "optimizer"], one)),
         "that is the rank that computes longest in total; one slow step, such as the first, is enough for "
         "that",
         "find out for each all-reduce who arrives last, and count"),
        (lasts[-1], "that is the rank that arrives last in the last all-reduce; how is it in the others?",
         "count over all of them"),
    ], "an all-reduce begins to transfer when its last rank arrives: which rank is that, most of the time?",
       "compare the start of the k-th all_reduce of each rank")


class Experiment:
    """A program whose phases one can only slow down, as a function of the factors by name."""

    def __init__(self, rows: Sequence[Mapping[str, float]], common: Mapping[str, float]) -> None:
        """Take each rank's phases with their durations in ms, and the phases that follow for all."""
        self._rows, self._common = rows, common
        self.phases = [name for part in [*rows, common] for name in part]

    def __call__(self, slower: Mapping[str, float]) -> float:
        """Return the duration of a step in ms with these factors."""
        if any(factor < 1 for factor in slower.values()):
            raise ValueError("step_ms can only slow phases down: each factor must be at least 1")

        def total(part: Mapping[str, float]) -> float:
            return sum(ms * slower.get(name, 1) for name, ms in part.items())

        return max(map(total, self._rows)) + total(self._common)

    def __repr__(self) -> str:
        return "step_ms"


# In the first, `forward` and `data` run beside each other, and each is on the path for a part of its time.
EXPERIMENTS: Final = (
    (Experiment([{"data": 30}, {"forward": 10, "backward": 14}], {"all_reduce": 20}), "data", 2),
    (Experiment([{"data": 30}, {"forward": 10, "backward": 14}], {"all_reduce": 20}), "all_reduce", 4),
    (Experiment([{"log": 9}, {"data": 40}], {"all_reduce": 12, "optimizer": 3}), "log", 3),
    (Experiment([{"forward": 8, "backward": 16}, {"data": 5}], {"all_reduce": 6}), "backward", 1.5),
)


def _other_experiment(random: Random) -> tuple[Any, ...]:
    data, forward, backward, reduced = (float(random.randint(5, 40)) for _ in range(4))
    rows = {"data": data}, {"forward": forward, "backward": backward}
    experiment = Experiment(rows, {"all_reduce": reduced})
    return experiment, experiment.phases, random.choice(experiment.phases), random.uniform(1.5, 4)


@exercise(
    LESSON,
    "With everything else slower by the factor, a step takes the factor times as long as with the phase "
    "faster.",
    [(experiment, experiment.phases, name, factor) for experiment, name, factor in EXPERIMENTS],
    other=_other_experiment,
)
def virtual_speedup(answer: Any, step_ms: Experiment, phases: list[str], name: str, factor: float) -> None:
    """virtual_speedup(step_ms, phases, name, factor) returns how many ms per step it saves if the phase
    `name` becomes `factor` times as fast. `step_ms({})` measures a step, `step_ms({'data': 2})` one with a
    phase twice as slow; nothing can be made faster. `phases` lists all names."""
    now = step_ms({})
    slowed = step_ms(dict.fromkeys((phase for phase in phases if phase != name), factor))
    expect_numbers(answer(step_ms, phases, name, factor), now - slowed / factor, [
        (slowed / factor, "that is the step after the change, not what the change saves",
         "subtract it from the step as it is now"),
        (now - slowed,
         "here the slowed step is compared with the step as it is, although its other phases take the factor "
         "times as long", "how long would the slowed step be if time ran faster by the factor?"),
        (slowed / factor - now, "that has the wrong sign: what is saved is positive",
         "step now minus step after"),
        (step_ms({name: factor}) - now,
         "here the phase itself is slower; that a slow phase costs much does not say what a fast one "
         "saves", "slow all phases but this one"),
        (slowed - now, "that is how much the slowed program lost, not what the phase's speed-up saves",
         "two steps can be compared if they run by the same clock: do these?"),
        (now - step_ms(dict.fromkeys(phases, factor)) / factor,
         "here all phases are slower, this one, too: then only the clock has changed",
         "leave out the phase that is to become faster"),
    ], "if everything else is twice as slow, the phase is twice as fast in comparison. By which clock?",
       "two measurements are needed: the step as it is, and one with all other phases slower. In the second, "
       "time runs slower by the factor")


# Six gradients of 200 kB: 96 ms of bytes, 2.4 ms of latency, and a little work.
PAYS_LINK: Final = Link(gbit_per_s=0.1, latency_us=200)
SIX: Final = 6
NUMBERS: Final = 50_000  # in each gradient
ROUNDS: Final = 5
CHANGES: Final = ("one message", "half the bytes", "half the compute")
WHY: Final = {
    "one message": (
        "six messages have six times two latencies; how long do their bytes take?",
        "2 · 0.2 ms per message is latency, and 200 kB at 12.5 MB per second take 16 ms",
    ),
    "half the compute": (
        "the ranks compute for a few milliseconds; what do they do for the rest of a step?",
        "compare the time of 1.2 MB at 0.1 Gbit/s with that of the compute",
    ),
}


def _program(change: str) -> None:
    """Run a step: some work, then six gradients averaged, one after another."""
    kind = torch.float16 if change == "half the bytes" else torch.float32
    layer, batch = torch.full((64, 64), 1e-2), torch.ones(64, 64)
    for _ in range(10 if change == "half the compute" else 20):
        batch = (batch @ layer).relu()
    if change == "one message":
        dist.all_reduce(torch.ones(SIX * NUMBERS, dtype=kind))
        return
    for _ in range(SIX):
        dist.all_reduce(torch.ones(NUMBERS, dtype=kind))


def _in_turns() -> dict[str, float]:
    """Return the shortest duration of a step in ms, as it is ("") and with each change; all run in turns.

    Other programs can only make a step longer.
    """
    taken: dict[str, list[float]] = {change: [] for change in ("", *CHANGES)}
    for _ in range(ROUNDS):
        for change, found in taken.items():
            dist.barrier()
            start = time.perf_counter()
            _program(change)
            found.append(1e3 * (time.perf_counter() - start))
    return {change: min(found) for change, found in taken.items()}


@exercise(
    LESSON,
    "This change makes the step shortest: it consists of bytes on their way, 96 ms of them.", number=True,
)
def which_pays(answer: Any) -> None:
    """which_pays is one of three texts: 'one message', 'half the bytes' or 'half the compute'. Which change
    makes the step shortest? Two ranks average six gradients of 50,000 float32 numbers, one after another,
    over 0.1 Gbit/s with a latency of 200 µs, and compute for a few milliseconds."""
    wrong_if(answer not in CHANGES,
             f"given {answer!r}: expected {', '.join(map(repr, CHANGES[:-1]))} or {CHANGES[-1]!r}")
    if answer in WHY:  # the link decides, not the measurement: on a busy machine, that may be anything
        times = run_on_ranks(2, _in_turns, link=PAYS_LINK)[0]
        wrong_if(True, *WHY[answer],
                 f"which_pays: measured, a step takes {times['']:.0f} ms as it is and {times[answer]:.0f} ms with "
                 f"{answer}; the best change gives {min(times.values()):.0f} ms")


EXCHANGE_LINK: Final = Link(gbit_per_s=0.1, latency_us=3000)
RANKS: Final = 3  # not two: there, factors coincide
LAYERS: Final = 8
TOLERATED: Final = 1.1  # of the best time


def _gradients_of(rank: int) -> tuple[list[Tensor], Tensor]:
    """Return the gradients and the loss of a rank."""
    generator = torch.Generator().manual_seed(case_seed(rank))
    shapes = [(40, 40), (40,)] * LAYERS
    gradients = [torch.randn(*shape, generator=generator) for shape in shapes]
    return gradients, torch.randn((), generator=generator)


def _exchange_on_rank(answer: Callable[..., object]) -> list[Any]:
    gradients, loss = _gradients_of(dist.get_rank())
    mine = list(gradients)
    answer(gradients, loss)
    return [part.numpy() for part in (*mine, loss)]


def _means(divide: int = RANKS, gradients: bool = True, loss: bool = True) -> list[Tensor]:
    """Return the sums over the ranks, divided; or what rank 0 has itself."""
    of_ranks = [_gradients_of(rank) for rank in range(RANKS)]
    sums = [torch.stack(same).sum(0) / divide for same in zip(*(g for g, _ in of_ranks), strict=True)]
    mean = torch.stack([one for _, one in of_ranks]).sum(0) / divide
    return [*(sums if gradients else of_ranks[0][0]), mean if loss else of_ranks[0][1]]


@exercise(
    LESSON,
    "The means are right, and the exchange takes no more than 10 % longer than the best one on this link.",
    on_ranks=_exchange_on_rank, ranks=RANKS, link=EXCHANGE_LINK,
    call=f"exchange(gradients, loss) on {RANKS} ranks",
)
def exchange(results: Results) -> None:
    """exchange(gradients, loss) runs on every rank: replace each gradient and the loss in place with its mean
    over the ranks, within 10 % of the best time over a link with 0.1 Gbit/s and a latency of 3 ms."""
    right = _means()
    of_ranks = [[torch.as_tensor(part) for part in parts] for parts in results]
    expect(of_ranks[0], right, [
        (_means(gradients=False, loss=False), "the gradients and the loss are unchanged",
         "write the means into the given tensors, with copy_"),
        (_means(divide=1), "the tensors have the sums over the ranks, not the means",
         "divide by the number of ranks"),
        (_means(loss=False), "the gradients are right, but the loss is that of this rank",
         "the loss travels with them"),
        (_means(gradients=False), "the loss is right, but the gradients are those of this rank",
         "copy the means back"),
    ], "these are not the means over the ranks",
       "write the mean of each gradient and of the loss into its tensor", same=_close)
    wrong_if(not all(_close(parts, right) for parts in of_ranks),
             "rank 0 has the means, other ranks do not: every rank needs them")
    # How long rank 0's operations occupy the link, one after another, and the best one.
    spans = results.trace.filter(rank=0, kind="communication").spans
    messages, nbytes = len(spans), sum(span.nbytes for span in spans)
    least = sum(part.nbytes for part in right)
    ms = 1e3 * sum(EXCHANGE_LINK.seconds(span.name, span.nbytes, RANKS) for span in spans)
    best = 1e3 * EXCHANGE_LINK.seconds("all_reduce", least, RANKS)
    if ms <= TOLERATED * best:
        return
    shown = (f"{messages} operations with {nbytes:,} bytes take {ms:.0f} ms on this link; the best exchange "
             f"takes {best:.0f} ms")
    wrong_if(messages == 2, "two operations, twice the latency: what can travel together?",
             "the loss is one more number", shown)
    wrong_if(messages > 2, "each operation pays the latency again, however few bytes it has",
             "the latency is paid once per operation: how few operations can carry all the numbers?", shown)
    wrong_if(nbytes > TOLERATED * least,
             "one operation, but more bytes than needed: who needs what it carries?",
             "compare its bytes with those of the gradients and the loss", shown)
    wrong_if(True, "this operation is slower than the best one with as many bytes",
             "all_reduce gives every rank the sum", shown)


def _close(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(
        one.shape == other.shape and torch.allclose(one.float(), other.float(), atol=1e-4)
        for one, other in zip(a, b, strict=True)
    )
