"""The exercises of lesson 16: right answers pass, and each typical mistake gets its own hint."""

from __future__ import annotations

import torch
import torch.distributed as dist
from answers import Answers

answers = Answers()

right, wrong, mutant = answers.of("merge_softmax")


@right
def merge_one_by_one(parts):
    (out, lse), *others = parts
    for other, of_other in others:
        new = torch.logaddexp(lse, of_other)
        out, lse = out * (lse - new).exp() + other * (of_other - new).exp(), new
    return out, lse


@wrong("exp of a large score is infinite", cure="subtract the largest lse")
def merge_with_plain_exponentials(parts):
    outs, weights = torch.stack([out for out, _ in parts]), torch.stack([lse.exp() for _, lse in parts])
    total = weights.sum(0)
    return (outs * weights).sum(0) / total, total.log()


SHARES, OF_ALL = "((sums - of_all).exp() * outs).sum(0)", "of_all = sums.logsumexp(0)"
BOTH = f"return {SHARES}, of_all"
mutant(SHARES, "outs.mean(0)", "each part counts the same", cure="weight it with exp(lse)")
mutant(SHARES, "outs.sum(0)", "added without weights", cure="sum to 1")
mutant("(sums - of_all).exp()", "sums / sums.sum(0)", "here it is the weight itself", cure="exp(lse)")
mutant(SHARES, "outs[0]", "not that of all keys", cure="and add")
mutant(BOTH, f"return {SHARES}, sums.sum(0)", "the logarithms were added", cure="torch.logsumexp")
mutant(BOTH, f"return {SHARES}, of_all - 1", "lse is not that of all keys", cure="torch.logsumexp")
mutant(BOTH, f"return {SHARES}", "expected a pair")


right, wrong, mutant = answers.of("zigzag_documents")


@right
def documents_by_chunks(lengths, rank, p):
    chosen = []
    for document in torch.arange(sum(lengths)).split(lengths):
        blocks = document.chunk(2 * p)
        chosen += [blocks[rank], blocks[-1 - rank]]
    return torch.cat(chosen).tolist()


@wrong("the whole sequence is cut zig-zag", cure="cut each document")
def documents_as_one(lengths, rank, p):
    blocks = torch.arange(sum(lengths)).chunk(2 * p)
    return torch.cat([blocks[rank], blocks[-1 - rank]]).tolist()


BLOCKS = "(rank, 2 * p - 1 - rank)"
mutant(BLOCKS, "(2 * rank, 2 * rank + 1)", "the plain cut", cure="2p - 1 - rank")
STRIPES = "return list(range(sum(lengths)))[rank::p]"
mutant("return positions", STRIPES, "not the rank's two blocks", cure="from the document's start")
mutant("return positions", "return positions[::-1]", "in ascending order")
mutant(BLOCKS, "(rank,)", "only the block from the front", cure="2p - 1 - rank")
mutant("start += length", "pass", "every document begins at position 0", cure="all documents before it")
mutant(BLOCKS, "(rank, rank + p)", "not the rank's two blocks of each document", cure="from the document's start")


right, wrong, mutant = answers.of("attention_bytes")


@right
def bytes_by_messages(tokens, heads, kv_heads, width, p, value_bytes):
    head = tokens // p * width * value_bytes
    messages = [2 * kv_heads * head for _ in range(p - 1)]
    exchanged = [each * head / p for each in (heads, kv_heads, kv_heads, heads) for _ in range(p - 1)]
    return {"ring": sum(messages), "ulysses": sum(exchanged)}


RING, ULYSSES = "(p - 1) * 2 * kv_heads * own", "(p - 1) / p * (2 * heads + 2 * kv_heads) * own"
mutant(RING, "(p - 1) * 2 * heads * own", "in the ring, keys and values have")
mutant(RING, "(p - 1) * kv_heads * own", "both travel")
mutant(RING, "p * 2 * kv_heads * own", "the last turn is not needed", cure="does not come back")
mutant(ULYSSES, "(p - 1) / p * 4 * heads * own", "in Ulysses, keys and values have")
mutant(ULYSSES, "(p - 1) / p * (heads + 2 * kv_heads) * own", "the output goes back", cure="as large as the queries")
mutant(ULYSSES, "(2 * heads + 2 * kv_heads) * own", "its own part is not sent", cure="(p - 1)/p of it")
mutant(ULYSSES, "7 * own", "in Ulysses, a rank sends (p - 1)/p of its q, k, v and output")
mutant(RING, "7 * own", "go on p - 1 times")


@wrong("expected a dictionary")
def bytes_as_a_pair(tokens, heads, kv_heads, width, p, value_bytes):
    return 1.0, 2.0


right, wrong, mutant = answers.of("two_experts")


@right
def one_expert_after_the_other(x, probabilities, expert):
    weights, choices = probabilities.topk(2)
    total = torch.zeros_like(x)
    for weight, choice in zip(weights.T, choices.T, strict=True):
        order = choice.argsort()
        counts = choice.bincount(minlength=dist.get_world_size())
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts)
        here, back = x.new_empty(int(coming.sum()), x.shape[1]), torch.empty_like(x)
        dist.all_to_all_single(here, x[order], coming.tolist(), counts.tolist())
        dist.all_to_all_single(back, expert(here), counts.tolist(), coming.tolist())
        total[order] += back * weight[order, None]
    return total


@wrong("where 32 are enough", cure="to its two experts only")
def every_token_to_every_expert(x, probabilities, expert):
    p = dist.get_world_size()
    counts = torch.full((p,), len(x))
    coming = torch.empty_like(counts)
    dist.all_to_all_single(coming, counts)
    here, back = x.new_empty(int(coming.sum()), x.shape[1]), x.new_empty(p * len(x), x.shape[1])
    dist.all_to_all_single(here, x.repeat(p, 1), coming.tolist(), counts.tolist())
    dist.all_to_all_single(back, expert(here), counts.tolist(), coming.tolist())
    weight = torch.zeros_like(probabilities).scatter(1, probabilities.topk(2).indices, 1) * probabilities
    return (back.view(p, len(x), -1) * weight.T[..., None]).sum(0)


GIVEN = "weight, choice = (t.flatten() for t in probabilities.topk(2))"
HERE, ADDED = "dist.all_to_all_single(here, x[token], from_each, sizes)", "index_add(0, token, back * weight[order, None])"
RETURN = f"return torch.zeros_like(x).{ADDED}"
mutant(GIVEN, GIVEN + "\n    weight[1::2] = 0", "the most probable expert alone", cure="topk(2)")
mutant("back * weight[order, None]", "back", "not multiplied by their probabilities")
mutant(GIVEN, GIVEN + "\n    weight[0::2] = 0", "the first was overwritten", cure="index_add")
SUMS = "the sums of each token's two outputs"
mutant("index_add(0, token,", "index_add(0, torch.arange(len(token)) // 2,", SUMS, cure="add each to its token")
mutant(GIVEN, GIVEN + "\n    weight /= weight.view(-1, 2).sum(1).repeat_interleave(2)", SUMS, cure="need not sum to 1")
mutant(HERE, "dist.all_to_all_single(here, x[token], sizes, sizes)", "the sizes do not fit", cure="exchange the counts")
mutant(RETURN, RETURN.removeprefix("return "), "returned NoneType")


def gathered(x, probabilities, expert):
    rank, p = dist.get_rank(), dist.get_world_size()
    everything = [None] * p
    dist.all_gather_object(everything, (x, probabilities))
    results = []
    for own, of_own in everything:
        chosen = (of_own.topk(2).indices == rank).any(1)
        out = torch.zeros_like(own)
        out[chosen] = expert(own[chosen]) * of_own[chosen, rank, None]
        results.append(out)
    for out in results:
        dist.all_reduce(out)
    return results[rank]


wrong("the tokens travelled by", gathered, cure="use dist.all_to_all_single")


test_the_verdict_fits_the_answer = answers.test_of_verdicts()
test_every_exercise_has_right_and_wrong_answers_here = answers.test_of_completeness("long_sequences_and_experts")
