"""The exercises of lesson 04: sizes of activations, where to cut a model, a model on two devices, a middle stage."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from labkit.errors.lists import counted
from labkit.exercises.judging import AnswerError, Exercise, OnRanks, compare, listing

__all__ = ["EXERCISES"]

LESSON = "04_model_parallel"


def _network() -> nn.Sequential:
    """Return a small network with a nested container, so that leaves and containers differ."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 4)), nn.Flatten())


def _activation_bytes(answer: Any, _: OnRanks) -> str:
    model, batch = _network(), 5
    given = answer(model, torch.zeros(batch, 6))
    numbers = {"0": 8, "1.0": 8, "1.1": 4, "2": 4}  # outputs of each layer for one example
    expected = {name: batch * count * 4 for name, count in numbers.items()}
    if not isinstance(given, dict):
        raise AnswerError(f"expected a dict from layer names to bytes, given {given!r}")
    details = (f"given {given}", f"expected {expected}")
    if given == expected:
        if any(module._forward_hooks for module in model.modules()):
            raise AnswerError(
                "the numbers are right, but your hooks are still on the model, and slow every later forward: keep what "
                "register_forward_hook returns, and call its remove()"
            )
        if not all(module.training for module in model.modules()):
            raise AnswerError("the numbers are right, but the model is left in eval mode: leave it as you found it")
        doubled = answer(_network().double(), torch.zeros(batch, 6, dtype=torch.float64))
        if doubled != {name: 2 * count for name, count in expected.items()}:
            raise AnswerError(
                "right for float32, but a float64 has 8 bytes: ask the output itself, with element_size()",
                f"given for a model in float64: {doubled}",
            )
        return "Every layer's output in bytes: what would travel if the model were cut behind it."
    containers = sorted({str(name) for name in given} & {"", "1"})
    if containers:
        raise AnswerError(
            f"{listing([repr(name) for name in containers])} {'is a container' if len(containers) == 1 else 'are containers'}: "
            "count layers that have no children, or outputs are counted twice",
            *details,
        )
    lost = [name for name in expected if name not in given]
    if list(given) == [list(expected)[-1]]:
        raise AnswerError(
            "every hook wrote under the last layer's name: hooks that are made in a loop share its variable, and run when the "
            "loop is over. Make each in a separate function call, as note_shape does, or give it name=name",
            *details,
        )
    if lost:
        raise AnswerError(
            f"missing: {listing([repr(name) for name in lost])}. Look into containers, with named_modules()", *details
        )
    for factor, hint in (
        (1 / 4, "those are numbers, not bytes: a float32 has 4 (tensor.element_size())"),
        (1 / batch, f"that is one example: the whole batch of {batch} leaves the layer"),
        (1 / (4 * batch), f"those are the numbers of one example: the batch has {batch}, and a float32 4 bytes"),
    ):
        if all(given[name] == expected[name] * factor for name in expected):
            raise AnswerError(hint, *details)
    raise AnswerError("the bytes are not those of the layers' outputs (numel() × element_size())", *details)


def _best_cut(answer: Any, _: OnRanks) -> str:
    for costs in ([1, 1, 1, 1], [9, 1, 1, 1], [1, 1, 1, 9], [4, 3, 2, 1, 5], [2, 9, 4, 3, 3, 1], [1, 6, 1, 1, 1, 1, 1]):
        given = answer(list(costs))
        case = f"costs {costs}"
        if not isinstance(given, int) or not 0 < given < len(costs):
            raise AnswerError(f"{case}: given {given!r}, expected how many layers the first part has, from 1 to {len(costs) - 1}")
        slower = {cut: max(sum(costs[:cut]), sum(costs[cut:])) for cut in range(1, len(costs))}
        best = min(slower.values())
        if slower[given] == best:
            continue
        details = (f"given {given}: parts cost {sum(costs[:given])} and {sum(costs[given:])}", f"the slower part can be {best}")
        if given == len(costs) // 2:
            raise AnswerError(f"{case}: that is the middle by number of layers; layers cost different amounts", *details)
        raise AnswerError(f"{case}: another cut has a faster slower part, and the slower part sets the pace", *details)
    return "The slower of the two parts is as fast as one cut can make it."


class _Spy(nn.Module):
    """A part of a model that counts its calls."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Count the call, then compute."""
        self.calls += 1
        out: Tensor = self.inner(x)
        return out


def _two_devices(answer: Any, _: OnRanks) -> str:
    """Judge on any machine: the "meta" device computes only shapes, but like a GPU rejects tensors of other devices."""
    layers = _network()
    first, second = _Spy(layers[0]), _Spy(layers[1:])
    reference = copy.deepcopy(layers)
    model = answer(first, second, "cpu", "cpu")
    if not isinstance(model, nn.Module):
        raise AnswerError(f"expected an nn.Module, given {type(model).__name__}: derive the class from nn.Module")
    inputs = torch.randn(5, 6)
    outputs = model(inputs)
    if not isinstance(outputs, Tensor) or outputs.shape != (5, 4) or not torch.allclose(outputs, reference(inputs), atol=1e-6):
        raise AnswerError("the output is not that of the first part followed by the second")
    if first.calls != 1 or second.calls != 1:
        raise AnswerError(f"each part runs once per forward; the first ran {first.calls} times, the second {second.calls}")
    if not list(model.parameters()):
        raise AnswerError(
            "the model has no parameters of its own: an optimizer would train nothing. Call super().__init__() and keep the "
            "parts as attributes"
        )
    _on_meta(answer)
    outputs.sum().backward()
    reference(inputs).sum().backward()
    for (name, p), q in zip(layers.named_parameters(), reference.parameters(), strict=True):
        if p.grad is None or q.grad is None or not torch.allclose(p.grad, q.grad, atol=1e-6):
            raise AnswerError(
                f"the gradient of {name} is not that of the unsplit model: is the activation detached between the parts?"
            )
    return "Two parts on two devices, one activation sent across, and gradients that come back the same way."


def _on_meta(answer: Any) -> None:
    parts = _network()
    model = answer(parts[0], parts[1:], "cpu", "meta")
    places = [{p.device.type for p in part.parameters()} for part in (parts[0], parts[1:])]
    if places != [{"cpu"}, {"meta"}]:
        found = [listing(sorted(place)) for place in places]
        raise AnswerError(
            "the parts are not on their devices: the first belongs on device0, the second on device1",
            f"asked for cpu and meta (a device without memory, here in place of a second GPU), found {found[0]} and {found[1]}",
        )
    try:
        outputs = model(torch.randn(5, 6))
    except (RuntimeError, NotImplementedError) as error:
        raise AnswerError(
            "with two different devices the second part fails: move the activation to device1 before it goes in",
            str(error).splitlines()[0],
        ) from None
    if outputs.device.type != "meta":
        raise AnswerError("the second part did not compute on device1", f"the output is on {outputs.device.type}")
    parts = _network()
    model = answer(parts[0], parts[1:], "meta", "meta")
    try:
        model(torch.randn(5, 6))
    except (RuntimeError, NotImplementedError) as error:
        raise AnswerError(
            "with the first part on another device than the images it fails: move the input to device0",
            str(error).splitlines()[0],
        ) from None


# All messages of `middle_step` have one shape, so that a wrong tensor arrives and can be named.
SHAPE = (5, 6)


class _Seen(NamedTuple):
    """What one rank observed in a step over three ranks.

    Args:
        received: the messages from the middle stage; on the middle rank, those that the answer did not receive.
        gradients: of the parameters of this rank's stage.
        no_gradient: whether the answer failed on a gradient that is None, because its activation did not require one.
    """

    received: list[NDArray[Any]]
    gradients: dict[str, NDArray[Any]]
    no_gradient: bool = False


def _stages() -> list[nn.Sequential]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(SHAPE[1], SHAPE[1]), nn.Tanh()) for _ in range(3)]


def _examples() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    return torch.randn(SHAPE, generator=random), torch.randn(SHAPE, generator=random)


def _drain(source: int) -> list[Tensor]:
    """Receive messages up to the end marker; a message that was never sent is then missing, instead of waited for."""
    messages: list[Tensor] = []
    while True:
        message = torch.empty(SHAPE)
        dist.recv(message, src=source)
        if message.isnan().all():
            return messages
        messages.append(message)


def _middle_on_rank(answer: Callable[..., object]) -> _Seen:
    """Run the student's function on rank 1, between correct stages that do not wait for messages that never come."""
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
    gradients = {n: p.grad.numpy() for n, p in stage.named_parameters() if p.grad is not None}
    return _Seen([message.numpy() for message in received], gradients, no_gradient)


def _middle_step(answer: Any, on: OnRanks) -> str:
    first, middle, last = on(3, _middle_on_rank, answer)
    stages, (inputs, targets) = _stages(), _examples()
    before = stages[0](inputs)  # the input of the middle stage
    behind = stages[1](before)  # its output
    before.retain_grad()
    behind.retain_grad()
    nn.functional.mse_loss(stages[2](behind), targets).backward()
    assert before.grad is not None and behind.grad is not None
    if middle.no_gradient:
        raise AnswerError("the activation's `.grad` is None: it must require a gradient (requires_grad_) before `stage` sees it")
    if not last.received:
        raise AnswerError("rank 2 got nothing: send it the output of `stage`")
    if _same(last.received[0], before):
        raise AnswerError("rank 2 got the activation as it came from rank 0: it has to go through `stage` first")
    if not _same(last.received[0], behind):
        raise AnswerError("rank 2 did not get the output of `stage` for the activation from rank 0")
    if not first.received:
        raise AnswerError("rank 0 got nothing back: it waits for the gradient of the activation that it sent")
    if _same(first.received[0], behind.grad):
        raise AnswerError(
            "rank 0 got the gradient of your stage's output, as it came from rank 2; it waits for the gradient of your stage's "
            "input: the `.grad` of what came from rank 0, once your backward has run"
        )
    if middle.received:
        raise AnswerError(
            f"rank 1 did not receive {counted(len(middle.received), 'message')}: does it receive the gradient from rank 2?"
        )
    own = {n: p.grad.numpy() for n, p in stages[1].named_parameters() if p.grad is not None}
    if not _same(first.received[0], before.grad):
        raise AnswerError(
            "what rank 0 got is not the gradient of its activation: the backward of your stage has to start from the gradient "
            "that rank 2 sends, output.backward(gradient)"
        )
    compare([middle.gradients], own, subject="the gradients of the middle stage")
    if len(first.received) + len(last.received) > 2:
        raise AnswerError(
            "one message to each neighbour is enough", f"to rank 0: {len(first.received)}", f"to rank 2: {len(last.received)}"
        )
    return "One activation forward, one gradient back, and all three stages learn as in one process."


def _same(message: NDArray[Any], expected: Tensor) -> bool:
    return np.allclose(message, expected.detach().numpy(), atol=1e-6)


EXERCISES = (
    Exercise(
        "activation_bytes",
        LESSON,
        "activation_bytes(model, inputs) runs the model once and returns a dict: for each layer without children, by its name in "
        "named_modules(), the bytes of its output for that batch.",
        _activation_bytes,
    ),
    Exercise(
        "best_cut",
        LESSON,
        "Given the cost of each layer, return how many layers the first of two parts shall have, so that the slower part is as "
        "fast as possible.",
        _best_cut,
    ),
    Exercise(
        "TwoDevices",
        LESSON,
        "A module TwoDevices(first, second, device0, device1): each part lives on its device, and forward carries the input to "
        "the first and the activation to the second.",
        _two_devices,
    ),
    Exercise(
        "middle_step",
        LESSON,
        "middle_step(stage, shape) runs on rank 1 of 3: receive an activation of that shape from rank 0, send what `stage` makes "
        "of it (of the same shape) to rank 2, receive the gradient of that, and send rank 0 the gradient of its activation.",
        _middle_step,
    ),
)
