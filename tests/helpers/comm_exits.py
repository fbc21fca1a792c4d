"""Ranks that end with operations under way: each way to end, in two processes that exit as a script does. Prints
exit codes."""

from __future__ import annotations

import atexit
import faulthandler
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from labkit.recording.record import Recorder, here
from labkit.recording.ring_buffer import RING_BYTES, RingWriter
from labkit.worker.comm import install

os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"


def received_never(rank: int) -> object:
    work = dist.irecv(torch.zeros(1), 1 - rank)
    dist.barrier()  # torch refuses to receive from a rank that has ended
    time.sleep(0.01)  # until the thread that waits for it has received it
    return work


def received_never_group_destroyed(rank: int) -> object:
    work = received_never(rank)
    dist.destroy_process_group()
    return work


def not_waited_for_group_destroyed(rank: int) -> object:
    if rank:
        time.sleep(0.05)
    dist.all_reduce(torch.ones(1), async_op=True)
    dist.destroy_process_group()
    return None


def kept(rank: int) -> object:
    if rank:
        time.sleep(0.05)
    return dist.all_reduce(torch.ones(1), async_op=True)


def kept_for_a_late_rank(rank: int) -> object:
    if rank:
        time.sleep(2)  # the other rank has long come to its end
    return dist.all_reduce(torch.ones(1), async_op=True)


def fifty_under_way(rank: int) -> object:
    return [dist.all_reduce(torch.ones(1) * rank, async_op=True) for _ in range(50)]


def data_parallel_group_destroyed(rank: int) -> object:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    model(torch.ones(4) * rank).sum().backward()
    dist.destroy_process_group()
    return model


def not_waited_for_group_destroyed_at_exit(rank: int) -> object:
    atexit.register(dist.destroy_process_group)
    return kept(rank)


def group_destroyed_then_forked(rank: int) -> object:
    if rank:
        time.sleep(0.5)
    dist.all_reduce(torch.ones(1), async_op=True)
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()  # it locks what a forked process would wait for
    child = os.fork()
    if child == 0:
        signal.alarm(100)
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
    return None


def group_destroyed_after_the_last_wait(rank: int) -> object:
    left = kept(rank)
    left.wait()
    ends_last.append(dist.destroy_process_group)
    return left


ends_last: list[Callable[[], object]] = []
atexit.register(lambda: [end() for end in ends_last])  # before labkit's, so that it is called after that one
WAYS: list[Callable[[int], object]] = [
    received_never, received_never_group_destroyed, not_waited_for_group_destroyed, kept, kept_for_a_late_rank,
    fifty_under_way, data_parallel_group_destroyed, not_waited_for_group_destroyed_at_exit,
    group_destroyed_after_the_last_wait, group_destroyed_then_forked,
]  # fmt: skip


def join(way: Callable[[int], object], rank: int, store: Path) -> object:
    """What a rank does until it ends; returns the operations that it leaves unfinished."""
    faulthandler.dump_traceback_later(150, exit=True)
    torch.set_num_threads(1)
    recorder = Recorder(RingWriter(mmap.mmap(-1, RING_BYTES)))
    here.start(recorder)
    install.watch(recorder)
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1))
    return way(rank)


left: object = None
for number, way in enumerate(WAYS):
    children = []
    for rank in (0, 1):
        child = os.fork()
        if child == 0:
            left = join(way, rank, Path(sys.argv[1]) / str(number))
            break
        children.append(child)
    else:
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(f"{way.__name__.replace('_', ' ').replace(' group', ', group')}: {codes[0]} {codes[1]}", flush=True)
        continue
    break  # a rank ends here, as a script does
