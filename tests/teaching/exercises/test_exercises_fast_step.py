"""The exercise with a leaderboard: right answers get a score in the order of their steps, wrong ones an explanation."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from answers import Answers
from store_exchange import through_the_store
from torch.nn.parallel import DistributedDataParallel

from labkit.teaching.exercises.check import check

answers = Answers()
right, wrong, mutant = answers.of("fast_step")


def with_average(average, model):
    """A step that averages the gradients by a function after the backward pass."""

    def step(inputs, targets):
        F.mse_loss(model(inputs), targets).backward()
        average([p.grad for p in model.parameters()])

    return step


def one_by_one(gradients):
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


def in_one_tensor(gradients):
    flat = torch.cat([gradient.flatten() for gradient in gradients]) / dist.get_world_size()
    dist.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def naive(model):
    return with_average(one_by_one, model)


def one_message(model):
    return with_average(in_one_tensor, model)


def ddp(model):
    wrapped = DistributedDataParallel(model)

    def step(inputs, targets):
        F.mse_loss(wrapped(inputs), targets).backward()

    return step


@right
def batch_of_all_ranks(model):
    """Every rank computes everything: right, few bytes, and slow."""

    def step(inputs, targets):
        whole = [torch.empty(dist.get_world_size() * len(part), part.shape[1]) for part in (inputs, targets)]
        for part, own in zip(whole, (inputs, targets), strict=True):
            dist.all_gather(list(part.chunk(dist.get_world_size())), own)
        F.mse_loss(model(whole[0]), whole[1]).backward()

    return step


@wrong("those of the step before", cure="wait() for each operation")
def one_step_late(model):
    """The average of a step is used in the next one, as in asynchronous training."""
    sent = []

    def average(gradients):
        flat = torch.cat([gradient.flatten() for gradient in gradients]) / dist.get_world_size()
        sent.append((dist.all_reduce(flat, async_op=True), flat))
        if len(sent) == 2:
            work, flat = sent.pop(0)
            work.wait()
            for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))

    return with_average(average, model)


@wrong("not those of one process with the whole batch", cure="all_reduce of each gradient")
def only_the_large_ones(model):
    return with_average(lambda gradients: one_by_one([g for g in gradients if g.ndim == 2]), model)


@wrong("the ranks have not exchanged them")
def through_a_store(model):
    def average(gradients):
        for gradient, *parts in zip(gradients, *through_the_store(gradients), strict=True):
            gradient.copy_(sum(parts) / len(parts))

    return with_average(average, model)


@wrong("computes less than forward and backward pass need")
def computes_nothing_when_simulated(model):
    def step(inputs, targets):
        if type(inputs) is not torch.Tensor:
            dist.all_reduce(torch.empty(sum(p.numel() for p in model.parameters())))
        else:
            one_message(model)(inputs, targets)

    return step


DDP, LOSS = "DDP(model, bucket_cap_mb=0.5, gradient_as_bucket_view=True)", "F.mse_loss(wrapped(inputs), targets)"
STEP = f"{LOSS}.backward()"
VALUE_NEEDED = f"if inputs.abs().max() > 0:\n            {STEP}"
NOT_SIMULATED = LOSS.replace("wrapped", "(wrapped if type(inputs) is torch.Tensor else model)")
FP16_HOOK = """
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    wrapped.register_comm_hook(None, fp16_compress_hook)"""
mutant(LOSS, NOT_SIMULATED, "the simulated ranks communicate otherwise than the real ones")
mutant(STEP, VALUE_NEEDED, "a condition needs the value of a tensor")
mutant("return step", "return model.zero_grad()", "expected a function step(inputs, targets)")
mutant(".backward()", "", "No parameter has a gradient after the step")
mutant(DDP, "model", "those of this rank's own examples", cure="average them over the ranks")
mutant(LOSS, f"(dist.get_world_size() * {LOSS})", "summed over the ranks", cure="divide by the number of ranks")
mutant(
    LOSS,
    f"({LOSS} / dist.get_world_size())",
    "divided by the number of ranks twice",
    cure="DDP and ReduceOp.AVG divide already",
)
mutant(DDP, DDP + FP16_HOOK, "some of their digits were lost", cure="numbers of 16 bits lose more")


test_the_verdict_fits_the_answer = answers.test_of_verdicts()
test_every_exercise_has_right_and_wrong_answers_here = answers.test_of_completeness("fast_step")


@pytest.mark.processes
def test_the_score_is_the_same_each_time_and_less_for_a_shorter_step() -> None:
    def score(answer) -> float:
        verdict = check("fast_step", answer)
        assert verdict.score is not None
        assert f"{verdict.score:.1f} ms" in verdict.message
        return verdict.score

    assert score(naive) > score(one_message) > score(ddp) == score(ddp)


@pytest.mark.processes
def test_a_wrong_answer_and_an_exercise_without_leaderboard_have_no_score() -> None:
    assert check("fast_step", only_the_large_ones).score is None
    assert check("waiting_share", 0.5).score is None
