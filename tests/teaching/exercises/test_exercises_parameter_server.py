"""The exercises of lesson 07 about parameter servers: right answers pass, and wrong ones get an explanation."""

from __future__ import annotations

import threading

import torch
import torch.distributed.rpc as rpc
from answers import Answers

answers = Answers()

right, wrong, mutant = answers.of("WeightedServer")


@right
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


@wrong("gradients of earlier rounds")
class NeverForgets(OneFutureForAll):
    def begin(self):
        if not hasattr(self, "sum"):
            self.sum, self.examples = torch.zeros_like(self.weights), 0
        self.count, self.future = 0, torch.futures.Future()


@wrong("completed twice", cure="forget the old ones")
class FutureNotRenewed(OneFutureForAll):
    def begin(self):
        self.sum, self.examples, self.count = torch.zeros_like(self.weights), 0, 0
        if not hasattr(self, "future"):
            self.future = torch.futures.Future()


@wrong("expected a class with __init__")
def server_as_a_function(weights, rate, trainers):
    return weights


EXAMPLES, GRADIENTS = "sum(e for _, e, _ in waiting)", "sum(g for g, _, _ in waiting)"
CHANGE, ANSWER = f"self.rate * weighted / {EXAMPLES}", "future.set_result(self.weights)"
DECORATOR, HEADER = "@rpc.functions.async_execution\n    ", "def update(self, gradient, examples):"
APPLY_OWN = f"""def update(self, gradient, examples):
        self.weights = self.weights - self.rate * gradient
        return self.weights

    def no_{HEADER.removeprefix("def ")}"""
OWN_ONLY, ITS_MEAN = "only its own gradient applied", "step once with their mean"
mutant(CHANGE, f"self.rate * {GRADIENTS} / self.trainers", "the plain mean of", cure="by their examples")
mutant(CHANGE, f"self.rate * {GRADIENTS}", "only added up", cure="by their examples")
mutant(CHANGE, "self.rate * weighted", "weighted sum is not divided", cure="all examples")
mutant(CHANGE, "self.rate * weighted / self.trainers", "divided by the number of trainers", cure="all examples")
mutant("self.weights - self.rate", "self.weights + self.rate", "uphill", cure="subtract rate times")
mutant("self.rate * weighted", "weighted", "learning rate is missing", cure="subtract rate times")
mutant("== self.trainers", ">= 1", OWN_ONLY, cure=ITS_MEAN)
mutant(DECORATOR + HEADER, APPLY_OWN, OWN_ONLY, cure=ITS_MEAN)
mutant(
    ANSWER,
    f"{ANSWER}\n        self.weights = self.weights + {CHANGE}",
    "starts from the first weights again",
    cure="keep the new ones",
)
mutant("future in waiting:", "future in waiting[-1:]:", "is its future never completed", cure="not only of the last")
mutant(
    "return future",
    "return future.wait()",
    "keeps a thread of the server waiting",
    cure="return a torch.futures.Future at once",
)
mutant(DECORATOR, "", "would try to send the future itself", cure="@rpc.functions.async_execution")
mutant(ANSWER, "future.set_result(None)", "is a NoneType")
mutant(ANSWER, "future.set_result(self.weights[1:])", "the weights have the wrong shape")
mutant(
    ANSWER,
    f"future.set_result(self.weights + {CHANGE})",
    "the weights from before the step",
    cure="complete the futures after it",
)
mutant(HEADER, "def update(self, gradient):", "update() takes 2 positional arguments")
mutant(CHANGE, f"3 * {CHANGE}", "not those of one step with the weighted mean")


right, wrong, mutant = answers.of("push_less")


@right
def push_less_with_futures(server, gradient_of, rounds, parts):
    weights = server.remote().values().to_here()
    for _ in range(rounds):
        gradients = torch.stack([gradient_of(weights, part) for part in range(parts)])
        weights = server.rpc_async().update(gradients.mean(0)).wait()
    return weights


FETCH, MEAN = "server.rpc_sync().values()", "sum(gradients) / parts"
UPDATE = f"weights = server.rpc_sync().update({MEAN})"
ONE_BY_ONE = f"for gradient in gradients:\n            {UPDATE.replace(MEAN, 'gradient / parts')}"
mutant(UPDATE, ONE_BY_ONE, "every part was sent by itself", cure="send their mean")
mutant(MEAN, "sum(gradients)", "are added up", cure="send their mean")
mutant(MEAN, "gradients[-1]", "only the last part")
mutant(MEAN, "gradients[0]", "only the first part")
mutant(MEAN, f"{MEAN} / 2", "not those of steps with the parts' mean")
mutant("(weights, part)", "(weights, part + 1)", "a part that does not exist")
mutant(UPDATE, f"{UPDATE}\n        weights = {FETCH}", "one is enough", cure="values() is needed only once")
mutant(
    f"{UPDATE}\n    return weights",
    f"last_{UPDATE}\n    return last_weights",
    "computed with the first weights",
    cure="reply",
)
mutant(FETCH, "server.values()", "an RRef is not the object", cure="reference.rpc_sync().the_method()")
mutant(UPDATE, UPDATE.replace("rpc_sync", "to_here"), "brings a copy of the server", cure="by reference")
mutant(FETCH, FETCH.replace("sync", "async"), "a future is not the result", cure="wait() for it first")
mutant(FETCH, "server.local_value().values()", "works only on the owner", cure="through the reference")
mutant("range(rounds)", "range(rounds + 2 * parts)", "one in each round")
mutant("return weights", "pass", "return the weights after the last update")
mutant("return weights", "return weights + 1", "others were returned", cure="return what the last update replied")


test_the_verdict_fits_the_answer = answers.test_of_verdicts()
test_every_exercise_has_right_and_wrong_answers_here = answers.test_of_completeness("parameter_server")
