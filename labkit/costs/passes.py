"""What a part of a model does forward and backward, counted on tensors without data: kernels, and memory in between."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from labkit.costs.device import ATTENTION, Device, Kernel
from labkit.costs.kernels import LiveTensors, fused_attention, kernel_of, tensors_in, without_cpu_libraries
from labkit.recording.torch_internals import DISPATCH, SIMULATION

SAMPLES: Final = (2, 3, 5)  # with which a part is counted: from two, its numbers for the third must follow
COSTS: Final = 1 << 14  # how many are remembered; a large plan needs some thousand
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
    live_bytes: tuple[float, ...]  # that exist after each operator

    def agrees_with(self, other: Passes) -> bool:
        """Whether all numbers are the same, but for rounding."""

        def numbers(passes: Passes) -> list[float]:
            kernels = passes.forward + passes.backward
            of_kernels = [number for each in kernels for number in (each.flops, each.read_bytes, each.written_bytes)]
            return [*of_kernels, passes.saved_bytes, passes.output_bytes, passes.products_bytes, *passes.live_bytes]

        return all(map(math.isclose, numbers(self), numbers(other)))


class PassCost(NamedTuple):
    """What the passes of a part of a model cost on a device, the backward pass with what it computes again."""

    forward_s: float
    backward_s: float
    kept_bytes: float  # between the two
    peak_bytes: float


class Counted:
    """A part of a model, for any number of samples."""

    def __init__(
        self, module: nn.Module, inputs: Inputs, counts: Sequence[int] = SAMPLES, *, dtype: torch.dtype | None = None
    ) -> None:
        """Count a module for the first two numbers of samples, and check that those for the others follow.

        `dtype` is what kernels compute with; default: the types of the module's parameters.
        """
        self._counts = counts
        first, second, *others = (_count(module, inputs, samples, dtype) for samples in counts)
        self._found = first, second
        names = [[kernel.name for kernel in each.forward + each.backward] for each in (first, second, *others)]
        if any(each != names[0] for each in names) or any(len(each.live_bytes) != len(first.live_bytes) for each in others):
            raise ValueError("it calls other operators for other numbers of samples")
        if not all(self.at(samples).agrees_with(each) for samples, each in zip(counts[2:], others, strict=True)):
            raise ValueError("its work does not grow linearly with the samples")

    def at(self, samples: float) -> Passes:
        """Return the passes for so many samples."""
        (one, other), (first, second) = self._found, self._counts[:2]
        times = (samples - first) / (second - first)

        def along(a: float, b: float) -> float:
            return a + (b - a) * times

        def kernels(some: Iterable[Kernel], more: Iterable[Kernel]) -> tuple[Kernel, ...]:
            return tuple(
                Kernel(
                    a.name,
                    along(a.flops, b.flops),
                    along(a.read_bytes, b.read_bytes),
                    along(a.written_bytes, b.written_bytes),
                    a.wide,
                )
                for a, b in zip(some, more, strict=True)
            )

        return Passes(
            kernels(one.forward, other.forward), kernels(one.backward, other.backward), along(one.saved_bytes, other.saved_bytes),
            along(one.output_bytes, other.output_bytes), along(one.products_bytes, other.products_bytes),
            tuple(map(along, one.live_bytes, other.live_bytes)),
        )  # fmt: skip

    @functools.lru_cache(maxsize=COSTS)  # noqa: B019  # it keeps alive at most so many
    def cost(self, samples: float, device: Device, recompute: str) -> PassCost:
        """Return what so many samples cost, if the backward pass computes nothing, "selective" or the "layer" again."""

        def seconds(kernels: Iterable[Kernel]) -> float:
            return sum(kernel.seconds(device) for kernel in kernels)

        passes = self.at(samples)
        again, kept_bytes = {
            "none": ((), passes.saved_bytes),
            "selective": ([kernel for kernel in passes.forward if not _is_kept(kernel)], passes.products_bytes),
            "layer": (passes.forward, passes.output_bytes),
        }[recompute]
        return PassCost(
            seconds(passes.forward), seconds(passes.backward) + seconds(again), kept_bytes, max(passes.live_bytes, default=0.0)
        )


def _is_kept(kernel: Kernel) -> bool:
    return kernel.name in PRODUCTS or kernel.name.startswith(ATTENTION)


class _Counter(LiveTensors):
    """What operators have done so far."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self.kept_bytes = 0.0  # of all results of matrix products and of attention, as torch's selective checkpoints keep them
        self.moments: list[int] = []  # the live bytes after each operator

    def add(self, kernel: Kernel | None, results: Iterable[torch.Tensor]) -> None:
        """Note an operator and its results."""
        self.hold(results)
        self.moments.append(self.live_bytes)
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


@contextlib.contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Undo afterwards what a forward pass stores in a module, such as a mask that it makes once."""
    owned = [each for part in module.modules() for each in (vars(part), *vars(part).values()) if isinstance(each, dict | list)]
    kept = [each.copy() for each in owned]
    try:
        yield
    finally:
        for each, before in zip(owned, kept, strict=True):
            each.clear()
            each.update(before) if isinstance(each, dict) else each.extend(before)


def _count(module: nn.Module, inputs: Inputs, samples: int, dtype: torch.dtype | None) -> Passes:
    """Count a module's passes for so many samples."""
    counter = _Counter()
    logger = logging.getLogger(SIMULATION["FakeTensorMode"].__module__)
    anywhere = (  # whatever the caller has set
        torch.device("cpu"), torch.inference_mode(False), torch.enable_grad(), torch.autograd.set_detect_anomaly(False),
        torch.autocast("cpu", enabled=False), sdpa_kernel(list(SDPBackend.__members__.values())),
    )  # fmt: skip
    fake = SIMULATION["FakeTensorMode"](allow_non_fake_inputs=True)
    with contextlib.ExitStack() as stack:
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.CRITICAL)  # it repeats in many lines what an error says, such as one on shapes that do not fit
        for context in (*anywhere, fused_attention(), without_cpu_libraries(), _restored(module), fake, _counting(counter)):
            stack.enter_context(context)
        passes = _passes(module, inputs, samples, dtype, counter)
    if counter.live_bytes:
        gc.collect()
    if counter.live_bytes:
        raise ValueError(
            "it keeps tensors elsewhere than in its attributes, buffers and submodules (in a list, a cache, a hook?); now some "
            "of them have no data, so create it again"
        )
    return passes


def _passes(module: nn.Module, inputs: Inputs, samples: int, dtype: torch.dtype | None, counter: _Counter) -> Passes:
    state = {name: torch.empty_like(each, device="cpu") for name, each in module.named_buffers()}
    for name, each in module.named_parameters():
        state[name] = torch.empty_like(each, device="cpu", dtype=dtype).requires_grad_(each.requires_grad)
        if each.requires_grad:
            state[name].register_post_accumulate_grad_hook(_free)
    given = inputs(samples)
    before = counter.live_bytes
    counter.moments.clear()
    output = functional_call(module, state, tuple(given))
    forward, saved = counter.take(), counter.live_bytes - before
    outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    if not outputs and any(tensor.requires_grad for tensor in state.values()):
        raise ValueError("no tensor of its output (a tensor, list, tuple or dict) depends on its parameters")
    output_bytes = sum(tensor.nbytes for tensor in outputs)
    kept = counter.kept_bytes + output_bytes
    starts = [tensor for tensor in outputs if not tensor.dim()] or outputs  # losses, if there are some
    torch.autograd.backward(starts, [torch.empty_like(tensor) for tensor in starts])
    live = tuple(moment - before for moment in counter.moments)
    return Passes(forward, counter.take(), saved, output_bytes, kept, live)


def _free(parameter: torch.Tensor) -> None:
    parameter.grad = None
