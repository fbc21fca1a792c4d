"""The exercises of lesson 04: idle shares, where to cut a model, a model on two devices, a middle stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from labkit.errors.lists import counted
from labkit.teaching.exercises.comparisons import TOLERANCE, compare, equal, expect_numbers, listing, whole_number, wrong_if
from labkit.teaching.exercises.exercise import Results, exercise
from labkit.teaching.exercises.random_state import case_seed

from .data_parallel import Gradients, gradients_of

LESSON = "04_model_parallel"
_same = partial(equal, within=TOLERANCE)


def _other_spans(random: Random) -> tuple[list[tuple[int, float, float]]]:
    spans = []
    for rank in range(random.randint(2, 4)):
        now = random.uniform(5, 20)
        for _ in range(random.randint(1, 3)):
            end = now + random.uniform(1, 5)
            spans.append((rank, now, end))
            now = end + random.uniform(0, 4)
    return (spans,)


@exercise(
    LESSON, "Each rank's idle share of the whole step, also where ranks compute at the same time.",
    [  # No step starts at 0, and in two of them ranks compute at the same time.
        ([(0, 10, 12), (1, 12, 13), (1, 13, 15), (0, 16, 20)],),  # with a gap: else the shares add up to 1
        ([(1, 105, 111), (0, 100, 104), (0, 112, 120)],),
        ([(0, 3.5, 5.5), (1, 5.5, 6.5), (2, 6.5, 7.5), (2, 7.5, 9.5), (1, 9.5, 11.5), (0, 11.5, 13.5)],),
        ([(0, 50, 54), (0, 54, 58), (1, 54, 57), (1, 58, 60)],),
    ],
    other=_other_spans,
)
def idle_shares(answer: Any, spans: Sequence[tuple[int, float, float]]) -> None:
    """idle_shares(spans) returns a list: for each rank, in rank order, the share of the step in which it does
    not compute. A span is (rank, start, end) in milliseconds; the step lasts from the first start to the last
    end of all ranks."""
    ranks = 1 + max(rank for rank, _, _ in spans)
    first, last = min(start for _, start, _ in spans), max(end for _, _, end in spans)
    own = [[(start, end) for r, start, end in spans if r == rank] for rank in range(ranks)]
    busy = [sum(end - start for start, end in mine) for mine in own]
    windows = [max(end for _, end in mine) - min(start for start, _ in mine) for mine in own]
    right = [1 - b / (last - first) for b in busy]
    expect_numbers(answer(spans), right, [
        ([b / (last - first) for b in busy],
         "that is the share in which each rank computes; the idle share is the rest"),
        ([100 * share for share in right], "right as percentages: return shares between 0 and 1"),
        ([1 - b / window for b, window in zip(busy, windows, strict=True)],
         "each rank is measured from its own first span to its own last, and the step is longer",
         "the step lasts from the first start on any rank to the last end on any rank"),
        ([1 - b / last for b in busy], "the step does not begin at 0",
         "it begins with the first start of all spans"),
        ([1 - b / sum(busy) for b in busy], "the spans are divided by what all ranks compute together, but "
         "ranks can compute at the same time, or none may"),
        ([last - first - b for b in busy], "those are idle milliseconds, not shares",
         "divide them by the length of the step"),
        (right[::-1], "right, but in another order: rank 0 comes first, however the spans are sorted"),
    ], "those are not the idle shares: how long does each rank compute, and how long is the step?",
       "add up what each rank computes, divide it by the length of the whole step, and subtract that from 1",
       form="a list with one share per rank")


@exercise(
    LESSON, "The slower rank is as fast as a cut that fits into both memories can make it.",
    [
        ([1, 1, 1, 1], [1, 1, 1, 1], 4),
        ([9, 1, 1, 1], [1, 1, 1, 1], 4),
        ([1, 1, 1, 9], [1, 1, 1, 1], 4),
        ([4, 3, 2, 1, 5], [2, 2, 2, 2, 2], 8),
        ([2, 9, 4, 3, 3, 1], [1, 1, 1, 1, 1, 1], 5),
        ([4, 1, 1, 2], [1, 1, 1, 1], 2),  # the fastest cut does not fit into the second rank
        ([2, 2, 2, 6], [3, 3, 3, 1], 6),  # ... nor here into the first
        ([5, 5, 5, 5], [8, 1, 1, 6], 9),
        ([1, 2, 3], [4, 4, 4], 7),  # no cut fits
        ([0, 4], [1, 1], 2),  # without a layer on rank 0, the slower part is as fast
    ],
    call="best_cut({ms}, {nbytes}, limit={limit})",
)
def best_cut(answer: Any, ms: list[int], nbytes: list[int], limit: int) -> None:
    """best_cut(ms, nbytes, limit) returns how many layers rank 0 gets, so that both parts fit into `limit`
    bytes and the slower part is as fast as possible; None if no cut fits."""
    given, cuts = answer(ms, nbytes, limit), range(1, len(ms))
    slower = {cut: max(sum(ms[:cut]), sum(ms[cut:])) for cut in cuts}
    memory = {cut: (sum(nbytes[:cut]), sum(nbytes[cut:])) for cut in cuts}
    fitting = [cut for cut in cuts if max(memory[cut]) <= limit]
    if given is None:
        for cut in fitting:
            wrong_if(True, f"given None, but a cut fits: with {cut} layers on rank 0, {memory[cut]} bytes")
        return
    wrong_if(whole_number(given) not in cuts,
             f"given {given!r}, expected how many layers rank 0 gets, from 1 to {cuts[-1]}, or None if no "
             "cut fits")
    fastest = min((slower[cut] for cut in fitting), default="-")
    shown = (
        f"given {given}: the parts take {sum(ms[:given])} and {sum(ms[given:])} ms and {memory[given]} bytes",
        f"cuts that fit: {fitting}; of these the slower part can take {fastest} ms",
    )
    wrong_if(not fitting, f"no cut fits into {limit} bytes per rank: return None", "", *shown)
    rank = 0 if memory[given][0] > limit else 1
    wrong_if(given not in fitting,
             f"rank {rank} would need {memory[given][rank]} bytes of {limit}: both parts must fit",
             "", *shown)
    wrong_if(slower[given] != fastest and given == len(ms) // 2,
             "that is the middle by number of layers; layers take different times", "", *shown)
    wrong_if(slower[given] != fastest,
             "another cut that fits has a faster slower part, which sets the pace", "", *shown)


def _network() -> nn.Sequential:
    """Return a small network with a nested container, so that leaves and containers differ."""
    torch.manual_seed(case_seed(0))
    return nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 4)), nn.Flatten())


class _OnDevices(NamedTuple):
    """What one call of a model observed, whose parts belong on two devices."""

    output: NDArray[Any] | None  # what it returned, if that is on the CPU
    device: str  # of what it returned; the type of something that is no tensor
    places: list[list[str]]  # by part, the devices of its parameters
    error: str = ""  # the first line of the error that ended the call


class _Split(NamedTuple):
    """What a rank observed of `TwoDevices`."""

    on_cpu: _OnDevices  # the call with both parts on the CPU
    # The calls with the second part, and with both, on "meta", which computes only shapes, but like a GPU
    # rejects tensors of other devices.
    on_meta: tuple[_OnDevices, _OnDevices]
    calls: list[int]  # the parts that ran in the call on the CPU, in order
    trains: bool  # whether the model has parameters
    gradients: Gradients  # of the parameters of the parts


def _images() -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(case_seed(1)))


def _split_on_rank(answer: Any) -> _Split | str:
    """Use the student's class on a rank; return the type of what it made, if that is no module."""
    layers, calls = _network(), list[int]()
    parts = layers[0], layers[1:]
    for number, part in enumerate(parts):
        part.register_forward_pre_hook(lambda *_, number=number: calls.append(number))
    model = answer(*parts, "cpu", "cpu")
    if not isinstance(model, nn.Module):
        return type(model).__name__
    outputs = model(_images())
    if isinstance(outputs, Tensor) and outputs.requires_grad:
        outputs.sum().backward()
    gradients = gradients_of(layers)
    on_meta = _called_on(answer, "cpu", "meta"), _called_on(answer, "meta", "meta")
    return _Split(_seen_in(outputs, []), on_meta, calls, any(True for _ in model.parameters()), gradients)


def _called_on(answer: Any, *devices: str) -> _OnDevices:
    layers = _network()
    parts = layers[0], layers[1:]
    model = answer(*parts, *devices)
    places = [sorted({p.device.type for p in part.parameters()}) for part in parts]
    try:
        return _seen_in(model(_images()), places)
    except RuntimeError as error:
        return _OnDevices(None, "", places, str(error).splitlines()[0])


def _seen_in(outputs: Any, places: list[list[str]]) -> _OnDevices:
    if not isinstance(outputs, Tensor):
        return _OnDevices(None, type(outputs).__name__, places)
    device = outputs.device.type
    return _OnDevices(outputs.detach().numpy() if device == "cpu" else None, device, places)


@exercise(
    LESSON,
    "Two parts on two devices, one activation sent across, and gradients that come back the same way.",
    on_ranks=_split_on_rank, ranks=1, call='TwoDevices(first, second, "cpu", "cpu")',
)
def TwoDevices(results: Results) -> None:  # noqa: N802  # the answer is a class
    """A module TwoDevices(first, second, device0, device1): each part lives on its device, and forward
    carries the input to the first and the activation to the second."""
    split: _Split = results[0]
    wrong_if(isinstance(split, str), f"expected an nn.Module, given {split}: derive the class from nn.Module")
    whole = _network()
    expected = whole(_images())
    expected.sum().backward()
    given = split.on_cpu.output
    wrong_if(not _same(given, expected), "the output is not that of the first part followed by the second")
    wrong_if(sorted(split.calls) != [0, 1], f"each part runs once per forward; the first ran "
             f"{split.calls.count(0)} times, the second {split.calls.count(1)}")
    wrong_if(not split.trains, "the model has no parameters of its own: an optimizer would train nothing",
             "call super().__init__() and keep the parts as attributes")
    second, both = split.on_meta
    places = [listing(place) for place in second.places]
    wrong_if(places != ["cpu", "meta"],
             "the parts are not on their devices: the first belongs on device0, the second on device1", "",
             "asked for cpu and meta (a device without memory, here in place of a second GPU), found "
             f"{' and '.join(places)}")
    wrong_if(second.error,
             "with two different devices the second part fails: on which one is the activation?",
             "move the activation to device1 before it goes into the second part", second.error)
    wrong_if(second.device != "meta", "the second part did not compute on device1", "",
             f"the output is on {second.device}")
    wrong_if(both.error, "with the first part on another device than the images it fails",
             "move the input to device0", both.error)
    for name, p in whole.named_parameters():
        wrong_if(not _same(split.gradients.get(name), p.grad),
                 f"the gradient of {name} is not that of the unsplit model: is the activation detached "
                 "between the parts?")


# All messages of `middle_step` have one shape, so that a wrong tensor arrives and can be named.
SHAPE = (5, 6)


class _Seen(NamedTuple):
    """What one rank observed in a step over three ranks."""

    received: list[NDArray[Any]]  # from the middle stage; on the middle rank, what the answer did not receive
    gradients: Gradients  # of the parameters of this rank's stage
    no_gradient: bool = False  # whether it failed on one that is None: its activation required none


def _stages() -> list[nn.Sequential]:
    torch.manual_seed(case_seed(0))
    return [nn.Sequential(nn.Linear(SHAPE[1], SHAPE[1]), nn.Tanh()) for _ in range(3)]


def _examples() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(case_seed(1))
    return torch.randn(SHAPE, generator=random), torch.randn(SHAPE, generator=random)


def _drain(source: int) -> list[Tensor]:
    """Receive messages up to the end marker; one that was never sent is then missing, not waited for."""
    messages: list[Tensor] = []
    while True:
        message = torch.empty(SHAPE)
        dist.recv(message, src=source)
        if message.isnan().all():
            return messages
        messages.append(message)


def _middle_on_rank(answer: Callable[..., object]) -> _Seen:
    """Run the student's function on rank 1, between correct stages that wait for nothing that never comes."""
    rank = dist.get_rank()
    stage, (inputs, targets), marker = _stages()[rank], _examples(), torch.full(SHAPE, torch.nan)
    posted: list[Any] = []
    no_gradient = False

    def post(message: Tensor, to: int) -> None:
        posted.append(dist.isend(message, dst=to))

    if rank == 0:
        activation = stage(inputs)
        post(activation.detach(), 1)
        post(marker, 1)
        received = _drain(1)
    elif rank == 1:
        needs: list[bool] = []
        stage.register_forward_pre_hook(lambda _, given: needs.append(given[0].requires_grad))
        try:
            answer(stage, SHAPE)
        except (TypeError, AttributeError) as error:
            if any(needs) or not needs or "NoneType" not in str(error):
                raise
            no_gradient = True
        post(marker, 0)
        post(marker, 2)
        received = _drain(0) + _drain(2)
    else:
        first = torch.empty(SHAPE)
        dist.recv(first, src=1)
        received = []
        if not first.isnan().all():
            activation = first.clone().requires_grad_()
            nn.functional.mse_loss(stage(activation), targets).backward()
            assert activation.grad is not None
            post(activation.grad, 1)
            received = [first, *_drain(1)]
        post(marker, 1)
    for work in posted:
        work.wait()
    return _Seen([message.numpy() for message in received], gradients_of(stage), no_gradient)


@exercise(
    LESSON, "One activation forward, one gradient back, and all three stages learn as in one process.",
    on_ranks=_middle_on_rank, ranks=3, call=f"middle_step(stage, {SHAPE}) on rank 1 of 3",
)
def middle_step(results: Results) -> None:
    """middle_step(stage, shape) runs on rank 1 of 3: receive an activation of that shape from rank 0, send
    what `stage` makes of it (of the same shape) to rank 2, receive the gradient of that, and send rank 0 the
    gradient of its activation."""
    first, middle, last = results
    stages, (inputs, targets) = _stages(), _examples()
    before = stages[0](inputs)  # the input of the middle stage
    behind = stages[1](before)  # its output
    before.retain_grad()
    behind.retain_grad()
    nn.functional.mse_loss(stages[2](behind), targets).backward()
    wrong_if(middle.no_gradient,
             "the activation's `.grad` is None: what came in a message does not require a gradient",
             "let it require one, with requires_grad_(), before `stage` sees it")
    wrong_if(not last.received, "rank 2 got nothing: what does it wait for?",
             "send it the output of `stage`")
    to_last = last.received[0]
    wrong_if(_same(to_last, before),
             "rank 2 got the activation as it came from rank 0: it has to go through `stage` first")
    wrong_if(not _same(to_last, behind),
             "rank 2 did not get the output of `stage` for the activation from rank 0")
    wrong_if(not first.received,
             "rank 0 got nothing back: it waits for the gradient of the activation that it sent")
    to_first = first.received[0]
    wrong_if(_same(to_first, behind.grad), "rank 0 got the gradient of your stage's output, as it came from "
             "rank 2; it waits for the gradient of your stage's input",
             "send the `.grad` of what came from rank 0, once your backward has run")
    wrong_if(middle.received, f"rank 1 did not receive {counted(len(middle.received), 'message')}: does it "
             "receive the gradient from rank 2?")
    wrong_if(not _same(to_first, before.grad), "what rank 0 got is not the gradient of its activation: from "
             "what does the backward of your stage start?",
             "it has to start from the gradient that rank 2 sends, output.backward(gradient)")
    compare([middle.gradients], gradients_of(stages[1]), subject="the gradients of the middle stage")
    wrong_if(len(first.received) + len(last.received) > 2, "one message to each neighbour is enough", "",
             f"to rank 0: {len(first.received)}", f"to rank 2: {len(last.received)}")
