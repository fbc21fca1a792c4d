"""Waits of exercises on RPC, with limits that count only while all processes run: a stall is no wrong answer."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Final

import torch.distributed.rpc as rpc

MEET_S: Final = 5.0  # that a call waits for the others; calls that overlap meet within milliseconds
TURNS: Final = 5  # a stall costs one of them at most


class Meeting:
    """An object on the master at which the called workers wait for each other."""

    def __init__(self, expected: int) -> None:
        self.expected = expected  # the number of workers that must be at work at the same time
        self.visits: list[tuple[str, int]] = []  # each call's worker and a number that the worker gives
        self.alone = False  # whether a worker was called only when another had finished
        self._all = threading.Event()
        self._lock = threading.Lock()

    def arrive(self, name: str, number: int) -> None:
        """Wait until all workers have a call to serve; set `alone` if that takes longer than `MEET_S`."""
        with self._lock:
            self.visits.append((name, number))
            if len({visitor for visitor, _ in self.visits} - {"master"}) >= self.expected:
                self._all.set()
        if name != "master" and not self.alone and not happens_within(MEET_S, self._all.wait):
            self.alone = True


def happens_within(limit_s: float, wait: Callable[[float], bool]) -> bool:
    """Return whether something happens within a time in which all processes run.

    The time is divided into turns. Before each turn but the first, every process answers a call: one that is stalled
    answers when it runs again, and the turns that are left give it time to go on with its work.

    Args:
        limit_s: the time in seconds; nothing in it should take longer than one turn.
        wait: waits at most for the given seconds; returns whether it has happened.
    """
    for turn in range(TURNS):
        if turn:
            for rank in range(int(os.environ["WORLD_SIZE"])):
                rpc.rpc_sync(rank, _answer, timeout=0)
        if wait(limit_s / TURNS):
            return True
    return False


def _answer() -> None:
    """Called in a process to see that it runs."""
