"""Frames between notebook and ranks: messages on a socket of this machine, with a file descriptor beside them."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import sys
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from labkit.ipc.pickling import Parcel

__all__ = ["Channel", "Encoded", "Frame", "encode"]


@dataclass(slots=True)
class Frame:
    """One message: a word that says what it is, small plain data, and perhaps a parcel."""

    kind: str
    data: Any = None
    parcel: Parcel | None = None


_LENGTHS: Final = struct.Struct("<IQ")  # bytes of the head, bytes of the parcel's stream
AT_ONCE: Final = 1 << 14  # bytes that one call asks for: nearly every frame is one call to send and one to receive
_FD_SPACE: Final = socket.CMSG_LEN(struct.calcsize("i"))


class Encoded(NamedTuple):
    """A frame as it is sent.

    Args:
        parts: its bytes, one after the other.
        fd: the descriptor that goes with the first part; -1 for none.
    """

    parts: tuple[bytes, ...]
    fd: int


def encode(kind: str, data: Any = None, parcel: Parcel | None = None) -> Encoded:
    """Put a frame into bytes; see `Frame` for the arguments."""
    stream, fd, about = b"", -1, None
    if parcel is not None:
        stream, fd = parcel.data, parcel.fd
        about = fd >= 0, parcel.spans, parcel.lender, parcel.moved
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
        self._rest = b""  # received, and part of the next frame
        self._fds: list[int] = []  # received, perhaps with the bytes of an earlier frame

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self._socket.fileno()

    @property
    def received(self) -> bool:
        """Whether a frame has come with an earlier one, which a selector does not see; `receive` gives it."""
        return len(self._rest) >= _LENGTHS.size  # all of it may not be there yet, but it is on its way

    def send(self, kind: str, data: Any = None, parcel: Parcel | None = None) -> None:
        """Send one frame; the parcel stays the caller's to close.

        Raises:
            OSError: the other side is gone.
        """
        self.send_encoded(encode(kind, data, parcel))

    def send_encoded(self, frame: Encoded) -> None:
        """Send a frame that other channels may get as well.

        Raises:
            OSError: the other side is gone.
        """
        first, *rest = frame.parts
        if frame.fd >= 0:
            first = first[socket.send_fds(self._socket, [first], [frame.fd]) :]
        self._socket.sendall(first)
        for part in rest:
            self._socket.sendall(part)

    def receive(self) -> Frame:
        """The next frame; waits for it.

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
            return Frame(kind, plain)
        with_fd, spans, lender, moved = about
        return Frame(kind, plain, Parcel(stream, spans, self._fds.pop(0) if with_fd else -1, lender, moved))

    def close(self) -> None:
        """Close the socket, and what came with frames that nobody has taken."""
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
