"""One loop takes what ranks send, whether they start, run or end: a receiver gets each message and each death."""

from __future__ import annotations

import contextlib
import selectors
from typing import Final, Protocol

from labkit.group.member import Member
from labkit.ipc.messages import Message

__all__ = ["MessageLoop", "Receiver"]

_MESSAGE: Final = "message"
_END: Final = "end"


class Receiver(Protocol):
    """What somebody does with the messages of ranks while they wait for some of them."""

    def pause_s(self) -> float | None:
        """Called before each wait: do what is due, and say how long to wait at most; None ends the loop."""

    def expects(self, member: Member) -> bool:
        """Whether a message of this rank is still expected."""

    def message(self, member: Member, message: Message) -> None:
        """A rank has sent a message.

        Raises:
            EOFError, OSError: the rank is gone.
        """

    def died(self, member: Member) -> None:
        """A rank's process has ended; all messages of it that were expected and had been sent have been received."""


class MessageLoop:
    """Waits for messages and for the ends of processes.

    Prints are not waited for. To wake up at each of them would cost the ranks, which print, more than the notebook;
    receivers look at them now and then.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._dead: dict[int, Member] = {}

    def add(self, member: Member) -> None:
        """From now on wait for a rank, too."""
        self._selector.register(member.channel, selectors.EVENT_READ, (_MESSAGE, member))
        if member.process.sentinel >= 0:  # else the end of the channel tells
            self._selector.register(member.process.sentinel, selectors.EVENT_READ, (_END, member))

    def run(self, receiver: Receiver) -> None:
        """Give a receiver everything that comes, until it ends the loop."""
        for member in list(self._dead.values()):  # it died in an earlier run of the loop, and will not be heard of again
            receiver.died(member)
        while (limit_s := receiver.pause_s()) is not None:
            events = self._selector.select(limit_s)
            # Messages before deaths: a failing rank's own report tells more than the fact that it ended.
            for kind in (_MESSAGE, _END):
                for key, _ in events:
                    its_kind, member = key.data
                    if its_kind is kind and member.rank not in self._dead:
                        self._receive(member, receiver) if kind is _MESSAGE else self._end(member, receiver)

    def close(self) -> None:
        """Wait for nobody any more."""
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
