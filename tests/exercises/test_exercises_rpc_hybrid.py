"""The exercises of lesson 08: right answers pass, and wrong ones get an explanation."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.autograd as dist_autograd
import torch.nn.functional as F
from answers import Answers, judge

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


@wrong("distributed_step", "optimizer has to be given it", cure="optimizer.step(context)")
def context_forgotten(forward, optimizer, images, labels):
    F.cross_entropy(forward(images), labels).backward()
    optimizer.step()


@wrong("distributed_step", "optimizer has to be given it", cure="optimizer.step(context)")
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


@wrong("distributed_step", "was called outside the context", cure="under one `with dist_autograd.context()`")
def forward_outside_the_context(forward, optimizer, images, labels):
    loss = F.cross_entropy(forward(images), labels)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [loss])
        optimizer.step(context_id)


@wrong("distributed_step", "loss.backward() cannot leave", cure="dist_autograd.backward(context_id, [loss])")
def backward_of_one_process(forward, optimizer, images, labels):
    with dist_autograd.context() as context_id:
        F.cross_entropy(forward(images), labels).backward()
        optimizer.step(context_id)


@pytest.mark.parametrize("answer", answers.parameters())
def test_the_verdict_fits_the_answer(answer) -> None:
    judge(answer)


def test_every_exercise_has_right_and_wrong_answers_here() -> None:
    answers.complete("rpc_hybrid")
