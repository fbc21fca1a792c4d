"""What the notebook asks of the process that starts ranks, and its replies.

Each is one pickled packet: (number of the request, request or reply). A request that Stop interrupts is sent as a whole
or not at all, and its reply, which nobody waits for any more, is recognized by its number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from labkit.ipc.options import Place

BATCH: Final = 64  # most ranks in one request: each takes three file descriptors, and the kernel passes at most 253
LONGEST_BYTES: Final = 1 << 16  # of a packet; those of a thousand ranks take a tenth
READY: Final = 0  # the number of the first reply, which answers no request: all modules are imported


@dataclass(frozen=True, slots=True)
class Fork:
    """Fork a rank for each of these numbers; the file descriptors of its socket, output and memory come along."""

    ranks: Sequence[int]  # the numbers
    first: int = 0  # the rank, in its group, of the first one
    total: int = 0  # the number of ranks of the group


@dataclass(frozen=True, slots=True)
class Forked:
    """The ranks have been forked."""

    pids: Mapping[int, int]  # their process ids, by number
    places: Mapping[int, Place] = field(default_factory=dict)  # where they are, by number; none if all are on this machine
    notes: Sequence[str] = ()  # remarks for the student


@dataclass(frozen=True, slots=True)
class Reap:
    """End these ranks and the processes that they have started.

    The reply is a dict by the ranks' numbers, without ranks that were reaped before: of their exit codes, negative for
    signals; from a relay, of their `End`s.
    """

    ranks: Sequence[int]


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask a question about living ranks where they are.

    The reply is a dict of answers by the ranks' numbers, without the ranks of machines that do not answer. Without a
    question, it comes after all that they have recorded and printed so far.
    """

    question: Any
    ranks: Sequence[int]


@dataclass(frozen=True, slots=True)
class Survey:
    """Ask a relay about its machines."""


@dataclass(frozen=True, slots=True)
class Surveyed:
    """The reply."""

    names: Sequence[str]
    machines: Sequence[Any]  # what is known of those that can be used: `machines.facts.KnownMachine`
    problems: Mapping[str, str]  # by machine, "" for several


@dataclass(frozen=True, slots=True)
class Waits:
    """Not yet a reply: the request is waiting for something, which the text names."""

    text: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The request could not be carried out, for this reason."""

    reason: str


Request = Fork | Reap | Ask | Survey
Reply = Any
