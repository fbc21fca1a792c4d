"""The exercises of lesson 05: right answers pass, and wrong ones get an explanation."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from answers import Answers, judge
from torch.nn.functional import mse_loss

import labkit as lab

answers = Answers()
right, wrong = answers.right, answers.wrong


# bubble


@right("bubble")
def bubble(forward, backward, micro_batches):
    step = sum(forward) + sum(backward) + (micro_batches - 1) * (max(forward) + max(backward))
    return 1 - micro_batches * (sum(forward) + sum(backward)) / (len(forward) * step)


@right("bubble")
def bubble_of_the_schedule(forward, backward, micro_batches):
    return lab.schedule("gpipe", stages=len(forward), micro_batches=micro_batches, forward=forward, backward=backward).bubble


@wrong("bubble", "holds for equal stages")
def bubble_of_equal_stages(forward, backward, micro_batches):
    return (len(forward) - 1) / (micro_batches + len(forward) - 1)


@wrong("bubble", "right as a percentage")
def bubble_in_percent(forward, backward, micro_batches):
    return 100 * bubble(forward, backward, micro_batches)


@wrong("bubble", "relative to the work")
def bubble_per_work(forward, backward, micro_batches):
    return (len(forward) - 1) / micro_batches


@wrong("bubble", "the share in which the ranks work")
def bubble_as_efficiency(forward, backward, micro_batches):
    return 1 - bubble(forward, backward, micro_batches)


@wrong("bubble", "one stage too many")
def bubble_without_the_one(forward, backward, micro_batches):
    return len(forward) / (micro_batches + len(forward))


@wrong("bubble", "can belong to different stages", cure="take the two maxima separately")
def bubble_with_one_maximum(forward, backward, micro_batches):
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    step = sum(both) + (micro_batches - 1) * max(both)
    return 1 - micro_batches * sum(both) / (len(both) * step)


@wrong("bubble", "the idle seconds of all ranks", cure="divide by the seconds of all ranks")
def bubble_in_seconds(forward, backward, micro_batches):
    share = bubble(forward, backward, micro_batches)
    return share / (1 - share) * micro_batches * (sum(forward) + sum(backward))


@wrong("bubble", "when does the first micro-batch leave")
def bubble_otherwise(forward, backward, micro_batches):
    return 0.123


@wrong("bubble", "expected one number")
def bubble_as_text(forward, backward, micro_batches):
    return "27 %"


@right("bubble")
def bubble_as_a_tensor(forward, backward, micro_batches):
    return torch.tensor(bubble(forward, backward, micro_batches), dtype=torch.float64)


# balanced_stages


@right("balanced_stages")
def balanced_stages(costs, stages):
    """The smallest limit that a greedy filling does not exceed."""
    for limit in range(max(costs), sum(costs) + 1):
        sizes, cost = [0], 0
        for c in costs:
            if cost + c > limit:
                sizes.append(0)
                cost = 0
            sizes[-1] += 1
            cost += c
        if len(sizes) <= stages:
            break
    while len(sizes) < stages:  # fewer stages are enough: divide one
        i = sizes.index(max(sizes))
        sizes[i : i + 1] = [1, sizes[i] - 1]
    return sizes


@right("balanced_stages")
def balanced_by_recursion(costs, stages):
    def best(costs, stages):
        if stages == 1:
            return sum(costs), [len(costs)]
        tries = []
        for k in range(stages - 1, len(costs)):
            slowest, sizes = best(costs[:k], stages - 1)
            tries.append((max(slowest, sum(costs[k:])), [*sizes, len(costs) - k]))
        return min(tries)

    return best(costs, stages)[1]


@wrong("balanced_stages", "equal numbers of layers")
def balanced_by_count(costs, stages):
    return [len(costs) * (i + 1) // stages - len(costs) * i // stages for i in range(stages)]


@wrong("balanced_stages", "filling each stage up to the mean", cure="smallest limit")
def balanced_by_filling(costs, stages):
    sizes, cost, size = [], 0, 0
    for i, c in enumerate(costs):
        cost, size = cost + c, size + 1
        missing = stages - len(sizes) - 1
        if missing and (cost >= sum(costs) / stages or len(costs) - i - 1 == missing):
            sizes.append(size)
            cost = size = 0
    return [*sizes, size]


@wrong("balanced_stages", "at least 1 each")
def balanced_with_empty_stages(costs, stages):
    return [len(costs), *[0] * (stages - 1)]


@wrong("balanced_stages", "cuts")
def balanced_as_cuts(costs, stages):
    sizes = balanced_stages(costs, stages)
    return [sum(sizes[:i]) for i in range(1, stages)]


@wrong("balanced_stages", "not their costs")
def balanced_as_lists(costs, stages):
    sizes = balanced_stages(costs, stages)
    return [costs[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(stages)]


@wrong("balanced_stages", "but the model has")
def balanced_without_the_rest(costs, stages):
    return [len(costs) // stages] * (stages - 1) + [1]


@wrong("balanced_stages", "another split has a faster slowest stage")
def balanced_badly(costs, stages):
    return [1] * (stages - 1) + [len(costs) - stages + 1]


@wrong("balanced_stages", "expected a list with the number of layers")
def balanced_as_a_number(costs, stages):
    return max(costs)


@wrong("balanced_stages", "is not a whole number")
def stages_of_halves(costs, stages):
    return [size + 0.5 for size in balanced_stages(costs, stages)]


# gpipe_step


def receive(like, source):
    message = torch.empty_like(like)
    dist.recv(message, source)
    return message


class Stage:
    """The passes of one rank, with variations for the mistakes."""

    def __init__(self, stage, inputs, targets, micro_batches, *, split=torch.tensor_split, weight=None, send=dist.isend):
        self.rank, self.last = dist.get_rank(), dist.get_world_size() - 1
        self.stage, self.send, self.pending = stage, send, []
        self.parts = list(zip(split(inputs, micro_batches), split(targets, micro_batches), strict=True))
        self.weight = weight or (lambda examples: examples / len(inputs))
        self.live = {}

    def post(self, tensor, to):
        self.pending.append(self.send(tensor, to))

    def forward(self, i):
        x = self.parts[i][0]
        if self.rank > 0:
            x = receive(x, self.rank - 1).requires_grad_()
        y = self.stage(x)
        if self.rank < self.last:
            self.post(y.detach(), self.rank + 1)
        self.live[i] = x, y

    def backward(self, i):
        x, y = self.live.pop(i)
        if self.rank == self.last:
            (mse_loss(y, self.parts[i][1]) * self.weight(len(y))).backward()
        else:
            y.backward(receive(y, self.rank + 1))
        if self.rank > 0:
            self.post(self.answer_to(x, y), self.rank - 1)

    def answer_to(self, x, _):
        return x.grad

    def gpipe(self):
        for i in range(len(self.parts)):
            self.forward(i)
        for i in range(len(self.parts)):
            self.backward(i)
        self.finish()

    def one_f_one_b(self, ahead=None):
        m = len(self.parts)
        ahead = min(m, self.last - self.rank if ahead is None else ahead)
        for i in range(ahead):
            self.forward(i)
        for i in range(m - ahead):
            self.forward(ahead + i)
            self.backward(i)
        for i in range(m - ahead, m):
            self.backward(i)
        self.finish()

    def finish(self):
        for work in self.pending:
            if work is not None:
                work.wait()


@right("gpipe_step")
def gpipe_step(stage, inputs, targets, micro_batches):
    Stage(stage, inputs, targets, micro_batches).gpipe()


@right("gpipe_step")
def gpipe_blocking_in_chunks(stage, inputs, targets, micro_batches):
    Stage(stage, inputs, targets, micro_batches, split=torch.chunk, send=dist.send).gpipe()


@right("gpipe_step")
def gpipe_from_the_last(stage, inputs, targets, micro_batches):
    s = Stage(stage, inputs, targets, micro_batches)
    for i in range(micro_batches):
        s.forward(i)
    for i in reversed(range(micro_batches)):
        s.backward(i)
    s.finish()


@wrong("gpipe_step", "losses were added up", cure="by its share of the examples")
def gpipe_undivided(stage, inputs, targets, micro_batches):
    Stage(stage, inputs, targets, micro_batches, weight=lambda _: 1.0).gpipe()


@wrong("gpipe_step", "every micro-batch counts the same", cure="by its share of the examples")
def gpipe_divided_by_m(stage, inputs, targets, micro_batches):
    Stage(stage, inputs, targets, micro_batches, weight=lambda _: 1 / micro_batches).gpipe()


@wrong("gpipe_step", "neither divided by the number of examples nor means", cure="by its share")
def gpipe_with_sums(stage, inputs, targets, micro_batches):
    Stage(stage, inputs, targets, micro_batches, weight=lambda n: n).gpipe()


@wrong("gpipe_step", "only the last micro-batch's gradients are left", cure="nothing may clear it in between")
def gpipe_clears(stage, inputs, targets, micro_batches):
    class Clearing(Stage):
        def backward(self, i):
            for p in self.stage.parameters():
                p.grad = None
            super().backward(i)

    Clearing(stage, inputs, targets, micro_batches).gpipe()


@wrong("gpipe_step", "Which gradient do you send back", cure="send back the gradient of your stage's input")
def gpipe_hands_on(stage, inputs, targets, micro_batches):
    class Wrong(Stage):
        def answer_to(self, _, y):
            return torch.ones_like(y)

    Wrong(stage, inputs, targets, micro_batches).gpipe()


@wrong("gpipe_step", "does not require a gradient", cure="requires_grad_()")
def gpipe_without_requires_grad(stage, inputs, targets, micro_batches):
    class Wrong(Stage):
        def forward(self, i):
            super().forward(i)
            if self.rank > 0:
                x = self.live[i][0].detach()
                self.live[i] = x, self.live[i][1]

    Wrong(stage, inputs, targets, micro_batches).gpipe()


@wrong("gpipe_step", "expected one per micro-batch")
def gpipe_in_one_piece(stage, inputs, targets, micro_batches):
    Stage(stage, inputs, targets, 1).gpipe()


@wrong("gpipe_step", "only one rank works at a time", cure="run all forward passes first")
def gpipe_one_at_a_time(stage, inputs, targets, micro_batches):
    Stage(stage, inputs, targets, micro_batches).one_f_one_b(ahead=0)


@wrong("gpipe_step", "all forward passes before the first backward pass")
def gpipe_as_1f1b(stage, inputs, targets, micro_batches):
    Stage(stage, inputs, targets, micro_batches).one_f_one_b()


@wrong("gpipe_step", "every micro-batch needs its own", cure="still in the pipeline")
def gpipe_without_the_last_backward(stage, inputs, targets, micro_batches):
    s = Stage(stage, inputs, targets, micro_batches)
    for i in range(micro_batches):
        s.forward(i)
    for i in range(micro_batches - 1):
        s.backward(i)
    s.finish()


@wrong("gpipe_step", "Only rank 0 may use `inputs`", cure="from their neighbours")
def gpipe_with_inputs_everywhere(stage, inputs, targets, micro_batches):
    s = Stage(stage, inputs, targets, micro_batches)
    received, s.rank = s.rank, s.rank
    for i in range(micro_batches):
        s.forward(i)
        if received:
            x = s.parts[i][0].clone().requires_grad_()
            s.live[i] = x, s.live[i][1] + 0 * x
    for i in range(micro_batches):
        s.backward(i)
    s.finish()


# one_f_one_b_step


@right("one_f_one_b_step")
def one_f_one_b_step(stage, inputs, targets, micro_batches):
    Stage(stage, inputs, targets, micro_batches).one_f_one_b()


@right("one_f_one_b_step")
def one_f_one_b_with_a_warm_up_of_s(stage, inputs, targets, micro_batches):
    Stage(stage, inputs, targets, micro_batches).one_f_one_b(ahead=dist.get_world_size() - 1)


@wrong("one_f_one_b_step", "each waits until the other receives", cure="use dist.isend")
def one_f_one_b_blocking(stage, inputs, targets, micro_batches):
    Stage(stage, inputs, targets, micro_batches, send=dist.send).one_f_one_b()


@wrong("one_f_one_b_step", "may give fewer parts than you ask for", cure="`tensor_split(m)` always gives m")
def one_f_one_b_with_chunk(stage, inputs, targets, micro_batches):
    Stage(stage, inputs, targets, micro_batches, split=torch.chunk).one_f_one_b()


@wrong("one_f_one_b_step", "as in GPipe", cure="each forward pass is followed by a backward pass")
def one_f_one_b_as_gpipe(stage, inputs, targets, micro_batches):
    Stage(stage, inputs, targets, micro_batches).gpipe()


@wrong("one_f_one_b_step", "the pipeline never fills", cure="forward passes come before it")
def one_f_one_b_without_warm_up(stage, inputs, targets, micro_batches):
    Stage(stage, inputs, targets, micro_batches).one_f_one_b(ahead=0)


@wrong("one_f_one_b_step", "every micro-batch needs its own", cure="when the last forward pass is over")
def one_f_one_b_without_cool_down(stage, inputs, targets, micro_batches):
    s = Stage(stage, inputs, targets, micro_batches)
    ahead = s.last - s.rank
    for i in range(ahead):
        s.forward(i)
    for i in range(micro_batches - ahead):
        s.forward(ahead + i)
        s.backward(i)


@wrong("one_f_one_b_step", "asked for a micro-batch that does not exist", cure="the warm-up has at most")
def one_f_one_b_warms_up_too_far(stage, inputs, targets, micro_batches):
    s = Stage(stage, inputs, targets, micro_batches)
    ahead = s.last - s.rank  # with 2 micro-batches on 4 ranks, more than there are
    for i in range(ahead):
        s.forward(i)
    for i in range(ahead, micro_batches):
        s.forward(i)
        s.backward(i - ahead)
    for i in range(max(0, micro_batches - ahead), micro_batches):
        s.backward(i)
    s.finish()


@wrong("one_f_one_b_step", "every micro-batch counts the same", cure="by its share of the examples")
def one_f_one_b_divided_by_m(stage, inputs, targets, micro_batches):
    Stage(stage, inputs, targets, micro_batches, weight=lambda _: 1 / micro_batches).one_f_one_b()


@pytest.mark.parametrize("answer", answers.parameters())
@pytest.mark.processes
def test_the_verdict_fits_the_answer(answer) -> None:
    judge(answer)


def test_every_exercise_has_right_and_wrong_answers_here() -> None:
    answers.complete("pipeline_parallel")
    for name in ("bubble", "balanced_stages", "gpipe_step", "one_f_one_b_step"):
        own = [answer for answer in answers.all if answer.exercise == name]
        assert sum(not answer.words for answer in own) >= 2
        assert len({answer.words for answer in own if answer.words}) >= 4
