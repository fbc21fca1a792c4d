"""The exercises of lesson 08: right answers pass, and wrong ones get an explanation."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.nn.functional as F
from answers import Answers, judge
from time_limits import LIMITS_S, some_limit_does

from labkit.teaching.exercises.check import check

answers = Answers()
right, wrong = answers.right, answers.wrong


# overlapped_time


@right("overlapped_time")
def overlapped_time(first, second, parts):
    return (first + second + (parts - 1) * max(first, second)) / parts


@wrong("overlapped_time", "without any overlap")
def overlapped_not_at_all(first, second, parts):
    return first + second


@wrong("overlapped_time", "the slower worker alone takes that long")
def overlapped_all_the_time(first, second, parts):
    return max(first, second)


@wrong("overlapped_time", "belong to the whole batch", cure="a part takes 1/parts")
def overlapped_whole_batches(first, second, parts):
    return first + second + (parts - 1) * max(first, second)


@wrong("overlapped_time", "sets the pace, not the faster one")
def overlapped_at_the_faster_pace(first, second, parts):
    return (first + second + (parts - 1) * min(first, second)) / parts


@wrong("overlapped_time", "belong to the whole batch", cure="a part takes 1/parts")
def overlapped_as_in_section_1(first, second, parts):
    return parts * (first + second) - min(first, second)


@wrong("overlapped_time", "the other parts follow it")
def overlapped_one_part(first, second, parts):
    return (first + second) / parts


@wrong("overlapped_time", "right for two parts")
def overlapped_in_two_parts(first, second, parts):
    return first + second - min(first, second) / 2


@wrong("overlapped_time", "not the time at which the last part ends")
def overlapped_a_third_of_the_time(first, second, parts):
    return (first + second) / 3


@wrong("overlapped_time", "expected one number")
def overlapped_in_words(first, second, parts):
    return f"{first + second} ms"


@right("overlapped_time")
def overlapped_step_by_step(first, second, parts):
    end1 = end2 = 0.0
    for _ in range(parts):
        end1 += first / parts
        end2 = max(end1, end2) + second / parts
    return end2


# both_workers


@right("both_workers")
def both_workers_by_references(workers, images):
    references = [worker.remote().forward(half) for worker, half in zip(workers, images.chunk(2), strict=True)]
    return torch.cat([reference.to_here() for reference in references])


@right("both_workers")
def both_workers(workers, images):
    halves = images.chunk(2)
    futures = [worker.rpc_async().forward(half) for worker, half in zip(workers, halves, strict=True)]
    return torch.cat(torch.futures.wait_all(futures))


@wrong("both_workers", "rpc_sync waits")
def one_after_the_other(workers, images):
    return torch.cat([worker.rpc_sync().forward(half) for worker, half in zip(workers, images.chunk(2), strict=True)])


@wrong("both_workers", "a wait() right after rpc_async")
def asked_and_waited_for_one_by_one(workers, images):
    halves = zip(workers, images.chunk(2), strict=True)
    return torch.cat([worker.rpc_async().forward(half).wait() for worker, half in halves])


@wrong("both_workers", "an RRef is not the module", cure="workers[0].rpc_async().forward(half)")
def references_called(workers, images):
    return torch.cat([worker(half) for worker, half in zip(workers, images.chunk(2), strict=True)])


@wrong("both_workers", "an RRef is not the module", cure="workers[0].rpc_async().forward(half)")
def methods_of_references_called(workers, images):
    return torch.cat([worker.forward(half) for worker, half in zip(workers, images.chunk(2), strict=True)])


@wrong("both_workers", "joined in the wrong order")
def halves_swapped(workers, images):
    return torch.cat(list(reversed(both_workers(workers, images).chunk(2))))


@wrong("both_workers", "more than its half", cure="chunk(2)")
def whole_batch_to_both(workers, images):
    first, _ = torch.futures.wait_all([worker.rpc_async().forward(images) for worker in workers])
    return first


@wrong("both_workers", "expected one tensor", cure="wait for the parts and join them")
def futures_returned(workers, images):
    futures = [worker.rpc_async().forward(half) for worker, half in zip(workers, images.chunk(2), strict=True)]
    torch.futures.wait_all(futures)
    return futures


@wrong("both_workers", "expected one tensor", cure="wait for the parts and join them")
def futures_returned_at_once(workers, images):
    return [worker.rpc_async().forward(half) for worker, half in zip(workers, images.chunk(2), strict=True)]


@wrong("both_workers", "only worker1 worked")
def first_worker_only(workers, images):
    return workers[0].rpc_sync().forward(images)


@wrong("both_workers", "the wrong shape", cure="torch.cat")
def halves_stacked(workers, images):
    return both_workers(workers, images).reshape(2, -1, 3)


@wrong("both_workers", "not those of the whole batch")
def halves_added(workers, images):
    return both_workers(workers, images) + 1


# distributed_step


@right("distributed_step")
def distributed_step(forward, optimizer, images, labels):
    with dist_autograd.context() as context_id:
        loss = F.cross_entropy(forward(images), labels)
        dist_autograd.backward(context_id, [loss])
        optimizer.step(context_id)


@right("distributed_step")
def distributed_step_by_hand(forward, optimizer, images, labels):
    with dist_autograd.context() as context_id:
        loss = -F.log_softmax(forward(images), dim=1)[range(len(labels)), labels].mean()
        dist_autograd.backward(context_id, [loss])
        optimizer.step(context_id)


@wrong("distributed_step", "the parameters on the workers have not changed", cure="optimizer.step(context_id)")
def step_forgotten(forward, optimizer, images, labels):
    with dist_autograd.context() as context_id:
        loss = F.cross_entropy(forward(images), labels)
        dist_autograd.backward(context_id, [loss])


@wrong("distributed_step", "belong to the summed loss of 6 examples")
def loss_summed(forward, optimizer, images, labels):
    with dist_autograd.context() as context_id:
        loss = F.cross_entropy(forward(images), labels, reduction="sum")
        dist_autograd.backward(context_id, [loss])
        optimizer.step(context_id)


@wrong("distributed_step", "have the wrong sign")
def loss_negated(forward, optimizer, images, labels):
    with dist_autograd.context() as context_id:
        loss = -F.cross_entropy(forward(images), labels)
        dist_autograd.backward(context_id, [loss])
        optimizer.step(context_id)


@wrong("distributed_step", "which the optimizer does not know", cure="optimizer.step(context)")
def context_forgotten(forward, optimizer, images, labels):
    F.cross_entropy(forward(images), labels).backward()
    optimizer.step()


@wrong("distributed_step", "which the optimizer does not know", cure="optimizer.step(context)")
def context_not_handed_on(forward, optimizer, images, labels):
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [F.cross_entropy(forward(images), labels)])
        optimizer.step()


@wrong("distributed_step", "zero_grad is not needed")
def gradients_set_to_zero(forward, optimizer, images, labels):
    optimizer.zero_grad()
    distributed_step(forward, optimizer, images, labels)


@wrong("distributed_step", "takes a list of losses", cure="backward(context, [loss])")
def loss_in_no_list(forward, optimizer, images, labels):
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, F.cross_entropy(forward(images), labels))
        optimizer.step(context_id)


@wrong("distributed_step", "the context ends with its `with` block", cure="belongs inside")
def step_behind_the_block(forward, optimizer, images, labels):
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [F.cross_entropy(forward(images), labels)])
    optimizer.step(context_id)


@wrong("distributed_step", "TypeError")
def images_and_words_added(forward, optimizer, images, labels):
    distributed_step(forward, optimizer, images + "", labels)


@wrong("distributed_step", "the forward pass was outside a context", cure="under one `with dist_autograd.context()`")
def forward_outside_the_context(forward, optimizer, images, labels):
    loss = F.cross_entropy(forward(images), labels)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [loss])
        optimizer.step(context_id)


@wrong("distributed_step", "loss.backward() cannot leave", cure="dist_autograd.backward(context, [loss])")
def backward_of_one_process(forward, optimizer, images, labels):
    with dist_autograd.context() as context_id:
        F.cross_entropy(forward(images), labels).backward()
        optimizer.step(context_id)


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
def one_after_the_other_in_master(shard1, shard2, batches, parts, rate):
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
def step_forgotten_in_master(shard1, shard2, batches, parts, rate):
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


@wrong("hybrid_master", "loss.backward() cannot leave", cure="dist_autograd.backward(context, [loss])")
def backward_of_one_process_in_master(shard1, shard2, batches, parts, rate):
    optimizer = optimizer_of(shard1, shard2, rate=rate)
    for x, y in batches:
        with dist_autograd.context() as context:
            F.cross_entropy(joined(shard1, shard2, x, parts), y).backward()
            optimizer.step(context)


@wrong("hybrid_master", "the forward pass was outside a context", cure="under one `with dist_autograd.context()`")
def forward_outside_the_context_in_master(shard1, shard2, batches, parts, rate):
    optimizer = optimizer_of(shard1, shard2, rate=rate)
    for x, y in batches:
        loss = F.cross_entropy(joined(shard1, shard2, x, parts), y)
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [loss])
            optimizer.step(context)


@wrong("hybrid_master", "which are on the workers", cure="DistributedOptimizer(torch.optim.SGD, references")
def optimizer_of_one_process(shard1, shard2, batches, parts, rate):
    torch.optim.SGD(shard1.rpc_sync().parameter_rrefs(), lr=rate, momentum=0.9)


@wrong("hybrid_master", "the gradients are in a context", cure="optimizer.step(context)")
def context_not_handed_on_in_master(shard1, shard2, batches, parts, rate):
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
@pytest.mark.processes
def test_the_verdict_fits_the_answer(answer) -> None:
    judge(answer)


def test_every_exercise_has_right_and_wrong_answers_here() -> None:
    answers.complete("rpc_hybrid")


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
        monkeypatch.setattr("labkit.teaching.exercises.answer_ranks.LIMIT_S", limit_s)
        verdict = check("hybrid_master", features_fetched)
        assert not verdict.passed
        return "does the loss use every result of a remote call in its context?" in verdict.message

    assert some_limit_does(named, LIMITS_S)
