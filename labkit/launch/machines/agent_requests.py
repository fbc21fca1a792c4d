"""What the relay asks of an agent, and its replies: a class for each, pickled in a block with the request's number.

`Fork`, `Reap` and `Ask` are what the notebook asks of the relay (`launch/server_requests.py`), here for the ranks of
one machine; no file descriptors come along. `Failed` may be the reply to each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from labkit.launch.machines.facts import Facts
from labkit.launch.server_requests import Answered, Ask, Ended, Failed, Fork, Forked, Reap

HELLO: Final = 0  # the number of the first reply, which answers no request: the `Facts`


@dataclass(frozen=True, slots=True)
class Prepare:
    """Import what a runtime's ranks need. The reply is `AgentReady`."""

    runtime: str


@dataclass(frozen=True, slots=True)
class AgentReady:
    """Ranks can be started."""


@dataclass(frozen=True, slots=True)
class Listen:
    """Accept connections of other machines for a moment. The reply is `Listening`."""


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


Request = Prepare | Listen | Connect | Fork | Reap | Ask
Reply = Facts | AgentReady | Listening | Connected | Forked | Ended | Answered | Failed
