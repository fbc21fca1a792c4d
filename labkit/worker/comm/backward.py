"""Records when a rank waits for gradients at the end of a backward pass, and distributed backward passes.

DistributedDataParallel issues its all-reduces during the backward pass and waits for them at its end, both in C++.
Exposed communication can only be distinguished from hidden if the start of that wait is known. Its end is recorded
here, too: the backend's thread that reports the completion may get a core only milliseconds later, when the rank is at
its next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from labkit.costs.kernels import tensors_in
from labkit.recording.group_keys import DIST_BACKWARD
from labkit.recording.operations import GRADIENTS, RECEIVED_GRADIENTS
from labkit.recording.record import clock, student_line
from labkit.recording.ring_buffer import RingWriter
from labkit.recording.schema import AUTOMATIC, COMPUTE, OWN_THREAD
from labkit.recording.torch_internals import BACKWARD, REMOTE_CONTEXT
from labkit.worker.comm.operation import Operation


class RpcBackwards:
    """Records the distributed backward passes that this rank starts, and its part in those of other ranks.

    torch runs them in C++ on every rank, but calls the hooks of the autograd graph. All ranks identify a pass by the
    id of its context. The caller waits until the last rank has computed its part; after that, gradients are
    transferred.
    """

    def __init__(self, ring: RingWriter) -> None:
        self._ring = ring

    def started(
        self, backward: Callable[..., Any], context_id: int, roots: Sequence[torch.Tensor], *args: Any, **kwargs: Any
    ) -> None:
        """Record the student's call of `backward`: compute until this rank's own part is done, then waiting."""
        start_ns = clock()
        operation = Operation(self._ring, DIST_BACKWARD, start_ns, group=DIST_BACKWARD, match=context_id, line=student_line())

        def own_part_ends() -> None:
            operation.start_ns = clock()
            operation.wait_begins()

        begin = roots[0].grad_fn if len(roots) else None
        hook = begin.register_prehook(lambda _: at_end_of_pass(own_part_ends)) if begin is not None else None
        try:
            backward(context_id, roots, *args, **kwargs)
        except BaseException:
            operation.failed()
            raise
        finally:
            if hook is not None:
                hook.remove()
            self._ring.write(DIST_BACKWARD, COMPUTE, start_ns, operation.wait_start_ns or clock(), flags=AUTOMATIC)
        operation.wait_ends()

    def served(self, function: str, caller: int, arguments: Any, result: Any, *, replies: bool) -> None:
        """Add hooks to the autograd graph of a function that another rank has called.

        Gradients have the size of their tensors: gradients of the arguments go to the caller, gradients of the result
        come from it. A result that stays here is fetched by the rank with the reference, which records that it sends
        the gradients: see `fetched`.
        """
        ends = [tensor.grad_fn for tensor in tensors_in(result) if tensor.grad_fn is not None]
        if not ends:
            return
        context = context_id()
        if context is None:
            return  # no backward pass can go through it
        nbytes = tuple(sum(t.nbytes for t in tensors_in(value) if t.grad_fn is not None) for value in (result, arguments))
        part = _BackwardPart(self._ring, f"backward of {function}", context, caller, (nbytes[0] if replies else 0, nbytes[1]))
        for end in ends:
            end.register_prehook(part.begins)
        for tensor in tensors_in(arguments):
            if tensor.grad_fn is not None:
                tensor.register_hook(part.sends_back)

    def fetched(self, value: Any, owner: int) -> None:
        """Add hooks to a value that was fetched through its reference: gradients of its tensors go to the owner."""
        ends: dict[Any, int] = {}
        for tensor in tensors_in(value):
            if tensor.grad_fn is not None:
                ends[tensor.grad_fn] = ends.get(tensor.grad_fn, 0) + tensor.nbytes
        for end, nbytes in ends.items():
            end.register_prehook(partial(self._sends_back, nbytes, owner))

    def _sends_back(self, nbytes: int, owner: int, _: object) -> None:
        now = clock()
        self._ring.write_communication(GRADIENTS.name, now, now, nbytes=nbytes, peer=owner)


class _BackwardPart:
    """One rank's part of a backward pass: from the arriving gradient to the leaving one, or to the end of the pass."""

    def __init__(self, ring: RingWriter, name: str, context_id: int, caller: int, nbytes: tuple[int, ...]) -> None:
        self._ring, self._name, self._context_id, self._caller = ring, name, context_id, caller
        self._nbytes = nbytes  # of gradients that come from the caller, and of those that go there
        self._start_ns = self._sent_ns = 0

    def begins(self, _: object) -> None:
        if not self._start_ns:
            self._start_ns = now = clock()
            if self._nbytes[0]:
                self._ring.write_communication(
                    RECEIVED_GRADIENTS.name, now, now, nbytes=self._nbytes[0], peer=self._caller, flags=OWN_THREAD
                )
            at_end_of_pass(self._ends)

    def sends_back(self, _: object) -> None:
        self._sent_ns = clock()

    def _ends(self) -> None:
        start_ns, end_ns = self._start_ns, self._sent_ns or clock()
        self._start_ns = self._sent_ns = 0  # for another pass through the same graph
        self._ring.write(self._name, COMPUTE, start_ns, end_ns, flags=AUTOMATIC | OWN_THREAD)
        self._ring.write_communication(
            GRADIENTS.name, end_ns, end_ns, nbytes=self._nbytes[1], peer=self._caller, group=DIST_BACKWARD,
            match=self._context_id, flags=OWN_THREAD,
        )  # fmt: skip


def context_id() -> int | None:
    """Return the id of the distributed autograd context in which this thread runs; None outside of one."""
    try:
        found: int = REMOTE_CONTEXT.of(REMOTE_CONTEXT["_current_context"](), "_context_id")()
    except (RuntimeError, AttributeError):
        return None
    return found


# Returns the id of this thread's current backward pass; -1: none.
in_backward: Callable[[], int] = BACKWARD["_current_graph_task_id"] if BACKWARD.found else lambda: -1


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
            operation.wait_begins(in_torch=True)
        if waited_for:
            at_end_of_pass(lambda: self._over(waited_for))

    @staticmethod
    def _over(waited_for: list[Operation]) -> None:
        """Note that the rank's waits in C++ have ended, perhaps before the backend's thread reports the completion."""
        for operation in waited_for:
            future = operation.future
            if future is not None and future.done():
                operation.completed()
