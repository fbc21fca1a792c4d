"""What goes wrong on real GPUs: out of memory, failed kernels, dead ranks, Stop, and collectives that nobody joins."""

from __future__ import annotations

import _thread
import os
import signal
import threading
from collections.abc import Iterator

import pytest
import torch
from gpu_device import DEVICES, gpu, needs_cuda, needs_two_gpus

import labkit as lab
from labkit.errors.exceptions import LabError, RankError, Stopped
from labkit.errors.exit_reasons import Cause

pytestmark = gpu

LONG_CYCLES = 20_000_000_000  # cycles of the GPU's clock: about ten seconds, far longer than it takes to notice a dead rank


@pytest.fixture
def pair() -> Iterator[lab.Group]:
    with lab.Group(2, devices=DEVICES) as group:
        yield group


def total() -> float:
    import torch.distributed as dist

    x = torch.ones(1, device=lab.device())
    dist.all_reduce(x)
    return x.item()


def works_again(group: lab.Group) -> None:
    assert group.run(total).results == [2.0, 2.0]


@needs_cuda
def test_out_of_memory(pair: lab.Group) -> None:
    def too_much() -> None:
        import torch.distributed as dist

        if dist.get_rank() == 1:
            torch.empty(2 * torch.cuda.get_device_properties(0).total_memory, dtype=torch.uint8, device=lab.device())
        total()

    with pytest.raises(RankError, match=r"rank 1 failed: .*OutOfMemoryError: CUDA out of memory"):
        pair.run(too_much)
    works_again(pair)


@needs_cuda
def test_the_memory_of_a_failed_run_is_freed(pair: lab.Group) -> None:
    """A traceback keeps the tensors of its frames alive; failed ranks are replaced or release them."""

    def fail_with_half() -> None:
        half = torch.empty(torch.cuda.get_device_properties(0).total_memory // 2, dtype=torch.uint8, device="cuda:0")
        raise ValueError(f"holding {half.numel()} bytes")

    one = pair[0]
    for _ in range(3):
        with pytest.raises(RankError, match="ValueError: holding"):
            one.run(fail_with_half)
    works_again(pair)


@needs_cuda
@pytest.mark.usefixtures("patient")
def test_a_device_side_assert(pair: lab.Group) -> None:
    def out_of_bounds() -> float:
        table = torch.ones(4, device=lab.device())
        return float(table[torch.tensor([99], device=table.device)].sum().item())

    with pytest.raises(RankError, match=r"rank 0 failed: .*CUDA error: device-side assert triggered"):
        pair.run(out_of_bounds)
    works_again(pair)


@needs_cuda
def test_a_kernel_that_fails_after_its_function_returned(pair: lab.Group) -> None:
    def leave_it_running() -> None:
        table = torch.ones(4, device=lab.device())
        torch.cuda._sleep(100_000_000)
        table[torch.tensor([99], device=table.device)]

    with pytest.raises(RankError, match=r"leave_it_running.. returned, and then a CUDA kernel .* failed"):
        pair.run(leave_it_running)
    works_again(pair)


@needs_cuda
def test_a_rank_killed_while_its_kernel_runs(pair: lab.Group) -> None:
    def killed() -> None:
        import torch.distributed as dist

        torch.ones(1, device=lab.device())
        if dist.get_rank() == 1:
            torch.cuda._sleep(LONG_CYCLES)
            os.kill(os.getpid(), signal.SIGKILL)
        total()

    with pytest.raises(RankError) as caught:
        pair.run(killed)
    assert [(f.rank, f.cause) for f in caught.value.failures[:1]] == [(1, Cause.KILLED)]
    works_again(pair)


@needs_cuda
def test_stop_while_ranks_wait_for_a_long_kernel(pair: lab.Group) -> None:
    def wait_long() -> None:
        torch.cuda._sleep(LONG_CYCLES)
        torch.cuda.synchronize()

    total_run = pair.run(total)
    assert total_run.results == [2.0, 2.0]
    timer = threading.Timer(1.0, _thread.interrupt_main)
    timer.start()
    try:
        with pytest.raises(Stopped):
            pair.run(wait_long)
    finally:
        timer.cancel()
        timer.join()
    works_again(pair)


def test_a_collective_of_gpu_tensors_that_one_rank_never_enters(pair: lab.Group) -> None:
    """On one GPU this is gloo's all-reduce, on two NCCL's; both are reported."""

    def one_of_two() -> float:
        import torch.distributed as dist

        return total() if dist.get_rank() == 0 else 0.0

    with pytest.raises(LabError, match=r"rank 1.*returned"):
        pair.run(one_of_two)
    works_again(pair)


@needs_two_gpus
def test_collectives_of_nccl_in_another_order(pair: lab.Group) -> None:
    def crossed() -> None:
        import torch.distributed as dist

        x, y = torch.ones(1 << 20, device=lab.device()), torch.ones(1 << 10, device=lab.device())
        total()
        if dist.get_rank() == 0:
            dist.broadcast(x, 0)
        else:
            dist.all_reduce(y)
        torch.cuda.synchronize()

    with pytest.raises(LabError):
        pair.run(crossed)
    works_again(pair)
