"""Executes a function as one rank of many, in a process of its own whose torch is changed for this purpose."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, Final

import torch
import torch.distributed.distributed_c10d as c10d
from torch.distributed import HashStore

from labkit.comm.private_names import in_place_of
from labkit.comm.torch_internals import DISPATCH, SIMULATION
from labkit.errors.exceptions import LabError
from labkit.errors.lists import listed
from labkit.recording.import_hook import when_imported
from labkit.simulation.kernel_mode import computed, kernel_mode
from labkit.simulation.program import Event
from labkit.simulation.rank_log import RankLog, is_fake
from labkit.simulation.simulated_group import simulated_process_group
from labkit.simulation.streams import follow_streams
from labkit.simulation.unknown_values import hide_values

__all__ = ["execute"]

# What cannot be simulated, where it is, and why.
REFUSED: Final = (
    ("torch", "compile", "its kernels are those of generated code. Simulate the program without torch.compile"),
    ("torch", "save", "tensors have no data to be saved"),
    ("torch.distributed.rpc", "init_rpc", "other ranks decide when this one is called. Run it in a group"),
    ("torch.distributed", "recv_object_list", "it receives data. Run it in a group"),
    ("torch.distributed", "scatter_object_list", "it receives data. Run it in a group"),
)


def execute(
    function: Callable[..., Any], args: Any, kwargs: Any, ranks: Sequence[int], size: int, measured: bool = False
) -> list[tuple[int, Event]]:
    """Call a function as one of many ranks.

    The process must be a torch rank of a group, and end afterwards: torch's functions stay replaced.

    Args:
        function: the function.
        args: its arguments.
        kwargs: its named arguments.
        ranks: the rank to execute, for each rank of the group.
        size: the number of simulated ranks.
        measured: whether tensors have data, so that the times between events are those of a real rank; then operators
            are not recorded.

    Returns:
        the events of the rank, each with the time in ns at which it was recorded.

    Raises:
        LabError: the function does what cannot be simulated, or this version of torch lacks what simulation needs.
    """
    if missing := [*SIMULATION.missing, *DISPATCH.missing]:
        raise LabError(f"torch {torch.__version__} lacks {listed(missing)}, which the simulation of ranks needs.")
    rank, log = ranks[c10d.get_rank()], RankLog(measured=measured)
    c10d.destroy_process_group()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    c10d.ProcessGroup = torch.distributed.ProcessGroup = simulated_process_group(log)  # type: ignore[misc]
    init: Any = c10d.init_process_group
    getattr(init, "__labkit_original__", init)("fake", store=HashStore(), rank=rank, world_size=size)
    _refuse_programs()
    if measured:
        function(*args, **kwargs)
        return log.events
    _adapt_torch(log)
    with SIMULATION["FakeTensorMode"](allow_non_fake_inputs=True), kernel_mode(log):
        function(*args, **kwargs)
    return log.events


def _adapt_torch(log: RankLog) -> None:
    """Replace functions of torch that need data, or count what a real rank does not have."""

    def resize(original: Callable[..., Any], storage: Any, size: int) -> Any:
        result = original(storage, size)
        log.resized(storage)
        return result

    def unrecorded(original: Callable[..., Any], *args: Any) -> Any:
        with log.pause():
            return original(*args)

    def swap(original: Callable[..., Any], one: torch.Tensor, other: torch.Tensor) -> None:
        if is_fake(one) and is_fake(other) and one.device == other.device:
            one.data = other.data  # `Module.to` needs no more, and torch itself keeps weak references, which forbid to swap
        else:
            original(one, other)

    hide_values(log)
    torch.utils.swap_tensors = in_place_of(torch.utils.swap_tensors, swap)
    storage_class: Any = torch.UntypedStorage
    storage_class.resize_ = in_place_of(storage_class.resize_, resize)
    follow_streams(log)
    SIMULATION.replace("_object_to_tensor", computed)
    SIMULATION.replace("_propagate_tensor_meta_non_cached", unrecorded)
    SIMULATION.set("_chunk_with_empty", _Chunks)


def _refuse_programs() -> None:
    for home, name, why in REFUSED:
        when_imported(home, partial(_refuse, name, why))
    when_imported("tensorflow", _refuse_module)


def _refuse(name: str, why: str, module: ModuleType) -> None:
    """Have a function of a module raise an error."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise LabError(f"{module.__name__}.{name} cannot be simulated: {why}.")

    setattr(module, name, refuse)


def _refuse_module(module: ModuleType) -> None:
    raise LabError(f"programs with {module.__name__} cannot be simulated, only those with torch. Run it in a group.")


class _Chunks:
    """The parts of a tensor that `torch.chunk` returns, each made when it is asked for; beyond these, empty tensors.

    FSDP2 splits each parameter into a part for each rank, and uses its own and the first.

    Args:
        tensor: the tensor.
        num_chunks: the number of parts.
        dim: the dimension that is split.
    """

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._length = -(-tensor.shape[dim] // num_chunks)  # of each part but the last

    def __getitem__(self, index: int) -> torch.Tensor:
        start, end = index * self._length, self._tensor.shape[self._dim]
        if index and start >= end:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._length, end - start))
