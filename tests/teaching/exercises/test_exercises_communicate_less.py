"""The exercises of lesson 18: right answers pass, and each typical mistake gets its own hint."""

from __future__ import annotations

import torch
import torch.distributed as dist
from answers import Answers

answers = Answers()

right, wrong, mutant = answers.of("bytes_by_method")


@right
def bytes_by_cases(method, n, p, k, every):
    if method == "top-k":
        return 8 * k * (p - 1)
    if method == "server":
        return 4 * n * (p - 1)
    numbers = 2 * (p - 1) * n / p
    return {"every step": 4 * numbers, "fp16": 2 * numbers, "local": 4 * numbers / every}[method]


mutant("2 * (p - 1) / p * 4 * n", "4 * n", "how much of it does a ring send?", cure="2 (p - 1) / p of it")
mutant("ring / 2", "ring", "not the bytes of 'fp16'", cure="a float16 number has two bytes")
mutant("(4 * k + 4 * k)", "4 * k", "the places travel, too", cure="a place of four bytes")
mutant("(p - 1) * (4 * k + 4 * k)", "8 * k", "who receives it?", cure="each of the p - 1 others")
mutant("ring / every", "ring", "how many are there?", cure="divide by `every`")
mutant("(p - 1) * 4 * n}", "4 * n}", "which rank is the busiest?", cure="answers each of p - 1 workers")
mutant("ring = 2 * (p - 1) / p * 4 * n", "ring = n", "not the bytes of 'every step'", cure="has four bytes")
mutant("ring / every", "ring * every", "not the bytes of 'local'", cure="in `every` steps")


right, wrong, mutant = answers.of("top_k_with_feedback")


@right
def top_k_in_two_messages(gradients, kept_back, k):
    from torch.nn.utils import parameters_to_vector, vector_to_parameters

    total = parameters_to_vector(gradients) + parameters_to_vector(kept_back)
    places = torch.argsort(total.abs(), descending=True)[:k].int()
    all_values = [torch.empty(k) for _ in range(dist.get_world_size())]
    all_places = [torch.empty(k, dtype=torch.int32) for _ in range(dist.get_world_size())]
    dist.all_gather(all_values, total[places])
    dist.all_gather(all_places, places)
    total[places] = 0
    mean = torch.zeros_like(total).index_add(0, torch.cat(all_places), torch.cat(all_values)) / dist.get_world_size()
    for tensors, vector in ((gradients, mean), (kept_back, total)):
        made = [torch.empty_like(one) for one in tensors]
        vector_to_parameters(vector, made)
        for tensor, values in zip(tensors, made, strict=True):
            tensor.copy_(values)


mutant("(g + kept).flatten()", "g.flatten()", "never travels", cure="before you choose")
mutant("total[places] = 0", "pass", "not what they should be", cure="what was sent is not kept back")
mutant("kept.copy_(of_total.view_as(kept))", "kept.zero_()", "is lost", cure="store it in kept_back")
mutant("total.abs().topk(k)", "total.topk(k)", "not what they should be", cure="-6 comes before 5")
mutant("values / dist.get_world_size()", "values", "the sum over the ranks", cure="divide by the number of ranks")
mutant("g.copy_(of_mean.view_as(g))", "g = of_mean", "not what they should be", cure="with copy_")
GATHER = "dist.all_gather(everyones, mine)"
WITH_LONG_PLACES = f"{GATHER}; dist.all_gather([torch.empty_like(places) for _ in everyones], places)"
mutant(GATHER, WITH_LONG_PLACES, "too many bytes", cure="four bytes at most")


@wrong("k values of each tensor", cure="as one vector")
def top_k_of_each(gradients, kept_back, k):
    for g, kept in zip(gradients, kept_back, strict=True):
        total = (g + kept).flatten()
        sent = torch.zeros_like(total)
        places = total.abs().topk(min(k, len(total))).indices
        sent[places] = total[places]
        kept.copy_((total - sent).view_as(kept))
        dist.all_reduce(sent)
        g.copy_(sent.view_as(g) / dist.get_world_size())


right, wrong, mutant = answers.of("quantised_all_reduce")


@right
def quantised_with_lists(x):
    ranks = dist.get_world_size()

    def quantised(values):
        scale = values.abs().max() / 127
        scales = [torch.empty(()) for _ in range(ranks)]
        dist.all_gather(scales, scale)
        return torch.round(values / scale).to(torch.int8), scales

    numbers, scales = quantised(x)
    pieces = [torch.empty(len(x) // ranks, dtype=torch.int8) for _ in range(ranks)]
    dist.all_to_all(pieces, list(numbers.chunk(ranks)))
    mean, scales = quantised(sum(p.float() * s for p, s in zip(pieces, scales, strict=True)) / ranks)
    means = [torch.empty_like(mean) for _ in range(ranks)]
    dist.all_gather(means, mean)
    x.copy_(torch.cat([m * s for m, s in zip(means, scales, strict=True)]))


@wrong("more bytes travel than needed", cure="only its own piece")
def quantised_all_gather(x):
    scale = (x.abs().max() / 127).view(1)
    small = torch.round(x / scale).to(torch.int8)
    parts = [torch.empty_like(small) for _ in range(dist.get_world_size())]
    scales = [torch.empty_like(scale) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, small)
    dist.all_gather(scales, scale)
    x.copy_(sum(p * s for p, s in zip(parts, scales, strict=True)) / dist.get_world_size())


@wrong("does not fit into int8", cure="before you add")
def sum_in_int8(x):
    scale = (x.abs().max() / 127).view(1)
    small = torch.round(x / scale).to(torch.int8)
    scales = [torch.empty_like(scale) for _ in range(dist.get_world_size())]
    dist.all_gather(scales, scale)
    dist.all_reduce(small)
    x.copy_(small * scales[0] / dist.get_world_size())


mutant(".mean(0)", ".sum(0)", "the sum over the ranks", cure="divide by the number of ranks")
mutant("x.copy_((gathered", "x = ((gathered", "more than rounding", cure="by the sender's scale")
mutant("scales = gathered(scale)", "scales = scale.expand(dist.get_world_size(), 1)", "this rank's scale", cure="the scales, too")
mutant("/ 127", "/ 20", "more than rounding", cure="by the sender's scale")
mutant("x.copy_((gathered(small) * gathered(scale)).flatten())",
       "x.copy_((gathered(small) * gathered(scale)).flatten()); x.chunk(len(scales))[dist.get_rank()].copy_(mean)",
       "different numbers", cure="as it was quantised")  # fmt: skip


right, wrong, mutant = answers.of("diloco_outer_step")


@right
def outer_step_with_torch(shared, weights, momentum, lr, mu):
    average = weights.clone()
    dist.all_reduce(average)
    parameter = torch.nn.Parameter(shared.clone())
    parameter.grad = shared - average / dist.get_world_size()
    optimizer = torch.optim.SGD([parameter], lr, momentum=mu, nesterov=True)
    optimizer.state[parameter]["momentum_buffer"] = momentum
    optimizer.step()
    shared.copy_(parameter.detach())
    weights.copy_(shared)


mutant("g /= dist.get_world_size()", "pass", "the sum over the ranks", cure="divide by the number of ranks")
mutant("g = shared - weights", "g = weights - shared", "move away", cure="shared - weights")
mutant("(g + mu * momentum)", "momentum", "without Nesterov's", cure="g + mu · momentum")
mutant("momentum.mul_(mu).add_(g)", "momentum.copy_(g)", "has forgotten", cure="in place")
mutant("weights.copy_(shared)", "pass", "its own weights", cure="copy the shared weights")
AVERAGE = "weights.copy_(shared + lr * (g + mu * momentum) - g)"
mutant("weights.copy_(shared)", AVERAGE, "not the shared weights", cure="in place")
mutant("shared -= lr", "shared = shared - lr", "not the shared weights", cure="in place")


test_the_verdict_fits_the_answer = answers.test_of_verdicts()
test_every_exercise_has_right_and_wrong_answers_here = answers.test_of_completeness("communicate_less")
