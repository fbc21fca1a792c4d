"""Exercises of lesson 07 about parameter servers: a server with weighted batches, and a trainer that sends little."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed.rpc as rpc
from numpy.typing import NDArray
from torch import Tensor

from labkit.errors.lists import counted
from labkit.teaching.exercises.judging import AnswerError, Hint, OnRanks, exercise, explaining, judge_result, showing
from labkit.teaching.exercises.rpc_waits import happens_within

from .calls_and_references import MISTAKES

LESSON = "07_rpc"
SIZE = 4
ROUNDS = 3
RATE = 0.5
ANSWER_S = 10.0  # that a trainer waits for its answer, which takes milliseconds
Array = NDArray[Any]
IN_SERVER: dict[str, Hint] = {
    "Future can only be marked completed once": (
        "a future was completed twice: every future gets one result",
        "each round needs its own futures, so forget the old ones when the round is complete",
    ),
    **MISTAKES,
}


# WeightedServer


class _Host:
    """An object on the server that passes calls on to the student's server, and observes them.

    Args:
        server: the student's server.
        decorated: whether its `update` has `async_execution`.
    """

    def __init__(self, server: Any, decorated: bool) -> None:
        self.server, self.decorated = server, decorated

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
    """What a trainer received.

    Args:
        answers: one for each round, as arrays; the name of its type if it is no tensor.
        futures: whether the server returned futures.
    """

    answers: list[Array | str]
    futures: bool


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


def _serve_on_rank(answer: Callable[..., Any], weights: Tensor, gradients: list[list[Tensor]], examples: list[list[int]]) -> Any:
    """Return what each trainer received, and whether `update` is decorated."""
    if rpc.get_worker_info().name != "server":
        return None
    marks = vars(rpc.functions.async_execution(_trainer)).keys()  # which this decorator leaves on a function
    decorated = marks <= getattr(getattr(answer, "update", None), "__dict__", {}).keys()
    host = rpc.RRef(_Host(answer(weights.clone(), RATE, len(gradients)), decorated))
    calls = [
        rpc.rpc_async(f"trainer{i}", _trainer, args=(host, *own), timeout=0)
        for i, own in enumerate(zip(gradients, examples, strict=True), 1)
    ]
    return torch.futures.wait_all(calls), decorated


@exercise(
    LESSON,
    "A class WeightedServer(weights, rate, trainers) whose update(gradient, examples) returns a future at once: when the "
    "gradients of all trainers are there, step once with their mean, weighted by examples, and answer every caller with the "
    "new weights.",
    f"{ROUNDS} steps for {3 * ROUNDS} calls of three trainers, and no thread of the server waited.",
    name="WeightedServer",
)
def _weighted_server(answer: Any, on: OnRanks) -> None:
    random = np.random.default_rng()
    if not answer.is_class:
        raise AnswerError("expected a class with __init__(self, weights, rate, trainers) and update(self, gradient, examples)")
    for trainers in (3, 2, 1):
        weights = random.normal(size=SIZE).astype(np.float32)
        gradients = random.normal(size=(trainers, ROUNDS, SIZE)).astype(np.float32)
        examples = random.permutation(3 * ROUNDS).reshape(3, ROUNDS)[:trainers] + 3  # all differ; no sum is trainers / RATE
        sent = [[torch.from_numpy(one) for one in own] for own in gradients]
        names = ["server", *(f"trainer{i}" for i in range(1, trainers + 1))]
        given = torch.from_numpy(weights), sent, examples.tolist()
        with showing(f"WeightedServer(weights, {RATE}, {trainers}), update(gradient, examples)"), explaining(IN_SERVER):
            received, decorated = on(names, _serve_on_rank, answer, *given, runtime="rpc")[0]
            _judge_served(received, decorated, weights, gradients, examples)


def _judge_served(received: list[_Answers | str], decorated: bool, weights: Array, gradients: Array, examples: Array) -> None:
    trainers = len(gradients)
    given = [one for one in received if isinstance(one, _Answers)]
    if len(given) < trainers:
        raise AnswerError(
            f"{counted(trainers - len(given), 'trainer')} got no answer within {ANSWER_S:.0f} s: is its future "
            "never completed, or does a thread wait for a lock that it already holds?",
            cure="when the last gradient of a round arrives, complete the future of every caller, not only of the last",
        )
    kinds = [part for one in given for part in one.answers if isinstance(part, str)]
    if kinds:
        raise AnswerError(f"the answer to update is a {kinds[0]}: complete the future with a tensor, the new weights")
    _judge_values([one.answers for one in given], weights, gradients, examples)
    if not all(one.futures for one in given):
        raise AnswerError(
            "the weights are right, but `update` keeps a thread of the server waiting until the last gradient is there: with "
            "more trainers than threads nobody could be served",
            cure="return a torch.futures.Future at once, and complete it later",
        )
    if not decorated:
        raise AnswerError(
            "`update` returns a future, and RPC would try to send the future itself",
            cure="the decorator @rpc.functions.async_execution makes it send the result once there is one",
        )


def _judge_values(answers: list[list[Any]], weights: Array, gradients: Array, examples: Array) -> None:
    trainers, before = len(gradients), weights
    all_weighted, all_examples = np.zeros(SIZE), 0.0
    for number in range(ROUNDS):
        these, counts = gradients[:, number], examples[:, number, None]
        weighted = (these * counts).sum(0)
        mean = weighted / counts.sum()
        all_weighted, all_examples = all_weighted + weighted, all_examples + counts.sum()
        expected = before - RATE * mean
        got = [own[number] for own in answers]
        details = (f"round {number + 1}: given {_rounded(got[0])}", f"expected {_rounded(expected)}")
        for name, one in enumerate(got, 1):
            if one.shape != expected.shape:
                raise AnswerError("the weights have the wrong shape", f"given {one.shape}, expected {expected.shape}")
            if trainers > 1 and not _close(one, expected) and _close(one, before - RATE * these[name - 1]):
                raise AnswerError(
                    f"trainer{name} was answered with only its own gradient applied",
                    *details,
                    cure="keep the gradients until all trainers' have arrived, then step once with their mean",
                )
        weigh, step_down = (
            "weight the gradients by their examples, divide by all examples",
            "subtract rate times the mean gradient",
        )
        steps: dict[Hint, Any] = {
            ("that is the plain mean of the gradients, however many examples each has", weigh): RATE * these.mean(0),
            ("the gradients are only added up", weigh): RATE * these.sum(0),
            ("the weighted sum is not divided", "divide it by the number of all examples"): RATE * weighted,
            ("the weighted sum is divided by the number of trainers", "divide by that of all examples"): RATE
            * weighted
            / trainers,
            ("the step goes uphill", step_down): -RATE * mean,
            ("the learning rate is missing", step_down): mean,
            ("the trainers got the weights from before the step", "complete the futures after it"): np.zeros(SIZE),
        }
        if number:
            steps |= {
                "gradients of earlier rounds are still there: each round begins with none": RATE * all_weighted / all_examples,
                "gradients of earlier rounds are still added up: each round begins with none": RATE * all_weighted / counts.sum(),
                ("each round starts from the first weights again", "keep the new ones"): before - weights + RATE * mean,
            }
        judge_result(
            got, expected, {hint: before - step for hint, step in steps.items()} if trainers > 1 or number else {},
            "the weights are not those of one step with the weighted mean of all gradients", *details,
            same=lambda a, b: all(_close(one, b) for one in (a if isinstance(a, list) else [a])),
        )  # fmt: skip
        before = expected


def _close(given: Array, expected: Array) -> bool:
    return given.shape == expected.shape and bool(np.allclose(given, expected, atol=1e-5))


def _rounded(values: Array) -> list[float]:
    return [round(float(v), 3) for v in np.ravel(values)]


# push_less


class _Weights:
    """The server of a single trainer.

    Args:
        weights: the first weights.
        log: a reference to the list of calls, which a copy uses too.
    """

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


def _push_on_rank(answer: Callable[..., Any], weights: Tensor, targets: Tensor, rounds: int) -> Any:
    """Return the result, the server's weights in the end, and the calls."""
    if rpc.get_worker_info().name != "trainer":
        return None
    calls: list[str] = []
    server = rpc.remote("server", _Weights, args=(weights, rpc.RRef(calls)))

    def gradient_of(values: Tensor, part: int) -> Tensor:
        return values - targets[part]

    result = answer(server, gradient_of, rounds, len(targets))
    made = list(calls)
    final = server.rpc_sync().values().numpy()
    return result.numpy() if isinstance(result, Tensor) else type(result).__name__, final, made


@exercise(
    LESSON,
    "push_less(server, gradient_of, rounds, parts) runs on a trainer: fetch the weights with values(); in each round send "
    "the mean of gradient_of(weights, part) over all parts with one update(...), whose reply is the new weights; return "
    "the last ones.",
    "One call to fetch the weights, then one per round, however many parts it has.",
)
def _push_less(answer: Any, on: OnRanks) -> None:
    random = np.random.default_rng()
    for rounds, parts in ((3, 2), (2, 4), (1, 1)):
        weights, *targets = random.normal(size=(parts + 1, SIZE)).astype(np.float32)
        given = torch.from_numpy(weights), torch.from_numpy(np.stack(targets)), rounds
        unknown = f"gradient_of(weights, part) was called with a part that does not exist: they are 0 to {parts - 1}"
        with (
            showing(f"push_less(server, gradient_of, {rounds}, {parts})"),
            explaining(MISTAKES | {"out of bounds": unknown}),
        ):
            seen = on(["server", "trainer"], _push_on_rank, answer, *given, runtime="rpc")[1]
            _judge_push(*seen, weights=weights, targets=np.stack(targets), rounds=rounds)


def _judge_push(result: Any, final: Array, calls: list[str], *, weights: Array, targets: Array, rounds: int) -> None:
    parts, start = len(targets), weights - targets.mean(0)
    updates, fetches = calls.count("update"), calls.count("values")
    counts = f"calls for {counted(rounds, 'round')} of {counted(parts, 'part')}: {updates} of update, {fetches} of values"
    expected = targets.mean(0) + start * (1 - RATE) ** rounds
    details = (counts, f"given {_rounded(final)}", f"expected {_rounded(expected)}")
    if any(call.endswith("copy") for call in calls):
        raise AnswerError("to_here() brings a copy of the server to the trainer", cure="update the server itself, by reference")
    if parts > 1 and updates == rounds * parts:
        cure = "compute all parts of a round first, and send their mean"
        raise AnswerError("every part was sent by itself", counts, cure=cure)
    if updates != rounds:
        raise AnswerError(f"expected {counted(rounds, 'update')}, one in each round", counts)
    mean, last, first = targets.mean(0), targets[-1], targets[0]
    mistakes = {
        ("every gradient was computed with the first weights", "use the last update's reply"): weights - rounds * RATE * start,
        ("the gradients of the parts are added up", "send their mean"): mean + start * (1 - RATE * parts) ** rounds,
        "only the last part of each round was sent": last + (weights - last) * (1 - RATE) ** rounds,
        "only the first part of each round was sent": first + (weights - first) * (1 - RATE) ** rounds,
    }
    otherwise = "the weights on the server are not those of steps with the parts' mean gradient"
    judge_result(final, expected, mistakes if parts > 1 else {}, otherwise, *details, same=_close)
    if isinstance(result, str):
        raise AnswerError(f"the answer is a {result}: return the weights after the last update")
    if not _close(result, expected):
        hint = "the server has the right weights, but others were returned", "return what the last update replied"
        raise AnswerError(hint, f"given {_rounded(result)}", f"expected {_rounded(expected)}")
    if fetches != 1:
        cure = "the reply to update already contains the new weights, so values() is needed only once, before the loop"
        raise AnswerError(f"the weights are right, with {counted(fetches, 'call')} of values: one is enough", counts, cure=cure)
