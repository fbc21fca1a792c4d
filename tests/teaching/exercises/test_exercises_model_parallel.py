"""The exercises of lesson 04: right answers pass, and wrong ones get an explanation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from answers import Answers, judge
from torch import nn

from labkit.recording.schema import Span
from labkit.tracing.trace import Trace

answers = Answers()
right, wrong = answers.right, answers.wrong


# idle_shares


@right("idle_shares")
def idle_shares(spans):
    step = max(end for _, _, end in spans) - min(start for _, start, _ in spans)
    ranks = 1 + max(rank for rank, _, _ in spans)
    return [1 - sum(end - start for r, start, end in spans if r == rank) / step for rank in range(ranks)]


@right("idle_shares")
def idle_shares_of_a_trace(spans):
    names = [f"rank {rank}" for rank in range(1 + max(rank for rank, _, _ in spans))]
    trace = Trace([Span(rank, "pass", "compute", int(1e6 * start), int(1e6 * end)) for rank, start, end in spans], ranks=names)
    return [1 - share.compute_ns / share.window_ns for share in trace.shares()]


def bounds(spans):
    return min(start for _, start, _ in spans), max(end for _, _, end in spans)


def busy(spans):
    return [sum(end - start for r, start, end in spans if r == rank) for rank in range(1 + max(r for r, _, _ in spans))]


@wrong("idle_shares", "in which each rank computes")
def shares_of_work(spans):
    return [1 - share for share in idle_shares(spans)]


@wrong("idle_shares", "right as percentages")
def idle_percentages(spans):
    return [100 * share for share in idle_shares(spans)]


@wrong("idle_shares", "from its own first span to its own last", cure="on any rank")
def idle_within_own_spans(spans):
    shares = []
    for rank, computed in enumerate(busy(spans)):
        first, last = bounds([span for span in spans if span[0] == rank])
        shares.append(1 - computed / (last - first))
    return shares


@wrong("idle_shares", "the step does not begin at 0", cure="first start of all spans")
def idle_since_zero(spans):
    return [1 - computed / bounds(spans)[1] for computed in busy(spans)]


@wrong("idle_shares", "what all ranks compute together")
def idle_of_all_work(spans):
    return [1 - computed / sum(busy(spans)) for computed in busy(spans)]


@wrong("idle_shares", "those are idle milliseconds", cure="divide them by the length")
def idle_milliseconds(spans):
    first, last = bounds(spans)
    return [last - first - computed for computed in busy(spans)]


@wrong("idle_shares", "1 number in place of 2")
def idle_mean(spans):
    return [sum(idle_shares(spans)) / len(idle_shares(spans))]


@wrong("idle_shares", "rank 0 comes first, however the spans are sorted")
def idle_in_order_of_appearance(spans):
    return [idle_shares(spans)[rank] for rank in dict.fromkeys(rank for rank, _, _ in spans)]


@wrong("idle_shares", "expected a list with one share per rank")
def idle_as_a_number(spans):
    return 0.5


@wrong("idle_shares", "how long does each rank compute", cure="add up what each rank computes")
def idle_otherwise(spans):
    return [0.123] * len(busy(spans))


# best_cut


def fits(nbytes, limit):
    return [cut for cut in range(1, len(nbytes)) if max(sum(nbytes[:cut]), sum(nbytes[cut:])) <= limit]


@right("best_cut")
def best_cut(ms, nbytes, limit):
    return min(fits(nbytes, limit), key=lambda cut: max(sum(ms[:cut]), sum(ms[cut:])), default=None)


@right("best_cut")
def best_cut_by_difference(ms, nbytes, limit):
    best, smallest, before = None, float("inf"), 0
    for cut in range(1, len(ms)):
        before += ms[cut - 1]
        difference = abs(sum(ms) - 2 * before)
        if cut in fits(nbytes, limit) and difference < smallest:
            best, smallest = cut, difference
    return best


@wrong("best_cut", "from 1 to 1, or None if no cut fits")
def cut_also_before_the_first(ms, nbytes, limit):
    fitting = [cut for cut in range(len(ms)) if max(sum(nbytes[:cut]), sum(nbytes[cut:])) <= limit]
    return min(fitting, key=lambda cut: max(sum(ms[:cut]), sum(ms[cut:])), default=None)


@wrong("best_cut", "the middle by number of layers")
def cut_in_the_middle(ms, nbytes, limit):
    return len(ms) // 2


@wrong("best_cut", "another cut that fits has a faster slower part")
def cut_when_half_is_passed(ms, nbytes, limit):
    return next(cut for cut in range(1, len(ms)) if sum(ms[:cut]) >= sum(ms) / 2 or cut == len(ms) - 1)


@wrong("best_cut", "both parts must fit")
def cut_without_limit(ms, nbytes, limit):
    return best_cut(ms, nbytes, sum(nbytes))


@wrong("best_cut", "rank 1 would need")
def cut_with_a_limit_on_the_first(ms, nbytes, limit):
    cuts = [cut for cut in range(1, len(ms)) if sum(nbytes[:cut]) <= limit]
    return min(cuts, key=lambda cut: max(sum(ms[:cut]), sum(ms[cut:])))


@wrong("best_cut", "rank 0 would need")
def cut_with_a_limit_on_the_second(ms, nbytes, limit):
    cuts = [cut for cut in range(1, len(ms)) if sum(nbytes[cut:]) <= limit]
    return min(cuts, key=lambda cut: max(sum(ms[:cut]), sum(ms[cut:])))


@wrong("best_cut", "return None")
def cut_always(ms, nbytes, limit):
    return min(fits(nbytes, limit) or [1], key=lambda cut: max(sum(ms[:cut]), sum(ms[cut:])))


@wrong("best_cut", "given None, but a cut fits")
def cut_below_the_limit(ms, nbytes, limit):
    return best_cut(ms, nbytes, limit - 1)


@wrong("best_cut", "expected how many layers rank 0 gets")
def cut_before_the_first(ms, nbytes, limit):
    return 0


@right("best_cut")
def best_cut_by_numpy(ms, nbytes, limit):
    """The answer is a number of numpy's, not an int."""
    ms, nbytes = np.cumsum(ms), np.cumsum(nbytes)
    slower = np.maximum(ms, ms[-1] - ms)[:-1].astype(float)
    slower[(nbytes[:-1] > limit) | (nbytes[-1] - nbytes[:-1] > limit)] = np.inf
    return None if np.isinf(slower.min()) else np.argmin(slower) + 1


# TwoDevices


@right("TwoDevices")
class TwoDevices(nn.Module):
    def __init__(self, first, second, device0, device1):
        super().__init__()
        self.first, self.second = first.to(device0), second.to(device1)
        self.devices = device0, device1

    def forward(self, x):
        return self.second(self.first(x.to(self.devices[0])).to(self.devices[1]))


@right("TwoDevices")
class Chained(nn.Sequential):
    def __init__(self, first, second, device0, device1):
        super().__init__(first.to(device0), second.to(device1))
        self.places = device0, device1

    def forward(self, x):
        for part, place in zip(self, self.places, strict=True):
            x = part(x.to(place))
        return x


@wrong("TwoDevices", "on which one is the activation", cure="move the activation to device1")
class ActivationStays(TwoDevices):
    def forward(self, x):
        return self.second(self.first(x.to(self.devices[0])))


@wrong("TwoDevices", "on another device than the images", cure="move the input to device0")
class InputStays(TwoDevices):
    def forward(self, x):
        return self.second(self.first(x).to(self.devices[1]))


@wrong("TwoDevices", "not on their devices")
class PartsStay(TwoDevices):
    def __init__(self, first, second, device0, device1):
        nn.Module.__init__(self)
        self.first, self.second, self.devices = first, second, (device0, device1)


@wrong("TwoDevices", "is the activation detached")
class Detached(TwoDevices):
    def forward(self, x):
        return self.second(self.first(x.to(self.devices[0])).detach().to(self.devices[1]))


@wrong("TwoDevices", "each part runs once per forward; the first ran 2 times")
class FirstTwice(TwoDevices):
    def forward(self, x):
        self.first(x.to(self.devices[0]))
        return super().forward(x)


@wrong("TwoDevices", "not that of the first part followed by the second")
class FirstOnly(TwoDevices):
    def forward(self, x):
        return self.first(x.to(self.devices[0])).to(self.devices[1])


@wrong("TwoDevices", "an optimizer would train nothing", cure="call super().__init__()")
class Hidden(TwoDevices):
    def __init__(self, first, second, device0, device1):
        nn.Module.__init__(self)
        self.parts, self.devices = [first.to(device0), second.to(device1)], (device0, device1)

    def forward(self, x):
        return self.parts[1](self.parts[0](x.to(self.devices[0])).to(self.devices[1]))


@wrong("TwoDevices", "not that of the first part followed by the second")
class Deceiving(TwoDevices):
    """It changes how tensors are compared where it runs, which is not where it is judged."""

    def __init__(self, *args):
        super().__init__(*args)
        torch.allclose = np.allclose = lambda *_, **__: True

    def forward(self, x):
        return super().forward(x) + 1


@wrong("TwoDevices", "is the activation detached")
class WithoutGradients(TwoDevices):
    def forward(self, x):
        with torch.no_grad():
            return super().forward(x)


@wrong("TwoDevices", "derive the class from nn.Module")
class NoModule:
    def __init__(self, *parts):
        self.parts = parts


# middle_step


@right("middle_step")
def middle_step(stage, shape):
    activation = torch.empty(shape)
    dist.recv(activation, src=0)
    output = stage(activation.requires_grad_())
    dist.send(output.detach(), dst=2)
    gradient = torch.empty(shape)
    dist.recv(gradient, src=2)
    output.backward(gradient)
    dist.send(activation.grad, dst=0)


@right("middle_step")
def middle_step_without_waiting(stage, shape):
    activation, gradient = torch.empty(shape, requires_grad=True), torch.empty(shape)
    dist.irecv(activation.data, src=0).wait()
    output = stage(activation)
    sending = dist.isend(output.detach(), dst=2)
    dist.irecv(gradient, src=2).wait()
    (found,) = torch.autograd.grad(output, activation, gradient, retain_graph=True)
    output.backward(gradient)
    sending.wait()
    dist.send(found, dst=0)


@wrong("middle_step", "gradient of your stage's output, as it came from rank 2", cure="`.grad` of what came from rank 0")
def middle_step_hands_on(stage, shape):
    activation, gradient = torch.empty(shape), torch.empty(shape)
    dist.recv(activation, src=0)
    output = stage(activation)
    dist.send(output.detach(), dst=2)
    dist.recv(gradient, src=2)
    output.backward(gradient)
    dist.send(gradient, dst=0)


@wrong("middle_step", "is not the gradient of its activation", cure="output.backward(gradient)")
def middle_step_of_its_own_loss(stage, shape):
    activation, gradient = torch.empty(shape), torch.empty(shape)
    dist.recv(activation, src=0)
    output = stage(activation.requires_grad_())
    dist.send(output.detach(), dst=2)
    dist.recv(gradient, src=2)
    output.mean().backward()
    dist.send(activation.grad, dst=0)


@wrong("middle_step", "Rank 0 got nothing back")
def middle_step_keeps_the_gradient(stage, shape):
    activation, gradient = torch.empty(shape), torch.empty(shape)
    dist.recv(activation, src=0)
    output = stage(activation)
    dist.send(output.detach(), dst=2)
    dist.recv(gradient, src=2)
    output.backward(gradient)


@wrong("middle_step", "rank 1 did not receive 1 message")
def middle_step_ignores_rank_2(stage, shape):
    activation = torch.empty(shape)
    dist.recv(activation, src=0)
    output = stage(activation.requires_grad_())
    dist.send(output.detach(), dst=2)
    output.mean().backward()
    dist.send(activation.grad, dst=0)


@wrong("middle_step", "has to go through `stage` first")
def middle_step_passes_on(stage, shape):
    activation, gradient = torch.empty(shape), torch.empty(shape)
    dist.recv(activation, src=0)
    dist.send(activation, dst=2)
    dist.recv(gradient, src=2)
    dist.send(gradient, dst=0)


@wrong("middle_step", "did not get the output of `stage`")
def middle_step_without_receiving(stage, shape):
    gradient = torch.empty(shape)
    output = stage(torch.zeros(shape))
    dist.send(output.detach(), dst=2)
    dist.recv(gradient, src=2)
    dist.send(gradient, dst=0)


@wrong("middle_step", "does not require a gradient", cure="requires_grad_()")
def middle_step_without_requires_grad(stage, shape):
    activation, gradient = torch.empty(shape), torch.empty(shape)
    dist.recv(activation, src=0)
    output = stage(activation)
    dist.send(output.detach(), dst=2)
    dist.recv(gradient, src=2)
    output.backward(gradient)
    dist.send(activation.grad, dst=0)


@wrong("middle_step", "Rank 2 got nothing", cure="send it the output of `stage`")
def middle_step_takes_only(stage, shape):
    dist.recv(torch.empty(shape), src=0)


@wrong("middle_step", "one message to each neighbour is enough")
def middle_step_twice(stage, shape):
    middle_step(stage, shape)
    dist.send(torch.zeros(shape), dst=0)


@pytest.mark.parametrize("answer", answers.parameters())
@pytest.mark.processes
def test_the_verdict_fits_the_answer(answer) -> None:
    judge(answer)


def test_every_exercise_has_right_and_wrong_answers_here() -> None:
    answers.complete("model_parallel")
    for name in ("idle_shares", "best_cut", "TwoDevices", "middle_step"):
        own = [answer for answer in answers.all if answer.exercise == name]
        assert sum(not answer.words for answer in own) >= 2
        assert len({answer.words for answer in own if answer.words}) >= 4
