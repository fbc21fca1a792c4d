"""`FramePort`: reads and writes whole frames on a rank's socket without waiting, and without looking into them."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections import deque
from typing import Final, NamedTuple

from labkit.ipc.channel import FD_SPACE, HEADER_BYTES, frame_sizes

READ_BYTES: Final = 1 << 18


class RawFrame(NamedTuple):
    """A frame as `Channel` transmits it, and the file descriptor that comes along, or -1."""

    data: bytes
    fd: int = -1


class FramePort:
    """One end of a rank's socket.

    Args:
        sock: the socket; it becomes nonblocking.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.setblocking(False)
        self._data = bytearray()
        self._fds: deque[int] = deque()
        self._out: deque[tuple[memoryview, int]] = deque()

    def read(self) -> list[RawFrame]:
        """Return some of the frames that have come; [] if no whole frame has.

        Raises:
            EOFError: the other side has closed the connection, and all frames have been returned.
        """
        frames: list[RawFrame] = []
        count = 0
        while count < READ_BYTES:  # a rank may send without end
            try:
                more, ancillary, _, _ = self.sock.recvmsg(READ_BYTES, FD_SPACE)
            except BlockingIOError:
                break
            except OSError:
                more, ancillary = b"", []
            for _, _, fds in ancillary:
                self._fds.append(int.from_bytes(fds, sys.byteorder))
                os.set_inheritable(self._fds[-1], False)
            if not more:
                if frames:
                    break
                raise EOFError
            count += len(more)
            self._data += more
            frames += self._whole()
        return frames

    def _whole(self) -> list[RawFrame]:
        frames: list[RawFrame] = []
        at = 0
        while len(self._data) - at >= HEADER_BYTES:
            size, with_fd = frame_sizes(bytes(self._data[at : at + HEADER_BYTES]))
            if len(self._data) - at < size:
                break
            frames.append(RawFrame(bytes(self._data[at : at + size]), self._fds.popleft() if with_fd else -1))
            at += size
        del self._data[:at]
        return frames

    def write(self, frame: RawFrame) -> None:
        """Add a frame to what `flush` writes. Its file descriptor is closed once it has been sent."""
        self._out.append((memoryview(frame.data), frame.fd))

    def flush(self) -> bool:
        """Write as much as the socket takes; return whether that was all.

        Raises:
            OSError: the other side has closed the connection.
        """
        while self._out:
            data, fd = self._out[0]
            try:
                done = socket.send_fds(self.sock, [data], [fd]) if fd >= 0 else self.sock.send(data)
            except BlockingIOError:
                return False
            if fd >= 0:
                os.close(fd)
            self._out[0] = data[done:], -1
            if not data[done:]:
                self._out.popleft()
        return True

    def close(self) -> None:
        """Close the socket, and file descriptors that were received or not yet sent."""
        self.sock.close()
        for fd in (*self._fds, *(fd for _, fd in self._out)):
            with contextlib.suppress(OSError):
                if fd >= 0:
                    os.close(fd)
        self._fds.clear()
        self._out.clear()
