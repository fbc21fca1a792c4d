"""Records when a rank waits for gradients at the end of a backward pass.

DistributedDataParallel issues its all-reduces during the backward pass and waits for them at its end, both in C++.
Exposed communication can only be distinguished from hidden if the start of that wait is known. Its end is recorded
here, too: the backend's thread that reports the completion may get a core only milliseconds later, when the rank is at
its next step.
"""

from __future__ import annotations

from collections.abc import Callable

from labkit.comm.operation import Operation
from labkit.comm.torch_internals import BACKWARD


def _unknown() -> int:
    return -1


# Returns the id of this thread's current backward pass; -1: none.
in_backward: Callable[[], int] = BACKWARD["_current_graph_task_id"] if BACKWARD.found else _unknown


def at_end_of_pass(callback: Callable[[], None]) -> None:
    """Call a function at the end of this thread's current backward pass."""
    if BACKWARD.found:
        BACKWARD["_execution_engine"].queue_callback(callback)


class Backwards:
    """The operations issued in current backward passes."""

    def __init__(self) -> None:
        self._passes: dict[int, list[Operation]] = {}

    def issued(self, number: int, operation: Operation) -> None:
        """Note that an operation was issued in a backward pass.

        Callbacks at the end of a pass run in the order in which they were queued. The first callback is queued here
        with the first bucket; DistributedDataParallel queues the one in which it waits with the last bucket. A callback
        that is queued by a callback runs after all others.
        """
        operations = self._passes.get(number)
        if operations is None:
            self._passes = {n: o for n, o in self._passes.items() if not all(x.done for x in o)}  # drop failed passes
            operations = self._passes[number] = []
            at_end_of_pass(lambda: self._end(number))
        operations.append(operation)

    def _end(self, number: int) -> None:
        # A pass inside another one, as of `checkpoint(..., use_reentrant=True)`, may have dropped the outer one.
        waited_for = [operation for operation in self._passes.pop(number, []) if operation.has_future]
        for operation in waited_for:  # waits for the student's own operations are recorded elsewhere
            operation.wait_begins_in_torch()
        if waited_for:
            at_end_of_pass(lambda: self._over(waited_for))

    @staticmethod
    def _over(waited_for: list[Operation]) -> None:
        for operation in waited_for:
            operation.wait_has_ended_in_torch()
