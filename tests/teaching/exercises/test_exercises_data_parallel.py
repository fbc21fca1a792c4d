"""The exercises of lesson 02: right answers pass, and wrong ones get an explanation."""

from __future__ import annotations

import itertools
import random

import torch
import torch.distributed as dist
from answers import Answers
from store_exchange import through_the_store

answers = Answers()

right, wrong, mutant = answers.of("average_gradients")


@right
def average_gradients_by_gathering(model):
    for p in model.parameters():
        if p.requires_grad:
            own = torch.zeros_like(p) if p.grad is None else p.grad
            every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(every, own)
            p.grad = torch.stack(every).mean(0)


@wrong("the ranks have not exchanged them")
def average_through_the_store(model):
    gradients = through_the_store([p.grad for p in model.parameters()])
    for number, p in enumerate(model.parameters()):
        if p.requires_grad:
            own = [g[number] for g in gradients if g[number] is not None]
            p.grad = sum(own) / dist.get_world_size()


MEAN = "dist.all_reduce(p.grad)\n            p.grad /= dist.get_world_size()"
ZEROS = "p.grad = torch.zeros_like(p) if p.grad is None else p.grad"
THROWN_AWAY = """gradient = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()"""
BY_USERS = """users = torch.tensor(float(p.grad.any()))
            dist.all_reduce(users)
            dist.all_reduce(p.grad)
            p.grad /= users"""
FIRST = "if p is next(model.parameters()):\n                "
mutant(f"{ZEROS}\n            {MEAN}", THROWN_AWAY, "its own examples do not use it", cure="put zeros into p.grad")
mutant(MEAN, BY_USERS, "The gradients of the experts are 3 times what they should be", cure="divide by the number of all ranks")
mutant(
    f"if p.requires_grad:\n            {ZEROS}",
    "if True:",
    "p.grad is None here. Is the parameter frozen",
    cure="skip a frozen parameter",
)
mutant(ZEROS, "p.grad.div_(1)", "AttributeError", cure="take part with zeros")
mutant(MEAN, f"{MEAN}\n    model.zero_grad()", "all gradients are missing, on all ranks", cure="works in place")
mutant(
    "p.requires_grad:",
    "p.grad is not None:",
    "rank 0 has no gradient of experts.1.weight afterwards",
    cure="put zeros into p.grad",
)
mutant(
    "p.requires_grad:",
    "True:",
    "trunk.bias is frozen (requires_grad is False), and now has a gradient on rank 0",
    cure="skip",
)
mutant(
    "p.grad /= dist.get_world_size()",
    "pass",
    "The gradients were summed, not averaged: each is 3 times",
    cure="divide by the number of ranks",
)
mutant("dist.get_world_size()", "2", "divided by 2, not by the number of ranks", cure="dist.get_world_size()")
mutant("dist.get_world_size()", "dist.get_world_size() ** 2", "once too often")
mutant(MEAN, "dist.all_reduce(p.grad.clone())", "each rank still has its own", cure="stored in p.grad itself")
mutant(MEAN, "dist.broadcast(p.grad, src=0)", "an all_reduce combines all of them")
mutant(MEAN, FIRST + MEAN.replace("\n", "\n    "), "right: trunk.weight")
mutant(MEAN, "p.grad = dist.all_reduce(p.grad)", "what is assigned to p.grad?", cure="returns None")


right, wrong, mutant = answers.of("average_in_buckets")


@right
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


@wrong("the ranks have not exchanged them")
def buckets_through_the_store(model, bucket_bytes):
    average_through_the_store(model)


mutant("[::-1]", "")  # right: from the first parameter to the last
FULL = "sum(g.nbytes for g in buckets[-1]) + grad.nbytes > bucket_bytes"
BUCKETS = "for bucket in buckets_of(model, bucket_bytes):"
THAW = "for p in model.parameters():\n        p.grad = torch.zeros_like(p) if p.grad is None else p.grad\n    "
PARTS = "zip(bucket, flat.split([grad.numel() for grad in bucket])"
mutant(FULL, "True", "each travelled alone", cure="put them into one tensor")
mutant(FULL, "False", "all gradients travelled in one message")
mutant(FULL, FULL.replace("nbytes", "numel()"), "numel() counts numbers", cure="p.grad.nbytes")
mutant(
    FULL,
    "sum(g.nbytes for g in buckets[-1]) >= bucket_bytes",
    "a bucket of 252 bytes was sent",
    cure="before you add it, not after",
)
mutant(BUCKETS, BUCKETS.replace("):", ")[:-1]:"), "The last bucket is rarely full", cure="after the loop")
mutant("grad.copy_(part.view_as(grad))", "pass", "a bucket is a copy", cure="p.grad.copy_(part.view_as(p.grad))")
mutant(PARTS, PARTS.replace("bucket", "bucket[::-1]"), "in the wrong places", cure="in the order in which you packed them")
mutant("flat /= dist.get_world_size()", "pass", "were summed, not averaged", cure="divide by the number of ranks")
mutant("dist.get_world_size()", "dist.get_world_size() ** 2", "once too often")
mutant(" if p.requires_grad]", "]", "has no gradient, p.grad is None", cure="leave it out of the buckets")
mutant(BUCKETS, THAW + BUCKETS, "0.bias is frozen (requires_grad is False), and now has a gradient")
mutant("dist.all_reduce(flat)", "dist.all_reduce(flat)\n        dist.broadcast(flat, 0)", "8 messages where 4 are enough")


right, wrong, mutant = answers.of("draw_indices")

_calls = itertools.count()


@right
def draw_indices_in_blocks(examples, rank, ranks, epoch):
    each = -(-examples // ranks)
    order = random.Random(epoch).sample(range(examples), examples) * 2
    return order[rank * each : (rank + 1) * each]


@wrong("two calls for epoch 0 give two orders", cure="seed with the epoch")
def draw_unseeded(examples, rank, ranks, epoch):
    calls = next(_calls)  # represents a seed from the clock: the same epoch, another order
    return [(index + calls // ranks) % examples for index in draw_indices_in_blocks(examples, rank, ranks, epoch)]


SEED, PADDING, SHARE = "manual_seed(epoch)", "order += order[: -examples % ranks]", "order[rank::ranks]"
mutant(SEED, "manual_seed(0)", "as when set_epoch is forgotten", cure="part of the seed")
mutant(SEED, "manual_seed(1000 * rank + epoch)", "shuffle with the same seed")
mutant(PADDING, "pass", "different numbers of examples", cure="repeat a few examples")
mutant(SHARE, f"{SHARE}[: examples // ranks]", "left out", cure="round up and repeat some")
mutant(SHARE, f"{SHARE}[: int(examples / ranks + 0.5)]", "left out", cure="round up and repeat some")
mutant(SHARE, f"[index + 1 for index in {SHARE}]", "there is no example")
mutant(SHARE, "order", "each rank has 12 examples, 4 are enough")
mutant(SHARE, "examples[rank::ranks]", "`examples` is a number, not a list")
mutant(SHARE, "range(examples + '1')", "draw_indices failed: TypeError: unsupported operand")
mutant(SHARE, f"[index + 0.5 for index in {SHARE}]", "is not a whole number")


right, wrong, mutant = answers.of("scaled_learning_rate")


@right
def scaled_per_example(base, base_batch, per_rank, ranks):
    per_example = base / base_batch
    return sum(per_example * per_rank for _ in range(ranks))


RATE, WHOLE_BATCH = "base * per_rank * ranks / base_batch", "multiply by the batch of all ranks together"
mutant(RATE, "base * (per_rank * ranks / base_batch) ** 0.5", "square-root rule")
mutant(RATE, "base * ranks", "the number of ranks is not what counts")
mutant(RATE, "base * per_rank / base_batch", "that is the batch of one rank")
mutant(RATE, "base * (per_rank * ranks // base_batch)", "// rounds down")
mutant(RATE, "base * max(1, per_rank * ranks / base_batch)", "not the linear rule", cure=WHOLE_BATCH)
mutant(RATE, "base / (per_rank * ranks / base_batch)", "not a smaller one")
mutant(RATE, "base", "not the linear rule", cure=WHOLE_BATCH)


test_the_verdict_fits_the_answer = answers.test_of_verdicts()
test_every_exercise_has_right_and_wrong_answers_here = answers.test_of_completeness("data_parallel")
