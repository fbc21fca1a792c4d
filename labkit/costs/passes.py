"""What a part of a model does forward and backward, counted on tensors without data: kernels, and memory in between."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.func import functional_call

from labkit.costs.device import ATTENTION, Device, Kernel
from labkit.costs.kernels import LiveTensors, kernel_of, tensors_in
from labkit.recording.torch_internals import DISPATCH, SIMULATION

SAMPLES: Final = (2, 3)  # with which a part is counted: all its numbers grow linearly with them
COSTS: Final = 1 << 12  # how many are remembered; a large plan needs some hundred
PRODUCTS: Final = ("mm", "addmm")  # matrix products with parameters; selective recomputation keeps their results
Inputs = Callable[[int], Sequence[torch.Tensor]]  # of a module, by the number of samples


@dataclass(frozen=True, slots=True)
class Passes:
    """A forward and a backward pass of a part of a model for some samples; bytes without parameters and gradients."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    saved_bytes: float  # the output, and what is kept for the backward pass
    output_bytes: float
    products_bytes: float  # the output, and what selective recomputation keeps: results of matrix products and of attention
    peak_bytes: float  # the most that exist at one time


class Cost(NamedTuple):
    """What the passes of a part of a model cost on a device, the backward pass with what it computes again."""

    forward_s: float
    backward_s: float
    kept_bytes: float  # between the two
    peak_bytes: float


class Counted:
    """A part of a model, for any number of samples."""

    def __init__(self, module: nn.Module, inputs: Inputs) -> None:
        self._two, self._three = (_count(module, inputs, samples) for samples in SAMPLES)
        names = [[kernel.name for kernel in each.forward + each.backward] for each in (self._two, self._three)]
        if names[0] != names[1]:
            raise ValueError(f"it calls other operators for {SAMPLES[0]} samples than for {SAMPLES[1]}")

    def at(self, samples: float) -> Passes:
        """Return the passes for so many samples."""
        passes: Passes = _along(self._two, self._three, samples)
        return passes

    @functools.lru_cache(maxsize=COSTS)  # noqa: B019  # it keeps alive at most so many
    def cost(self, samples: float, device: Device, recompute: str) -> Cost:
        """Return what so many samples cost, if the backward pass computes nothing, "selective" or the "layer" again."""

        def seconds(kernels: Iterable[Kernel]) -> float:
            return sum(kernel.seconds(device) for kernel in kernels)

        passes = self.at(samples)
        again, kept_bytes = {
            "none": ((), passes.saved_bytes),
            "selective": ([kernel for kernel in passes.forward if not _is_kept(kernel)], passes.products_bytes),
            "layer": (passes.forward, passes.output_bytes),
        }[recompute]
        return Cost(seconds(passes.forward), seconds(passes.backward) + seconds(again), kept_bytes, passes.peak_bytes)


def _along(two: Any, three: Any, samples: float) -> Any:
    """Return what so many samples give, where two and three of them give these; all else is equal."""
    if isinstance(two, tuple):
        return tuple(_along(a, b, samples) for a, b in zip(two, three, strict=True))
    if is_dataclass(two):
        values = (_along(getattr(two, each.name), getattr(three, each.name), samples) for each in fields(two))
        return type(two)(*values)  # type: ignore[misc]  # a class, not an object
    return two if two == three else two + (three - two) * (samples - SAMPLES[0])


def _is_kept(kernel: Kernel) -> bool:
    return kernel.name in PRODUCTS or kernel.name.startswith(ATTENTION)


class _Counter(LiveTensors):
    """What operators have done so far."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self.kept_bytes = 0.0  # of all results of matrix products and of attention, as torch's selective checkpoints keep them
        self.most_bytes = 0

    def changed(self) -> None:
        self.most_bytes = max(self.most_bytes, self.live_bytes)

    def add(self, kernel: Kernel | None, results: Iterable[torch.Tensor]) -> None:
        """Note an operator and its results."""
        self.hold(results)
        if kernel is not None:
            self.kernels.append(kernel)
            self.kept_bytes += kernel.written_bytes if _is_kept(kernel) else 0

    def take(self) -> tuple[Kernel, ...]:
        """Return the kernels since the last call."""
        kernels, self.kernels = tuple(self.kernels), []
        return kernels


def _counting(counter: _Counter) -> Any:
    """Return a context manager in which a counter notes all operators."""
    dispatch_mode: Any = DISPATCH["TorchDispatchMode"]

    class CountingMode(dispatch_mode):  # type: ignore[misc]  # a class of torch's, looked up by name
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            counter.add(kernel_of(func, args, kwargs or {}, result), tensors_in(result))
            return result

    return CountingMode()


def _count(module: nn.Module, inputs: Inputs, samples: int) -> Passes:
    """Count a module's passes for so many samples."""
    counter = _Counter()
    # It repeats in many lines what an error says, such as one on shapes that do not fit.
    logging.getLogger(SIMULATION["FakeTensorMode"].__module__).setLevel(logging.CRITICAL)
    anywhere = torch.device("cpu"), torch.inference_mode(False), torch.enable_grad()  # whatever the caller has set
    with contextlib.ExitStack() as stack:
        for context in (*anywhere, SIMULATION["FakeTensorMode"](allow_non_fake_inputs=True), _counting(counter)):
            stack.enter_context(context)
        tensors = [*module.named_parameters(), *module.named_buffers()]
        state = {name: torch.empty_like(each, device="cpu").requires_grad_(each.requires_grad) for name, each in tensors}
        for tensor in state.values():
            if tensor.requires_grad:
                tensor.register_post_accumulate_grad_hook(_free)
        given = inputs(samples)
        before = counter.most_bytes = counter.live_bytes
        output = functional_call(module, state, tuple(given))
        forward, saved = counter.take(), counter.live_bytes - before
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if not outputs and any(tensor.requires_grad for tensor in state.values()):
            raise ValueError("no output depends on its parameters")
        output_bytes = sum(tensor.nbytes for tensor in outputs)
        kept = counter.kept_bytes + output_bytes
        torch.autograd.backward(outputs, [torch.empty_like(tensor) for tensor in outputs])
    return Passes(forward, counter.take(), saved, output_bytes, kept, counter.most_bytes - before)


def _free(parameter: torch.Tensor) -> None:
    parameter.grad = None
