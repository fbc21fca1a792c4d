"""The loop that passes each message and each death of a rank to a receiver, whether ranks start or run."""

from __future__ import annotations

import contextlib
import selectors
from typing import Final, Protocol

from labkit.group.pool_state import Member
from labkit.ipc.protocol import Message

_MESSAGE: Final = "message"
_END: Final = "end"


class Receiver(Protocol):
    """Handles the messages of ranks while waiting for some of them."""

    def pause_s(self) -> float | None:
        """Do what is due and return how long to wait at most; None ends the loop. Called before each wait."""

    def expects(self, member: Member) -> bool:
        """Return whether a message from this rank is still expected."""

    def message(self, member: Member, message: Message) -> None:
        """Handle a message from a rank. EOFError, OSError: the rank is gone."""

    def died(self, member: Member) -> None:
        """Handle the end of a rank's process. All expected messages that it sent have been received before."""


class MessageLoop:
    """Waits for messages and for the ends of processes.

    It does not wait for printed output: waking up for each print would cost the ranks more than the notebook. Receivers
    check for output now and then.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._dead: dict[int, Member] = {}

    def add(self, member: Member) -> None:
        """Also wait for a rank from now on."""
        self._selector.register(member.channel, selectors.EVENT_READ, (_MESSAGE, member))
        if member.process.sentinel >= 0:  # otherwise the end of the channel reports it
            self._selector.register(member.process.sentinel, selectors.EVENT_READ, (_END, member))

    def run(self, receiver: Receiver) -> None:
        """Pass everything that arrives to a receiver, until it ends the loop."""
        for member in list(self._dead.values()):  # died in an earlier run of the loop, so no event will report it again
            receiver.died(member)
        while (limit_s := receiver.pause_s()) is not None:
            self.poll(receiver, limit_s)

    def poll(self, receiver: Receiver, limit_s: float = 0.0) -> bool:
        """Pass what arrives within a time limit to a receiver, and return whether anything has."""
        events = self._selector.select(limit_s)
        # Messages before deaths: a failing rank's own report says more than the fact that it ended.
        for kind in (_MESSAGE, _END):
            for key, _ in events:
                its_kind, member = key.data
                if its_kind is kind and member.rank not in self._dead:
                    self._receive(member, receiver) if kind is _MESSAGE else self._end(member, receiver)
        return bool(events)

    def close(self) -> None:
        """Stop waiting for all ranks."""
        self._selector.close()

    def _receive(self, member: Member, receiver: Receiver) -> None:
        try:
            receiver.message(member, member.channel.receive())
            while member.channel.received:
                receiver.message(member, member.channel.receive())
        except (EOFError, OSError):
            self._end(member, receiver)

    def _end(self, member: Member, receiver: Receiver) -> None:
        self._dead[member.rank] = member
        for registered in (member.channel, member.process.sentinel):
            with contextlib.suppress(KeyError, ValueError):  # it has no sentinel
                self._selector.unregister(registered)
        with contextlib.suppress(EOFError, OSError):
            while receiver.expects(member):
                receiver.message(member, member.channel.receive())
        receiver.died(member)
