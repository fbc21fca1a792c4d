"""What a simulated rank has done so far: its events, which communications it has not waited for, its live memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from labkit.costs.kernels import LiveTensors
from labkit.group.simulation.program import Communication, Elapsed, Event, Memory, Wait
from labkit.recording.torch_internals import SIMULATION


class RankLog(LiveTensors):
    """Collects the events of one rank, each with the time in ns at which it was recorded.

    If `measured`, tensors have data, so that these times are those of a real rank.
    """

    def __init__(self, *, measured: bool = False) -> None:
        super().__init__()
        self.measured = measured
        self.events: list[tuple[int, Event]] = []
        self._without_value: set[int] = set()  # the storages of numbers that depend on other ranks or on data
        self._communications = 0
        self._pending: set[int] = set()  # the communications that nothing has waited for
        self._written_by: dict[int, int] = {}  # by storage: the last communication that writes it

    def add(self, event: Event) -> None:
        """Record an event."""
        self.events.append((time.perf_counter_ns(), event))

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Record that what happens inside this context takes a real rank no time."""
        start_ns = time.perf_counter_ns()
        yield
        if self.measured:
            self.add(Elapsed(start_ns - time.perf_counter_ns()))

    def forget_values(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note that the numbers in these tensors are not those that a real rank would have."""
        for tensor in tensors:
            self._without_value.add(self.key_of(tensor.untyped_storage()))

    def has_value(self, tensor: torch.Tensor) -> bool:
        """Whether the numbers in a tensor are those that a real rank would have."""
        return not is_fake(tensor) and id(tensor.untyped_storage()) not in self._without_value

    def freed(self, key: int) -> None:
        """Forget a storage."""
        super().freed(key)
        self._written_by.pop(key, None)
        self._without_value.discard(key)

    def changed(self) -> None:
        """Record that tensors were allocated or freed."""
        self.add(Memory(self.live_bytes))

    def communicate(self, written: Iterable[torch.Tensor], **fields: Any) -> int:
        """Record a communication that writes tensors, so that what uses them waits for it; return its number."""
        number, self._communications = self._communications, self._communications + 1
        self.add(Communication(number, **fields))
        self._pending.add(number)
        for tensor in written:
            self._written_by[self.key_of(tensor.untyped_storage())] = number
        return number

    def wait(self, number: int) -> None:
        """Record that the rank waits for a communication, unless it has done so before."""
        if number in self._pending:
            self._pending.remove(number)
            self.add(Wait(number))

    def uses(self, tensors: Iterable[torch.Tensor]) -> None:
        """Record waits for the communications that write these tensors."""
        if self._pending:
            for tensor in tensors:
                self.wait(self._written_by.get(id(tensor.untyped_storage()), -1))


def is_fake(value: Any) -> bool:
    """Whether a value is a tensor without data."""
    return isinstance(value, SIMULATION["FakeTensor"])
