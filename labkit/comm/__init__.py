"""Every collective, message and RPC of a rank becomes a span with its bytes, without the student's help.

torch makes its process groups of the class that it finds under the name `ProcessGroup`. In a rank that is ours: torch's
own class, whose methods write down what passes. Everything passes there: `torch.distributed`'s functions,
DistributedDataParallel's reducer in C++, functional collectives (DTensor, FSDP2), pipelines. A slow link holds it back
in the same place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed.distributed_c10d as c10d
from torch.distributed import rpc

from labkit.comm.cuda_timing import DeviceClock
from labkit.comm.emulated_link import SlowLink, wake_in_time
from labkit.comm.futures import Futures
from labkit.comm.group_creation import watch_creation
from labkit.comm.members import Numbering
from labkit.comm.own_process_groups import watched_gloo
from labkit.comm.pipelines import Pipelines
from labkit.comm.process_group import watched_process_group
from labkit.costs.link import Link
from labkit.costs.shared_link import SharedLink
from labkit.recording.record import Recorder, here

__all__ = ["slow_link", "watch_device", "watch_rpc", "watch_script", "watch_torch"]


def slow_link(link: Link, rank: int, fd: int) -> SlowLink:
    """Have what this rank sends and receives take as long as over a link.

    Args:
        link: the link.
        rank: this rank's number.
        fd: the memory of the group's shared link, `costs.shared_link.SHARED_LINK_BYTES` long, which all its ranks
            share; kept.
    """
    wake_in_time()
    shared_link = SharedLink(fd)
    shared_link.keep_from_forks()
    return SlowLink(link, rank, shared_link)


def watch_torch(recorder: Recorder, slow: SlowLink | None = None) -> Callable[[], None]:
    """Write down what goes through the process groups made from now on.

    Args:
        recorder: this rank's. Call it before `torch.distributed.init_process_group`.
        slow: what holds it back; default: nothing.

    Returns:
        what has the calls of RPC written down as well, if called before `init_rpc`.
    """
    futures = _watch_groups(recorder, slow, given=True)
    return lambda: _watch_calls(recorder, futures, slow)


def watch_rpc(recorder: Recorder, slow: SlowLink | None = None, *, given: bool = False) -> Callable[[], None]:
    """Write down the calls of `torch.distributed.rpc`, on both ends, and what goes through process groups.

    Args:
        recorder: this rank's. Call it before `torch.distributed.rpc.init_rpc`, which fixes what C++ calls.
        slow: what holds calls and replies back; default: nothing.
        given: whether the ranks of the first process group have the numbers of their processes.

    Returns:
        what is left to do before another `init_rpc`: nothing.
    """
    _watch_calls(recorder, _watch_groups(recorder, slow, given=given), slow)
    return lambda: None


def watch_script(recorder: Recorder, *, given: bool = True) -> bool:
    """Write down whatever a script that somebody else starts may use: process groups, RPC, a GPU once it is awake.

    Args:
        recorder: this process's. Call it when torch has been imported.
        given: whether the ranks of the first process group have the numbers of their processes, as torchrun gives them.

    Returns:
        whether a process group was there already, which is not seen.
    """
    late = c10d.GroupMember.WORLD is not None
    if rpc.is_available():
        watch_rpc(recorder, given=given)
    else:
        _watch_groups(recorder, None, given=given)
    if torch.version.cuda is not None:
        # torch calls this when it initialises CUDA: until then there is nothing to time, and to ask for GPUs may
        # initialise it.
        torch.cuda._lazy_call(lambda: watch_device(recorder, torch.device("cuda")))
    return late


def _watch_calls(recorder: Recorder, futures: Futures, slow: SlowLink | None) -> None:
    from labkit.comm.rpc_calls import RpcCalls  # not every build of torch has RPC

    RpcCalls(recorder, futures, slow).install()


def _watch_groups(recorder: Recorder, slow: SlowLink | None, *, given: bool) -> Futures:
    futures = Futures()
    futures.install()
    Pipelines(recorder).install()
    numbering = Numbering(recorder.rank, recorder.size, given=given)
    c10d.ProcessGroup = watched_process_group(recorder, futures, numbering, slow)  # type: ignore[misc]
    # By these names programs make groups themselves.
    torch.distributed.ProcessGroup = c10d.ProcessGroup  # type: ignore[misc]
    if c10d.is_gloo_available():
        torch.distributed.ProcessGroupGloo = watched_gloo(c10d.ProcessGroup)  # type: ignore[misc]
    watch_creation(recorder)
    return futures


def watch_device(recorder: Recorder, device: torch.device) -> None:
    """Time spans and operations by the GPU.

    Args:
        recorder: this rank's.
        device: what the rank computes on; nothing changes unless it is a GPU.
    """
    if device.type == "cuda":
        recorder.device_clock = DeviceClock(recorder.ring)
        here.forget_spans()  # spans made until now are timed by the host
