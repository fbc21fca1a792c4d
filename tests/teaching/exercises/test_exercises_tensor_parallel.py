"""The exercises of lesson 06: right answers pass, and each typical mistake gets its own hint."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from answers import Answers, judge
from store_exchange import through_the_store
from torch.distributed.nn.functional import all_reduce as summing_both_ways
from torch.nn.functional import linear, pad

answers = Answers()
right, wrong = answers.right, answers.wrong


class CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x.view_as(x)

    @staticmethod
    def backward(_, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class SumOut(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(_, gradient):
        return gradient


# column_backward


@right("column_backward")
def column_backward(x, weight, grad):
    grad_x = grad @ weight
    dist.all_reduce(grad_x)
    return grad_x, grad.T @ x, grad.sum(0)


@right("column_backward")
def column_by_autograd(x, weight, grad):
    x, weight, bias = x.requires_grad_(), weight.requires_grad_(), torch.zeros(len(weight), dtype=x.dtype, requires_grad=True)
    linear(CopyIn.apply(x), weight, bias).backward(grad)
    return [x.grad, weight.grad, bias.grad]


@right("column_backward")
def column_by_gathering(x, weight, grad):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, grad @ weight)
    return sum(parts[1:], parts[0]), grad.T @ x, grad.sum(0)


@wrong(
    "column_backward",
    "grad_x is only this rank's part: x went into the columns of every rank",
    cure="the sum of what the ranks contribute",
)
def column_without_a_sum(x, weight, grad):
    return grad @ weight, grad.T @ x, grad.sum(0)


@wrong("column_backward", "it is a sum, not a mean")
def column_averaged(x, weight, grad):
    grad_x, *own = column_backward(x, weight, grad)
    return grad_x / dist.get_world_size(), *own


@wrong("column_backward", "grad_x is a NoneType on rank 0, expected a tensor; dist.all_reduce works in place")
def column_with_its_return_value(x, weight, grad):
    return dist.all_reduce(grad @ weight), grad.T @ x, grad.sum(0)


@wrong("column_backward", "grad_weight is transposed")
def column_transposed(x, weight, grad):
    grad_x, grad_weight, grad_bias = column_backward(x, weight, grad)
    return grad_x, grad_weight.T, grad_bias


@wrong("column_backward", "where 35 are enough")
def column_that_sends_the_bias_too(x, weight, grad):
    dist.all_reduce(torch.zeros(3))
    return column_backward(x, weight, grad)


@wrong("column_backward", "grad_weight is the sum over the ranks")
def column_with_a_sum_of_weights(x, weight, grad):
    grad_x, grad_weight, grad_bias = column_backward(x, weight, grad)
    total = torch.zeros(10, 7, dtype=x.dtype)
    total[: len(grad_weight)] = grad_weight
    dist.all_reduce(total)
    return grad_x, total[: len(grad_weight)], grad_bias


@wrong("column_backward", "need no other rank", cure="without communication")
def column_with_a_mean_bias(x, weight, grad):
    grad_x, grad_weight, _ = column_backward(x, weight, grad)
    return grad_x, grad_weight, grad.mean(0)


@wrong("column_backward", "grad_bias has the shape (5, 5) on rank 0 of 2, expected (5,): one number per output")
def column_without_a_sum_over_the_batch(x, weight, grad):
    grad_x, grad_weight, _ = column_backward(x, weight, grad)
    return grad_x, grad_weight, grad


@wrong("column_backward", "grad was modified", cure="a new tensor")
def column_in_place(x, weight, grad):
    result = column_backward(x, weight, grad)
    grad.zero_()
    return result


@wrong("column_backward", "expected three gradients, (grad_x, grad_weight, grad_bias); rank 0 returned 2 values")
def column_without_bias(x, weight, grad):
    return column_backward(x, weight, grad)[:2]


@wrong("column_backward", "the ranks have not exchanged it")
def column_through_the_store(x, weight, grad):
    return sum(through_the_store(grad @ weight)), grad.T @ x, grad.sum(0)


# row_linear


def own_columns(x):
    return x.tensor_split(dist.get_world_size(), -1)[dist.get_rank()]


@right("row_linear")
def row_linear(x, weight, bias):
    return SumOut.apply(linear(own_columns(CopyIn.apply(x)), weight)) + bias


@right("row_linear")
def row_of_a_padded_weight(x, weight, bias):
    """Multiplies the whole x by a weight that is zero outside of this rank's columns."""
    rank, widths = dist.get_rank(), [len(part) for part in torch.arange(x.shape[-1]).tensor_split(dist.get_world_size())]
    whole = pad(weight, (sum(widths[:rank]), sum(widths[rank + 1 :])))
    return SumOut.apply(linear(CopyIn.apply(x), whole)) + bias


@wrong(
    "row_linear",
    "the bias was added on every rank before the sum, so it is in it once for each rank",
    cure="after the all_reduce",
)
def row_with_bias_inside(x, weight, bias):
    return SumOut.apply(linear(own_columns(CopyIn.apply(x)), weight, bias))


@wrong("row_linear", "the bias is missing")
def row_without_bias(x, weight, bias):
    return SumOut.apply(linear(own_columns(CopyIn.apply(x)), weight))


@wrong("row_linear", "the product of its own columns", cure="the sum over the ranks")
def row_without_a_sum(x, weight, bias):
    return linear(own_columns(CopyIn.apply(x)), weight) + bias


@wrong("row_linear", "the products were averaged")
def row_averaged(x, weight, bias):
    return SumOut.apply(linear(own_columns(CopyIn.apply(x)), weight)) / dist.get_world_size() + bias


@wrong("row_linear", "zero outside of its own columns", cure="pass x through f")
def row_without_f(x, weight, bias):
    return SumOut.apply(linear(own_columns(x), weight)) + bias


@wrong("row_linear", "the gradient of the weight is 2 times what it should be", cure="passes the gradient on as it is")
def row_with_a_sum_in_the_backward(x, weight, bias):
    return summing_both_ways(linear(own_columns(CopyIn.apply(x)), weight)) + bias


@wrong("row_linear", "the gradient of the bias is 1/2 of what it should be", cure="after the sum")
def row_with_a_shared_bias(x, weight, bias):
    return SumOut.apply(linear(own_columns(CopyIn.apply(x)), weight, bias / dist.get_world_size()))


@wrong("row_linear", "has only some of its columns", cure="take the same columns")
def row_of_the_whole_x(x, weight, bias):
    return SumOut.apply(linear(x, weight)) + bias


@wrong("row_linear", "has only some of its columns", cure="chunk(p) cuts into other sizes")
def row_of_chunks(x, weight, bias):
    return SumOut.apply(linear(CopyIn.apply(x).chunk(dist.get_world_size(), -1)[dist.get_rank()], weight)) + bias


@wrong("row_linear", "an autograd function is applied", cure="CopyIn.apply(x)")
def row_without_apply(x, weight, bias):
    return SumOut.apply(linear(own_columns(CopyIn(x)), weight)) + bias


@wrong("row_linear", "Are these gradients of parts of x?", cure="pass x through f before you cut it")
def row_with_f_after_the_cut(x, weight, bias):
    return SumOut.apply(linear(CopyIn.apply(own_columns(x)), weight)) + bias


@wrong("row_linear", "bias gets no gradient on rank 0")
def row_that_detaches(x, weight, bias):
    return row_linear(x, weight, bias.detach())


@wrong("row_linear", "it returned NoneType")
def row_that_returns_nothing(x, weight, bias):
    row_linear(x, weight, bias)


# my_heads


def mine(parts):
    return parts.tensor_split(dist.get_world_size())[dist.get_rank()]


@right("my_heads")
def my_heads(weight, heads):
    return torch.cat([mine(part.unflatten(0, (heads, -1))).flatten(0, 1) for part in weight.chunk(3)])


@right("my_heads")
def my_heads_by_index(weight, heads):
    rank, ranks, hidden = dist.get_rank(), dist.get_world_size(), weight.shape[1]
    width, each, more = hidden // heads, heads // ranks, heads % ranks
    first = rank * each + min(rank, more)
    last = first + each + (rank < more)
    return torch.cat([weight[i * hidden + first * width : i * hidden + last * width] for i in range(3)])


@wrong("my_heads", "as if the q, k and v of a head stood together", cure="cut q, k and v one by one")
def heads_of_the_whole(weight, heads):
    return mine(weight)


@wrong("my_heads", "rows were counted, not heads")
def heads_cut_through(weight, heads):
    return torch.cat([mine(part) for part in weight.chunk(3)])


@wrong("my_heads", "only the queries")
def heads_of_queries(weight, heads):
    return mine(weight.chunk(3)[0].unflatten(0, (heads, -1))).flatten(0, 1)


@wrong("my_heads", "split by its inputs")
def heads_by_inputs(weight, heads):
    return weight.tensor_split(dist.get_world_size(), -1)[dist.get_rank()]


@wrong("my_heads", "each row keeps its 20 numbers", cure="along dimension 0")
def heads_side_by_side(weight, heads):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    parts = [part.unflatten(0, (heads, -1)).tensor_split(ranks)[rank].flatten(0, 1) for part in weight.chunk(3)]
    return torch.cat(parts, dim=1)


@wrong("my_heads", "all q first, then all k, then all v")
def heads_together(weight, heads):
    return mine(weight.unflatten(0, (3, heads, -1)).transpose(0, 1)).flatten(0, 2)


@wrong("my_heads", "every rank has all heads")
def heads_of_all(weight, heads):
    return weight


@wrong("my_heads", "heads // p rounds down", cure="the first heads % p ranks")
def heads_rounded_down(weight, heads):
    rank, each = dist.get_rank(), heads // dist.get_world_size()
    return torch.cat([part.unflatten(0, (heads, -1))[rank * each : (rank + 1) * each].flatten(0, 1) for part in weight.chunk(3)])


@wrong("my_heads", "chunk(p) may return fewer than p parts", cure="tensor_split(p)")
def heads_of_chunks(weight, heads):
    parts = [part.unflatten(0, (heads, -1)).chunk(dist.get_world_size())[dist.get_rank()] for part in weight.chunk(3)]
    return torch.cat([part.flatten(0, 1) for part in parts])


@wrong("my_heads", "expected two dimensions, (rows, hidden); rank 0 returned 3")
def heads_not_flattened(weight, heads):
    return torch.cat([mine(part.unflatten(0, (heads, -1))) for part in weight.chunk(3)], 1)


@wrong("my_heads", "expected a tensor with this rank's rows")
def heads_as_a_list(weight, heads):
    return [mine(part) for part in weight.chunk(3)]


# bytes_per_step


@wrong("bytes_per_step", "not of kB or MB")
def bytes_in_mb(layers, batch, sequence, hidden, ranks, value_bytes):
    return layers * 4 * 2 * (ranks - 1) / ranks * batch * sequence * hidden * value_bytes / 1e6


@right("bytes_per_step")
def bytes_per_step(layers, batch, sequence, hidden, ranks, value_bytes):
    n = batch * sequence * hidden * value_bytes
    return layers * 4 * 2 * (ranks - 1) / ranks * n


@right("bytes_per_step")
def bytes_with_all_gather_and_reduce_scatter(layers, batch, sequence, hidden, ranks, value_bytes):
    piece = batch * sequence * hidden * value_bytes / ranks
    return sum((ranks - 1) * piece for _ in range(layers) for _ in ("attention", "mlp") for _ in range(4))


@wrong("bytes_per_step", "sends n bytes in an all_reduce of n bytes", cure="2(p − 1)/p times n bytes")
def bytes_without_the_ring(layers, batch, sequence, hidden, ranks, value_bytes):
    return layers * 4 * batch * sequence * hidden * value_bytes


@wrong("bytes_per_step", "that is half", cure="and the backward pass has two more")
def bytes_of_the_forward(*args):
    return bytes_per_step(*args) / 2


@wrong("bytes_per_step", "that is one layer")
def bytes_of_a_layer(layers, *args):
    return bytes_per_step(1, *args)


@wrong("bytes_per_step", "those are numbers, not bytes")
def numbers_per_step(*args):
    return bytes_per_step(*args[:-1], 1)


@wrong("bytes_per_step", "what all ranks send together", cure="2(p − 1) pieces of n/p bytes")
def bytes_of_all_ranks(*args):
    return bytes_per_step(*args) * args[4]


@wrong("bytes_per_step", "those are the parameters", cure="batch × sequence × hidden")
def bytes_of_parameters(layers, batch, sequence, hidden, ranks, value_bytes):
    return layers * 12 * hidden**2 * value_bytes * 2 * (ranks - 1) / ranks


@wrong("bytes_per_step", "one rank is asked for", cure="not of n bytes")
def bytes_undivided(layers, batch, sequence, hidden, ranks, value_bytes):
    return layers * 4 * 2 * (ranks - 1) * batch * sequence * hidden * value_bytes


@wrong("bytes_per_step", "expected one number")
def bytes_in_words(*args):
    return f"{bytes_per_step(*args)} B"


@pytest.mark.parametrize("answer", answers.parameters())
@pytest.mark.processes
def test_the_verdict_names_the_mistake(answer):
    judge(answer)


def test_every_exercise_has_answers():
    answers.complete("tensor_parallel")
