"""Exercises of lesson 07 about calls: fan out to several workers, and objects that stay with their owners."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed.rpc as rpc
from torch import Tensor

from labkit.errors.lists import counted
from labkit.teaching.exercises.comparisons import TOLERANCE, Hint, equal, listing, wrong_if
from labkit.teaching.exercises.exercise import Results, exercise
from labkit.teaching.exercises.rpc_waits import Meeting, happens_within

LESSON = "07_rpc"
SHORTEST = 2  # the length of the first input; each one is longer by 1, by which the workers know them
ASKED_S = 2.0  # that an addition waits for somebody who asks for the total too early

THROUGH_REFERENCE = "call a method through the reference, as in reference.rpc_sync().the_method()"
NO_TUPLE = "`args` is a tuple, even with one argument", "write args=(x,), with the comma"
NO_RESULT = "a future is not the result", "wait() for it first"
MISTAKES: dict[str, Hint] = {  # parts of torch's messages, and what they mean here
    "PyRRef' object": ("an RRef is not the object, which lives with its owner", THROUGH_REFERENCE),
    "can't call localValue()": ("local_value() works only on the owner", THROUGH_REFERENCE),
    "function should be callable": (
        "the function has run before the call was made",
        "write rpc_async(worker, function, args=(x,)), not rpc_async(worker, function(x))",
    ),
    "_Tally' object is not callable": (
        "the object was made before the call",
        "pass the class, as in rpc.remote(owner, tally_class)",
    ),
    "Boolean value of Tensor": NO_TUPLE,
    "iteration over a 0-d tensor": NO_TUPLE,
    "'Future'": NO_RESULT,
    "torch._C.Future": NO_RESULT,
}


def _workers(count: int) -> list[str]:
    return [f"worker{i}" for i in range(1, count + 1)]


def _shown(result: Any, *kinds: type) -> list[Any] | str:
    """Return a list, with the types of parts that are of no such kind; or the type of something else."""
    if not isinstance(result, (list, tuple)):
        return type(result).__name__
    return [part if isinstance(part, kinds) else type(part).__name__ for part in result]


# ask_all


def _visit(meeting: Any, x: Tensor) -> Tensor:
    """The function to call on the workers: note the visit, then compute."""
    meeting.rpc_sync(timeout=0).arrive(rpc.get_worker_info().name, len(x) - SHORTEST)
    return x**2 + 1


class _Asked(NamedTuple):
    """What the master observed."""

    result: list[Any] | str  # the answer; the name of its type if it is no list
    visits: list[tuple[str, int]]  # for each call, the worker that ran the function, and the input's number
    alone: bool  # whether a worker was called only when another had finished


def _ask_on_rank(answer: Callable[..., Any], workers: list[str], inputs: list[Tensor]) -> _Asked | None:
    if rpc.get_worker_info().name != "master":
        return None
    meeting = Meeting(min(len(workers), len(inputs)))
    result = answer(list(workers), partial(_visit, rpc.RRef(meeting)), list(inputs))
    return _Asked(_shown(result, Tensor), meeting.visits, meeting.alone)


def _questions(random: Random) -> list[tuple[list[str], list[Tensor]]]:
    generator = torch.Generator().manual_seed(random.getrandbits(30))
    return [
        (_workers(workers), [torch.rand(SHORTEST + i, generator=generator) + i for i in range(count)])
        for workers, count in ((2, 5), (3, 3), (1, 2))
    ]


@exercise(
    LESSON, "All workers worked at the same time, and the results are in order.", _questions,
    on_ranks=_ask_on_rank, ranks=lambda workers, _: ["master", *workers], runtime="rpc", errors=MISTAKES,
    call=lambda workers, inputs: (
        f"ask_all({workers}, function, inputs) with {counted(len(inputs), 'input')}"
    ),
)
def ask_all(results: Results, workers: list[str], inputs: list[Tensor]) -> None:
    """ask_all(workers, function, inputs) runs on the master: call function(x) for every x, on the workers in
    turn, all at the same time; return the list of results in the order of the inputs."""
    seen: _Asked = results[0]
    visitors = [name for name, _ in seen.visits]
    visits = [f"{name}: {counted(visitors.count(name), 'call')}" for name in sorted(set(visitors))]
    wrong_if("master" in visitors, "the function ran on the master, which should only ask",
             "pass it to rpc_async, without calling it yourself", *visits)
    wrong_if(isinstance(seen.result, str),
             f"the answer is a {seen.result}: expected a list with one result for each input")
    for part in seen.result:
        wrong_if(isinstance(part, str), f"the list contains a {part} in place of a result",
                 "wait for the futures, for instance with torch.futures.wait_all")
    idle = sorted(set(workers) - set(visitors))
    wrong_if(idle and len(inputs) >= len(workers),
             f"{listing(idle)} had nothing to do: deal the inputs out to all workers in turn", "", *visits)
    wrong_if(seen.alone, "a worker was called only when another had finished: rpc_sync waits, and so does "
             "wait() right after rpc_async", "", *visits)
    wrong_if(len(seen.visits) != len(inputs), f"{counted(len(inputs), 'input')} and "
             f"{counted(len(seen.visits), 'call')}: with more inputs than workers, workers get several; "
             "input i goes to worker i % len(workers)", "", *visits)
    for name, number in sorted(seen.visits, key=lambda visit: visit[1]):
        right = workers[number % len(workers)]
        wrong_if(name != right,
                 f"input {number} went to {name}, and {number} modulo {len(workers)} workers is {right}",
                 "", *visits)
    wrong_if(len(seen.result) != len(inputs),
             f"given {counted(len(seen.result), 'result')} for {counted(len(inputs), 'input')}")
    expected = [x**2 + 1 for x in inputs]
    in_order = equal(seen.result, expected, TOLERANCE)
    known = [any(equal(part, wanted, TOLERANCE) for wanted in expected) for part in seen.result]
    wrong_if(not in_order and all(known),
             "the results are in another order than the inputs: result i belongs to input i")
    wrong_if(not in_order, "the results are not what the function returns for these inputs")


# remote_tallies


class _Log:
    """What happens to the tallies, kept on the master."""

    def __init__(self) -> None:
        self.events: list[_Event] = []

    def note(self, *fields: Any) -> None:
        """Add an event."""
        self.events.append(_Event(*fields))


class _Event(NamedTuple):
    """One call of a method."""

    kind: str  # "made", "add" or "total"
    where: str  # the process in which it ran
    copied: bool  # whether the object is a copy of another
    adds: int  # how many additions the object has finished


class _Tally:
    """The class that the student uses: `add(x)` and `total()`.

    Args:
        log: a reference to the log.
        slow: whether the first addition waits for somebody who asks for the total too early.
    """

    def __init__(self, log: Any, slow: bool) -> None:
        self._log, self._slow, self._sum, self._adds, self._copied = log, slow, 0.0, 0, False
        self._lock, self._asked = threading.Lock(), threading.Event()
        self._note("made")

    def __getstate__(self) -> tuple[Any, float, int]:
        return self._log, self._sum, self._adds

    def __setstate__(self, state: tuple[Any, float, int]) -> None:
        self._log, self._sum, self._adds = state
        self._slow, self._copied = False, True
        self._lock, self._asked = threading.Lock(), threading.Event()

    def add(self, x: float) -> None:
        """Add a number."""
        if self._slow:
            happens_within(ASKED_S, self._asked.wait)
        with self._lock:
            self._slow = False
            self._sum += x
            self._adds += 1
        self._note("add")

    def total(self) -> float:
        """Return the sum so far."""
        with self._lock:
            total = self._sum
            self._note("total")
        self._asked.set()
        return total

    def _note(self, kind: str) -> None:
        self._log.rpc_sync().note(kind, rpc.get_worker_info().name, self._copied, self._adds)


def _tally_on_rank(
    answer: Callable[..., Any], owners: list[str], amounts: list[list[float]], slow: bool
) -> tuple[list[Any] | str, list[_Event]] | None:
    if rpc.get_worker_info().name != "master":
        return None
    log = _Log()
    result = answer(partial(_Tally, rpc.RRef(log), slow), list(owners), [list(some) for some in amounts])
    return _shown(result, int, float), list(log.events)


def _amounts(random: Random) -> list[tuple[list[str], list[list[float]], bool]]:
    """Draw what is added on each owner; no two totals are equal, so that their order can be judged."""
    cases = []
    for counts, slow in (((3,), True), ((2, 0, 4), False)):
        amounts: list[list[float]] = []
        while len({sum(own) for own in amounts}) < len(counts):
            amounts = [[float(random.randint(1, 999)) for _ in range(count)] for count in counts]
        cases.append((_workers(len(counts)), amounts, slow))
    return cases


@exercise(
    LESSON, "One object on each owner keeps the state; only numbers and references travelled.", _amounts,
    on_ranks=_tally_on_rank, ranks=lambda owners, *_: ["master", *owners], runtime="rpc", errors=MISTAKES,
    call="remote_tallies(tally_class, {owners}, {amounts})",
)
def remote_tallies(results: Results, owners: list[str], amounts: list[list[float]], _: bool) -> None:
    """remote_tallies(tally_class, owners, amounts) runs on the master: make one tally_class() on each owner,
    call its add(x) for every x in amounts[i] on owner i, and return the list of what total() then says on
    each owner."""
    result, events = results[0]
    made = [event.where for event in events if event.kind == "made"]
    added = [event.where for event in events if event.kind == "add"]
    wrong_if(any(event.copied for event in events),
             "to_here() brings a copy to the master, and the object on its owner does not change",
             "call the method through the reference, as in tally.rpc_sync().add(x)")
    wrong_if("master" in made, "an object was built on the master",
             "rpc.remote(owner, tally_class) builds it on its owner")
    for owner in owners:
        wrong_if(made.count(owner) > 1,
                 f"{made.count(owner)} objects on {owner}: each rpc.remote(owner, tally_class) makes a new "
                 "one",
                 "make it once, and keep its reference")
        wrong_if(owner not in made,
                 f"there is no object on {owner}: every owner gets one, even if it has nothing to add")
    expected = [sum(some) for some in amounts]
    shown = f"given {result}", f"expected {expected}"
    wrong_if(isinstance(result, str),
             f"the answer is a {result}: expected a list with the total of each owner")
    for kind in sorted({part for part in result if isinstance(part, str)}):
        wrong_if(True, f"the list contains a {kind} in place of a number",
                 "wait() for a future, call to_here() for a reference", *shown)
    if result == expected:
        return
    for event in events:
        wrong_if(event.kind == "total" and event.adds < len(amounts[owners.index(event.where)]),
                 f"the total was asked for when {counted(event.adds, 'addition')} had finished: rpc_async "
                 "and remote only send the call", "wait for the additions first", *shown)
    wrong_if(sorted(result) == sorted(expected), "the totals are in another order than the owners",
             "", *shown)
    for owner, some in zip(owners, amounts, strict=True):
        wrong_if(added.count(owner) != len(some),
                 f"{owner} got {counted(added.count(owner), 'addition')}, and has "
                 f"{counted(len(some), 'amount')}", "", *shown)
    wrong_if(True, "the totals are not those of the owners' amounts", "", *shown)
