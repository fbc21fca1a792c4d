"""Waits of exercises on RPC, with limits that count only while all processes run: a stall is no wrong answer."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

import torch.distributed.rpc as rpc

__all__ = ["happens_within"]

TURNS: Final = 5  # a stall costs one of them at most


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
