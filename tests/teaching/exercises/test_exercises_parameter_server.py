"""The exercises of lesson 07 about parameter servers: right answers pass, and wrong ones get an explanation."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed.rpc as rpc
from answers import Answers, judge

answers = Answers()
right, wrong = answers.right, answers.wrong


# WeightedServer


@right("WeightedServer")
class WeightedServer:
    def __init__(self, weights, rate, trainers):
        self.weights, self.rate, self.trainers = weights, rate, trainers
        self.waiting, self.lock = [], threading.Lock()

    @rpc.functions.async_execution
    def update(self, gradient, examples):
        future = torch.futures.Future()
        with self.lock:
            self.waiting.append((gradient, examples, future))
            if len(self.waiting) == self.trainers:
                self.answer_all()
        return future

    def answer_all(self):
        gradients, examples, futures = zip(*self.waiting, strict=True)
        self.waiting = []
        self.step(gradients, examples)
        for future in futures:
            future.set_result(self.weights)

    def step(self, gradients, examples):
        self.weights = self.weights - self.rate * self.mean(gradients, examples)

    def mean(self, gradients, examples):
        return self.weighted(gradients, examples) / sum(examples)

    def weighted(self, gradients, examples):
        return sum(g * e for g, e in zip(gradients, examples, strict=True))


@right("WeightedServer")
class OneFutureForAll:
    """The callers of a round share one future, and sums are kept instead of the gradients."""

    def __init__(self, weights, rate, trainers):
        self.weights, self.rate, self.trainers, self.lock = weights, rate, trainers, threading.Lock()
        self.begin()

    def begin(self):
        self.sum, self.examples, self.count, self.future = torch.zeros_like(self.weights), 0, 0, torch.futures.Future()

    @rpc.functions.async_execution
    def update(self, gradient, examples):
        with self.lock:
            future = self.future
            self.sum += gradient * examples
            self.examples += examples
            self.count += 1
            if self.count == self.trainers:
                self.weights -= self.rate * self.sum / self.examples
                self.begin()
                future.set_result(self.weights.clone())
        return future


@wrong("WeightedServer", "the plain mean of the gradients", cure="by their examples")
class PlainMean(WeightedServer):
    def mean(self, gradients, examples):
        return sum(gradients) / len(examples)


@wrong("WeightedServer", "only added up", cure="by their examples")
class SumOfGradients(WeightedServer):
    def mean(self, gradients, examples):
        return sum(gradients) * (sum(examples) > 0)


@wrong("WeightedServer", "weighted sum is not divided", cure="all examples")
class SumOfWeighted(WeightedServer):
    def mean(self, gradients, examples):
        return self.weighted(gradients, examples)


@wrong("WeightedServer", "divided by the number of trainers", cure="all examples")
class DividedByTrainers(WeightedServer):
    def mean(self, gradients, examples):
        return self.weighted(gradients, examples) / self.trainers


@wrong("WeightedServer", "uphill", cure="subtract rate times")
class Uphill(WeightedServer):
    def mean(self, gradients, examples):
        return -super().mean(gradients, examples)


@wrong("WeightedServer", "learning rate is missing", cure="subtract rate times")
class WithoutRate(WeightedServer):
    def mean(self, gradients, examples):
        return super().mean(gradients, examples) / self.rate


@wrong("WeightedServer", "only its own gradient applied", cure="step once with their mean")
class AnsweredAtOnce(WeightedServer):
    def __init__(self, *args):
        super().__init__(*args)
        self.trainers = 1


@wrong("WeightedServer", "only its own gradient applied", cure="step once with their mean")
class AnsweredAtOnceWithoutFuture(WeightedServer):
    def update(self, gradient, examples):
        with self.lock:
            self.step([gradient], [examples])
            return self.weights


@wrong("WeightedServer", "gradients of earlier rounds")
class NeverForgets(OneFutureForAll):
    def begin(self):
        if not hasattr(self, "sum"):
            self.sum, self.examples = torch.zeros_like(self.weights), 0
        self.count, self.future = 0, torch.futures.Future()


@wrong("WeightedServer", "starts from the first weights again", cure="keep the new ones")
class NeverLearns(WeightedServer):
    def answer_all(self):
        first = self.weights
        super().answer_all()
        self.weights = first


@wrong("WeightedServer", "completed twice", cure="forget the old ones")
class FutureNotRenewed(OneFutureForAll):
    def begin(self):
        self.sum, self.examples, self.count = torch.zeros_like(self.weights), 0, 0
        if not hasattr(self, "future"):
            self.future = torch.futures.Future()


@wrong("WeightedServer", "is its future never completed", cure="not only of the last")
class LastCallerOnly(WeightedServer):
    def answer_all(self):
        gradients, examples, futures = zip(*self.waiting, strict=True)
        self.waiting = []
        self.step(gradients, examples)
        futures[-1].set_result(self.weights)


@wrong("WeightedServer", "keeps a thread of the server waiting", cure="return a torch.futures.Future at once")
class WaitsInTheThread(WeightedServer):
    def __init__(self, weights, rate, trainers):
        super().__init__(weights, rate, trainers)
        self.complete = threading.Barrier(trainers, self.apply)

    def update(self, gradient, examples):
        with self.lock:
            self.waiting.append((gradient, examples))
        self.complete.wait(30)
        return self.weights

    def apply(self):
        self.step(*zip(*self.waiting, strict=True))
        self.waiting = []


@wrong("WeightedServer", "would try to send the future itself", cure="@rpc.functions.async_execution")
class WithoutDecorator(WeightedServer):
    def update(self, gradient, examples):
        return WeightedServer.update(self, gradient, examples)


@wrong("WeightedServer", "is a NoneType")
class AnswersNothing(WeightedServer):
    def answer_all(self):
        gradients, examples, futures = zip(*self.waiting, strict=True)
        self.waiting = []
        self.step(gradients, examples)
        for future in futures:
            future.set_result(None)


@wrong("WeightedServer", "the weights from before the step", cure="complete the futures after it")
class AnswersBeforeTheStep(WeightedServer):
    def answer_all(self):
        gradients, examples, futures = zip(*self.waiting, strict=True)
        self.waiting = []
        for future in futures:
            future.set_result(self.weights)
        self.step(gradients, examples)


@wrong("WeightedServer", "update() takes 2 positional arguments")
class TakesNoExamples(WeightedServer):
    @rpc.functions.async_execution
    def update(self, gradient):
        return super().update(gradient, 1)


# push_less


@right("push_less")
def push_less(server, gradient_of, rounds, parts):
    weights = server.rpc_sync().values()
    for _ in range(rounds):
        weights = server.rpc_sync().update(sum(gradient_of(weights, part) for part in range(parts)) / parts)
    return weights


@right("push_less")
def push_less_with_futures(server, gradient_of, rounds, parts):
    weights = server.remote().values().to_here()
    for _ in range(rounds):
        gradients = torch.stack([gradient_of(weights, part) for part in range(parts)])
        weights = server.rpc_async().update(gradients.mean(0)).wait()
    return weights


@wrong("push_less", "every part was sent by itself", cure="send their mean")
def each_part_sent(server, gradient_of, rounds, parts):
    weights = server.rpc_sync().values()
    for _ in range(rounds):
        for part in range(parts):
            weights = server.rpc_sync().update(gradient_of(weights, part) / parts)
    return weights


@wrong("push_less", "are added up", cure="send their mean")
def parts_added_up(server, gradient_of, rounds, parts):
    weights = server.rpc_sync().values()
    for _ in range(rounds):
        weights = server.rpc_sync().update(sum(gradient_of(weights, part) for part in range(parts)))
    return weights


@wrong("push_less", "only the last part")
def last_part_only(server, gradient_of, rounds, parts):
    weights = server.rpc_sync().values()
    for _ in range(rounds):
        for part in range(parts):
            gradient = gradient_of(weights, part)
        weights = server.rpc_sync().update(gradient)
    return weights


@wrong("push_less", "a part that does not exist")
def parts_from_one(server, gradient_of, rounds, parts):
    weights = server.rpc_sync().values()
    for _ in range(rounds):
        weights = server.rpc_sync().update(sum(gradient_of(weights, part + 1) for part in range(parts)) / parts)
    return weights


@wrong("push_less", "one is enough", cure="values() is needed only once")
def fetched_in_each_round(server, gradient_of, rounds, parts):
    for _ in range(rounds):
        weights = server.rpc_sync().values()
        server.rpc_sync().update(sum(gradient_of(weights, part) for part in range(parts)) / parts)
    return server.rpc_sync().values()


@wrong("push_less", "computed with the first weights", cure="reply")
def first_weights_only(server, gradient_of, rounds, parts):
    weights = server.rpc_sync().values()
    for _ in range(rounds):
        last = server.rpc_sync().update(sum(gradient_of(weights, part) for part in range(parts)) / parts)
    return last


@wrong("push_less", "an RRef is not the object", cure="reference.rpc_sync().the_method()")
def method_of_the_reference(server, gradient_of, rounds, parts):
    weights = server.values()
    for _ in range(rounds):
        weights = server.update(sum(gradient_of(weights, part) for part in range(parts)) / parts)
    return weights


@wrong("push_less", "brings a copy of the server", cure="by reference")
def copy_updated(server, gradient_of, rounds, parts):
    copy = server.to_here()
    weights = copy.values()
    for _ in range(rounds):
        weights = copy.update(sum(gradient_of(weights, part) for part in range(parts)) / parts)
    return weights


@wrong("push_less", "a future is not the result", cure="wait() for it first")
def future_used(server, gradient_of, rounds, parts):
    weights = server.rpc_async().values()
    for _ in range(rounds):
        weights = server.rpc_async().update(sum(gradient_of(weights, part) for part in range(parts)) / parts)
    return weights.wait()


@wrong("push_less", "one in each round")
def one_round_too_many(server, gradient_of, rounds, parts):
    return push_less(server, gradient_of, rounds + 2 * parts, parts)


@wrong("push_less", "return the weights after the last update")
def nothing_returned(server, gradient_of, rounds, parts):
    push_less(server, gradient_of, rounds, parts)


@wrong("push_less", "others were returned", cure="return what the last update replied")
def first_weights_returned(server, gradient_of, rounds, parts):
    first = server.rpc_sync().values()
    weights = first
    for _ in range(rounds):
        weights = server.rpc_sync().update(sum(gradient_of(weights, part) for part in range(parts)) / parts)
    return first


@wrong("push_less", "works only on the owner", cure="through the reference")
def local_value_of_the_server(server, gradient_of, rounds, parts):
    return server.local_value().values()


@wrong("push_less", "not those of steps with the parts' mean")
def gradients_halved(server, gradient_of, rounds, parts):
    return push_less(server, lambda weights, part: gradient_of(weights, part) / 2, rounds, parts)


@pytest.mark.parametrize("answer", answers.parameters())
@pytest.mark.processes
def test_the_verdict_fits_the_answer(answer) -> None:
    judge(answer)


def test_every_exercise_has_right_and_wrong_answers_here() -> None:
    answers.complete("parameter_server")
