"""Messages between notebook and ranks, on a socket of this machine, with a file descriptor beside them where need be."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import sys
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from labkit.ipc.pickling import Payload

__all__ = ["Channel", "Encoded", "Message", "encode"]


@dataclass(slots=True)
class Message:
    """One message: a word that says what it is, small plain data, and perhaps a payload."""

    kind: str
    data: Any = None
    payload: Payload | None = None


_LENGTHS: Final = struct.Struct("<IQ")  # bytes of the head, bytes of the payload's stream
AT_ONCE: Final = 1 << 14  # bytes that one call asks for: nearly every message is one call to send and one to receive
_FD_SPACE: Final = socket.CMSG_LEN(struct.calcsize("i"))


class Encoded(NamedTuple):
    """A message as it is sent.

    Args:
        parts: its bytes, one after the other.
        fd: the descriptor that goes with the first part; -1 for none.
    """

    parts: tuple[bytes, ...]
    fd: int


def encode(kind: str, data: Any = None, payload: Payload | None = None) -> Encoded:
    """Put a message into bytes; see `Message` for the arguments."""
    stream, fd, about = b"", -1, None
    if payload is not None:
        stream, fd = payload.data, payload.fd
        about = fd >= 0, payload.spans, payload.lender, payload.moved
    head = pickle.dumps((kind, data, about))
    start = _LENGTHS.pack(len(head), len(stream)) + head
    return Encoded((start, stream) if len(stream) > AT_ONCE else (start + stream,), fd)


class Channel:
    """Frames over a stream socket of this machine.

    Args:
        sock: a connected Unix socket, blocking.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._rest = b""  # received, and part of the next message
        self._fds: list[int] = []  # received, perhaps with the bytes of an earlier message

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self._socket.fileno()

    @property
    def received(self) -> bool:
        """Whether a message has come with an earlier one, which a selector does not see; `receive` gives it."""
        return len(self._rest) >= _LENGTHS.size  # all of it may not be there yet, but it is on its way

    def send(self, kind: str, data: Any = None, payload: Payload | None = None) -> None:
        """Send one message; the payload stays the caller's to close.

        Raises:
            OSError: the other side is gone.
        """
        self.send_encoded(encode(kind, data, payload))

    def send_encoded(self, message: Encoded) -> None:
        """Send a message that other channels may get as well.

        Raises:
            OSError: the other side is gone.
        """
        first, *rest = message.parts
        if message.fd >= 0:
            first = first[socket.send_fds(self._socket, [first], [message.fd]) :]
        self._socket.sendall(first)
        for part in rest:
            self._socket.sendall(part)

    def receive(self) -> Message:
        """The next message; waits for it.

        Raises:
            EOFError: the other side is gone.
        """
        data = self._rest
        while len(data) < _LENGTHS.size or len(data) < _LENGTHS.size + _LENGTHS.unpack_from(data)[0]:
            more, beside, _, _ = self._socket.recvmsg(AT_ONCE, _FD_SPACE)
            for _, _, fds in beside:
                self._fds.append(int.from_bytes(fds, sys.byteorder))
                os.set_inheritable(self._fds[-1], False)
            if not more:
                raise EOFError
            data += more
        head_size, stream_size = _LENGTHS.unpack_from(data)
        at = _LENGTHS.size + head_size
        kind, plain, about = pickle.loads(memoryview(data)[_LENGTHS.size : at])
        stream, self._rest = data[at : at + stream_size], data[at + stream_size :]
        if len(stream) < stream_size:
            stream = self._complete(stream, stream_size)
        if about is None:
            return Message(kind, plain)
        with_fd, spans, lender, moved = about
        return Message(kind, plain, Payload(stream, spans, self._fds.pop(0) if with_fd else -1, lender, moved))

    def close(self) -> None:
        """Close the socket, and what came with messages that nobody has taken."""
        self._socket.close()
        while self._fds:
            os.close(self._fds.pop())

    def _complete(self, begin: bytes, size: int) -> bytes:
        data = bytearray(size)
        at = len(begin)
        data[:at] = begin
        view = memoryview(data)
        while at < size:
            count = self._socket.recv_into(view[at:])
            if not count:
                raise EOFError
            at += count
        return bytes(data)
