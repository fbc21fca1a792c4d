"""What the relay asks of an agent, and its replies: a class for each, pickled in a block with the request's number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from labkit.launch.rank_process import End
from labkit.machines.facts import Facts

__all__ = [
    "HELLO", "Answers", "AskRanks", "Connect", "Connected", "EndRanks", "Ends", "Listen", "Listening", "Prepare", "Ready",
    "Refused", "StartRanks", "Started",
]  # fmt: skip

HELLO: Final = 0  # the number of the first reply, which answers no request: the `Facts`


@dataclass(frozen=True, slots=True)
class Prepare:
    """Import what a runtime's ranks need. The reply is `Ready` or `Refused`.

    Args:
        runtime: the runtime's name.
    """

    runtime: str


@dataclass(frozen=True, slots=True)
class Ready:
    """Ranks can be started."""


@dataclass(frozen=True, slots=True)
class StartRanks:
    """Start ranks with these numbers. The reply is `Started` or `Refused`."""

    ranks: Sequence[int]


@dataclass(frozen=True, slots=True)
class Started:
    """The process ids of the ranks, by number."""

    pids: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class EndRanks:
    """End ranks, and the processes that they have started. The reply is `Ends`."""

    ranks: Sequence[int]


@dataclass(frozen=True, slots=True)
class Ends:
    """How ranks have ended, by number."""

    ends: Mapping[int, End]


@dataclass(frozen=True, slots=True)
class AskRanks:
    """Ask a `launch.starters.Question` about ranks, or nothing but that all they have recorded so far comes first.

    The reply is `Answers`, after what they had recorded.
    """

    question: Any
    ranks: Sequence[int]


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers, by number; without the ranks that had recorded more than can be sent now."""

    answers: Mapping[int, Any]


@dataclass(frozen=True, slots=True)
class Listen:
    """Accept connections of other machines for a moment. The reply is `Listening` or `Refused`."""


@dataclass(frozen=True, slots=True)
class Listening:
    """The port, at the machine's address."""

    port: int


@dataclass(frozen=True, slots=True)
class Connect:
    """Connect to other machines: name, address and port of each. The reply is `Connected`."""

    targets: Sequence[tuple[str, str, int]]


@dataclass(frozen=True, slots=True)
class Connected:
    """Those that cannot be reached: name, address, port, and why."""

    failed: Sequence[tuple[str, str, int, str]]


@dataclass(frozen=True, slots=True)
class Refused:
    """It could not be done, for this reason."""

    reason: str


Request = Prepare | Listen | Connect | StartRanks | EndRanks | AskRanks
Reply = Facts | Ready | Listening | Connected | Started | Ends | Answers | Refused
