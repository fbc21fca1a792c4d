"""The process group that torch creates in a rank: torch's own, with every collective and message recorded."""

from __future__ import annotations

import inspect
import itertools
import math
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cached_property, partial
from types import FrameType
from typing import Any, ClassVar, Final

import torch
import torch.distributed.distributed_c10d as c10d
import typing_extensions
from torch.distributed import ProcessGroup, c10d_logger  # the original group, which `comm.install` replaces later

from labkit.recording.group_keys import pair_key
from labkit.recording.operations import RECV, SEND, Form, OperationType, methods, type_of
from labkit.recording.record import Recorder, clock, is_students, student_line
from labkit.recording.torch_internals import BATCHES, MESSAGE_SENDERS, PROCESS_GROUPS, TIME_LIMITS
from labkit.worker.comm.backward import Backwards, in_backward
from labkit.worker.comm.cuda_timing import DeviceOperation
from labkit.worker.comm.descriptions import first_tensor, most_nbytes, nbytes_of, root_of, signature_of, tensor_in_words
from labkit.worker.comm.emulated_link import Booking, SlowLink
from labkit.worker.comm.futures import Futures
from labkit.worker.comm.members import Numbering, check_peer, numbers_of
from labkit.worker.comm.operation import Operation, OwnLimit, blocked, ends_by_itself
from labkit.worker.comm.work import Attendant, HostCopy, RecordedMessage, RecordedWork

# Between a program's call of torch.distributed and the methods below: ours, the function, what logs its errors, and
# what warns that it is deprecated.
DISTRIBUTED_FILES: Final = frozenset({__file__, c10d.__file__, c10d_logger.__file__, typing_extensions.__file__})
COMPARED: Final = frozenset({"all_reduce", "all_gather"})  # with what the other ranks give, in a run with `check=True`
BLOCKING: Final = frozenset(inspect.unwrap(function).__code__ for function in (c10d.send, c10d.recv))  # they wait at once


class _Kind(type(ProcessGroup)):  # type: ignore[misc]  # pybind11's metaclass, which has no name of its own
    """Makes `isinstance` true for torch's own process groups, too, and for what represents one in `torch.compile`."""

    def __call__(cls, store: Any, rank: int, size: int, *, real: Any = None) -> Any:
        """Return a recorded group to torch, and torch's own to a program: its ranks may be any processes."""
        if real is None and sys._getframe(1).f_globals is not vars(c10d):
            return ProcessGroup(store, rank, size)
        return super().__call__(store, rank, size, real=real)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, ProcessGroup)


class _RecordedGroup(ProcessGroup, metaclass=_Kind):
    """A process group in two halves that share their backends.

    `_real` is an instance of torch's class, and does the work. The other half is this object, which Python and C++
    refer to: torch calls its methods below. Other methods are delegated to `_real`. If C++ still uses the group when
    the Python object is gone, the C++ part of this object does the work, unrecorded.
    """

    recorder: ClassVar[Recorder]
    futures: ClassVar[Futures]
    attendant: ClassVar[Attendant]
    backwards: ClassVar[Backwards]
    slow: ClassVar[SlowLink | None] = None
    numbering: ClassVar[Numbering]

    def __init__(self, store: Any, rank: int, size: int, *, real: Any = None) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the constructor that Python classes inherit is not in the stub
        self._members = self.numbering.join(store, rank, size)
        self._real: Any = real if real is not None else ProcessGroup(store, rank, size)
        self._label = ""
        self._ranks: list[int] = []
        self.numbers: list[int] = []  # for a part, whose ranks torch does not list: its ranks in the default group
        self.collectives = 0  # that it has begun
        self._pairs: dict[tuple[str, int, int], tuple[int, str, Iterator[int]]] = {}  # a cache of `_pair`
        self._used_by_torch = False  # whether a part of torch has issued operations, which may refer to the group in C++
        self._together: list[tuple[Operation, object]] | None = None  # the current batch
        self._created_at = student_line()
        self._set_at: dict[float, str] = {}  # time limits that were set later, with their lines

    @classmethod
    def around(cls, real: Any) -> _RecordedGroup:
        """Wrap a group that torch has created."""
        group = cls(None, real.rank(), real.size(), real=real)
        for device, backend in _backends(real):
            kind = c10d.Backend.backend_type_map.get(backend.name(), ProcessGroup.BackendType.CUSTOM)
            PROCESS_GROUPS["_register_backend"](group, device, kind, backend)
            PROCESS_GROUPS["_set_default_backend"](group, kind)
        PROCESS_GROUPS["_set_group_name"](group, real.group_name)
        PROCESS_GROUPS["_set_group_desc"](group, real.group_desc)
        return group

    def split_group(self, *args: Any, **kwargs: Any) -> Any:
        """Return a new group of some of the ranks; None in a rank that is not one of them."""
        child = self._real.split_group(*args, **kwargs)
        if child is None:
            return None
        part, mine = self.around(child), numbers_of(self)
        part.numbers = [mine[rank] for rank in sorted(args[0] if args else kwargs["ranks"])]
        return part

    @cached_property
    def gpu_backend(self) -> str:
        """The name of the backend that transfers GPU tensors: "nccl", "gloo", ...; "" if there is none."""
        return next((backend.name() for device, backend in _backends(self._real) if device.type == "cuda"), "")

    @property
    def moves_on_gpu(self) -> bool:
        """Whether NCCL transfers GPU tensors without the host, so that only the GPU can time operations."""
        return self.gpu_backend == "nccl"

    @cached_property
    def limit_s(self) -> float:
        """The time limit that the program has set for this group's operations, in seconds; inf if it has set none."""
        limits = [
            TIME_LIMITS.of(backend.options, "_timeout")
            for _, backend in _backends(self._real)
            if TIME_LIMITS.found and backend.name() == "gloo"  # NCCL's ends the process
        ]
        return min((limit.total_seconds() for limit in limits if ends_by_itself(limit)), default=math.inf)

    @cached_property
    def message_limit_s(self) -> float:
        """The same for messages, to which gloo applies the time limit with which the group was created."""
        return self.limit_s

    def _get_backend(self, device: torch.device) -> Any:
        """Return the backend for a kind of device; the caller may change its time limit."""
        assert self.message_limit_s  # evaluate it before the limit changes
        self.__dict__.pop("limit_s", None)
        return PROCESS_GROUPS.of(self._real, "_get_backend")(device)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of all operations but messages."""
        assert self.message_limit_s  # as above
        self.__dict__.pop("limit_s", None)
        self._set_at[timeout.total_seconds()] = student_line()
        self._real.set_timeout(timeout)

    def shutdown(self) -> None:
        """End communication; `destroy_process_group` calls it."""
        if self._used_by_torch:
            self.futures.keep(self, self._label)
        self._real.shutdown()

    @property
    def label(self) -> str:
        """The group's key, the same on all its ranks."""
        if not self._label:
            self._label, self._ranks = self._members.of(self)
        return self._label

    def _root(self, arguments: tuple[Any, ...]) -> int:
        """Return the global rank of a collective's root; -1 if the group has no such rank."""
        root = root_of(arguments)
        return self._ranks[root] if 0 <= root < len(self._ranks) else -1  # torch will reject the rank

    def _issue(
        self, name: str, tensors: tuple[Any, ...], group: str, match: int, signature: str, limit_s: float, *, peer: int = -1,
        root: int = -1,
    ) -> Operation:  # fmt: skip
        """Return a new operation, timed by the GPU if NCCL transfers its tensors, otherwise by the host."""
        start_ns = clock()
        nbytes = most_nbytes(tensors)
        ring, device_clock, line = self.recorder.ring, self.recorder.device_clock, student_line()
        number = in_backward()
        if number != -1 and not line:  # a thread of the autograd engine runs this on behalf of the main thread
            line = student_line(sys._current_frames().get(threading.main_thread().ident or 0))
        limit = None
        if limit_s < math.inf:
            created_at = self._created_at if limit_s == self.message_limit_s else ""
            limit = OwnLimit(limit_s, self._set_at.get(limit_s, created_at))
        on_gpu = first_tensor(tensors) if device_clock is not None else None
        device = on_gpu.device.index if on_gpu is not None and on_gpu.is_cuda else None
        given = name, start_ns, nbytes, peer, group, match, line
        operation: Operation
        if device is not None and self.moves_on_gpu:
            operation = DeviceOperation(device_clock, device, ring, *given, None, signature, root, limit)
        else:
            ready = device_clock.mark(device) if device is not None and self.gpu_backend == "gloo" else None
            operation = Operation(ring, *given, ready, signature, root, limit)
        if number != -1:
            self.backwards.issued(number, operation)
        return operation

    def _booked(self, kind: OperationType, arguments: tuple[Any, ...], operation: Operation) -> Booking | None:
        """Schedule a collective on the emulated link, if there is one."""
        if self.slow is None:
            return None
        nbytes, match, at_ns = operation.nbytes, operation.match, operation.start_ns
        if kind.root_has_all and not (nbytes_of(arguments[0]) and nbytes_of(arguments[1])):
            nbytes *= self.size()  # only the root has all parts
        return self.slow.collective(kind.name, nbytes, self._ranks, self._label, match, at_ns, self.limit_s)

    def _followed(self, operation: Operation, work: Any, kept: object, tells: bool) -> Any:
        """Arrange that the end of an issued operation is recorded."""
        if self._together is not None:
            self._together.append((operation, kept))
            return work
        if isinstance(operation, DeviceOperation):
            operation.launched(None if work is None else work.wait, kept)
        elif work is None:
            operation.completed()
        if work is None:
            return None
        silent = tells and not isinstance(operation, DeviceOperation) and not self._tell(operation, work, kept)
        own = _called_by_program()
        self._used_by_torch |= not own
        return RecordedWork(work, [operation], self.futures, notified=tells and not silent, own=own, silent=silent)

    def _tell(self, operation: Operation, work: Any, arguments: Any) -> bool:
        """Let the backend report when the operation completes; False if it cannot: then only a wait shows its end."""
        if self.moves_on_gpu:
            tensor = first_tensor(arguments)
            if tensor is None or tensor.is_cuda:
                return False  # NCCL's futures complete immediately, and its barrier when it is waited for
        try:
            future = work.get_future()
        except RuntimeError:  # "getFuture not implemented": gloo's reduce_scatter
            return False
        self.futures.tell(future, operation.on_completion, group=operation.group)
        return True

    def _message(self, method: str, tensors: list[Any], peer: int, tag: int, *who: int) -> Any:
        name, group, match = method, "", 0
        if who:  # otherwise a receive from any rank
            check_peer(method, peer, None if self.moves_on_gpu else self.rank(), self.size())
            peer, group, numbers = self._pairs.get((method, peer, tag)) or self._pair(method, peer, tag)
            match = next(numbers)
        else:
            name = RECV.name
        operation = self._issue(name, (tensors,), group, match, tensor_in_words(tensors), self.message_limit_s, peer=peer)
        if group:
            self._book_message(operation)
        copy = None
        try:
            if tensors[0].is_cuda and self.gpu_backend == "gloo":
                copy = HostCopy(tensors[0])
                if method == SEND.name:
                    copy.copy(to_gpu=False)
                tensors = [copy.host]
            work = getattr(self._real, method)(tensors, *who, tag)
        except BaseException:
            operation.withdrawn()
            raise
        if work is None or self._together is not None or isinstance(operation, DeviceOperation):
            return self._followed(operation, work, tensors, False)
        received = copy if operation.name == RECV.name else None
        from_any = not group
        arrived = partial(self._arrived, tag, from_any, received) if from_any or received is not None else None
        operation.blocking = sys._getframe(3).f_code in BLOCKING  # beyond our `send` and torch's `isend`
        message = RecordedMessage(work, operation, self.futures, arrived, own=_called_by_program())
        if not operation.blocking:
            self.attendant.watch(message)
        return message

    def _arrived(self, tag: int, from_any: bool, copy: HostCopy | None, work: Any, operation: Operation) -> None:
        """Copy what has arrived to the GPU; complete the record of a receive from any rank."""
        if copy is not None:
            copy.copy(to_gpu=True)
        if not from_any or not MESSAGE_SENDERS.found:
            return
        sender = MESSAGE_SENDERS.of(work, "_source_rank")()
        operation.peer, operation.group, numbers = self._pair(RECV.name, sender, tag)
        operation.match = next(numbers)
        self._book_message(operation)

    def _book_message(self, operation: Operation) -> None:
        """Schedule this end of a message on the emulated link, if there is one."""
        if self.slow is not None:
            me, other = self._ranks[self.rank()], operation.peer
            ends = (me, other) if operation.name == SEND.name else (other, me)
            operation.booking = self.slow.message(
                *ends, operation.nbytes, operation.group, operation.match, operation.start_ns, limit_s=self.message_limit_s
            )

    def _pair(self, method: str, peer: int, tag: int) -> tuple[int, str, Iterator[int]]:
        """Return the peer's global rank, the key of the pair of ranks, and the numbers of its messages."""
        pair = self._pairs.get((method, peer, tag))
        if pair is None:
            label = self.label  # also sets `_ranks`
            me, other = self._ranks[self.rank()], self._ranks[peer]
            source, destination = (me, other) if method == SEND.name else (other, me)
            pair = self._pairs[method, peer, tag] = other, pair_key(source, destination, tag, label), itertools.count(1)
        return pair

    def send(self, tensors: list[Any], dstRank: int, tag: int) -> Any:  # noqa: N803  # torch's names
        """Send a message to another rank."""
        return self._message("send", tensors, dstRank, tag, dstRank)

    def recv(self, tensors: list[Any], srcRank: int, tag: int) -> Any:  # noqa: N803
        """Receive a message from another rank."""
        return self._message("recv", tensors, srcRank, tag, srcRank)

    def recv_anysource(self, tensors: list[Any], tag: int) -> Any:
        """Receive a message from any rank."""
        return self._message("recv_anysource", tensors, -1, tag)

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        """Run a barrier that reports missing ranks; it has no asynchronous form."""
        self.collectives += 1
        kind = type_of("monitored_barrier")
        operation = self._issue(kind.name, (), self.label, self.collectives, "", self.limit_s)
        operation.booking = self._booked(kind, (), operation)
        with blocked(operation, limit=args[0] if args else kwargs.get("timeout")):
            self._real.monitored_barrier(*args, **kwargs)

    def _start_coalescing(self, device: torch.device) -> None:
        """Start a batch: operations until `_end_coalescing` are launched together."""
        self._of_real("start_coalescing")(device)
        self._together = []

    def _end_coalescing(self, device: torch.device) -> Any:
        launched, self._together = self._together or [], None
        operations = [operation for operation, _ in launched]
        try:
            work = self._of_real("end_coalescing")(device)
        except BaseException:
            for operation in operations:
                operation.failed()
            raise
        for operation, kept in launched:
            if isinstance(operation, DeviceOperation):
                operation.launched(None if work is None else work.wait, kept)
        if work is None:
            for operation in operations:
                operation.completed()
            return None
        return RecordedWork(work, operations, self.futures, own=_called_by_program())

    def _of_real(self, name: str) -> Any:
        return getattr(self._real, name, None) or BATCHES.of(self._real, f"_{name}")

    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing  # called by C++ in versions after 2.13


def _backends(group: Any) -> Iterator[tuple[torch.device, Any]]:
    """Yield the backend of a group for each kind of device."""
    for device in PROCESS_GROUPS.of(group, "_device_types"):
        yield device, PROCESS_GROUPS.of(group, "_get_backend")(device)


def _called_by_program() -> bool:
    """Whether the program's own code has called the function of torch.distributed that issues an operation.

    Otherwise, a part of torch has, which knows how to wait: DistributedDataParallel's reducer keeps a `Work` in C++.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in DISTRIBUTED_FILES:
        frame = frame.f_back
    return frame is not None and is_students(frame.f_code.co_filename)


def _collective(method: str, kind: OperationType, form: Form) -> Callable[..., Any]:
    """Return a method that replaces one of torch's collectives, and records it."""
    inherited = getattr(ProcessGroup, method)
    of_one = next((other for other in kind.forms if other.name == form.of_one), None)

    def collective(self: _RecordedGroup, *args: Any, **kwargs: Any) -> Any:
        arguments = (*args, *kwargs.values()) if kwargs else args
        called = of_one if of_one is not None and len(arguments[0]) == 1 else form
        label = self._label or self.label  # also sets `_ranks`
        root = self._root(arguments) if kind.rooted else -1
        self.collectives = match = self.collectives + 1
        facts = self.recorder.facts
        if facts is not None and facts.checking and kind.name in COMPARED and form.alike is not None:
            facts.operand(called.name, first_tensor(arguments[form.alike]), label, match)
        at_once = bool(arguments) and not getattr(arguments[-1], "asyncOp", True)  # the caller waits for it at once
        signature = signature_of(kind, called, arguments, root)
        operation = self._issue(called.name, arguments, label, match, signature, self.limit_s, root=root)
        operation.booking = self._booked(kind, arguments, operation)
        try:
            work = inherited(self._real, *args, **kwargs)
        except BaseException:
            operation.withdrawn()
            self.collectives -= 1  # keeps this rank's next collective matched with the others'
            raise
        if not at_once or self._together is not None or isinstance(operation, DeviceOperation):
            return self._followed(operation, work, arguments, not at_once)
        operation.blocking = True
        with blocked(operation, limit=arguments[-1].timeout if kind.own_limit else None):
            if work is not None:
                work.wait()
        return work

    return collective


def recorded_process_group(
    recorder: Recorder, futures: Futures, numbering: Numbering, slow: SlowLink | None
) -> type[ProcessGroup]:
    """Return a class of process groups that record their operations, delayed by the emulated link `slow` if any."""
    members = {
        "recorder": recorder, "futures": futures, "attendant": Attendant(), "backwards": Backwards(),
        "numbering": numbering, "slow": slow, "__module__": ProcessGroup.__module__,
    }  # fmt: skip
    return _Kind(ProcessGroup.__name__, (_RecordedGroup,), members)


def _delegated(method: str, *, both: bool) -> Any:
    """Return a method or property that uses torch's half; a setter, or with `both`, uses our half, too."""
    inherited = getattr(ProcessGroup, method)
    if isinstance(inherited, property):

        def set_both(self: _RecordedGroup, value: Any) -> None:
            inherited.__set__(self, value)
            setattr(self._real, method, value)

        return property(lambda self: getattr(self._real, method), set_both if inherited.fset else None)

    def call(self: _RecordedGroup, *args: Any, **kwargs: Any) -> Any:
        if both:
            inherited(self, *args, **kwargs)
        return getattr(self._real, method)(*args, **kwargs)

    return call


INHERITED: Final = frozenset({"BackendType", "boxed", "unbox", "rank", "size", *ProcessGroup.BackendType.__members__})
HALVES: Final[dict[str, str]] = {}  # what carries out each method of this version of torch's class
for _method in dir(ProcessGroup):
    if _method.startswith(("__", "_pybind11")) or _method in INHERITED:
        continue
    if _method in vars(_RecordedGroup):
        HALVES[_method] = "ours"
    elif _method in methods():
        HALVES[_method] = "recorded"
        setattr(_RecordedGroup, _method, _collective(_method, *methods()[_method]))
    else:
        _both = _method in PROCESS_GROUPS and _method.startswith(("_register", "_set"))
        HALVES[_method] = "both halves" if _both else "delegated"
        setattr(_RecordedGroup, _method, _delegated(_method, both=_both))
