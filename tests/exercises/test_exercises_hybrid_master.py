"""The exercise about the hybrid's master: right answers pass, and wrong ones get an explanation."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.nn.functional as F
from answers import Answers, judge
from time_limits import LIMITS_S, some_limit_does

from labkit.exercises.check import check

MODULE = sys.modules[check.__module__]  # `labkit.check` is the function
answers = Answers()
right, wrong = answers.right, answers.wrong


def optimizer_of(*shards, rate):
    from torch.distributed.optim import DistributedOptimizer  # its import warns, which only ranks may do

    references = [reference for shard in shards for reference in shard.rpc_sync().parameter_rrefs()]
    return DistributedOptimizer(torch.optim.SGD, references, lr=rate, momentum=0.9)


def joined(shard1, shard2, x, parts):
    return shard2.rpc_sync().score(*[shard1.remote().forward(part) for part in x.chunk(parts)])


def step(optimizer, forward, x, y):
    with dist_autograd.context() as context:
        loss = F.cross_entropy(forward(x), y)
        dist_autograd.backward(context, [loss])
        optimizer.step(context)
    return loss.item()


def train(shard1, shard2, batches, rate, forward):
    optimizer = optimizer_of(shard1, shard2, rate=rate)
    return [step(optimizer, forward, x, y) for x, y in batches]


@right("hybrid_master")
def hybrid_master(shard1, shard2, batches, parts, rate):
    return train(shard1, shard2, batches, rate, lambda x: joined(shard1, shard2, x, parts))


@right("hybrid_master")
def hybrid_master_by_functions(shard1, shard2, batches, parts, rate):
    def forward(x):
        pieces = [rpc.remote(shard1.owner(), forward_on, args=(shard1, part)) for part in x.chunk(parts)]
        return shard2.rpc_async().score(*pieces).wait()

    optimizer, losses = optimizer_of(shard2, shard1, rate=rate), []
    for x, y in batches:
        losses.append(step(optimizer, forward, x, y))
    return losses


def forward_on(shard, x):
    return shard.local_value().forward(x)


@wrong("hybrid_master", "sent only when another had been computed", cure="with remote first")
def one_after_the_other(shard1, shard2, batches, parts, rate):
    def forward(x):
        return torch.cat([shard2.rpc_sync().score(shard1.remote().forward(part)) for part in x.chunk(parts)])

    return train(shard1, shard2, batches, rate, forward)


@wrong("hybrid_master", "the features came to the master", cure="returns a reference")
def features_through_the_master(shard1, shard2, batches, parts, rate):
    def forward(x):
        futures = [shard1.rpc_async().forward(part) for part in x.chunk(parts)]
        return shard2.rpc_sync().score(*torch.futures.wait_all(futures))

    return train(shard1, shard2, batches, rate, forward)


@wrong("hybrid_master", "a worker answers twice in a context", cure="call it once per batch")
def score_for_each_part(shard1, shard2, batches, parts, rate):
    def forward(x):
        references = [shard1.remote().forward(part) for part in x.chunk(parts)]
        return torch.cat([shard2.rpc_sync().score(reference) for reference in references])

    return train(shard1, shard2, batches, rate, forward)


@wrong("hybrid_master", "3 batches came to shard 1 in 3 parts", cure="chunk(parts)")
def batch_in_one_piece(shard1, shard2, batches, parts, rate):
    return hybrid_master(shard1, shard2, batches, 1, rate)


@wrong("hybrid_master", "parts is 3 here", cure="chunk(parts)")
def always_two_parts(shard1, shard2, batches, parts, rate):
    return hybrid_master(shard1, shard2, batches, 2, rate)


@wrong("hybrid_master", "a future cannot be sent", cure="a reference can")
def futures_sent_on(shard1, shard2, batches, parts, rate):
    return train(
        shard1, shard2, batches, rate,
        lambda x: shard2.rpc_sync().score(*[shard1.rpc_async().forward(part) for part in x.chunk(parts)]),
    )  # fmt: skip


@wrong("hybrid_master", "an RRef is not the shard", cure="shard1.remote().forward(part)")
def reference_called(shard1, shard2, batches, parts, rate):
    return train(shard1, shard2, batches, rate, lambda x: shard2.score(shard1.forward(x)))


@wrong("hybrid_master", "no parameter has changed", cure="optimizer.step(context)")
def step_forgotten(shard1, shard2, batches, parts, rate):
    losses = []
    for x, y in batches:
        with dist_autograd.context() as context:
            loss = F.cross_entropy(joined(shard1, shard2, x, parts), y)
            dist_autograd.backward(context, [loss])
        losses.append(loss.item())
    return losses


@wrong("hybrid_master", "parameters of shard 2 have not changed", cure="of both shards")
def first_shard_only(shard1, shard2, batches, parts, rate):
    optimizer = optimizer_of(shard1, rate=rate)
    return [step(optimizer, lambda x: joined(shard1, shard2, x, parts), x, y) for x, y in batches]


@wrong("hybrid_master", "there was no momentum", cure="make one optimizer before the loop")
def an_optimizer_for_each_batch(shard1, shard2, batches, parts, rate):
    return [hybrid_master(shard1, shard2, [batch], parts, rate)[0] for batch in batches]


@wrong("hybrid_master", "the gradients of earlier batches are still in this context", cure="each batch needs a new one")
def one_context_for_all(shard1, shard2, batches, parts, rate):
    optimizer, losses = optimizer_of(shard1, shard2, rate=rate), []
    with dist_autograd.context() as context:
        for x, y in batches:
            loss = F.cross_entropy(joined(shard1, shard2, x, parts), y)
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
            losses.append(loss.item())
    return losses


@wrong("hybrid_master", "loss.backward() cannot leave the master", cure="dist_autograd.backward(context, [loss])")
def backward_of_one_process(shard1, shard2, batches, parts, rate):
    optimizer = optimizer_of(shard1, shard2, rate=rate)
    for x, y in batches:
        with dist_autograd.context() as context:
            F.cross_entropy(joined(shard1, shard2, x, parts), y).backward()
            optimizer.step(context)


@wrong("hybrid_master", "the forward pass was outside a context", cure="under one `with dist_autograd.context()`")
def forward_outside_the_context(shard1, shard2, batches, parts, rate):
    optimizer = optimizer_of(shard1, shard2, rate=rate)
    for x, y in batches:
        loss = F.cross_entropy(joined(shard1, shard2, x, parts), y)
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [loss])
            optimizer.step(context)


@wrong("hybrid_master", "which are on the workers", cure="DistributedOptimizer(torch.optim.SGD, references")
def optimizer_of_one_process(shard1, shard2, batches, parts, rate):
    torch.optim.SGD(shard1.rpc_sync().parameter_rrefs(), lr=rate, momentum=0.9)


@wrong("hybrid_master", "the gradients are in a context", cure="optimizer.step(context) needs it")
def context_not_handed_on(shard1, shard2, batches, parts, rate):
    optimizer = optimizer_of(shard1, shard2, rate=rate)
    for x, y in batches:
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [F.cross_entropy(joined(shard1, shard2, x, parts), y)])
            optimizer.step()


@wrong("hybrid_master", "mean cross-entropy of all its examples")
def mean_of_the_parts_means(shard1, shard2, batches, parts, rate):
    optimizer, losses = optimizer_of(shard1, shard2, rate=rate), []
    for x, y in batches:
        with dist_autograd.context() as context:
            scores = joined(shard1, shard2, x, parts)
            halves = zip(scores.chunk(parts), y.chunk(parts), strict=True)
            loss = sum(F.cross_entropy(*half) for half in halves) / parts
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
            losses.append(loss.item())
    return losses


@wrong("hybrid_master", "in place of a number", cure="loss.item()")
def losses_as_tensors(shard1, shard2, batches, parts, rate):
    return [torch.tensor(loss) for loss in hybrid_master(shard1, shard2, batches, parts, rate)]


@wrong("hybrid_master", "expected the list of losses")
def nothing_returned(shard1, shard2, batches, parts, rate):
    hybrid_master(shard1, shard2, batches, parts, rate)


@wrong("hybrid_master", "not those of the batches, in order")
def last_loss_only(shard1, shard2, batches, parts, rate):
    return hybrid_master(shard1, shard2, batches, parts, rate)[-1:]


@wrong("hybrid_master", "shard1.forward was never called")
def nothing_done(shard1, shard2, batches, parts, rate):
    return [0.0 for _ in batches]


@pytest.mark.parametrize("answer", answers.parameters())
def test_the_verdict_fits_the_answer(answer) -> None:
    judge(answer)


def test_every_exercise_has_right_and_wrong_answers_here() -> None:
    answers.complete("hybrid_master")


def features_fetched(shard1, shard2, batches, parts, rate):
    def forward(x):
        features = [shard1.remote().forward(part) for part in x.chunk(parts)]
        features[0].to_here()  # only to look at them
        return shard2.rpc_sync().score(*features)

    return train(shard1, shard2, batches, rate, forward)


@pytest.mark.processes  # `check` starts ranks, which names in the test do not show
def test_a_result_that_the_loss_leaves_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """`dist_autograd.backward` waits for ever; the limit must leave it the time to begin."""

    def named(limit_s: float) -> bool:
        monkeypatch.setattr("labkit.exercises.answer_ranks.LIMIT_S", limit_s)
        verdict = check("hybrid_master", features_fetched)
        assert not verdict.passed
        return "does the loss use every result of a remote call in its context?" in verdict.message

    assert some_limit_does(named, LIMITS_S)
