"""The exercises of lesson 02: right answers pass, and wrong ones get an explanation."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from answers import Answers, judge
from store_exchange import through_the_store

answers = Answers()
right, wrong = answers.right, answers.wrong


# average_gradients


def trainable(model):
    """The parameters that take part, with zeros where this rank has no gradient."""
    for p in model.parameters():
        if p.requires_grad:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            yield p


@right("average_gradients")
def average_gradients(model):
    for p in model.parameters():
        if p.requires_grad:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


@right("average_gradients")
def average_gradients_by_gathering(model):
    for p in model.parameters():
        if p.requires_grad:
            own = torch.zeros_like(p) if p.grad is None else p.grad
            every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(every, own)
            p.grad = torch.stack(every).mean(0)


@wrong("average_gradients", "rank 0 has no gradient of experts.1.weight afterwards", cure="put zeros into p.grad")
def average_and_skip(model):
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


@wrong("average_gradients", "its own examples do not use it", cure="put zeros into p.grad")
def average_and_throw_away(model):
    for p in model.parameters():
        if p.requires_grad:
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()


@wrong("average_gradients", "trunk.bias is frozen (requires_grad is False), and now has a gradient on rank 0", cure="skip")
def average_the_frozen_too(model):
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


@wrong(
    "average_gradients", "The gradients of the experts are 3 times what they should be", cure="divide by the number of all ranks"
)
def average_over_users(model):
    for p in model.parameters():
        if p.requires_grad:
            users = torch.tensor(float(p.grad is not None))
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(users)
            dist.all_reduce(p.grad)
            p.grad /= users


@wrong("average_gradients", "The gradients were summed, not averaged: each is 3 times", cure="divide by the number of ranks")
def sum_gradients(model):
    for p in trainable(model):
        dist.all_reduce(p.grad)


@wrong("average_gradients", "divided by 2, not by the number of ranks", cure="dist.get_world_size()")
def average_over_two(model):
    for p in trainable(model):
        dist.all_reduce(p.grad)
        p.grad /= 2


@wrong("average_gradients", "once too often")
def average_twice(model):
    for p in trainable(model):
        p.grad /= dist.get_world_size()
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


@wrong("average_gradients", "each rank still has its own", cure="stored in p.grad itself")
def average_a_copy(model):
    for p in trainable(model):
        total = p.grad.clone()
        dist.all_reduce(total)
        total /= dist.get_world_size()


@wrong("average_gradients", "an all_reduce combines all of them")
def broadcast_gradients(model):
    for p in trainable(model):
        dist.broadcast(p.grad, src=0)


@wrong("average_gradients", "right: trunk.weight")
def average_the_first(model):
    first, *_ = trainable(model)
    dist.all_reduce(first.grad)
    first.grad /= dist.get_world_size()


@wrong("average_gradients", "what is assigned to p.grad?", cure="returns None")
def average_by_assignment(model):
    for p in trainable(model):
        p.grad = dist.all_reduce(p.grad)


@wrong("average_gradients", "p.grad is None here. Is the parameter frozen", cure="skip a frozen parameter")
def reduce_what_is_missing_too(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)


@wrong("average_gradients", "AttributeError", cure="take part with zeros")
def divide_what_is_missing_too(model):
    for p in model.parameters():
        p.grad.div_(dist.get_world_size())
        dist.all_reduce(p.grad)


@wrong("average_gradients", "all gradients are missing, on all ranks", cure="works in place")
def clear_gradients(model):
    model.zero_grad()


@wrong("average_gradients", "the ranks have not exchanged them")
def average_through_the_store(model):
    gradients = through_the_store([p.grad for p in model.parameters()])
    for number, p in enumerate(model.parameters()):
        if p.requires_grad:
            own = [g[number] for g in gradients if g[number] is not None]
            p.grad = sum(own) / dist.get_world_size()


# average_in_buckets


def packed(model, most, size=lambda p: p.grad.nbytes, order=lambda parameters: parameters[::-1]):
    """Lists of parameters whose gradients travel together."""
    buckets = []
    for p in order([p for p in model.parameters() if p.requires_grad]):
        if not buckets or sum(map(size, buckets[-1])) + size(p) > most:
            buckets.append([])
        buckets[-1].append(p)
    return buckets


def average_bucket(bucket, divide=True):
    flat = torch.cat([p.grad.flatten() for p in bucket])
    dist.all_reduce(flat)
    if divide:
        flat /= dist.get_world_size()
    for p, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
        p.grad.copy_(part.view_as(p.grad))


@right("average_in_buckets")
def average_in_buckets(model, bucket_bytes):
    for bucket in packed(model, bucket_bytes):
        average_bucket(bucket)


@right("average_in_buckets")
def average_in_buckets_while_packing(model, bucket_bytes):
    """A list that is sent when the next gradient does not fit, asynchronously, and read with an offset."""
    waiting, bucket, filled = [], [], 0

    def send():
        flat = torch.empty(sum(p.numel() for p in bucket))
        offset = 0
        for p in bucket:
            flat[offset : offset + p.numel()] = p.grad.view(-1) / dist.get_world_size()
            offset += p.numel()
        waiting.append((dist.all_reduce(flat, async_op=True), flat, list(bucket)))

    for p in reversed(list(model.parameters())):
        if p.grad is None:
            continue
        if bucket and filled + p.grad.nbytes > bucket_bytes:
            send()
            bucket, filled = [], 0
        bucket.append(p)
        filled += p.grad.nbytes
    send()
    for work, flat, parameters in waiting:
        work.wait()
        offset = 0
        for p in parameters:
            p.grad = flat[offset : offset + p.numel()].view_as(p).clone()
            offset += p.numel()


@right("average_in_buckets")
def average_in_buckets_forwards(model, bucket_bytes):
    for bucket in packed(model, bucket_bytes, order=lambda parameters: parameters):
        average_bucket(bucket)


@wrong("average_in_buckets", "each travelled alone", cure="put them into one tensor")
def bucket_for_each(model, bucket_bytes):
    for bucket in packed(model, 1):
        average_bucket(bucket)


@wrong("average_in_buckets", "all gradients travelled in one message")
def one_bucket(model, bucket_bytes):
    average_bucket([p for p in model.parameters() if p.requires_grad])


@wrong("average_in_buckets", "numel() counts numbers", cure="p.grad.nbytes")
def buckets_of_numbers(model, bucket_bytes):
    for bucket in packed(model, bucket_bytes, size=lambda p: p.numel()):
        average_bucket(bucket)


@wrong("average_in_buckets", "a bucket of 252 bytes was sent", cure="before you add it, not after")
def buckets_that_overflow(model, bucket_bytes):
    bucket = []
    for p in [p for p in model.parameters() if p.requires_grad][::-1]:
        bucket.append(p)
        if sum(p.grad.nbytes for p in bucket) >= bucket_bytes:
            average_bucket(bucket)
            bucket = []
    if bucket:
        average_bucket(bucket)


@wrong("average_in_buckets", "The last bucket is rarely full", cure="after the loop")
def all_buckets_but_the_last(model, bucket_bytes):
    for bucket in packed(model, bucket_bytes)[:-1]:
        average_bucket(bucket)


@wrong("average_in_buckets", "a bucket is a copy", cure="p.grad.copy_(part.view_as(p.grad))")
def buckets_thrown_away(model, bucket_bytes):
    for bucket in packed(model, bucket_bytes):
        flat = torch.cat([p.grad.flatten() for p in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()


@wrong("average_in_buckets", "in the wrong places", cure="in the order in which you packed them")
def buckets_unpacked_backwards(model, bucket_bytes):
    for bucket in packed(model, bucket_bytes):
        flat = torch.cat([p.grad.flatten() for p in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for p, part in zip(bucket[::-1], flat.split([p.numel() for p in bucket[::-1]]), strict=True):
            p.grad.copy_(part.view_as(p.grad))


@wrong("average_in_buckets", "were summed, not averaged", cure="divide by the number of ranks")
def summed_buckets(model, bucket_bytes):
    for bucket in packed(model, bucket_bytes):
        average_bucket(bucket, divide=False)


@wrong("average_in_buckets", "once too often")
def buckets_divided_twice(model, bucket_bytes):
    average_in_buckets(model, bucket_bytes)
    for bucket in packed(model, bucket_bytes):
        for p in bucket:
            p.grad /= dist.get_world_size()


@wrong("average_in_buckets", "has no gradient, p.grad is None", cure="leave it out of the buckets")
def buckets_with_the_frozen(model, bucket_bytes):
    average_bucket(list(model.parameters()))


@wrong("average_in_buckets", "0.bias is frozen (requires_grad is False), and now has a gradient")
def buckets_that_thaw(model, bucket_bytes):
    average_in_buckets(model, bucket_bytes)
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad


@wrong("average_in_buckets", "8 messages where 4 are enough")
def buckets_reduced_and_broadcast(model, bucket_bytes):
    average_in_buckets(model, bucket_bytes)
    for bucket in packed(model, bucket_bytes):
        dist.broadcast(torch.cat([p.grad.flatten() for p in bucket]), 0)


@wrong("average_in_buckets", "the ranks have not exchanged them")
def buckets_through_the_store(model, bucket_bytes):
    average_through_the_store(model)


# draw_indices

_calls = itertools.count()


@right("draw_indices")
def draw_indices(examples, rank, ranks, epoch):
    order = torch.randperm(examples, generator=torch.Generator().manual_seed(epoch)).tolist()
    each = -(-examples // ranks)
    order += order[: each * ranks - examples]
    return order[rank::ranks]


@right("draw_indices")
def draw_indices_in_blocks(examples, rank, ranks, epoch):
    each = -(-examples // ranks)
    order = random.Random(epoch).sample(range(examples), examples) * 2
    return order[rank * each : (rank + 1) * each]


@wrong("draw_indices", "as when set_epoch is forgotten", cure="part of the seed")
def draw_the_same(examples, rank, ranks, epoch):
    return draw_indices(examples, rank, ranks, 0)


@wrong("draw_indices", "shuffle with the same seed")
def draw_by_own_seed(examples, rank, ranks, epoch):
    order = torch.randperm(examples, generator=torch.Generator().manual_seed(1000 * rank + epoch)).tolist()
    return order[rank::ranks]


@wrong("draw_indices", "different numbers of examples", cure="repeat a few examples")
def draw_unequal(examples, rank, ranks, epoch):
    order = torch.randperm(examples, generator=torch.Generator().manual_seed(epoch)).tolist()
    return order[rank::ranks]


@wrong("draw_indices", "left out", cure="round up and repeat some")
def draw_too_few(examples, rank, ranks, epoch):
    order = torch.randperm(examples, generator=torch.Generator().manual_seed(epoch)).tolist()
    return order[rank::ranks][: examples // ranks]


@wrong("draw_indices", "two calls for epoch 0 give two orders", cure="seed with the epoch")
def draw_unseeded(examples, rank, ranks, epoch):
    calls = next(_calls)  # represents a seed from the clock: the same epoch, another order
    return [(index + calls // ranks) % examples for index in draw_indices(examples, rank, ranks, epoch)]


@wrong("draw_indices", "there is no example")
def draw_from_one(examples, rank, ranks, epoch):
    return [index + 1 for index in draw_indices(examples, rank, ranks, epoch)]


@wrong("draw_indices", "each rank has 12 examples, 4 are enough")
def draw_everything(examples, rank, ranks, epoch):
    return torch.randperm(examples, generator=torch.Generator().manual_seed(epoch)).tolist()


@wrong("draw_indices", "`examples` is a number, not a list")
def draw_from_a_list(examples, rank, ranks, epoch):
    return examples[rank::ranks]


@wrong("draw_indices", "draw_indices failed: TypeError: unsupported operand")
def draw_and_fail(examples, rank, ranks, epoch):
    return range(examples + "1")


@wrong("draw_indices", "is not a whole number")
def draw_halves(examples, rank, ranks, epoch):
    return [index + 0.5 for index in draw_indices(examples, rank, ranks, epoch)]


@wrong("draw_indices", "left out", cure="round up and repeat some")
def draw_the_nearest_number(examples, rank, ranks, epoch):
    each = int(examples / ranks + 0.5)
    return draw_indices_in_blocks(examples, rank, ranks, epoch)[:each]


# scaled_learning_rate


@right("scaled_learning_rate")
def scaled_learning_rate(base, base_batch, per_rank, ranks):
    return base * per_rank * ranks / base_batch


@right("scaled_learning_rate")
def scaled_per_example(base, base_batch, per_rank, ranks):
    per_example = base / base_batch
    return sum(per_example * per_rank for _ in range(ranks))


@wrong("scaled_learning_rate", "square-root rule")
def scaled_by_the_root(base, base_batch, per_rank, ranks):
    return base * (per_rank * ranks / base_batch) ** 0.5


@wrong("scaled_learning_rate", "the number of ranks is not what counts")
def scaled_by_ranks(base, base_batch, per_rank, ranks):
    return base * ranks


@wrong("scaled_learning_rate", "that is the batch of one rank")
def scaled_by_one_rank(base, base_batch, per_rank, ranks):
    return base * per_rank / base_batch


@wrong("scaled_learning_rate", "// rounds down")
def scaled_in_whole_numbers(base, base_batch, per_rank, ranks):
    return base * (per_rank * ranks // base_batch)


@wrong("scaled_learning_rate", "not the linear rule", cure="multiply by the batch of all ranks together")
def scaled_up_only(base, base_batch, per_rank, ranks):
    return base * max(1, per_rank * ranks / base_batch)


@wrong("scaled_learning_rate", "not a smaller one")
def scaled_down(base, base_batch, per_rank, ranks):
    return base / (per_rank * ranks / base_batch)


@wrong("scaled_learning_rate", "not the linear rule", cure="multiply by the batch of all ranks together")
def not_scaled(base, base_batch, per_rank, ranks):
    return base


@pytest.mark.parametrize("answer", answers.parameters())
@pytest.mark.processes
def test_the_verdict_fits_the_answer(answer) -> None:
    judge(answer)


def test_every_exercise_has_right_and_wrong_answers_here() -> None:
    answers.complete("data_parallel")
