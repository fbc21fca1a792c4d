"""When a rank waits, at the end of a backward pass, for the gradients that are still under way.

DistributedDataParallel issues its all-reduces during the backward pass and waits for them at its end, both in C++. How
much of them is hidden behind computing, and how much is not, shows only if the begin of that wait is known. Its end is
known as well: the backend's thread that tells of a completion may get a core only milliseconds later, when the rank has
long been at its next step.
"""

from __future__ import annotations

import torch

from labkit.comm.operation import Operation

__all__ = ["Backwards", "in_backward"]

in_backward = torch._C._current_graph_task_id  # the number of the backward pass that this thread works for; -1: none


class Backwards:
    """The operations that were issued in backward passes under way."""

    def __init__(self) -> None:
        self._passes: dict[int, list[Operation]] = {}

    def issued(self, number: int, operation: Operation) -> None:
        """An operation was issued in that pass.

        Callbacks at the end of a pass run in the order in which they were asked for. Ours is asked for with the first
        bucket, and the one in which DistributedDataParallel waits with the last. One that such a callback asks for runs
        after them all.
        """
        operations = self._passes.get(number)
        if operations is None:
            self._passes = {n: o for n, o in self._passes.items() if not all(x.done for x in o)}  # what failed passes left
            operations = self._passes[number] = []
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(number))
        operations.append(operation)

    def _end(self, number: int) -> None:
        waited_for = [operation for operation in self._passes.pop(number) if operation.future is not None]
        for operation in waited_for:  # the others are the student's, whose wait for them we shall see
            operation.wait_begins_in_torch()
        if waited_for:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._over(waited_for))

    @staticmethod
    def _over(waited_for: list[Operation]) -> None:
        for operation in waited_for:
            operation.wait_has_ended_in_torch()
