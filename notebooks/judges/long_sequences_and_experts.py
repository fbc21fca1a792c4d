"""The exercises of lesson 16: merged softmax, packed documents, the bytes of attention, two experts per token."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.teaching.exercises.comparisons import expect, expect_numbers, whole_numbers, wrong_if
from labkit.teaching.exercises.exercise import Results, exercise
from labkit.teaching.exercises.random_state import case_seed

LESSON = "16_long_sequences_and_experts"

Part = tuple[Tensor, Tensor]  # a finished attention, and the logarithm of the sum of its exponentials


def _parts(keys: tuple[int, ...], scale: float, other: int = 0) -> tuple[list[Part], Part]:
    """Return the attention over each part of the keys, and over all of them: 2 heads of 3 numbers, in float64."""
    torch.manual_seed(case_seed(sum(keys) + other))
    scores = scale * torch.randn(2, sum(keys), dtype=torch.float64)
    values = torch.randn(2, sum(keys), 3, dtype=torch.float64)

    def attention(scores: Tensor, values: Tensor) -> Part:
        out = (scores.softmax(-1)[:, None] @ values)[:, 0]
        return out, scores.logsumexp(-1, keepdim=True)

    cut = zip(scores.split(keys, 1), values.split(keys, 1), strict=True)
    return [attention(*part) for part in cut], attention(scores, values)


@exercise(
    LESSON, "All keys together: each part counts by the sum of its exponentials, however large its scores are.",
    [((5, 2, 9), 1.0), ((4, 4), 1.0), ((3,), 1.0), ((2, 3, 4), 900.0)],
    other=lambda random: (tuple(random.randint(1, 9) for _ in range(3)), random.uniform(1, 3)),
    call="merge_softmax(parts), of {keys} keys, with scores of about {scale:.0f}",
)
def merge_softmax(answer: Any, keys: tuple[int, ...], scale: float) -> None:
    """merge_softmax(parts) returns the pair (out, lse) for all keys together. `parts` is a list of such pairs, each of
    some of the keys, with shapes (heads, width) and (heads, 1); scores may be large."""
    parts, (out, lse) = _parts(keys, scale)
    given = answer([(own.clone(), sums.clone()) for own, sums in parts])
    wrong_if(not isinstance(given, (tuple, list)) or len(given) != 2,
             "expected a pair, (out, lse), in the same form as each part")
    outs, sums = torch.stack([part[0] for part in parts]), torch.stack([part[1] for part in parts])
    wrong_if(not bool(torch.isfinite(torch.as_tensor(given[0])).all()) and bool(torch.isfinite(out).all()),
             "the result is not finite: exp of a large score is infinite",
             "subtract the largest lse, or torch.logsumexp of all, before you take exp")
    expect(given[0], out, [
        (outs.mean(0), "each part counts the same, whatever its scores are", "weight it with exp(lse)"),
        (outs.sum(0), "the outputs were added without weights", "the weights exp(lse - lse of all) sum to 1"),
        ((outs * sums).sum(0) / sums.sum(0),
         "lse is a logarithm: here it is the weight itself", "the weight is exp(lse)"),
    ], "the output is not that of all keys", "weight each with exp(lse - lse of all), and add")
    expect(given[1], lse, [
        (sums.sum(0), "out is right, but the logarithms were added: the sums of exponentials add up",
         "torch.logsumexp of the parts"),
    ], "out is right, but lse is not that of all keys", "torch.logsumexp of the parts")


def _blocks(length: int, rank: int, p: int, start: int = 0) -> list[int]:
    """Return the positions of a rank's two blocks of one document."""
    each = length // (2 * p)
    return [start + block * each + i for block in (rank, 2 * p - 1 - rank) for i in range(each)]


def _other_documents(random: Random) -> tuple[list[int], int, int]:
    p = random.randint(2, 4)
    return [2 * p * random.randint(1, 5) for _ in range(random.randint(2, 4))], random.randrange(p), p


@exercise(
    LESSON, "Every rank has the same number of pairs of tokens, in each document.",
    [([12, 24], 1, 3), ([12, 24], 0, 3), ([8, 16, 8], 3, 4), ([16], 1, 2)], other=_other_documents,
)
def zigzag_documents(answer: Any, lengths: list[int], rank: int, p: int) -> None:
    """zigzag_documents(lengths, rank, p) returns the positions that a rank holds, in ascending order, if each
    document of a packed sequence is cut zig-zag by itself. `lengths` are divisible by 2p."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    documents = list(zip(lengths, starts, strict=True))
    right = [at for length, start in documents for at in _blocks(length, rank, p, start)]
    given = whole_numbers(answer(list(lengths), rank, p), "a list of positions")
    wrong_if(sorted(given) == right != given, "these are the rank's positions; they must be in ascending order")
    expect(given, right, [
        ([at for length in lengths for at in _blocks(length, rank, p)],
         "here every document begins at position 0; the second begins where the first one ends",
         "add the lengths of all documents before it"),
        (_blocks(sum(lengths), rank, p),
         "the whole sequence is cut zig-zag: a document may then be on one rank alone, with all its pairs",
         "cut each document into 2p blocks"),
        ([at for n, start in documents for at in range(start + rank * n // p, start + (rank + 1) * n // p)],
         "each document has the plain cut: the last rank has most of the pairs of tokens",
         "give a rank block number `rank` and block number 2p - 1 - rank"),
        ([at for n, start in documents for at in _blocks(n, rank, p, start)[: n // (2 * p)]],
         "only the block from the front; one from the back belongs to it", "block number 2p - 1 - rank"),
    ], "these are not the rank's two blocks of each document", "blocks of length // (2p) tokens, counted from the "
       "document's start", f"given {given}, expected {right}")


@exercise(
    LESSON, "A ring sends keys and values alone, so fewer heads of them help it more than Ulysses.",
    [(48, 12, 3, 10, 3, 2), (60, 6, 3, 8, 3, 4), (32, 8, 8, 4, 8, 2), (16, 4, 2, 4, 1, 2)],
    other=lambda random: (12 * random.randint(1, 9), 12, 6, random.randint(3, 9), 3, random.choice([2, 4])),
)
def attention_bytes(
    answer: Any, tokens: int, heads: int, kv_heads: int, width: int, p: int, value_bytes: int
) -> None:
    """attention_bytes(tokens, heads, kv_heads, width, p, value_bytes) returns a dictionary with the keys ring and
    ulysses: the bytes that a rank sends in one forward pass of attention over p ranks."""
    q, kv = (tokens * own * width * value_bytes for own in (heads, kv_heads))
    ring, ulysses = (p - 1) * 2 * kv / p, (p - 1) * (2 * q + 2 * kv) / p ** 2
    given = answer(tokens, heads, kv_heads, width, p, value_bytes)
    wrong_if(not isinstance(given, dict) or set(given) != {"ring", "ulysses"},
             "expected a dictionary with the keys ring and ulysses")
    expect_numbers(given["ring"], ring, [
        ((p - 1) * 2 * q / p, "in the ring, keys and values have `kv_heads` heads"),
        ((p - 1) * kv / p, "in the ring, that is keys or values; both travel"),
        (2 * kv, "in the ring, the blocks go on p - 1 times: the last turn is not needed",
         "a rank's own block does not come back to it"),
    ], "in the ring, k and v of 1/p of the tokens go on p - 1 times")
    expect_numbers(given["ulysses"], ulysses, [
        ((p - 1) * 4 * q / p ** 2, "in Ulysses, keys and values have `kv_heads` heads"),
        ((p - 1) * (q + 2 * kv) / p ** 2, "in Ulysses, the output goes back, too", "it is as large as the queries"),
        ((2 * q + 2 * kv) / p, "in Ulysses, a rank keeps 1/p of what it has: its own part is not sent",
         "(p - 1)/p of it is sent"),
    ], "in Ulysses, a rank sends (p - 1)/p of its q, k, v and output")


WIDTH = 3
TOKENS = (5, 7, 4, 6)  # of each rank


def _tokens(rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Return a rank's tokens and their probabilities; the last expert is chosen most."""
    torch.manual_seed(case_seed(10 * ranks + rank))
    scores = torch.randn(TOKENS[rank], ranks, dtype=torch.float64)
    scores[:, -1] += 1
    return torch.randn(TOKENS[rank], WIDTH, dtype=torch.float64), scores.softmax(-1)


def _expert(number: int, x: Tensor) -> Tensor:
    return torch.tanh((number + 1) * x) + number


def _experts_on_rank(answer: Callable[..., Any]) -> Any:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    seen: list[int] = []

    def expert(x: Tensor) -> Tensor:
        seen.append(len(x))
        return _expert(rank, x)

    result = answer(*_tokens(rank, ranks), expert)
    return (result.detach().clone() if isinstance(result, Tensor) else type(result).__name__), sum(seen)


@exercise(
    LESSON, "On 3, 4 and 2 ranks, each token has the two outputs of one process, and went to chosen experts only.",
    [(3,), (4,), (2,)], on_ranks=_experts_on_rank, call="two_experts(x, probabilities, expert) on {ranks} ranks",
    errors={
        "Split sizes": ("the sizes do not fit the tensors: how many rows go to each rank, and how many come?",
                        "exchange the counts by an all_to_all_single first"),
    },
)
def two_experts(results: Results, ranks: int) -> None:
    """two_experts(x, probabilities, expert) runs on every rank, forward only: each token goes to its two most probable
    experts, one per rank, and gets the sum of their outputs, each times its probability."""
    given = [result for result, _ in results]
    for rank, own in enumerate(given):
        wrong_if(not isinstance(own, Tensor), f"expected a tensor, one row per token; rank {rank} returned {own}")
    tokens = [_tokens(rank, ranks) for rank in range(ranks)]
    tops = [probabilities.topk(2) for _, probabilities in tokens]
    seen, chosen = sum(number for _, number in results), 2 * sum(TOKENS[:ranks])
    outputs = [torch.stack([_expert(e, x) for e in range(ranks)], 1) for x, _ in tokens]
    pairs = [
        (out.gather(1, top.indices[..., None].expand(-1, -1, WIDTH)), top.values[..., None])
        for out, top in zip(outputs, tops, strict=True)
    ]
    expect(given, [(out * weight).sum(1) for out, weight in pairs], [
        ([(out * weight)[:, 0] for out, weight in pairs],
         "that is the most probable expert alone; each token has two", "probabilities.topk(2)"),
        ([out.sum(1) for out, _ in pairs], "the outputs are not multiplied by their probabilities"),
        ([(out * weight).flip(1)[:, 0] for out, weight in pairs],
         "only the second expert's output is left: the first was overwritten", "add, with index_add"),
    ], "these are not the sums of each token's two outputs, each times its probability",
       "rows come back in the order in which they were sent: add each to its token. The probabilities stay as they are; "
       "two of them need not sum to 1")
    wrong_if(ranks > 2 and seen > chosen,
             f"the result is right, but the experts computed {seen} rows where {chosen} are enough",
             "send a token to its two experts only")
    names = {span.name for span in results.trace.filter(kind="communication")}
    wrong_if(not any(name.startswith("all_to_all") for name in names),
             f"the result is right, but the tokens travelled by {', '.join(sorted(names)) or 'no message'}",
             "use dist.all_to_all_single")
