"""Exercises of lesson 07 about parameter servers: weighted batches, and a trainer that sends little."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed.rpc as rpc
from numpy.typing import NDArray
from torch import Tensor

from labkit.errors.lists import counted
from labkit.teaching.exercises.comparisons import TOLERANCE, Hint, equal, expect, wrong_if
from labkit.teaching.exercises.exercise import Results, exercise
from labkit.teaching.exercises.rpc_waits import happens_within

from .calls_and_references import MISTAKES

LESSON = "07_rpc"
SIZE = 4
ROUNDS = 3
RATE = 0.5
ANSWER_S = 10.0  # that a trainer waits for its answer, which takes milliseconds
_close = partial(equal, within=TOLERANCE)
Array = NDArray[Any]


def _rounded(values: Array) -> list[float]:
    return [round(float(v), 3) for v in np.ravel(values)]


# WeightedServer


class _Host:
    """An object on the server that passes calls on to the student's server, and observes its answers."""

    def __init__(self, server: Any) -> None:
        self.server = server

    @rpc.functions.async_execution  # type: ignore[untyped-decorator]  # torch's decorator has no types
    def update(self, gradient: Tensor, examples: int) -> Any:
        """Return a future of the answer and whether the student's server returned a future too."""
        given = self.server.update(gradient, examples)
        if isinstance(given, torch.futures.Future):
            return given.then(lambda done: (done.value(), True))
        answer: Any = torch.futures.Future()
        answer.set_result((given, False))
        return answer


class _Answers(NamedTuple):
    """What a trainer received."""

    answers: list[Array | str]  # one for each round, as arrays; the name of its type if it is no tensor
    futures: bool  # whether the server returned futures


def _trainer(host: Any, gradients: list[Tensor], examples: list[int]) -> _Answers | str:
    """Run a trainer: one call in each round."""
    answers: list[Array | str] = []
    futures = True
    for gradient, count in zip(gradients, examples, strict=True):
        call, answered = host.rpc_async(timeout=0).update(gradient, count), threading.Event()
        call.add_done_callback(lambda _, answered=answered: answered.set())
        if not happens_within(ANSWER_S, answered.wait):
            return f"waited {ANSWER_S:.0f} s"
        value, as_future = call.wait()
        answers.append(value.detach().numpy() if isinstance(value, Tensor) else type(value).__name__)
        futures = futures and as_future
    return _Answers(answers, futures)


def _serve_on_rank(answer: Callable[..., Any], weights: Array, gradients: Array, examples: Array) -> Any:
    """Return what each trainer received, and whether `update` is decorated."""
    if rpc.get_worker_info().name != "server":
        return None
    marks = vars(rpc.functions.async_execution(_trainer)).keys()  # which this decorator leaves on a function
    decorated = marks <= getattr(getattr(answer, "update", None), "__dict__", {}).keys()
    host = rpc.RRef(_Host(answer(torch.tensor(weights), RATE, len(gradients))))
    calls = [
        rpc.rpc_async(f"trainer{i}", _trainer, args=(host, list(map(torch.tensor, own)), counts), timeout=0)
        for i, (own, counts) in enumerate(zip(gradients, examples.tolist(), strict=True), 1)
    ]
    return torch.futures.wait_all(calls), decorated


def _servings(random: Random) -> list[tuple[int, Array, Array, Array]]:
    generator = np.random.default_rng(random.getrandbits(32))
    cases = []
    for trainers in (3, 2, 1):
        weights = generator.normal(size=SIZE).astype(np.float32)
        gradients = generator.normal(size=(trainers, ROUNDS, SIZE)).astype(np.float32)
        examples = generator.permutation(3 * ROUNDS).reshape(3, ROUNDS)[:trainers] + 3  # all differ
        cases.append((trainers, weights, gradients, examples))  # no sum of examples is trainers / RATE
    return cases


@exercise(
    LESSON, f"{ROUNDS} steps for {3 * ROUNDS} calls of three trainers, and no thread of the server waited.",
    _servings,
    call=f"WeightedServer(weights, {RATE}, {{trainers}}), update(gradient, examples)",
    errors={
        "Future can only be marked completed once": (
            "a future was completed twice: every future gets one result",
            "each round needs its own futures, so forget the old ones when the round is complete",
        ),
        **MISTAKES,
    },
)
def WeightedServer(  # noqa: N802  # the answer is a class
    answer: Any, trainers: int, weights: Array, gradients: Array, examples: Array
) -> None:
    """A class WeightedServer(weights, rate, trainers) whose update(gradient, examples) returns a future at
    once: when the gradients of all trainers are there, step once with their mean, weighted by examples, and
    answer every caller with the new weights."""
    wrong_if(not answer.is_class, "expected a class with __init__(self, weights, rate, trainers) and "
             "update(self, gradient, examples)")
    names = ["server", *(f"trainer{i}" for i in range(1, trainers + 1))]
    given = weights, gradients, examples
    received, decorated = answer.on(names, _serve_on_rank, answer, *given, runtime="rpc")[0]
    answered = [one for one in received if isinstance(one, _Answers)]
    wrong_if(len(answered) < trainers,
             f"{counted(trainers - len(answered), 'trainer')} got no answer within {ANSWER_S:.0f} s: is its "
             "future never completed, or does a thread wait for a lock that it already holds?",
             "when the last gradient of a round arrives, complete the future of every caller, not only of "
             "the last")
    for part in (part for one in answered for part in one.answers):
        wrong_if(isinstance(part, str),
                 f"the answer to update is a {part}: complete the future with a tensor, the new weights")
    _judge_values([one.answers for one in answered], *given)
    wrong_if(not all(one.futures for one in answered),
             "the weights are right, but `update` keeps a thread of the server waiting until the last "
             "gradient is there: with more trainers than threads nobody could be served",
             "return a torch.futures.Future at once, and complete it later")
    wrong_if(not decorated, "`update` returns a future, and RPC would try to send the future itself",
             "the decorator @rpc.functions.async_execution makes it send the result once there is one")


def _judge_values(answers: list[list[Any]], weights: Array, gradients: Array, examples: Array) -> None:
    trainers, before = len(gradients), weights
    all_weighted, all_examples = np.zeros(SIZE), 0.0
    weigh = "weight the gradients by their examples, divide by all examples"
    step_down = "subtract rate times the mean gradient"
    for number in range(ROUNDS):
        these, counts = gradients[:, number], examples[:, number, None]
        weighted = (these * counts).sum(0)
        mean = weighted / counts.sum()
        all_weighted, all_examples = all_weighted + weighted, all_examples + counts.sum()
        expected = before - RATE * mean
        got = [own[number] for own in answers]
        shown = f"round {number + 1}: given {_rounded(got[0])}", f"expected {_rounded(expected)}"
        for trainer, one in enumerate(got, 1):
            wrong_if(one.shape != expected.shape, "the weights have the wrong shape", "",
                     f"given {one.shape}, expected {expected.shape}")
            alone = before - RATE * these[trainer - 1]
            wrong_if(trainers > 1 and not _close(one, expected) and _close(one, alone),
                     f"trainer{trainer} was answered with only its own gradient applied",
                     "keep the gradients until all trainers' have arrived, then step once with their mean",
                     *shown)
        steps: list[tuple[Any, ...]] = [
            (RATE * these.mean(0),
             "that is the plain mean of the gradients, however many examples each has", weigh),
            (RATE * these.sum(0), "the gradients are only added up", weigh),
            (RATE * weighted, "the weighted sum is not divided", "divide it by the number of all examples"),
            (RATE * weighted / trainers, "the weighted sum is divided by the number of trainers",
             "divide by that of all examples"),
            (-RATE * mean, "the step goes uphill", step_down),
            (mean, "the learning rate is missing", step_down),
            (np.zeros(SIZE), "the trainers got the weights from before the step",
             "complete the futures after it"),
        ]
        if number:
            steps += [
                (RATE * all_weighted / all_examples,
                 "gradients of earlier rounds are still there: each round begins with none"),
                (RATE * all_weighted / counts.sum(),
                 "gradients of earlier rounds are still added up: each round begins with none"),
                (before - weights + RATE * mean, "each round starts from the first weights again",
                 "keep the new ones"),
            ]
        expect(got, expected,
               [(before - step, *hint) for step, *hint in steps] if trainers > 1 or number else [],
               "the weights are not those of one step with the weighted mean of all gradients", "", *shown,
               same=lambda a, b: all(_close(one, b) for one in (a if isinstance(a, list) else [a])))
        before = expected


# push_less


class _Weights:
    """The server of a single trainer, which notes calls in a list of the trainer's; a copy does, too."""

    def __init__(self, weights: Tensor, log: Any) -> None:
        self._weights, self._log, self._copied = weights, log, False

    def __getstate__(self) -> tuple[Tensor, Any]:
        return self._weights, self._log

    def __setstate__(self, state: tuple[Tensor, Any]) -> None:
        (self._weights, self._log), self._copied = state, True

    def values(self) -> Tensor:
        """Return the weights."""
        self._note("values")
        return self._weights.clone()

    def update(self, gradient: Tensor) -> Tensor:
        """Apply a gradient and return the new weights."""
        self._note("update")
        self._weights = self._weights - RATE * gradient
        return self._weights.clone()

    def _note(self, kind: str) -> None:
        self._log.rpc_sync().append(f"{kind} of a copy" if self._copied else kind)


def _push_on_rank(answer: Callable[..., Any], weights: Array, targets: Array, rounds: int) -> Any:
    """Return the result, the server's weights in the end, and the calls."""
    if rpc.get_worker_info().name != "trainer":
        return None
    calls: list[str] = []
    server = rpc.remote("server", _Weights, args=(torch.tensor(weights), rpc.RRef(calls)))

    def gradient_of(values: Tensor, part: int) -> Tensor:
        return values - torch.tensor(targets[part])

    result = answer(server, gradient_of, rounds, len(targets))
    made = list(calls)
    final = server.rpc_sync().values().numpy()
    return result.numpy() if isinstance(result, Tensor) else type(result).__name__, final, made


def _pushes(random: Random) -> list[tuple[Array, Array, int]]:
    generator = np.random.default_rng(random.getrandbits(32))
    sizes = (3, 2), (2, 4), (1, 1)
    drawn = [(rounds, generator.normal(size=(parts + 1, SIZE)).astype(np.float32)) for rounds, parts in sizes]
    return [(both[0], both[1:], rounds) for rounds, both in drawn]


def _unknown_part(_weights: Array, targets: Array, _rounds: int) -> dict[str, Hint]:
    hint = "gradient_of(weights, part) was called with a part that does not exist: they are 0 to "
    return {"out of bounds": f"{hint}{len(targets) - 1}"}


@exercise(
    LESSON, "One call to fetch the weights, then one per round, however many parts it has.", _pushes,
    on_ranks=_push_on_rank, ranks=["server", "trainer"], runtime="rpc",
    call=lambda _, targets, rounds: f"push_less(server, gradient_of, {rounds}, {len(targets)})",
    errors=lambda *case: MISTAKES | _unknown_part(*case),
)
def push_less(results: Results, weights: Array, targets: Array, rounds: int) -> None:
    """push_less(server, gradient_of, rounds, parts) runs on a trainer: fetch the weights with values(); in
    each round send the mean of gradient_of(weights, part) over all parts with one update(...), whose reply is
    the new weights; return the last ones."""
    result, final, calls = results[1]
    parts, mean = len(targets), targets.mean(0)
    updates, fetches = calls.count("update"), calls.count("values")
    counts = (f"calls for {counted(rounds, 'round')} of {counted(parts, 'part')}: {updates} of update, "
              f"{fetches} of values")
    wrong_if(any(call.endswith("copy") for call in calls),
             "to_here() brings a copy of the server to the trainer", "update the server itself, by reference")
    wrong_if(parts > 1 and updates == rounds * parts, "every part was sent by itself",
             "compute all parts of a round first, and send their mean", counts)
    wrong_if(updates != rounds, f"expected {counted(rounds, 'update')}, one in each round", "", counts)

    def after(towards: Array, factor: float = 1) -> Array:
        return towards + (weights - towards) * (1 - RATE * factor) ** rounds

    expected = after(mean)
    expect(final, expected, [] if parts == 1 else [
        (weights - rounds * RATE * (weights - mean), "every gradient was computed with the first weights",
         "use the last update's reply"),
        (after(mean, parts), "the gradients of the parts are added up", "send their mean"),
        (after(targets[-1]), "only the last part of each round was sent"),
        (after(targets[0]), "only the first part of each round was sent"),
    ], "the weights on the server are not those of steps with the parts' mean gradient", "",
       counts, f"given {_rounded(final)}", f"expected {_rounded(expected)}", same=_close)
    wrong_if(isinstance(result, str), f"the answer is a {result}: return the weights after the last update")
    wrong_if(not _close(result, expected), "the server has the right weights, but others were returned",
             "return what the last update replied",
             f"given {_rounded(result)}", f"expected {_rounded(expected)}")
    wrong_if(fetches != 1, f"the weights are right, with {counted(fetches, 'call')} of values: one is enough",
             "the reply to update already contains the new weights, so values() is needed only once, before "
             "the loop", counts)
