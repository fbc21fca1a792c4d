"""Functions that ranks call on each other in the tests of references."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch.distributed import rpc

WORKER = "worker"
CALLS = 5  # that carry a reference and end at the same time
PATIENCE_S = 60.0  # only ends a test that fails


class _Deaths:
    """On which threads references of this rank died."""

    threads: list[str] = []  # noqa: RUF012  # one per process
    changed = threading.Condition()

    @classmethod
    def note(cls) -> None:
        with cls.changed:
            cls.threads.append(threading.current_thread().name)
            cls.changed.notify_all()


def watch_death(rref: Any) -> None:
    weakref.finalize(rref, _Deaths.note)


def deaths(count: int) -> list[str]:
    """Wait until so many references have died, and return the names of the threads."""
    with _Deaths.changed:
        _Deaths.changed.wait_for(lambda: len(_Deaths.threads) >= count, PATIENCE_S)
        return _Deaths.threads[:]


def dropped() -> tuple[list[str], list[str]]:
    """The threads on which references die: those that a worker is sent, and those that `remote` returns."""
    own = rpc.RRef(torch.ones(1))
    for future in [rpc.rpc_async(WORKER, watch_death, args=(own,)) for _ in range(CALLS)]:
        future.wait()
    for _ in range(CALLS):
        watch_death(rpc.remote(WORKER, Kept))
    return rpc.rpc_sync(WORKER, deaths, args=(CALLS,)), deaths(CALLS)


class Kept:
    """An object whose end its owner notices."""

    def answer(self) -> int:
        return 1


def use(rref: Any) -> int:
    return int(rref.rpc_sync().answer())


def freed() -> bool:
    """Whether the owner frees an object when the last reference to it is dropped."""
    value, gone = Kept(), threading.Event()
    weakref.finalize(value, gone.set)
    own = rpc.RRef(value)
    del value
    assert rpc.rpc_sync(WORKER, use, args=(own,)) == 1
    del own
    return gone.wait(PATIENCE_S)


class Meeting:
    """Calls wait here for each other."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(CALLS)

    def arrive(self) -> None:
        self._barrier.wait(PATIENCE_S)


def visit(meeting: Any, x: torch.Tensor) -> torch.Tensor:
    meeting.rpc_sync().arrive()
    return x + 1


def meetings(count: int) -> float:
    """Calls that carry a reference and a tensor, and all end at the same time, again and again."""
    total = 0.0
    for _ in range(count):
        meeting = rpc.RRef(Meeting())
        results = torch.futures.wait_all([rpc.rpc_async(WORKER, visit, args=(meeting, torch.zeros(1))) for _ in range(CALLS)])
        total += float(sum(results))
    return total
