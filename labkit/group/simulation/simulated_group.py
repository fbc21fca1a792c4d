"""The process group of a simulated rank: every collective and message is recorded, and completes at once.

Nothing is sent. Where the tensors of a collective have data, they get the results that all ranks with equal data would
have: torch compares shapes and buckets of DistributedDataParallel in this way. What a message brings is not known.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed.distributed_c10d as c10d
from torch.distributed import ReduceOp, Work
from torch.futures import Future

from labkit.costs.kernels import tensors_in
from labkit.errors.exceptions import LabError
from labkit.group.simulation.kernel_mode import computed
from labkit.group.simulation.rank_log import RankLog, is_fake
from labkit.recording.operations import RECV, SEND, Form, OperationType, Traffic, methods, type_of
from labkit.recording.record import student_line
from labkit.recording.torch_internals import SIMULATION
from labkit.worker.comm.descriptions import most_nbytes, root_of
from labkit.worker.comm.members import check_peer

ALIKE: Final = ("all_gather", "all_reduce", "broadcast", "gather")  # collectives whose results follow from equal data


class _Issued(Work):
    """The `Work` of one or several communications, which have completed; waits for them are recorded."""

    def __init__(self, log: RankLog, numbers: list[int], results: list[torch.Tensor]) -> None:
        super().__init__()
        self._log, self._numbers, self._results = log, numbers, results

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: ARG002  # nothing can be late
        for number in self._numbers:
            self._log.wait(number)
        return True

    def is_completed(self) -> bool:
        return True

    def result(self) -> list[torch.Tensor]:
        return self._results

    def get_future(self) -> Any:
        future: Future[list[torch.Tensor]] = Future()
        future.set_result(self._results)
        return future


def simulated_process_group(log: RankLog) -> Any:
    """Return a class of process groups that record what a rank issues in `log`, to be used in place of torch's."""
    torchs: Any = SIMULATION["ProcessGroup"]  # this name of torch.distributed refers to labkit's own in a rank

    class SimulatedGroup(torchs):  # type: ignore[misc]  # a class of C++
        """One process group of the simulated rank."""

        def __init__(self, store: Any, rank: int, size: int) -> None:
            super().__init__(rank, size)
            self._store = store
            self._ranks: tuple[int, ...] = ()
            self._together: list[tuple[int, list[torch.Tensor]]] | None = None  # the current batch

        def issue(self, name: str, tensors: tuple[Any, ...], written: Any, **fields: Any) -> Any:
            """Record a communication with its inputs and outputs, and which of them it writes; return its `Work`."""
            self._ranks = self._ranks or tuple(c10d.get_process_group_ranks(self))
            results = list(tensors_in(written))
            log.hold(tensors_in(tensors))
            if type_of(name).name not in ALIKE:
                log.forget_values(tensor for tensor in results if not is_fake(tensor))
                if log.measured:
                    with log.uncounted(), torch.no_grad():
                        for tensor in results:  # what was in memory may be slow to compute with; torch takes a one as yes
                            tensor.fill_(0 if tensor.is_floating_point() else 1)
            group = fields.pop("group", self._ranks)
            number = log.communicate(
                results, name=name, nbytes=most_nbytes(tensors), group=group, process_group=self._name(),
                line=student_line(), **fields
            )  # fmt: skip
            if self._together is not None:
                self._together.append((number, results))
            return _Issued(log, [number], results)

        def _name(self) -> str:
            """Return torch's name of the group, with its axis in a device mesh."""
            axis = self.group_desc.partition(":split:")[0]
            return f"{self.group_name} {axis}" if axis.startswith("mesh_") else self.group_name

        def _message(self, method: str, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
            check_peer(method, peer, self.rank(), self.size())
            me, other = (c10d.get_global_rank(self, rank) for rank in (self.rank(), peer))
            sends = method == SEND.name
            group = (me, other) if sends else (other, me)
            return self.issue(method, (tensors,), [] if sends else tensors, group=group, peer=other, tag=tag)

        def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int) -> Any:  # noqa: N803  # torch's names
            return self._message(SEND.name, tensors, dstRank, tag)

        def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int) -> Any:  # noqa: N803
            return self._message(RECV.name, tensors, srcRank, tag)

        def recv_anysource(self, _tensors: list[torch.Tensor], _tag: int) -> Any:
            """Refuse a message from any rank.

            Raises:
                LabError: always; which rank sends it depends on times that are not simulated.
            """
            raise LabError(
                "recv without a source cannot be simulated, since it depends on which rank is first. "
                "Give recv the sender: dist.recv(tensor, src=...)."
            )

        def get_group_store(self) -> Any:
            return self._store

        def _start_coalescing(self, _device: torch.device) -> None:
            self._together = []

        def _end_coalescing(self, _device: torch.device) -> Any:
            launched, self._together = self._together or [], None
            return _Issued(log, [number for number, _ in launched], [t for _, results in launched for t in results])

        start_coalescing, end_coalescing = _start_coalescing, _end_coalescing  # their names in versions after 2.13

    for method, (kind, form) in methods().items():
        if hasattr(torchs, method) and method not in vars(SimulatedGroup):
            setattr(SimulatedGroup, method, _collective(log, kind, form))
    SimulatedGroup.__name__ = SimulatedGroup.__qualname__ = torchs.__name__
    SimulatedGroup.__module__ = torchs.__module__
    return SimulatedGroup


def _collective(log: RankLog, kind: OperationType, form: Form) -> Callable[..., Any]:
    of_one = next((other for other in kind.forms if other.name == form.of_one), None)

    def collective(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = (*args, *kwargs.values())
        called = of_one if of_one is not None and len(arguments[0]) == 1 else form
        root = c10d.get_global_rank(self, root_of(arguments)) if kind.rooted else -1
        if not any(map(is_fake, tensors_in(arguments))):
            with log.uncounted():
                computed(_as_if_equal, kind.name, arguments, self.size())
        return self.issue(called.name, arguments, () if kind.traffic is Traffic.TOGETHER else arguments[:1], root=root)

    return collective


def _as_if_equal(name: str, arguments: Any, size: int) -> None:
    """Give the outputs of a collective the values that they have if all ranks have this rank's input."""
    if name in ("all_gather", "gather"):
        (given,) = tensors_in(arguments[1])
        for output in tensors_in(arguments[0]):
            output.view(-1, given.numel()).copy_(given.flatten().clone())  # it may be a part of the output
    elif name == "all_reduce" and arguments[-1].reduceOp == ReduceOp.SUM:
        for tensor in tensors_in(arguments[0]):
            tensor.mul_(size)
