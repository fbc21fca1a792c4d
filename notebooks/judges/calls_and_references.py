"""Exercises of lesson 07 about calls: fan out to several workers, and objects that stay with their owners."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed.rpc as rpc
from torch import Tensor

from labkit.errors.lists import counted
from labkit.teaching.exercises.comparisons import listing
from labkit.teaching.exercises.judging import AnswerError, Hint, OnRanks, exercise, explaining, reject, showing
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


def _names(workers: int) -> list[str]:
    return ["master", *(f"worker{i}" for i in range(1, workers + 1))]


# ask_all


def _visit(meeting: Any, x: Tensor) -> Tensor:
    """The function to call on the workers: note the visit, then compute."""
    meeting.rpc_sync(timeout=0).arrive(rpc.get_worker_info().name, len(x) - SHORTEST)
    return x**2 + 1


class _Asked(NamedTuple):
    """What the master observed.

    Args:
        result: the answer, tensors as arrays; the name of its type if it is no list.
        visits: for each call, the worker that ran the function, and the number of the input.
        alone: whether a worker was called only when another had finished.
    """

    result: list[Any] | str
    visits: list[tuple[str, int]]
    alone: bool


def _ask_on_rank(answer: Callable[..., Any], workers: list[str], inputs: list[Tensor]) -> _Asked | None:
    if rpc.get_worker_info().name != "master":
        return None
    meeting = Meeting(min(len(workers), len(inputs)))
    result = answer(list(workers), partial(_visit, rpc.RRef(meeting)), list(inputs))
    shown: list[Any] | str = type(result).__name__
    if isinstance(result, (list, tuple)):
        shown = [part.numpy() if isinstance(part, Tensor) else type(part).__name__ for part in result]
    return _Asked(shown, meeting.visits, meeting.alone)


@exercise(
    LESSON,
    "ask_all(workers, function, inputs) runs on the master: call function(x) for every x, on the workers in turn, all at the "
    "same time; return the list of results in the order of the inputs.",
    "All workers worked at the same time, and the results are in order.",
)
def _ask_all(answer: Any, on: OnRanks) -> None:
    random = torch.Generator().manual_seed(int(np.random.default_rng().integers(1 << 30)))
    for workers, count in ((2, 5), (3, 3), (1, 2)):
        names = _names(workers)
        inputs = [torch.rand(SHORTEST + i, generator=random) + i for i in range(count)]
        with showing(f"ask_all({names[1:]}, function, inputs) with {counted(count, 'input')}"), explaining(MISTAKES):
            seen = on(names, _ask_on_rank, answer, names[1:], inputs, runtime="rpc")[0]
            _judge_asked(seen, names[1:], [(x**2 + 1).numpy() for x in inputs])


def _judge_asked(seen: _Asked, workers: Sequence[str], expected: list[Any]) -> None:
    visitors = [name for name, _ in seen.visits]
    visits = [f"{name}: {counted(visitors.count(name), 'call')}" for name in sorted(set(visitors))]
    if "master" in visitors:
        cure = "pass it to rpc_async, without calling it yourself"
        raise AnswerError("the function ran on the master, which should only ask", *visits, cure=cure)
    if isinstance(seen.result, str):
        raise AnswerError(f"the answer is a {seen.result}: expected a list with one result for each input")
    futures = [part for part in seen.result if isinstance(part, str)]
    if futures:
        raise AnswerError(
            f"the list contains a {futures[0]} in place of a result",
            cure="wait for the futures, for instance with torch.futures.wait_all",
        )
    idle = sorted(set(workers) - set(visitors))
    faults = {
        f"{listing(idle)} had nothing to do: deal the inputs out to all workers in turn": idle and len(expected) >= len(workers),
        "a worker was called only when another had finished: rpc_sync waits, and so does wait() right after rpc_async": (
            seen.alone
        ),
        f"{counted(len(expected), 'input')} and {counted(len(seen.visits), 'call')}: with more inputs than workers, workers get "
        "several; input i goes to worker i % len(workers)": len(seen.visits) != len(expected),
    }
    reject(faults, *visits)
    for name, number in sorted(seen.visits, key=lambda visit: visit[1]):
        if name != (right := workers[number % len(workers)]):
            raise AnswerError(f"input {number} went to {name}, and {number} modulo {len(workers)} workers is {right}", *visits)
    if len(seen.result) != len(expected):
        raise AnswerError(f"given {counted(len(seen.result), 'result')} for {counted(len(expected), 'input')}")
    if all(map(_equal, seen.result, expected)):
        return
    if all(any(_equal(part, wanted) for wanted in expected) for part in seen.result):
        raise AnswerError("the results are in another order than the inputs: result i belongs to input i")
    raise AnswerError("the results are not what the function returns for these inputs")


def _equal(given: Any, expected: Any) -> bool:
    return given.shape == expected.shape and bool(np.allclose(given, expected, rtol=1e-5))


# remote_tallies


class _Log:
    """What happens to the tallies, kept on the master."""

    def __init__(self) -> None:
        self.events: list[_Event] = []

    def note(self, *fields: Any) -> None:
        """Add an event."""
        self.events.append(_Event(*fields))


class _Event(NamedTuple):
    """One call of a method.

    Args:
        kind: "made", "add" or "total".
        where: the process in which it ran.
        copied: whether the object is a copy of another.
        adds: how many additions the object has finished.
    """

    kind: str
    where: str
    copied: bool
    adds: int


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
    shown: list[Any] | str = type(result).__name__
    if isinstance(result, (list, tuple)):
        shown = [part if isinstance(part, (int, float)) else type(part).__name__ for part in result]
    return shown, list(log.events)


@exercise(
    LESSON,
    "remote_tallies(tally_class, owners, amounts) runs on the master: make one tally_class() on each owner, call its add(x) "
    "for every x in amounts[i] on owner i, and return the list of what total() then says on each owner.",
    "One object on each owner keeps the state; only numbers and references travelled.",
)
def _remote_tallies(answer: Any, on: OnRanks) -> None:
    random = np.random.default_rng()
    for counts, slow in (((3,), True), ((2, 0, 4), False)):
        names = _names(len(counts))
        amounts = _amounts(random, counts)
        with showing(f"remote_tallies(tally_class, {names[1:]}, {amounts})"), explaining(MISTAKES):
            result, events = on(names, _tally_on_rank, answer, names[1:], amounts, slow, runtime="rpc")[0]
            _judge_tallies(result, events, names[1:], amounts)


def _amounts(random: np.random.Generator, counts: Sequence[int]) -> list[list[float]]:
    """Draw what is added on each owner; no two totals are equal, so that their order can be judged."""
    while True:
        amounts = [random.integers(1, 1000, count).astype(float).tolist() for count in counts]
        if len({sum(own) for own in amounts}) == len(counts):
            return amounts


def _judge_tallies(result: list[Any] | str, events: list[_Event], owners: list[str], amounts: list[list[float]]) -> None:
    made = [event.where for event in events if event.kind == "made"]
    adds = [event for event in events if event.kind == "add"]
    if any(event.copied for event in events):
        raise AnswerError(
            "to_here() brings a copy to the master, and the object on its owner does not change",
            cure="call the method through the reference, as in tally.rpc_sync().add(x)",
        )
    if "master" in made:
        raise AnswerError("an object was built on the master", cure="rpc.remote(owner, tally_class) builds it on its owner")
    for owner in owners:
        if made.count(owner) > 1:
            raise AnswerError(
                f"{made.count(owner)} objects on {owner}: each rpc.remote(owner, tally_class) makes a new one",
                cure="make it once, and keep its reference",
            )
        if owner not in made:
            raise AnswerError(f"there is no object on {owner}: every owner gets one, even if it has nothing to add")
    expected = [sum(some) for some in amounts]
    details = (f"given {result}", f"expected {expected}")
    if isinstance(result, str):
        raise AnswerError(f"the answer is a {result}: expected a list with the total of each owner")
    kinds = sorted({part for part in result if isinstance(part, str)})
    if kinds:
        raise AnswerError(
            f"the list contains a {kinds[0]} in place of a number",
            *details,
            cure="wait() for a future, call to_here() for a reference",
        )
    early = [e for e in events if e.kind == "total" and e.adds < len(amounts[owners.index(e.where)])]
    if early and result != expected:
        raise AnswerError(
            f"the total was asked for when {counted(early[0].adds, 'addition')} had finished: rpc_async and remote only send "
            "the call",
            *details,
            cure="wait for the additions first",
        )
    if result == expected:
        return
    if isinstance(result, list) and sorted(result) == sorted(expected):
        raise AnswerError("the totals are in another order than the owners", *details)
    for owner, some in zip(owners, amounts, strict=True):
        number = sum(event.where == owner for event in adds)
        if number != len(some):
            raise AnswerError(f"{owner} got {counted(number, 'addition')}, and has {counted(len(some), 'amount')}", *details)
    raise AnswerError("the totals are not those of the owners' amounts", *details)
