"""The exercises of lesson 04: right answers pass, and wrong ones get an explanation."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from answers import Answers
from torch import nn

from labkit.recording.schema import Span
from labkit.tracing.trace import Trace

answers = Answers()

right, wrong, mutant = answers.of("idle_shares")


@right
def idle_shares_of_a_trace(spans):
    names = [f"rank {rank}" for rank in range(1 + max(rank for rank, _, _ in spans))]
    trace = Trace([Span(rank, "pass", "compute", int(1e6 * start), int(1e6 * end)) for rank, start, end in spans], ranks=names)
    return [1 - share.compute_ns / share.window_ns for share in trace.shares()]


SHARES, FIRST = "[1 - own / step for own in busy]", " - min(start for _, start, _ in spans)"
IN_ORDER = "[1 - busy[rank] / step for rank in dict.fromkeys(rank for rank, _, _ in spans)]"
STEP = "step = max(end for _, _, end in spans) - min(start for _, start, _ in spans)"
OWN_SPANS = """[
        1 - own / (max(end for r, _, end in spans if r == rank) - min(start for r, start, _ in spans if r == rank))
        for rank, own in enumerate(busy)
    ]"""
mutant(SHARES, "[own / step for own in busy]", "in which each rank computes")
mutant(SHARES, "[100 * (1 - own / step) for own in busy]", "right as percentages")
mutant(SHARES, OWN_SPANS, "from its own first span to its own last", cure="on any rank")
mutant(FIRST, "", "the step does not begin at 0", cure="first start of all spans")
mutant(SHARES, "[1 - own / sum(busy) for own in busy]", "what all ranks compute together")
mutant(SHARES, "[step - own for own in busy]", "those are idle milliseconds", cure="divide them by the length")
mutant(SHARES, f"[sum({SHARES}) / len(busy)]", "1 number in place of 2")
mutant(SHARES, IN_ORDER, "rank 0 comes first, however the spans are sorted")
mutant(SHARES, "0.5", "expected a list with one share per rank")
mutant(SHARES, "[0.123] * len(busy)", "how long does each rank compute", cure="add up what each rank computes")


right, wrong, mutant = answers.of("best_cut")


@wrong("another cut that fits has a faster slower part")
def cut_when_half_is_passed(ms, nbytes, limit):
    return next(cut for cut in range(1, len(ms)) if sum(ms[:cut]) >= sum(ms) / 2 or cut == len(ms) - 1)


@right
def best_cut_by_numpy(ms, nbytes, limit):
    """The answer is a number of numpy's, not an int."""
    ms, nbytes = np.cumsum(ms), np.cumsum(nbytes)
    slower = np.maximum(ms, ms[-1] - ms)[:-1].astype(float)
    slower[(nbytes[:-1] > limit) | (nbytes[-1] - nbytes[:-1] > limit)] = np.inf
    return None if np.isinf(slower.min()) else np.argmin(slower) + 1


FITS = "max(sum(nbytes[:cut]), sum(nbytes[cut:])) <= limit"
CUTS = f"[cut for cut in range(1, len(ms)) if {FITS}]"
SLOWER = "key=lambda cut: max(sum(ms[:cut]), sum(ms[cut:]))"
FASTEST = f"return min(cuts, {SLOWER}, default=None)"
HALF = "return next(cut for cut in range(1, len(ms)) if sum(ms[:cut]) >= sum(ms) / 2 or cut == len(ms) - 1)"
mutant(SLOWER, "key=lambda cut: abs(sum(ms) - 2 * sum(ms[:cut]))")  # right: the smallest difference
mutant("range(1, len(ms))", "range(len(ms))", "from 1 to 1, or None if no cut fits")
mutant(FASTEST, "return len(ms) // 2", "the middle by number of layers")
mutant(FASTEST, HALF, "another cut that fits has a faster slower part")
mutant(CUTS, "list(range(1, len(ms)))", "both parts must fit")
mutant(FITS, "sum(nbytes[:cut]) <= limit", "rank 1 would need")
mutant(FITS, "sum(nbytes[cut:]) <= limit", "rank 0 would need")
mutant(CUTS, f"{CUTS} or [1]", "return None")
mutant("<= limit", "< limit", "given None, but a cut fits")
mutant(FASTEST, "return 0", "expected how many layers rank 0 gets")


right, wrong, mutant = answers.of("TwoDevices")


@right
class Chained(nn.Sequential):
    def __init__(self, first, second, device0, device1):
        super().__init__(first.to(device0), second.to(device1))
        self.places = device0, device1

    def forward(self, x):
        for part, place in zip(self, self.places, strict=True):
            x = part(x.to(place))
        return x


@wrong("derive the class from nn.Module")
class NoModule:
    def __init__(self, *parts):
        self.parts = parts


ON_0, ON_1 = "x.to(self.device0)", ".to(self.device1)"
FORWARD = f"self.second(self.first({ON_0}){ON_1})"
PARTS = "self.first, self.second = first.to(device0), second.to(device1)"
# It changes how tensors are compared where it runs, which is not where it is judged.
DECEIVE = "import numpy as np\n        torch.allclose = np.allclose = lambda *_, **__: True\n        "
UNDER_NO_GRAD = f"with torch.no_grad():\n            return {FORWARD}"
OF_FIRST = "not that of the first part followed by the second"
mutant(ON_1, "", "on which one is the activation", cure="move the activation to device1")
mutant(ON_0, "x", "on another device than the images", cure="move the input to device0")
mutant(PARTS, "self.first, self.second = first, second", "not on their devices")
mutant(ON_1, f".detach(){ON_1}", "is the activation detached")
mutant(f"return {FORWARD}", UNDER_NO_GRAD, "is the activation detached")
mutant(FORWARD, f"(self.first({ON_0}), {FORWARD})[1]", "runs once per forward; the first ran 2 times")
mutant(FORWARD, f"self.first({ON_0}){ON_1}", OF_FIRST)
mutant(f"return {FORWARD}", f"{DECEIVE}return {FORWARD} + 1", OF_FIRST)
mutant(
    PARTS,
    "self.__dict__.update(first=first.to(device0), second=second.to(device1))",
    "an optimizer would train nothing",
    cure="call super().__init__()",
)


right, wrong, mutant = answers.of("middle_step")


@right
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


RECEIVED, BACK, RESULT = "dist.recv(activation, 0)", "dist.recv(gradient, 2)", "dist.send(activation.grad, 0)"
BACKWARD = f"{BACK}\n    output.backward(gradient)"
MEAN = "output.mean().backward()"
FOR_RANK_0 = "is not the gradient of its activation"
mutant(
    RESULT,
    "dist.send(gradient, 0)",
    "gradient of your stage's output, as it came from rank 2",
    cure="`.grad` of what came from rank 0",
)
mutant(BACKWARD, f"{BACK}\n    {MEAN}", FOR_RANK_0, cure="output.backward(gradient)")
mutant(RESULT, "pass", "Rank 0 got nothing back")
mutant(BACKWARD, MEAN, "rank 1 did not receive 1 message")
mutant("output.detach()", "activation.detach()", "has to go through `stage` first")
mutant(RECEIVED, "activation.zero_()", "did not get the output of `stage`")
mutant(".requires_grad_()", "", "does not require a gradient", cure="requires_grad_()")
mutant(f"{RECEIVED}\n", f"{RECEIVED}\n    return\n", "Rank 2 got nothing", cure="send it the output of `stage`")
mutant(RESULT, f"{RESULT}\n    {RESULT}", "one message to each neighbour is enough")


test_the_verdict_fits_the_answer = answers.test_of_verdicts()
test_every_exercise_has_right_and_wrong_answers_here = answers.test_of_completeness("model_parallel")
