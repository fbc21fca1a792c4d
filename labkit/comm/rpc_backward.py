"""The distributed backward pass: what it computes on each rank, and how long its caller waits for the others.

torch runs it in C++ on every rank, out of Python's sight, but calls the hooks of the graph that it goes through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import torch
from torch.distributed import autograd as dist_autograd

from labkit.comm.operation import Operation
from labkit.record import clock, student_line
from labkit.ring import COMPUTE, RingWriter

__all__ = ["RpcBackwards", "tensors_in"]

NAME: Final = "dist_autograd.backward"


class RpcBackwards:
    """Writes down the backward passes that this rank starts, and its part in those of others.

    All ranks give a pass the same number, that of its context. So the caller waits until the last of them has computed its part,
    and what comes after is the way of the gradients.
    """

    def __init__(self, ring: RingWriter) -> None:
        self._ring = ring

    def started(
        self, backward: Callable[..., Any], context_id: int, roots: Sequence[torch.Tensor], *args: Any, **kwargs: Any
    ) -> None:
        """The student's call: here until this rank's own part is computed, waiting from then on."""
        start_ns = clock()
        operation = Operation(self._ring, NAME, start_ns, group=NAME, match=context_id, line=student_line())

        def own_part_ends() -> None:
            operation.start_ns = clock()
            operation.wait_begins()

        begin = roots[0].grad_fn if len(roots) else None
        hook = begin.register_prehook(lambda _: _at_end_of_pass(own_part_ends)) if begin is not None else None
        try:
            backward(context_id, roots, *args, **kwargs)
        except BaseException:
            operation.failed()
            raise
        finally:
            if hook is not None:
                hook.remove()
            self._ring.write(NAME, COMPUTE, start_ns, operation.wait_start_ns or clock())
        operation.wait_ends()

    def served(self, function: str, arguments: Any, result: Any) -> None:
        """A function was called from another rank: the backward pass may come back to it."""
        ends = [tensor.grad_fn for tensor in tensors_in(result) if tensor.grad_fn is not None]
        if not ends:
            return
        try:
            context_id = dist_autograd._current_context()._context_id()
        except RuntimeError:
            return  # not called within a context: nobody can go back through it
        part = _Part(self._ring, f"backward of {function}", context_id)
        for end in ends:
            end.register_prehook(part.begins)
        for tensor in tensors_in(arguments):
            if tensor.grad_fn is not None:
                tensor.register_hook(part.sends_back)


class _Part:
    """One rank's part of a backward pass: from the gradient that arrives to the one that leaves, or to the end of the pass."""

    def __init__(self, ring: RingWriter, name: str, context_id: int) -> None:
        self._ring, self._name, self._context_id = ring, name, context_id
        self._start_ns = self._sent_ns = 0

    def begins(self, _: object) -> None:
        if not self._start_ns:
            self._start_ns = clock()
            _at_end_of_pass(self._ends)

    def sends_back(self, _: object) -> None:
        self._sent_ns = clock()

    def _ends(self) -> None:
        start_ns, end_ns = self._start_ns, self._sent_ns or clock()
        self._start_ns = self._sent_ns = 0  # there may be another pass through the same graph
        self._ring.write(self._name, COMPUTE, start_ns, end_ns)
        self._ring.write_communication("gradients", end_ns, end_ns, group=NAME, match=self._context_id)


def _at_end_of_pass(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a value, also those in lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        parts: Iterable[Any] = value.values() if isinstance(value, dict) else value
        for part in parts:
            yield from tensors_in(part)
