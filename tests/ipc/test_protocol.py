"""Messages between the notebook and its ranks: each class travels, and a frame can be passed on unread."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

from labkit.errors.exceptions import RankFailure
from labkit.ipc import pickling, protocol
from labkit.ipc.channel import Channel
from labkit.ipc.options import Options
from labkit.ipc.pickling import Payload
from labkit.ipc.protocol import Message
from labkit.recording.rank_facts import Fact, FactKind

FAILURE = RankFailure(1, "b", "ValueError: x", at_ns=7)
FACT = Fact(FactKind.PARAMETERS, 2, "cell 1, line 3", "optimizer 0", (), {"weight": 1 << 63})
MESSAGES: list[Message] = [
    protocol.RankConfig(1, Options(names=("a", "b"), runtime="bare", threads=3), ("path",), "folder", {"A": None}),
    protocol.Offer("10.0.0.2", 1234, ("a", "b")),
    protocol.Offers([protocol.Offer(port=1234), protocol.Offer()]),
    protocol.Done(["a note"]),
    protocol.NewFiles({"cell 1": ("cell 1", ["x = 1\n"])}),
    protocol.Install(Payload(b"stream")),
    protocol.Profile(begin=True),
    protocol.Profiled([("track", "name", "category", 1, 2)]),
    protocol.Observe(begin=False),
    protocol.CallFunction(True, False, Payload(b"stream", [(0, 10), (1 << 47, 1 << 40)], owner_pid=77, copied_from_gpu=True)),
    protocol.RunCell(False, True, "x = 1", "<cell>", "cell 1", {"y"}, Payload(b"")),
    protocol.Returned(True, False, False, ["a note"], {1: FAILURE}, [FACT], Payload(b"stream")),
    protocol.Raised(False, FAILURE),
    protocol.Changes("folder", ("new",), ("old",), {"A": "b"}),
    protocol.NewFilters(Payload(b"stream")),
    protocol.Forget([1, 2]),
    protocol.Restarted(2),
    protocol.ResultRead(),
    protocol.Release(),
    protocol.Serving(),
    protocol.Assigned(["x"]),
    protocol.Imported([protocol.ImportedModule("m", "m.py", 5, b"digest")]),
    protocol.Displayed({"text/plain": "x"}, {"width": 1}, 2),
    protocol.Warned("UserWarning: x", 2),
    protocol.AtBreakpoint("(Pdb) "),
    protocol.Command("n"),
    protocol.LeftBreakpoint(""),
]


@pytest.fixture
def channels() -> Iterator[tuple[Channel, ...]]:
    """The ends of two connections: the notebook's, the relay's two, and the rank's."""
    made = [Channel(end) for _ in range(2) for end in socket.socketpair()]
    yield tuple(made)
    for channel in made:
        channel.close()


def names(kind: Any) -> list[str]:
    return [field.name for field in fields(kind)]


def test_every_class_is_tried() -> None:
    assert {type(message) for message in MESSAGES} == set(protocol._CLASSES)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_message_travels(message: Message, channels: tuple[Channel, ...]) -> None:
    near, far, *_ = channels
    near.send(message)
    near.send(protocol.Release())
    assert far.receive() == message
    assert far.received
    assert far.receive() == protocol.Release()
    assert not far.received


def test_only_the_last_field_is_a_payload() -> None:
    """The others are pickled into the body, which a relay does not read."""
    for kind in protocol._CLASSES:
        assert all("Payload" not in field.type for field in fields(kind)[:-1])
        with_payload = [name for name in names(kind) if name == "payload"]
        assert with_payload == [field.name for field in fields(kind) if "Payload" in field.type]


def test_a_frame_is_passed_on_without_unpickling(channels: tuple[Channel, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    notebook, near, far, rank = channels
    memory = pickling.shared_memory(100)
    os.pwrite(memory, b"shared", 0)
    sent = Payload(bytes(1 << 16), [(0, 60), (64, 6)], memory)
    body = protocol.encode(protocol.CallFunction(True, False, sent)).body
    with monkeypatch.context() as patch:
        patch.setattr(protocol, "decode", None)
        patch.setattr(protocol.pickle, "loads", None)
        notebook.send(protocol.CallFunction(True, False, sent))
        frame = near.receive_frame()
        far.send_frame(frame)
    assert frame.body == body
    assert frame.payload is not None
    message = rank.receive()
    assert isinstance(message, protocol.CallFunction)
    assert (message.all_called, message.payload.data, message.payload.regions) == (True, sent.data, sent.regions)
    assert os.pread(message.payload.fd, 6, 0) == b"shared"
    for payload in (sent, frame.payload, message.payload):
        payload.close()


def test_a_frame_of_which_the_socket_takes_a_part_arrives_whole(
    channels: tuple[Channel, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far, *_ = channels
    real = near._socket

    class Reluctant:
        """Takes at first only so many bytes, with the descriptor."""

        def __init__(self, most: int) -> None:
            self._most = most

        def sendmsg(self, parts: Any, fds: Any) -> int:
            return real.sendmsg([b"".join(parts)[: self._most]], fds)

        def sendall(self, data: bytes) -> None:
            real.sendall(data)

    with open(os.devnull) as file:
        message = protocol.CallFunction(True, False, Payload(b"stream", [(1, 2)], file.fileno()))
        for most in range(1, 100):
            monkeypatch.setattr(near, "_socket", Reluctant(most))
            near.send(message)
            received = far.receive()
            assert isinstance(received, protocol.CallFunction)
            assert (received.all_called, received.payload.data, received.payload.regions) == (True, b"stream", [(1, 2)])
            received.payload.close()
    monkeypatch.setattr(near, "_socket", real)
