"""Executes a function as one rank of many, in a process of its own whose torch is changed for this purpose."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch import cpu
from torch.distributed import HashStore
from torch.utils.data import DataLoader

from labkit.costs.kernels import fused_attention, without_cpu_libraries
from labkit.errors.exceptions import LabError
from labkit.errors.lists import listed
from labkit.group.simulation.kernel_mode import computed, kernel_mode
from labkit.group.simulation.program import Event, OnStream, StreamEvent
from labkit.group.simulation.rank_log import RankLog, is_fake
from labkit.group.simulation.refused_calls import refuse_calls, refuse_other_devices
from labkit.group.simulation.simulated_group import simulated_process_group
from labkit.group.simulation.unknown_values import hide_values
from labkit.recording.torch_internals import DISPATCH, SIMULATION, wrap
from labkit.worker.comm.memory_tracker import resizing_reported


def execute(
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    ranks: Sequence[int],
    size: int,
    measured: bool = False,
    gpus: bool = True,
) -> list[tuple[int, Event]]:
    """Call a function as one of many ranks; return its events, each with the time in ns at which it was recorded.

    The process must be a torch rank of a group, and end afterwards: torch's functions stay replaced. `ranks` has the
    rank to execute for each rank of the group. If `measured`, tensors have data, so that the times between events are
    those of a real rank, and operators are not recorded. `gpus` says whether devices are GPUs.
    """
    if missing := [*SIMULATION.missing, *DISPATCH.missing]:
        raise LabError(f"torch {torch.__version__} lacks {listed(missing)}, which the simulation of ranks needs.")
    rank, log = ranks[c10d.get_rank()], RankLog(measured=measured)
    c10d.destroy_process_group()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    c10d.ProcessGroup = torch.distributed.ProcessGroup = simulated_process_group(log)  # type: ignore[misc]
    init: Any = c10d.init_process_group
    getattr(init, "__labkit_original__", init)("fake", store=HashStore(), rank=rank, world_size=size)
    refuse_calls()
    with contextlib.ExitStack() as stack:
        if not measured:
            _adapt_torch(log)
            fake_tensors = SIMULATION["FakeTensorMode"](allow_non_fake_inputs=True)
            for context in (resizing_reported(log.resized), fake_tensors, kernel_mode(log), without_cpu_libraries()):
                stack.enter_context(context)
            if gpus:
                stack.enter_context(fused_attention())
        try:
            function(*args, **kwargs)
        except SystemExit as error:  # `exit()` without an error ends it as in a group
            if error.code:
                raise
    return log.events


def _adapt_torch(log: RankLog) -> None:
    """Replace functions of torch that need data, or count what a real rank does not have."""

    def swap(original: Callable[..., Any], one: torch.Tensor, other: torch.Tensor) -> None:
        if is_fake(one) and is_fake(other) and one.device == other.device:
            one.data = other.data  # `Module.to` needs no more, and torch itself keeps weak references, which forbid to swap
        else:
            original(one, other)

    def to_empty(original: Callable[..., Any], module: torch.nn.Module, **kwargs: Any) -> Any:
        for part in module.modules() if kwargs.get("recurse", True) else (module,):
            for name, parameter in part.named_parameters(recurse=False):
                if is_fake(parameter) and parameter.is_meta:  # torch, too, replaces parameters without data
                    empty = torch.empty_like(parameter, device=kwargs["device"])
                    setattr(part, name, torch.nn.Parameter(empty, parameter.requires_grad))
        return original(module, **kwargs)

    iterate = DataLoader.__iter__  # which records the batches

    def iterate_here(loader: Any) -> Any:
        loader.num_workers = loader.timeout = 0  # processes of its own would have to send tensors without data
        return iterate(loader)

    hide_values(log)
    refuse_other_devices()
    # It repeats in many lines what an error says, such as one on shapes that do not fit.
    logging.getLogger(SIMULATION["FakeTensorMode"].__module__).setLevel(logging.CRITICAL)
    DataLoader.__iter__ = iterate_here  # type: ignore[method-assign]
    wrap(torch.nn.Module, to_empty=to_empty)
    wrap(torch.utils, swap_tensors=swap)
    follow_streams(log)
    SIMULATION.replace("_object_to_tensor", computed)
    SIMULATION.replace("_propagate_tensor_meta_non_cached", computed)  # its tensors are not those of a real rank
    SIMULATION.set("_chunk_with_empty", _Chunks)


def follow_streams(log: RankLog) -> None:
    """From now on in this process, record the streams of `torch.cpu`, and their events, for which other streams wait.

    FSDP2 gathers the parameters of the next layer on other streams, while the default stream computes. On the CPU it
    calls the same methods of `torch.cpu`, which do nothing there.
    """
    streams: dict[Any, int] = {cpu.current_stream(): 0}  # their numbers; this is the default stream
    recorded: dict[int, tuple[Any, int]] = {}  # by the id of an event: the event, which must live on, and its number
    numbers = itertools.count()

    def number_of(stream: Any) -> int:
        return streams.setdefault(cpu.current_stream() if stream is None else stream, len(streams))

    def record(event: Any, stream: Any = None) -> None:
        recorded[id(event)] = event, next(numbers)
        log.add(StreamEvent(recorded[id(event)][1], number_of(stream), waits=False))

    def record_event(stream: Any, event: Any = None) -> Any:
        event = event or cpu.Event()
        record(event, stream)
        return event

    def wait(event: Any, stream: Any = None) -> None:
        if id(event) in recorded:
            log.add(StreamEvent(recorded[id(event)][1], number_of(stream), waits=True))

    def wait_stream(stream: Any, other: Any) -> None:
        wait(record_event(other), stream)

    class StreamContext(cpu.StreamContext):
        def __enter__(self) -> None:
            super().__enter__()
            log.add(OnStream(number_of(None)))

        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            log.add(OnStream(number_of(None)))

    methods: dict[Any, dict[str, Any]] = {
        cpu.Stream: {"record_event": record_event, "wait_stream": wait_stream, "wait_event": lambda stream, e: wait(e, stream)},
        cpu.Event: {"record": record, "wait": wait, "synchronize": wait},
    }
    for owner, ours in methods.items():
        for name, function in ours.items():
            setattr(owner, name, function)
    cpu.stream = cpu.StreamContext = StreamContext  # type: ignore[misc]  # the one calls the other


class _Chunks:
    """The parts of a tensor that `torch.chunk` returns, each made when it is asked for; beyond these, empty tensors.

    FSDP2 splits each parameter into a part for each rank, and uses its own and the first.
    """

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._length = -(-tensor.shape[dim] // num_chunks)  # of each part but the last

    def __getitem__(self, index: int) -> torch.Tensor:
        start, end = index * self._length, self._tensor.shape[self._dim]
        if index and start >= end:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._length, end - start))
