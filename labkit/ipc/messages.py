"""Messages between the notebook and its ranks over a Unix socket, with a file descriptor attached where needed."""

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
    """One message.

    Args:
        kind: what sort of message it is.
        data: small plain data.
        payload: a pickled object, if the message carries one.
    """

    kind: str
    data: Any = None
    payload: Payload | None = None


_LENGTHS: Final = struct.Struct("<IQ")  # sizes in bytes of the header and of the payload's stream
AT_ONCE: Final = 1 << 14  # bytes per `recvmsg`, so that nearly every message takes one call to send and one to receive
_FD_SPACE: Final = socket.CMSG_LEN(struct.calcsize("i"))


class Encoded(NamedTuple):
    """A message in bytes.

    Args:
        parts: its bytes, in the order in which they are sent.
        fd: the file descriptor that is sent with the first part; -1 for none.
    """

    parts: tuple[bytes, ...]
    fd: int


def encode(kind: str, data: Any = None, payload: Payload | None = None) -> Encoded:
    """Encode a message in bytes; see `Message` for the arguments."""
    stream, fd, about = b"", -1, None
    if payload is not None:
        stream, fd = payload.data, payload.fd
        about = fd >= 0, payload.regions, payload.owner_pid, payload.copied_from_gpu
    head = pickle.dumps((kind, data, about))
    start = _LENGTHS.pack(len(head), len(stream)) + head
    return Encoded((start, stream) if len(stream) > AT_ONCE else (start + stream,), fd)


class Channel:
    """Sends and receives messages over a Unix socket.

    Args:
        sock: a connected stream socket, blocking.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._rest = b""  # received bytes that belong to the next message
        self._fds: list[int] = []  # received file descriptors; they may arrive with the bytes of an earlier message

    def fileno(self) -> int:
        """Return the socket's file descriptor, for selectors."""
        return self._socket.fileno()

    @property
    def received(self) -> bool:
        """Whether another message was received together with the last one, which a selector cannot notice."""
        return len(self._rest) >= _LENGTHS.size  # the rest of it may still be on its way

    def send(self, kind: str, data: Any = None, payload: Payload | None = None) -> None:
        """Send one message. The caller remains responsible for closing the payload.

        Raises:
            OSError: the other side has closed the connection.
        """
        self.send_encoded(encode(kind, data, payload))

    def send_encoded(self, message: Encoded) -> None:
        """Send a message that is already encoded, so that several channels can send the same one.

        Raises:
            OSError: the other side has closed the connection.
        """
        first, *rest = message.parts
        if message.fd >= 0:
            first = first[socket.send_fds(self._socket, [first], [message.fd]) :]
        self._socket.sendall(first)
        for part in rest:
            self._socket.sendall(part)

    def receive(self) -> Message:
        """Wait for the next message and return it.

        Raises:
            EOFError: the other side has closed the connection.
        """
        data = self._rest
        while len(data) < _LENGTHS.size or len(data) < _LENGTHS.size + _LENGTHS.unpack_from(data)[0]:
            more, ancillary, _, _ = self._socket.recvmsg(AT_ONCE, _FD_SPACE)
            for _, _, fds in ancillary:
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
        with_fd, regions, owner_pid, copied_from_gpu = about
        return Message(kind, plain, Payload(stream, regions, self._fds.pop(0) if with_fd else -1, owner_pid, copied_from_gpu))

    def close(self) -> None:
        """Close the socket, and received file descriptors that belong to no message yet."""
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
