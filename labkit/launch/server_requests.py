"""What the notebook asks of the server that forks ranks, and its replies: a class for each.

Each is one pickled packet: (number of the request, request or reply). A request that Stop interrupts is sent as a whole
or not at all, and its reply, which nobody waits for any more, is recognized by its number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["BATCH", "LONGEST_BYTES", "READY", "Failed", "Fork", "Forked", "Reap", "Reaped", "Reply", "Request"]

BATCH: Final = 64  # most ranks in one request: each takes three file descriptors, and the kernel passes at most 253
LONGEST_BYTES: Final = 1 << 16  # of a packet; those of a thousand ranks take a tenth
READY: Final = 0  # the number of the first reply, which answers no request: all modules are imported


@dataclass(frozen=True, slots=True)
class Fork:
    """Fork a rank for each of these numbers; the file descriptors of its socket, output and memory come along.

    The reply is `Forked` or `Failed`.
    """

    ranks: Sequence[int]


@dataclass(frozen=True, slots=True)
class Forked:
    """The process ids of the ranks, by their numbers."""

    pids: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Reap:
    """End these ranks and the processes that they have started. The reply is `Reaped`."""

    ranks: Sequence[int]


@dataclass(frozen=True, slots=True)
class Reaped:
    """The exit codes by the ranks' numbers, negative for signals; without ranks that were reaped before."""

    codes: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Failed:
    """The request could not be carried out, for this reason."""

    reason: str


Request = Fork | Reap
Reply = Forked | Reaped | Failed
