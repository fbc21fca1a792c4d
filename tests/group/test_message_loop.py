"""The loop that receives what ranks send, tested with channels of this process and pipes in place of processes."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from labkit.group.message_loop import MessageLoop
from labkit.ipc.channel import Channel
from labkit.ipc.protocol import Message, Warned

pytestmark = pytest.mark.processes


class FakeRank:
    """A rank without a process: this side's end of its channel, and its own."""

    def __init__(self, rank: int, *, with_sentinel: bool = True) -> None:
        here, there = socket.socketpair()
        self.rank, self.channel, self.own = rank, Channel(here), Channel(there)
        self._end, self._write = os.pipe()
        self.process = SimpleNamespace(sentinel=self._end if with_sentinel else -1)

    def say(self, word: str) -> None:
        """It sends a message with this word."""
        self.own.send(Warned(word, 1))

    def end(self) -> None:
        """Its process ends: its channel closes, and its sentinel becomes ready."""
        self.own.close()
        os.write(self._write, b"x")

    def close(self) -> None:
        self.own.close()
        self.channel.close()
        os.close(self._end)
        os.close(self._write)


class Log:
    """A receiver that records what it gets, and waits for a given number of messages."""

    def __init__(self, count: int) -> None:
        self.heard: list[tuple[int, str]] = []
        self._count = count

    def pause_s(self) -> float | None:
        return None if len(self.heard) >= self._count else 60

    def expects(self, member: Any) -> bool:
        return (member.rank, "last") not in self.heard

    def message(self, member: Any, message: Message) -> None:
        assert isinstance(message, Warned)
        self.heard.append((member.rank, message.text))

    def died(self, member: Any) -> None:
        self.heard.append((member.rank, "died"))


@pytest.fixture
def ranks() -> Iterator[list[FakeRank]]:
    made = [FakeRank(0), FakeRank(1), FakeRank(2, with_sentinel=False)]
    yield made
    for rank in made:
        rank.close()


@pytest.fixture
def loop(ranks: list[FakeRank]) -> Iterator[MessageLoop]:
    loop = MessageLoop()
    for rank in ranks:
        loop.add(rank)  # type: ignore[arg-type]
    yield loop
    loop.close()


def test_messages_that_arrive_together_are_received_together(loop: MessageLoop, ranks: list[FakeRank]) -> None:
    ranks[1].say("first")
    ranks[1].say("last")
    log = Log(1)
    loop.run(log)
    assert log.heard == [(1, "first"), (1, "last")]


def test_reports_come_before_deaths(loop: MessageLoop, ranks: list[FakeRank]) -> None:
    ranks[0].say("last")
    os.write(ranks[0]._write, b"x")  # its end is noticed at the same moment as the messages
    ranks[1].say("raised")
    ranks[2].say("raised")
    log = Log(4)
    loop.run(log)
    assert sorted(log.heard[:3]) == [(0, "last"), (1, "raised"), (2, "raised")]
    assert log.heard[3] == (0, "died")


def test_messages_of_a_dead_rank_are_received_while_expected(loop: MessageLoop, ranks: list[FakeRank]) -> None:
    class Impatient(Log):
        def message(self, member: Any, message: Message) -> None:
            super().message(member, message)
            if self.heard[-1] == (member.rank, "gone"):
                raise EOFError  # as when a result cannot be read because the rank that lent it is gone

    for kind in ("gone", "second", "last", "unexpected"):
        ranks[0].say(kind)
    log = Impatient(4)
    loop.run(log)
    assert log.heard == [(0, "gone"), (0, "second"), (0, "last"), (0, "died")]


@pytest.mark.parametrize("which", [1, 2], ids=["a sentinel tells", "the channel tells"])
def test_a_death_is_reported_once_and_again_to_the_next_receiver(which: int, loop: MessageLoop, ranks: list[FakeRank]) -> None:
    ranks[which].end()
    log = Log(1)
    loop.run(log)
    assert log.heard == [(which, "died")]
    ranks[0].say("last")
    later = Log(2)
    loop.run(later)
    assert later.heard == [(which, "died"), (0, "last")]
