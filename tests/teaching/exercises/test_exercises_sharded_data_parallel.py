"""The exercises of lesson 03: right answers pass, and wrong ones get an explanation."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from answers import Answers, judge
from store_exchange import through_the_store

from labkit.group.deadlock_words import ALL

answers = Answers()
right, wrong = answers.right, answers.wrong


# shard_range


@right("shard_range")
def shard_range(numbers, ranks, rank):
    size = -(-numbers // ranks)
    start, end = min(rank * size, numbers), min((rank + 1) * size, numbers)
    return start, end, size - (end - start)


@right("shard_range")
def cut_from_a_padded_tensor(numbers, ranks, rank):
    padded = F.pad(torch.arange(numbers), (0, -numbers % ranks), value=-1).chunk(ranks)[rank]
    own = [int(n) for n in padded if n >= 0]
    return (own[0], own[-1] + 1, len(padded) - len(own)) if own else (numbers, numbers, len(padded))


@wrong("shard_range", "rounds down", cure="round the size up")
def rounded_down(numbers, ranks, rank):
    size = numbers // ranks
    return rank * size, (rank + 1) * size, 0


@wrong("shard_range", "differ in length")
def the_rest_to_the_last(numbers, ranks, rank):
    size = numbers // ranks
    return rank * size, numbers if rank == ranks - 1 else (rank + 1) * size, 0


@wrong("shard_range", "reaches beyond the last number", cure="min(..., numbers)")
def not_limited(numbers, ranks, rank):
    size = -(-numbers // ranks)
    return rank * size, (rank + 1) * size, 0


@wrong("shard_range", "differ in length")
def padding_forgotten(numbers, ranks, rank):
    size = -(-numbers // ranks)
    sizes = [numbers // ranks + (r < numbers % ranks) for r in range(ranks)]
    return sum(sizes[:rank]), sum(sizes[: rank + 1]), 0 * size


@wrong("shard_range", "the padding is not")
def padding_of_all_ranks(numbers, ranks, rank):
    start, end, _ = shard_range(numbers, ranks, rank)
    return start, end, -numbers % ranks


@wrong("shard_range", "spread evenly", cure="fill the ranks in order")
def spread(numbers, ranks, rank):
    size = -(-numbers // ranks)
    start, end, _ = padding_forgotten(numbers, ranks, rank)
    return start, end, size - (end - start)


@wrong("shard_range", "expected three numbers")
def two_numbers(numbers, ranks, rank):
    return shard_range(numbers, ranks, rank)[:2]


@wrong("shard_range", "more padding than needed", cure="numbers / ranks, rounded up")
def one_too_large(numbers, ranks, rank):
    start, end, padding = shard_range(numbers, ranks, rank)
    return start, end, padding + 1


@wrong("shard_range", "is not a whole number")
def shard_range_of_halves(numbers, ranks, rank):
    start, end, padding = shard_range(numbers, ranks, rank)
    return start + 0.5, end + 0.5, padding


# memory_per_rank


@right("memory_per_rank")
def memory_per_rank(parameters, activations, ranks, stage):
    nbytes = 4 * parameters
    state = 2 * nbytes / (ranks if stage >= 1 else 1)
    gradients = nbytes / (ranks if stage >= 2 else 1)
    weights = nbytes / (ranks if stage >= 3 else 1)
    return weights + gradients + state + activations


@right("memory_per_rank")
def memory_with_padding(parameters, activations, ranks, stage):
    whole, shard = 4 * parameters, 4 * math.ceil(parameters / ranks)
    replicated = [4 * whole, 2 * whole, whole, 0][stage]
    return replicated + [0, 2, 3, 4][stage] * shard + activations


@wrong("memory_per_rank", "activations are not sharded")
def activations_divided(parameters, activations, ranks, stage):
    return memory_per_rank(parameters, activations / ranks, ranks, stage)


@wrong("memory_per_rank", "activations are missing")
def activations_forgotten(parameters, activations, ranks, stage):
    return memory_per_rank(parameters, 0, ranks, stage)


@wrong("memory_per_rank", "two moments")
def one_moment(parameters, activations, ranks, stage):
    return memory_per_rank(parameters, activations, ranks, stage) - 4 * parameters / (ranks if stage else 1)


@wrong("memory_per_rank", "gradients or the parameters are missing")
def gradients_forgotten(parameters, activations, ranks, stage):
    return memory_per_rank(parameters, activations, ranks, stage) - 4 * parameters / (ranks if stage >= 2 else 1)


@wrong("memory_per_rank", "keeps what the stages before it shard")
def each_stage_alone(parameters, activations, ranks, stage):
    parts = {1: 8, 2: 4, 3: 4}
    return sum(4 * size * parameters / 4 / (ranks if own == stage else 1) for own, size in parts.items()) + activations


@wrong("memory_per_rank", "divides everything")
def everything_divided(parameters, activations, ranks, stage):
    return 16 * parameters / (ranks if stage else 1) + activations


@wrong("memory_per_rank", "another order")
def parameters_first(parameters, activations, ranks, stage):
    nbytes = 4 * parameters
    divisor = [ranks if stage >= n else 1 for n in (1, 2, 3)]
    return nbytes / divisor[0] + nbytes / divisor[1] + 2 * nbytes / divisor[2] + activations


@wrong("memory_per_rank", "numbers, not bytes")
def in_numbers(parameters, activations, ranks, stage):
    return memory_per_rank(parameters, 0, ranks, stage) / 4 + activations


@wrong("memory_per_rank", "which of it does the stage shard?", cure="start from 4 bytes each")
def as_in_mixed_precision(parameters, activations, ranks, stage):
    return 20 * parameters + activations


# zero1


def padded(x, ranks):
    return F.pad(x.reshape(-1), (0, -x.numel() % ranks))


def written(tensor, flat):
    tensor.data.copy_(flat[: tensor.numel()].view_as(tensor))


@right("zero1")
def tensor_by_tensor(parameters, make_optimizer):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shards = [padded(p.data, ranks).chunk(ranks)[rank].clone() for p in parameters]
    optimizer = make_optimizer(shards)

    def step():
        for p, shard in zip(parameters, shards, strict=True):
            shard.grad = torch.empty_like(shard)
            dist.reduce_scatter(shard.grad, list(padded(p.grad, ranks).chunk(ranks)))
            shard.grad /= ranks
            p.grad = None
        optimizer.step()
        for p, shard in zip(parameters, shards, strict=True):
            whole = shard.new_empty(ranks * shard.numel())
            dist.all_gather_into_tensor(whole, shard)
            written(p, whole)

    return step


@right("zero1")
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


def variant(*, average=True, gather=True, clear=True, reduce="scatter", state="shards", own=False):
    """The right answer with one thing changed."""

    def zero1(parameters, make_optimizer):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        shards = [padded(p.data, ranks).chunk(ranks)[rank].clone() for p in parameters]
        optimizer = make_optimizer(shards if state == "shards" else parameters)

        def step():
            for p, shard in zip(parameters, shards, strict=True):
                shard.grad = torch.empty_like(shard)
                if own:
                    shard.grad = padded(p.grad, ranks).chunk(ranks)[rank] * 1
                elif reduce == "scatter":
                    dist.reduce_scatter(shard.grad, list(padded(p.grad, ranks).chunk(ranks)))
                else:
                    dist.all_reduce(p.grad)
                    shard.grad = padded(p.grad, ranks).chunk(ranks)[rank] * 1
                    p.grad /= ranks
                if average and not own:
                    shard.grad /= ranks
                if clear and state == "shards":
                    p.grad = None
            optimizer.step()
            for p, shard in zip(parameters, shards, strict=True):
                if gather and state == "shards":
                    whole = shard.new_empty(ranks * shard.numel())
                    dist.all_gather_into_tensor(whole, shard)
                    written(p, whole)
                if state != "shards":
                    p.grad = None

        return step

    return zero1


wrong("zero1", "summed, not averaged", variant(average=False), cure="divide by the number of ranks")
wrong("zero1", "different parameters after step()", variant(gather=False, clear=True, state="views"), cure="dist.all_gather")
wrong("zero1", "gradients of earlier steps are still there", variant(clear=False), cure="set p.grad to None")
wrong("zero1", "1.5 times the bytes", variant(reduce="all"), cure="use dist.reduce_scatter")
wrong("zero1", "every rank keeps optimizer state", variant(reduce="all", state="whole"), cure="this rank's shards")
wrong("zero1", "no operation added up the gradients", variant(own=True))


@wrong("zero1", "parameters are unchanged", cure="p.data.copy_(...)")
def never_written(parameters, make_optimizer):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shards = [padded(p.data, ranks).chunk(ranks)[rank].clone() for p in parameters]
    optimizer = make_optimizer(shards)
    return optimizer.step


@wrong("zero1", "not every tensor here divides", cure="add zeros at its end")
def without_padding(parameters, make_optimizer):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shards = [p.data.view(-1).chunk(ranks)[rank] for p in parameters]
    optimizer = make_optimizer(shards)

    def step():
        for p, shard in zip(parameters, shards, strict=True):
            shard.grad = torch.empty_like(shard)
            dist.reduce_scatter_tensor(shard.grad, p.grad.view(-1))
        optimizer.step()

    return step


@wrong("zero1", "whole tensors", cure="into equal shards")
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


@wrong("zero1", "must return a function")
def returns_the_optimizer(parameters, make_optimizer):
    return make_optimizer(parameters)


@wrong("zero1", ALL)
def only_rank_0_gathers(parameters, make_optimizer):
    step = tensor_by_tensor(parameters, make_optimizer)
    return step if dist.get_rank() == 0 else (lambda: None)


@wrong("zero1", "failed: NameError")
def zero1_with_a_name_that_is_not_defined(parameters, make_optimizer):
    """The line contains the word "size", which errors about shapes contain as well."""
    return parameters[0].numel() // dist.get_world_size() * misspelt  # noqa: F821


@wrong("zero1", "the ranks have not exchanged what it takes")
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


# global_norm


@right("global_norm")
def global_norm(gradients):
    square = sum((g.square().sum() for g in gradients), torch.zeros(()))
    dist.all_reduce(square)
    return square.sqrt()


@right("global_norm")
def gathered_squares(gradients):
    own = torch.cat([g.flatten() for g in gradients]).norm().square().reshape(1)
    every = torch.empty(dist.get_world_size())
    dist.all_gather_into_tensor(every, own)
    return math.sqrt(every.sum())


@wrong("global_norm", "norm of its own shards", cure="add up the squares of all ranks")
def own_norm(gradients):
    return torch.cat([g.flatten() for g in gradients]).norm()


@wrong("global_norm", "norms of ranks were added up", cure="all_reduce the sum of squares")
def sum_of_norms(gradients):
    norm = own_norm(gradients)
    dist.all_reduce(norm)
    return norm


@wrong("global_norm", "square root is missing")
def without_root(gradients):
    return global_norm(gradients) ** 2


@wrong("global_norm", "norms of tensors were added up", cure="take the root, once")
def sum_over_tensors(gradients):
    norm = sum((g.norm() for g in gradients), torch.zeros(()))
    dist.all_reduce(norm)
    return norm


@wrong("global_norm", "sum of squares was divided")
def mean_of_squares(gradients):
    return global_norm(gradients) / math.sqrt(dist.get_world_size())


@wrong("global_norm", "the others do not", cure="use all_reduce, not reduce")
def only_on_rank_0(gradients):
    square = sum((g.square().sum() for g in gradients), torch.zeros(()))
    dist.reduce(square, dst=0)
    return square.sqrt()


@wrong("global_norm", "the gradients have changed")
def in_place(gradients):
    square = sum((g.square_().sum() for g in gradients), torch.zeros(()))
    dist.all_reduce(square)
    return square.sqrt()


@wrong("global_norm", "one is enough", cure="add up this rank's squares first")
def one_by_one(gradients):
    total = torch.zeros(())
    for g in gradients:
        square = g.square().sum()
        dist.all_reduce(square)
        total += square
    return total.sqrt()


@wrong("global_norm", "nothing is returned")
def result_of_all_reduce(gradients):
    return dist.all_reduce(own_norm(gradients))


@wrong("global_norm", "largest norm")
def largest(gradients):
    norm = own_norm(gradients)
    dist.all_reduce(norm, op=dist.ReduceOp.MAX)
    return norm


@wrong("global_norm", "no operation was called")
def norm_through_the_store(gradients):
    return math.sqrt(sum(through_the_store(sum(float(g.square().sum()) for g in gradients))))


@pytest.mark.parametrize("answer", answers.parameters())
@pytest.mark.processes
def test_verdict(answer):
    judge(answer)


def test_every_exercise_has_right_and_wrong_answers():
    answers.complete("sharded_data_parallel")
