"""The exercises of lesson 18: bytes per step, top-k with feedback, an int8 all-reduce, an outer step of DiLoCo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.plots.traffic import sent_mb
from labkit.teaching.exercises.comparisons import expect, expect_numbers, wrong_if
from labkit.teaching.exercises.exercise import Results, exercise
from labkit.teaching.exercises.random_state import case_seed

LESSON: Final = "18_communicate_less"
RANKS: Final = 3  # not two: there, factors coincide
METHODS: Final = "every step", "fp16", "top-k", "local", "server"
FLOAT: Final = 4  # bytes
SUMMED: Final = "that is the sum over the ranks, not the mean", "divide by the number of ranks"


def _random(rank: int, round_: int, *shape: int) -> Tensor:
    """Return normally distributed numbers, others for each rank and round."""
    generator = torch.Generator().manual_seed(case_seed(100 * round_ + rank))
    return torch.randn(*shape, generator=generator)


def _close(a: Sequence[Sequence[Any]], b: Sequence[Sequence[Any]]) -> bool:
    """Whether the tensors or arrays of all ranks are equal up to rounding."""
    pairs = [pair for one, other in zip(a, b, strict=True) for pair in zip(one, other, strict=True)]
    return all(torch.allclose(torch.as_tensor(x), torch.as_tensor(y), atol=1e-5) for x, y in pairs)


def _other_bytes(random: Random) -> tuple[Any, ...]:
    n, p = random.randint(1000, 9000), random.randint(3, 9)
    return random.choice(METHODS), n, p, n // random.randint(20, 90), random.randint(3, 30)


@exercise(
    LESSON,
    "All five are what the busiest rank sends.",
    [(method, 6000, 4, 50, 8) for method in METHODS] + [(method, 900, 3, 7, 5) for method in METHODS],
    other=_other_bytes,
)
def bytes_by_method(answer: Any, method: str, n: int, p: int, k: int, every: int) -> None:
    """bytes_by_method(method, n, p, k, every) returns the bytes that the busiest of p ranks sends per step on
    average, for a gradient of n float32 numbers. `method` is 'every step', 'fp16' (ring all-reduces), 'top-k' (an
    all-gather of k values and k places of four bytes each), 'local' (an all-reduce in every `every`-th step) or
    'server' (per step of a worker; p - 1 workers)."""
    gradient, ring = FLOAT * n, 2 * (p - 1) / p
    size = gradient / {"fp16": 2, "local": every}.get(method, 1)
    right = {"top-k": (p - 1) * 2 * FLOAT * k, "server": (p - 1) * gradient}.get(method, ring * size)
    no_ring = "that is what is to be summed; how much of it does a ring send?", "2 (p - 1) / p of it"
    known: dict[str, list[tuple[Any, ...]]] = {
        "every step": [(size, *no_ring)],
        "fp16": [(size, *no_ring)],
        "top-k": [
            ((p - 1) * FLOAT * k, "the places travel, too", "each value has a place of four bytes"),
            (2 * FLOAT * k, "that is one message; who receives it?", "each of the p - 1 others"),
        ],
        "local": [
            (size, *no_ring),
            (ring * gradient, "that is a step with communication: how many are there?", "divide by `every`"),
        ],
        "server": [
            (
                gradient,
                "that is what a worker sends; which rank is the busiest?",
                "the server answers each of p - 1 workers with all weights",
            )
        ],
    }
    expect_numbers(
        answer(method, n, p, k, every),
        right,
        known[method],
        f"these are not the bytes of {method!r}",
        {"fp16": "a float16 number has two bytes", "local": "one all-reduce in `every` steps: divide by `every`"}.get(
            method, "a float32 number has four bytes"
        ),
    )


SHAPES: Final = ((4, 5), (5,), (3, 4))
SPREAD: Final = 1.0, 3.0, 0.4  # of the tensors: with the same k for each, others are chosen
K: Final = 6
ROUNDS: Final = 2


def _gradients(rank: int, round_: int) -> list[Tensor]:
    parts = [_random(rank, 10 * round_ + i, *shape) for i, shape in enumerate(SHAPES)]
    return [spread * part for spread, part in zip(SPREAD, parts, strict=True)]


def _top_k_on_rank(answer: Callable[..., object]) -> list[Any]:
    kept, found = _gradients(dist.get_rank(), 0), []
    for round_ in range(1, ROUNDS + 1):
        gradients = _gradients(dist.get_rank(), round_)
        answer(list(gradients), list(kept), K)
        found += [part.clone().numpy() for part in (*gradients, *kept)]
    return found


def _top_k(mean: int = RANKS, **mistake: bool) -> list[list[Tensor]]:
    """Return what each rank has after each round: the gradients and what is kept back."""
    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    kept = [torch.cat([part.flatten() for part in _gradients(rank, 0)]) for rank in range(RANKS)]
    found: list[list[Tensor]] = [[] for _ in range(RANKS)]
    for round_ in range(1, ROUNDS + 1):
        total_sent = torch.zeros(sum(sizes))
        for rank in range(RANKS):
            own = torch.cat([part.flatten() for part in _gradients(rank, round_)])
            total = own if mistake.get("ignored") else own + kept[rank]
            parts = total.abs().split(sizes) if mistake.get("each") else [total.abs()]
            mask = torch.cat([part >= part.topk(min(K, len(part))).values[-1] for part in parts])
            total_sent += total * mask
            kept[rank] = 0 * total if mistake.get("lost") else total * ~mask
        for rank in range(RANKS):
            for part in (total_sent / mean, kept[rank]):
                found[rank] += [one.view(shape) for one, shape in zip(part.split(sizes), SHAPES, strict=True)]
    return found


@exercise(
    LESSON,
    "What is sent is right, and what is not sent is kept back.",
    on_ranks=_top_k_on_rank,
    ranks=RANKS,
    call=f"top_k_with_feedback(gradients, kept_back, {K}), twice on {RANKS} ranks",
)
def top_k_with_feedback(results: Results) -> None:
    """top_k_with_feedback(gradients, kept_back, k) runs on every rank. Add what is kept back to the gradients, send
    the k largest magnitudes over all tensors together with their places (at most 8 k bytes), replace each gradient in
    place by the mean of what the ranks sent, and put what was not sent into kept_back, in place."""
    expect([*results], _top_k(), [
        (_top_k(ignored=True), "what was kept back never travels", "add kept_back before you choose"),
        (_top_k(lost=True), "what was not sent is lost", "store it in kept_back, in place"),
        (_top_k(each=True), "k values of each tensor were sent", "choose from all tensors as one vector"),
        (_top_k(mean=1), *SUMMED),
    ], "the gradients or kept_back are not what they should be", "check three things: the largest magnitude counts, so "
       "-6 comes before 5; what was sent is not kept back as well; both lists change in place, with copy_",
       same=_close)  # fmt: skip
    sent = 1e6 * max(sent_mb(results.trace, rank) for rank in range(RANKS)) / ROUNDS
    most = 8 * K * (RANKS - 1)
    wrong_if(
        sent > most + 0.5,
        "the numbers are right, but too many bytes travel",
        "the places are numbers of four bytes at most",
        f"a rank sends {sent:.0f} bytes per call; {most} are enough",
    )


N: Final = 240


def _vector(rank: int) -> Tensor:
    """Return the numbers of a rank; those of another rank are about three times as large."""
    return 3.0**rank * _random(rank, 0, N)


def _quantised_on_rank(answer: Callable[..., object]) -> Any:
    x = _vector(dist.get_rank())
    answer(x)
    return x.numpy()


def _rounded(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).round()


@exercise(
    LESSON,
    "All ranks have the same mean, within the rounding of two phases, and only bytes travelled.",
    on_ranks=_quantised_on_rank,
    ranks=RANKS,
    call=f"quantised_all_reduce(x) on {RANKS} ranks, {N} numbers",
)
def quantised_all_reduce(results: Results) -> None:
    """quantised_all_reduce(x) runs on every rank: replace the vector x in place by its mean over the ranks. Numbers
    travel as int8: rank i averages piece i of all ranks, quantises the mean, and all ranks gather the means. The
    length is a multiple of the number of ranks."""
    vectors = [_vector(rank) for rank in range(RANKS)]
    scales = [x.abs().max() / 127 for x in vectors]
    mean = torch.stack(vectors).mean(0)
    bound = 1.05 * float((sum(scales) / RANKS + mean.abs().max() / 127) / 2)  # half a unit in each phase

    def near(a: Tensor, b: Tensor) -> bool:
        return bool((a - b).abs().max() <= bound * max(1.0, float(b.abs().max() / mean.abs().max())))

    given = [torch.as_tensor(x) for x in results]
    numbers = [_rounded(x, scale) for x, scale in zip(vectors, scales, strict=True)]
    pieces = torch.stack(numbers).mean(0).chunk(RANKS)
    own_scale = torch.cat([piece * scale for piece, scale in zip(pieces, scales, strict=True)])
    wrapped = torch.stack(numbers).sum(0).to(torch.int8) * scales[0] / RANKS
    expect(given[0], mean, [
        (RANKS * mean, *SUMMED),
        (own_scale, "the numbers of other ranks are read with this rank's scale",
         "gather the scales, too"),
        (wrapped, "the sum does not fit into int8", "multiply by the scales before you add"),
    ], "the difference from the mean is more than rounding",
       "divide by the scale, round, multiply by the sender's scale, and write the mean into x with copy_",
       f"largest difference {(given[0] - mean).abs().max():.3f}, allowed {bound:.3f}", same=near)  # fmt: skip
    wrong_if(
        any(not torch.equal(x, given[0]) for x in given),
        "the ranks have different numbers",
        "also of its own piece, a rank takes the mean as it was quantised",
    )
    sent = 1e6 * max(sent_mb(results.trace, rank) for rank in range(RANKS))
    most = 2 * (RANKS - 1) / RANKS * N
    wrong_if(
        sent > most + 8 * FLOAT * RANKS,
        "the mean is right, but more bytes travel than needed",
        "in the first phase, a rank needs only its own piece of the others: dist.all_to_all_single",
        f"a rank sends {sent:.0f} bytes; {most:.0f} and the scales are enough",
    )


LR, MU, SIZE = 0.7, 0.9, 5


def _outer_on_rank(answer: Callable[..., object]) -> list[Any]:
    rank, found = dist.get_rank(), []
    shared, momentum = _random(0, 0, SIZE), torch.zeros(SIZE)
    weights = shared.clone()
    for round_ in range(1, ROUNDS + 1):
        weights += _random(rank, round_, SIZE)  # the inner steps
        answer(shared, weights, momentum, LR, MU)
        found += [part.clone().numpy() for part in (shared, weights, momentum)]
    return found


def _outer(mistake: str = "") -> list[list[Tensor]]:
    """Return what each rank has after each round: the shared weights, its own and the momentum."""
    shared, momentum = _random(0, 0, SIZE), torch.zeros(SIZE)
    own = [shared.clone() for _ in range(RANKS)]
    found: list[list[Tensor]] = [[] for _ in range(RANKS)]
    for round_ in range(1, ROUNDS + 1):
        own = [x + _random(rank, round_, SIZE) for rank, x in enumerate(own)]
        average = torch.stack(own).mean(0)
        outer = (average - shared if mistake == "sign" else shared - average) * (RANKS if mistake == "sum" else 1)
        momentum = (0 if mistake == "forgotten" else MU) * momentum + outer
        shared = shared - LR * (momentum if mistake == "heavy ball" else outer + MU * momentum)
        own = own if mistake == "own" else [shared] * RANKS
        for rank in range(RANKS):
            found[rank] += [shared, own[rank], momentum]
    return found


@exercise(
    LESSON,
    "Two rounds give what torch's SGD with Nesterov's momentum gives, and all ranks go on from the same weights.",
    on_ranks=_outer_on_rank,
    ranks=RANKS,
    call=f"diloco_outer_step(shared, weights, momentum, {LR}, {MU}), twice on {RANKS} ranks",
)
def diloco_outer_step(results: Results) -> None:
    """diloco_outer_step(shared, weights, momentum, lr, mu) runs on every rank after its inner steps. The outer gradient
    g is the mean over the ranks of shared - weights. Update in place: momentum is mu · momentum + g, shared loses
    lr · (g + mu · momentum), and weights become the shared ones."""
    expect([*results], _outer(), [
        (_outer("sum"), *SUMMED),
        (_outer("sign"), "the shared weights move away from what the ranks have learnt",
         "the outer gradient is shared - weights"),
        (_outer("heavy ball"), "this is momentum without Nesterov's look ahead", "step with g + mu · momentum"),
        (_outer("forgotten"), "the second round has forgotten the momentum of the first", "update momentum in place"),
        (_outer("own"), "each rank goes on from its own weights", "copy the shared weights into weights"),
    ], "these are not the shared weights, the rank's weights and the momentum of the formula",
       "change all three tensors in place", same=_close)  # fmt: skip
