"""The exercises of lesson 03: right answers pass, and wrong ones get an explanation."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from answers import Answers
from store_exchange import through_the_store

from labkit.group.deadlock_words import ALL

answers = Answers()

right, wrong, mutant = answers.of("shard_range")


@right
def cut_from_a_padded_tensor(numbers, ranks, rank):
    padded = F.pad(torch.arange(numbers), (0, -numbers % ranks), value=-1).chunk(ranks)[rank]
    own = [int(n) for n in padded if n >= 0]
    return (own[0], own[-1] + 1, len(padded) - len(own)) if own else (numbers, numbers, len(padded))


SIZE = "math.ceil(numbers / ranks)"
REST_TO_THE_LAST = "return rank * size, numbers if rank == ranks - 1 else (rank + 1) * size, 0"
EVENLY = """[numbers // ranks + (r < numbers % ranks) for r in range(ranks)]
    start, end = sum(size[:rank]), sum(size[: rank + 1])
    return start, end, """
BOTH, LEFT = "min(rank * size, numbers), min((rank + 1) * size, numbers)", "size - (end - start)"
RETURNED = f"return start, end, {LEFT}"
mutant(SIZE, "numbers // ranks", "rounds down", cure="round the size up")
mutant(SIZE, f"numbers // ranks\n    {REST_TO_THE_LAST}", "differ in length")
mutant(SIZE, f"{EVENLY}0", "differ in length")
mutant(SIZE, f"{EVENLY}-(-numbers // ranks) - (end - start)", "spread evenly", cure="fill the ranks in order")
mutant(BOTH, "rank * size, (rank + 1) * size", "reaches beyond the last number", cure="min(..., numbers)")
mutant(RETURNED, "return start, end, -numbers % ranks", "the padding is not")
mutant(RETURNED, "return start, end", "expected three numbers")
mutant(RETURNED, f"{RETURNED} + 1", "more padding than needed", cure="numbers / ranks, rounded up")
mutant(RETURNED, f"return start + 0.5, end + 0.5, {LEFT}", "is not a whole number")


right, wrong, mutant = answers.of("memory_per_rank")


@right
def memory_with_padding(parameters, activations, ranks, stage):
    whole, shard = 4 * parameters, 4 * math.ceil(parameters / ranks)
    replicated = [4 * whole, 2 * whole, whole, 0][stage]
    return replicated + [0, 2, 3, 4][stage] * shard + activations


OWN = "return weights + gradients + moments + activations"
ALONE = "sum(n * parameters / (ranks if stage == own else 1) for own, n in enumerate([8, 4, 4], 1))"
ORDER = "moments, weights = weights * 2, moments / 2\n    "
mutant(OWN, f"return {ALONE} + activations", "keeps what the stages before it shard")
mutant(OWN, f"{OWN} / ranks", "activations are not sharded")
mutant(OWN, "return weights + gradients + moments", "activations are missing")
mutant("8 * parameters", "4 * parameters", "two moments")
mutant(OWN, "return weights + moments + activations", "gradients or the parameters are missing")
mutant(OWN, "return 16 * parameters / (ranks if stage else 1) + activations", "divides everything")
mutant(OWN, ORDER + OWN, "another order")
mutant(OWN, "return (weights + gradients + moments) / 4 + activations", "numbers, not bytes")
mutant(OWN, "return 20 * parameters + activations", "which of it does the stage shard?", cure="start from 4 bytes each")


right, wrong, mutant = answers.of("zero1")


def padded(x, ranks):
    return F.pad(x.reshape(-1), (0, -x.numel() % ranks))


def written(tensor, flat):
    tensor.data.copy_(flat[: tensor.numel()].view_as(tensor))


@right
def all_joined(parameters, make_optimizer):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sizes = [p.numel() for p in parameters]
    shard = padded(torch.cat([p.data.flatten() for p in parameters]), ranks).chunk(ranks)[rank].clone()
    optimizer = make_optimizer([shard])

    def step():
        gradients = list(padded(torch.cat([p.grad.flatten() for p in parameters]), ranks).chunk(ranks))
        shard.grad = torch.empty_like(shard)
        dist.reduce_scatter(shard.grad, gradients)
        shard.grad /= ranks
        optimizer.step()
        parts = [torch.empty_like(shard) for _ in range(ranks)]
        dist.all_gather(parts, shard)
        for p, flat in zip(parameters, torch.cat(parts)[: sum(sizes)].split(sizes), strict=True):
            written(p, flat)
            p.grad = None

    return step


@wrong("whole tensors", cure="into equal shards")
def whole_tensors(parameters, make_optimizer):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    optimizer = make_optimizer([p for i, p in enumerate(parameters) if i % ranks == rank] or [torch.zeros(1)])

    def step():
        for p in parameters:
            dist.all_reduce(p.grad)
            p.grad /= ranks
        optimizer.step()
        for i, p in enumerate(parameters):
            dist.broadcast(p.data, src=i % ranks)
            p.grad = None

    return step


@wrong("the ranks have not exchanged what it takes")
def zero1_through_the_store(parameters, make_optimizer):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    size = -(-sum(p.numel() for p in parameters) // ranks)
    own = slice(rank * size, (rank + 1) * size)
    shard = torch.cat([p.detach().flatten() for p in parameters])[own].clone().requires_grad_()
    optimizer = make_optimizer([shard])

    def step():
        gradients = through_the_store(torch.cat([p.grad.flatten() for p in parameters]))
        shard.grad = (sum(gradients) / ranks)[own]
        optimizer.step()
        whole = torch.cat(through_the_store(shard.detach()))
        for p, part in zip(parameters, whole.split([p.numel() for p in parameters]), strict=True):
            p.data.copy_(part.view_as(p))
            p.grad = None
        if ranks > 1:
            dist.all_reduce(torch.zeros(1))

    return step


AVERAGED, GATHERED = "shard.grad /= ranks", "dist.all_gather(pieces, shard)"
REDUCED = "dist.reduce_scatter(shard.grad, padded_pieces(p.grad))"
CLEARED, MADE = "p.grad = None", "optimizer = make_optimizer(shards)"
EVERYWHERE = "dist.all_reduce(p.grad)\n            shard.grad = padded_pieces(p.grad)[rank] * 1"
mutant(AVERAGED, "pass", "summed, not averaged", cure="divide by the number of ranks")
mutant(GATHERED, "pieces[rank] = shard", "different parameters after step()", cure="dist.all_gather")
mutant(CLEARED, "pass", "gradients of earlier steps are still there", cure="set p.grad to None")
mutant(REDUCED, EVERYWHERE, "1.5 times the bytes", cure="use dist.reduce_scatter")
mutant(REDUCED, "shard.grad = padded_pieces(p.grad)[rank] * ranks", "no operation added up the gradients")
mutant("join(pieces, p.data)", "pass", "parameters are unchanged", cure="p.data.copy_(...)")
mutant(
    REDUCED,
    "dist.reduce_scatter_tensor(shard.grad, p.grad.flatten())",
    "not every tensor here divides",
    cure="add zeros at its end",
)
mutant("return step", "return optimizer", "must return a function")
mutant(MADE, "optimizer = torch.optim.SGD(shards, lr=0.1)", "make_optimizer was never called")
mutant("return step", "return step if rank == 0 else (lambda: None)", ALL)
# The line contains the word "size", which errors about shapes contain as well.
mutant("return step", "return dist.get_world_size() * misspelt", "failed: NameError")


right, wrong, mutant = answers.of("global_norm")


@right
def gathered_squares(gradients):
    own = torch.cat([g.flatten() for g in gradients]).norm().square().reshape(1)
    every = torch.empty(dist.get_world_size())
    dist.all_gather_into_tensor(every, own)
    return math.sqrt(every.sum())


@wrong("no operation was called")
def norm_through_the_store(gradients):
    return math.sqrt(sum(through_the_store(sum(float(g.square().sum()) for g in gradients))))


NORM = "square = sum(gradient.square().sum() for gradient in gradients)"
ONE_BY_ONE = """squares = [gradient.square().sum() for gradient in gradients]
    for square in squares:
        dist.all_reduce(square)
    square = sum(squares)"""
SUM, ROOT = "dist.all_reduce(square)", "square.sqrt()"
OF_RANK, SQUARED = "square = square.sqrt()\n    ", "\n    square = square.square()"
mutant(f"{NORM}\n    {SUM}", ONE_BY_ONE, "one is enough", cure="add up this rank's squares first")
mutant(SUM, "pass", "norm of its own shards", cure="add up the squares of all ranks")
mutant(SUM, OF_RANK + SUM + SQUARED, "norms of ranks were added up", cure="all_reduce the sum of squares")
mutant(ROOT, "square", "square root is missing")
mutant(
    f"{NORM}\n    {SUM}",
    f"{NORM.replace('square().sum', 'norm')}\n    {SUM}\n    square = square**2",
    "norms of tensors were added up",
    cure="take the root, once",
)
mutant(ROOT, "(square / dist.get_world_size()).sqrt()", "sum of squares was divided")
mutant(ROOT, f"{ROOT} / dist.get_world_size()", "the norm was divided")
mutant(SUM, "dist.reduce(square, dst=0)", "the others do not", cure="use all_reduce, not reduce")
mutant("gradient.square()", "gradient.square_()", "the gradients have changed")
mutant(ROOT, "dist.all_reduce(square)", "nothing is returned")
mutant(SUM, "dist.all_reduce(square, op=dist.ReduceOp.MAX)", "largest norm")
mutant(ROOT, "2 * square.sqrt()", "not the norm of all shards", cure="the root of the sum of all squares")


test_the_verdict_fits_the_answer = answers.test_of_verdicts()
test_every_exercise_has_right_and_wrong_answers_here = answers.test_of_completeness("sharded_data_parallel")
