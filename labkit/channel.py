"""Frames between notebook and ranks: messages on a socket of this machine, with file descriptors beside them."""

from __future__ import annotations

import os
import pickle
import socket
import struct
from dataclasses import dataclass
from typing import Any, Final

from labkit.wire import Parcel

__all__ = ["Channel", "Frame"]


@dataclass(slots=True)
class Frame:
    """One message: a word that says what it is, small plain data, and perhaps a parcel."""

    kind: str
    data: Any = None
    parcel: Parcel | None = None


_LENGTHS: Final = struct.Struct("<IQ")  # bytes of the head, bytes of the parcel's stream


class Channel:
    """Frames over a stream socket of this machine; file descriptors travel along.

    Args:
        sock: a connected Unix socket, blocking.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self._socket.fileno()

    def send(self, kind: str, data: Any = None, parcel: Parcel | None = None) -> None:
        """Send one frame; the parcel stays the caller's to close.

        Raises:
            OSError: the other side is gone.
        """
        stream, fds = b"", []
        if parcel is not None:
            stream = parcel.data
            fds = [parcel.fd] if parcel.fd >= 0 else []
        head = pickle.dumps((kind, data, None if parcel is None else (parcel.spans, parcel.moved, parcel.defines, len(fds))))
        start = _LENGTHS.pack(len(head), len(stream)) + head
        if fds:
            socket.send_fds(self._socket, [start[:1]], fds)
            start = start[1:]
        if len(stream) < 1 << 16:
            self._socket.sendall(start + stream)
        else:
            self._socket.sendall(start)
            self._socket.sendall(stream)

    def receive(self) -> Frame:
        """The next frame; waits for it.

        Raises:
            EOFError: the other side is gone.
        """
        first, fds, _, _ = socket.recv_fds(self._socket, 1, 1)
        if not first:
            raise EOFError
        for fd in fds:
            os.set_inheritable(fd, False)
        head_size, stream_size = _LENGTHS.unpack(first + self._exactly(_LENGTHS.size - 1))
        kind, data, parcel = pickle.loads(self._exactly(head_size))
        if parcel is None:
            return Frame(kind, data)
        spans, moved, defines, count = parcel
        return Frame(kind, data, Parcel(self._exactly(stream_size), spans, fds[0] if count else -1, moved, defines))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _exactly(self, size: int) -> bytes:
        if size < 1 << 16:
            chunk = self._socket.recv(size, socket.MSG_WAITALL) if size else b""
            if len(chunk) == size:
                return chunk
            if not chunk:
                raise EOFError
        else:
            chunk = b""
        data = bytearray(size)
        data[: len(chunk)] = chunk
        view, at = memoryview(data), len(chunk)
        while at < size:
            count = self._socket.recv_into(view[at:])
            if not count:
                raise EOFError
            at += count
        return bytes(data)
