"""`Channel`: sends and receives messages over a Unix socket, with a file descriptor attached where needed.

A frame is a header of fixed size, the regions of its payload, its body, and its payload's stream. The header says all
that is needed to pass the frame on: nothing has to be unpickled for that.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from typing import Final

from labkit.ipc.pickling import Payload
from labkit.ipc.protocol import Frame, Message, decode, encode

# The kind of message, flags, the number of regions, the sizes in bytes of body and stream, and the payload's owner.
_HEADER: Final = struct.Struct("<BBIIQi")
_REGION: Final = struct.Struct("<QQ")
_PAYLOAD, _WITH_FD, _COPIED_FROM_GPU = 1, 2, 4  # flags
AT_ONCE: Final = 1 << 14  # bytes per `recvmsg`, so that nearly every message takes one call to send and one to receive
FD_SPACE: Final = socket.CMSG_LEN(struct.calcsize("i"))
HEADER_BYTES: Final = _HEADER.size


class Channel:
    """Sends and receives messages over a Unix socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._rest = b""  # received bytes that belong to the next frame
        self._fds: list[int] = []  # received file descriptors; they may arrive with the bytes of an earlier frame

    def fileno(self) -> int:
        """Return the socket's file descriptor, for selectors."""
        return self._socket.fileno()

    @property
    def received(self) -> bool:
        """Whether another message was received together with the last one, which a selector cannot notice."""
        return len(self._rest) >= _HEADER.size  # the rest of it may still be on its way

    def send(self, message: Message) -> None:
        """Send one message. The caller remains responsible for closing its payload."""
        self.send_frame(encode(message))

    def receive(self) -> Message:
        """Wait for the next message and return it; an `EOFError` if the other side has closed the connection."""
        return decode(self.receive_frame())

    def send_frame(self, frame: Frame) -> None:
        """Send a frame; an `OSError` if the other side has closed the connection."""
        kind, body, payload = frame
        if payload is None:
            self._socket.sendall(_HEADER.pack(kind, 0, 0, len(body), 0, 0) + body)
            return
        regions, stream, fd = payload.regions, payload.data, payload.fd
        flags = _PAYLOAD | (_WITH_FD if fd >= 0 else 0) | (_COPIED_FROM_GPU if payload.copied_from_gpu else 0)
        first = _HEADER.pack(kind, flags, len(regions), len(body), len(stream), payload.owner_pid)
        first += b"".join(_REGION.pack(*region) for region in regions) + body if regions else body
        if len(stream) <= AT_ONCE:
            first, stream = first + stream, b""
        if fd >= 0:
            first = first[socket.send_fds(self._socket, [first], [fd]) :]
        self._socket.sendall(first)
        if stream:
            self._socket.sendall(stream)

    def receive_frame(self) -> Frame:
        """Wait for the next frame and return it; an `EOFError` as for `receive`."""
        data = self._rest
        while len(data) < _HEADER.size:
            data = self._receive_more(data)
        kind, flags, regions, body_size, stream_size, owner_pid = _HEADER.unpack_from(data)
        body_at = _HEADER.size + regions * _REGION.size
        stream_at = body_at + body_size
        if len(data) < stream_at:
            data = self._complete(data, stream_at)
        end = stream_at + stream_size
        body, self._rest = data[body_at:stream_at], data[end:]
        if not flags & _PAYLOAD:
            return Frame(kind, body, None)
        stream = data[stream_at:end] if len(data) >= end else self._complete(data[stream_at:], stream_size)
        where = [*_REGION.iter_unpack(data[_HEADER.size : body_at])] if regions else []
        fd = self._fds.pop(0) if flags & _WITH_FD else -1
        return Frame(kind, body, Payload(stream, where, fd, owner_pid, bool(flags & _COPIED_FROM_GPU)))

    def close(self) -> None:
        """Close the socket, and received file descriptors that belong to no message yet."""
        self._socket.close()
        while self._fds:
            os.close(self._fds.pop())

    def _receive_more(self, data: bytes) -> bytes:
        """Return data with some more bytes behind them."""
        more, ancillary, _, _ = self._socket.recvmsg(AT_ONCE, FD_SPACE)
        for _, _, fds in ancillary:
            self._fds.append(int.from_bytes(fds, sys.byteorder))
            os.set_inheritable(self._fds[-1], False)
        if not more:
            raise EOFError
        return data + more

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


def frame_sizes(header: bytes) -> tuple[int, bool]:
    """Return the size in bytes of the frame that starts with this header, and whether a file descriptor comes along."""
    _, flags, regions, body_size, stream_size, _ = _HEADER.unpack_from(header)
    return _HEADER.size + regions * _REGION.size + body_size + stream_size, bool(flags & _WITH_FD)
