"""`Forwarding`: passes the frames of one rank on, from its socket to the line and back; the same in relay and agent.

Large data goes apart from its frame. A frame waits for its data, and later ones of the rank for the frame; everything
else goes on. How much is under way is bounded: after `WINDOW_BYTES`, the socket is not read until the far side has
passed something on, so that a rank or the notebook blocks as it does on one machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import mmap
import os
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from labkit.ipc.channel import FD_SPACE, HEADER_BYTES, frame_sizes
from labkit.launch.machines.line import FrameKind, Large, Line

WINDOW_BYTES: Final = 1 << 20
READ_BYTES: Final = 1 << 18
LARGE_BYTES: Final = 1 << 16  # frames of this size or more are sent in parts
KEEP_S: Final = 1.0  # how long data that was sent to a machine is remembered: frames with the same arguments follow at once
_DATA: Final = struct.Struct("<II")  # numbers of large data: the frame itself, and its segment; 0 for none
TAKEN: Final = struct.Struct("<QQ")  # bytes of frames, and of prints


class RawFrame(NamedTuple):
    """A frame as `Channel` transmits it, and the file descriptor that comes along, or -1."""

    data: bytes
    fd: int = -1


class FramePort:
    """One end of a rank's socket: reads and writes whole frames without waiting, and without looking into them."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.setblocking(False)
        self._data = bytearray()
        self._fds: deque[int] = deque()
        self._out: deque[tuple[memoryview, int]] = deque()

    def read(self) -> list[RawFrame]:
        """Return some of the frames that have come, perhaps none.

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
        """Write as much as the socket takes; return whether that was all. OSError: the other side has closed it."""
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


class Segments:
    """Sends large data over a line, once if several ranks get the same."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._known: dict[object, tuple[int, int, float]] = {}  # number of the data, a descriptor, and when it was last used

    def send_fd(self, fd: int) -> int:
        """Send the segment of a file descriptor, which is closed; return the number of the data."""
        key = os.fstat(fd).st_ino  # of anonymous memory: unique as long as a descriptor is open
        return self._send(key, fd, lambda: memoryview(mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)))

    def send_frame(self, data: bytes) -> int:
        """Send a large frame; return the number of the data."""
        return self._send(hashlib.blake2b(data).digest(), -1, lambda: memoryview(data))

    def _send(self, key: object, fd: int, view: Callable[[], memoryview]) -> int:
        if key in self._known:
            number, kept, _ = self._known[key]
            if fd >= 0:
                os.close(fd)
        else:
            number, kept = self._line.send_large(view()), fd
        self._known[key] = number, kept, time.monotonic()
        return number

    def tidy(self) -> None:
        """Forget what has not been used for a while, here and on the far side."""
        for key, (number, fd, used_s) in list(self._known.items()):
            if time.monotonic() > used_s + KEEP_S:
                del self._known[key]
                self._line.send(FrameKind.FORGET, number)
                if fd >= 0:
                    os.close(fd)

    def clear(self) -> None:
        """Forget all; the far side does so, too."""
        for _, fd, _ in self._known.values():
            if fd >= 0:
                os.close(fd)
        self._known.clear()


class Forwarding:
    """Passes the frames of one rank on.

    `port` is this side's end of the rank's channel, and `large` has the data that has come over the line. `segments`
    sends data that several ranks may share; without it, each datum is sent once and then forgotten. `before` is called
    before each frame from the socket is passed on, and `closed` when the socket's other side has closed it.
    """

    def __init__(
        self,
        number: int,
        port: FramePort,
        line: Line,
        segments: Segments | None,
        large: Large,
        *,
        before: Callable[[], object] = lambda: None,
        closed: Callable[[], None] = lambda: None,
    ) -> None:
        self._number, self._port, self._line, self._segments, self._large = number, port, line, segments, large
        self._before, self._closed = before, closed
        self._loop = asyncio.get_running_loop()
        self._fd = port.sock.fileno()
        self._under_way = 0  # bytes sent over the line that the far side has not passed on yet
        self._arrived: deque[tuple[bytes, int, int] | Callable[[], None]] = deque()
        self._unacknowledged = 0  # bytes written to the socket's queue
        self._reading = self._writing = False
        self._open = True
        self._read_on()

    def _read_on(self) -> None:
        if self._open and not self._reading and self._under_way <= WINDOW_BYTES:
            self._reading = True
            self._loop.add_reader(self._fd, self.read)

    def _pause(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def read(self) -> None:
        """Pass on the frames that have come from the socket."""
        try:
            self._read()
        except EOFError:
            self._pause()
            self._closed()

    def read_all(self) -> None:
        """Pass on all frames that come before the socket's other side has closed it, or that have come so far."""
        with contextlib.suppress(EOFError):
            while self._read():
                pass

    def _read(self) -> bool:
        frames = self._port.read() if self._open else []
        for frame in frames:
            self._before()
            self._send(frame)
        if self._under_way > WINDOW_BYTES:
            self._pause()
        return bool(frames)

    def _send(self, frame: RawFrame) -> None:
        data, fd = frame
        segment = own = 0
        size = len(data)
        if fd >= 0:
            size += os.fstat(fd).st_size
            segment = self._send_fd(fd)
        if len(data) >= LARGE_BYTES:
            own = self._segments.send_frame(data) if self._segments is not None else self._line.send_large(memoryview(data))
            data = b""
        self._under_way += size
        self._line.send(FrameKind.FRAME, self._number, _DATA.pack(own, segment) + data)

    def _send_fd(self, fd: int) -> int:
        if self._segments is not None:
            return self._segments.send_fd(fd)
        number = self._line.send_large(memoryview(mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)))
        os.close(fd)
        return number

    def taken(self, nbytes: int) -> None:
        """The far side has passed on this many bytes of frames."""
        self._under_way -= nbytes
        self._read_on()

    def deliver(self, data: bytes) -> None:
        """Pass on a frame that has come over the line."""
        large = _DATA.unpack_from(data)
        for number in filter(None, large):
            self._large.use(number)
            if self._segments is not None:  # in the relay: each datum of an agent belongs to one frame
                self._large.forget(number)
        self._arrived.append((data[_DATA.size :], *large))
        self.write()

    def afterwards(self, action: Callable[[], None]) -> None:
        """Do something once all frames that have come so far are passed on."""
        self._arrived.append(action)
        self.write()

    def write(self) -> None:
        """Pass on to the socket what is complete, as much as it takes."""
        if not self._open:
            return
        try:
            while True:
                done = self._port.flush()
                if done and self._unacknowledged:
                    self._line.send(FrameKind.TAKEN, self._number, TAKEN.pack(self._unacknowledged, 0), urgent=True)
                    self._unacknowledged = 0
                self._wait_for_room(not done)
                if not done or not self._arrived or not self._next():
                    return
        except OSError:  # the other side has closed the socket: reading notices that
            self._wait_for_room(False)
            self._skip_frames()

    def _next(self) -> bool:
        """Write the next frame to the port's queue, or do what comes next; return whether that was possible."""
        first = self._arrived[0]
        if callable(first):
            self._arrived.popleft()
            first()
            return self._open
        data, own, segment = first
        if not all(self._large.complete(number) for number in (own, segment) if number):
            return False
        self._arrived.popleft()
        data = self._large.read(own) if own else data
        fd = self._large.fd(segment) if segment else -1
        self._unacknowledged += len(data) + (self._large.size(segment) if segment else 0)
        self._release(own, segment)
        self._port.write(RawFrame(data, fd))
        return True

    def _release(self, *numbers: int) -> None:
        for number in filter(None, numbers):
            self._large.release(number)

    def _skip_frames(self) -> None:
        """Do what remains to be done after frames that nobody receives any more."""
        while self._arrived:
            first = self._arrived.popleft()
            if callable(first):
                first()
            else:
                self._release(*first[1:])

    def _wait_for_room(self, wait: bool) -> None:
        if wait and not self._writing:
            self._loop.add_writer(self._fd, self.write)
        elif not wait and self._writing:
            self._loop.remove_writer(self._fd)
        self._writing = wait

    def close(self) -> None:
        """Close the port."""
        if self._open:
            self._pause()
            self._wait_for_room(False)
            self._open = False
            self._port.close()
            for first in self._arrived:
                if not callable(first):
                    self._release(*first[1:])
            self._arrived.clear()
