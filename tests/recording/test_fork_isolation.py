"""Forked ranks draw their own random numbers, and processes that a rank forks do not write into its records."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

import labkit as lab

pytestmark = pytest.mark.processes

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def two() -> Iterator[lab.Group]:
    with lab.Group(2, timeout_s=200) as group:
        yield group


def draw() -> tuple[float, ...]:
    import random

    import numpy as np
    import torch
    from torch.utils.data import DataLoader

    order = next(iter(DataLoader(range(1000), batch_size=1000, shuffle=True)))  # type: ignore[arg-type]
    dropped = torch.nn.functional.dropout(torch.ones(64)).nonzero().flatten()
    places = sum(1 << int(place) for place in dropped)
    return float(torch.rand(1)), float(order[:8].float() @ torch.arange(8.0)), places, random.random(), float(np.random.rand())  # noqa: NPY002


def test_ranks_and_groups_draw_different_random_numbers(two: lab.Group) -> None:
    """As under torchrun: otherwise weights that were not broadcast would be equal on all ranks by chance."""
    with lab.Group(2) as other:
        drawn = [*two.run(draw).results, *other.run(draw).results]
    for numbers in zip(*drawn, strict=True):
        assert len(set(numbers)) == 4


def test_a_seed_gives_the_same_numbers_as_in_a_plain_process(two: lab.Group) -> None:
    def seeded() -> list[float]:
        torch.manual_seed(0)
        return torch.rand(4).tolist()  # type: ignore[no-any-return]

    assert two.run(seeded).results == [seeded()] * 2


def kinds(run: lab.Run, rank: int) -> Counter[str]:
    return Counter(span.name for span in run.trace.spans if span.rank == rank)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")  # from Python 3.12
def test_children_of_a_rank_do_not_write_into_its_records(two: lab.Group) -> None:
    """A worker of a DataLoader, a child of multiprocessing, a plain fork: with spans, values and collectives."""

    def train() -> tuple[int, ...]:
        import multiprocessing
        import os

        import torch.distributed as dist
        from torch.utils.data import DataLoader, Dataset

        kept = lab.span("kept")

        class Items(Dataset[Any]):
            def __len__(self) -> int:
                return 16

            def __getitem__(self, index: int) -> Any:
                with kept, lab.span("new in the worker"):
                    lab.record(index=index)
                return torch.tensor([index])

        def in_a_child() -> None:
            try:
                with kept, lab.span("new in the child"):
                    dist.all_reduce(torch.ones(3), async_op=True)
            finally:
                os._exit(0)

        total = 0
        for batch in DataLoader(Items(), batch_size=4, num_workers=2):
            with kept:
                total += int(batch.sum())
        child = multiprocessing.get_context("fork").Process(target=in_a_child)
        child.start()
        child.join()
        pid = os.fork()
        if pid == 0:
            in_a_child()
        status = os.waitpid(pid, 0)[1]
        for _ in range(3):
            with kept:
                pass
        dist.all_reduce(torch.ones(2))
        return total, child.exitcode, status

    run = two.run(train)
    assert run.results == [(sum(range(16)), 0, 0)] * 2
    for rank in range(2):
        assert kinds(run, rank) == {"kept": 4 + 3, "all_reduce": 1, "train": 1, "data": 1 + 4 + 1}
    assert not run.trace.scalars
    assert run.trace.dropped == (0, 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_children_of_a_rank_do_not_use_its_emulated_link(two: lab.Group) -> None:
    def enter() -> tuple[int, list[int]]:
        import os

        from labkit.costs.shared_link import SHARED_LINK_BYTES, LinkCost, SharedLink
        from labkit.ipc.pickling import shared_memory

        book, alone = SharedLink(shared_memory(SHARED_LINK_BYTES)), LinkCost(1000, 1000, [0], [0], 1)
        book.keep_from_forks()
        book.arrive("group", 1, 5, alone)
        pid = os.fork()
        if pid == 0:
            try:
                book.arrive("group", 2, 5, alone)
            finally:
                os._exit(0)
        return os.waitpid(pid, 0)[1], [book.due_ns("group", match) for match in (1, 2)]

    assert two.run(enter).results == [(0, [1005, 0])] * 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_memory_mapped_later_at_the_same_address_is_left_alone(two: lab.Group, how: str) -> None:
    """A fork hook stays for the life of a process: it overwrote later mappings with zeros, and the child crashed."""

    def reuse(how: str) -> tuple[int, int]:
        import ctypes
        import mmap
        import os

        from labkit.recording.ring_buffer import MAP_FIXED, keep_from_forks

        nbytes = 1 << 20
        memory = mmap.mmap(-1, nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        keep_from_forks(memory)
        if how == "closed":
            memory.close()
        else:
            del memory
        map_memory = ctypes.CDLL(None).mmap
        map_memory.restype = ctypes.c_void_p
        map_memory.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
        assert map_memory(address, nbytes, protection, flags, -1, 0) == address
        other = ctypes.c_char.from_address(address)
        other.value = b"x"
        pid = os.fork()
        if pid == 0:
            os._exit(0 if other.value == b"x" else 7)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        unmap = ctypes.CDLL(None).munmap
        unmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        return status, unmap(address, nbytes)

    assert two.run(reuse, how).results == [(0, 0)] * 2


def test_deadlocks_are_found_with_any_number_of_span_names(capsys: pytest.CaptureFixture[str]) -> None:
    """14,000 short names, or 2,000 long ones, once filled the table: collectives lost theirs, and deadlocks were
    not found."""

    def train() -> None:
        import torch.distributed as dist

        for i in range(2_000 if dist.get_rank() == 0 else 1):
            with lab.span(f"forward {'of a layer with quite a long name ' * 12}{i}"):
                pass
        lab.record(loss=0.5)
        dist.all_reduce(torch.ones(3))

    def hang() -> None:
        import torch.distributed as dist

        if dist.get_rank() == 0:
            dist.recv(torch.ones(2), 1)
        else:
            dist.barrier()

    with lab.Group(2, timeout_s=200) as group:
        run = group.run(train)
        group.run(train)
        assert capsys.readouterr().out.count("span('forward'), not span(f'forward {i}')") == 1, "it is said once"
        names = kinds(run, 0)
        assert names["all_reduce"] == 1
        assert names["(other spans)"] > 0
        assert sum(names.values()) == 2_000 + 2
        assert {s.name for s in run.trace.scalars} == {"loss"}
        with pytest.raises(lab.LabError) as reported:
            group.run(hang)
    assert type(reported.value).__name__ == "DeadlockError"
