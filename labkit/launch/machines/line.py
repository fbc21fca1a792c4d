"""`Line`: a connection between the relay and an agent over a pair of streams: blocks of bytes, urgent ones first.

Large data, such as arguments and results, is cut into parts that are sent between other blocks. Otherwise a machine
that receives 512 MiB would seem to be silent meanwhile. For the same reason, the sockets and programs on the way must
not hold more than the line carries in a moment: the far side reports what it has received, and the sender waits for it.
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
import struct
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from enum import IntEnum
from typing import Final, NamedTuple

from labkit.ipc.pickling import shared_memory

PART_BYTES: Final = 1 << 16  # a line of 0.1 MB/s delays an urgent block by 0.7 s for each part under way
READ_BYTES: Final = 1 << 22  # how much may wait to be parsed
# The agent's first bytes. A shell that reads its user's settings may print before them.
BEGIN: Final = b"\0labkit agent\n"
REPORT_BYTES: Final = 1 << 16  # after so many, the far side reports them
# Between these delays of a report, in seconds, what may be under way stays the same; below it doubles, above it halves.
GOOD_S, BAD_S = 0.05, 0.15
LEAST_BYTES, MOST_BYTES = 1 << 17, 1 << 24  # the limits of that
_TOTAL: Final = struct.Struct("<Q")
_HEADER: Final = struct.Struct("<BIQ")  # kind, number, size in bytes
_PART: Final = struct.Struct("<QQ")  # offset, and size of the whole, in bytes


class FrameKind(IntEnum):
    """What a block holds, and what its number means."""

    CONTROL = 0  # a pickled request or reply; the number of the request
    FRAME = 1  # a frame of a rank's channel; the rank
    OUTPUT = 2  # what a rank has printed; the rank
    RECORDS = 3  # what is new in a rank's ring; the rank
    GONE = 4  # a rank's process has ended, and this is the last block about it; the rank
    TAKEN = 5  # the sizes in bytes of frames and prints that have been passed on; the rank
    PART = 6  # a part of large data; its number
    FORGET = 7  # large data that no frame will need again; its number
    CLOCK = 8  # a question for the time there, or its answer; 0
    STATES = 9  # the states of ranks, pickled; 0
    RECEIVED = 10  # how many bytes of other blocks have arrived so far; 0


class Block(NamedTuple):
    """A block that has arrived."""

    kind: FrameKind
    number: int
    data: bytes


class Line:
    """A connection between the relay and an agent; all methods are called on the thread of its event loop.

    The reader was made with a limit of `READ_BYTES`.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._urgent: deque[bytes] = deque()
        self._ordered: deque[bytes] = deque()
        self._large: deque[tuple[int, memoryview]] = deque()
        self._at = 0  # in the first of `_large`
        self._numbers = itertools.count(1)
        self._waiting = asyncio.Event()
        self._sent = self._reported = 0  # bytes so far, and of these the ones that the far side has received
        self._marks: deque[tuple[int, float]] = deque()  # how many had been sent, and when
        self._most = LEAST_BYTES  # bytes under way
        self._received = self._last_report = 0  # bytes so far, and the last report of them
        self.backlog = 0  # how many bytes of blocks wait to be sent, without large data

    def send(self, kind: FrameKind, number: int = 0, data: bytes = b"", *, urgent: bool = False) -> None:
        """Send a block, after those that were sent before; an urgent one, before all that are not urgent."""
        block = _HEADER.pack(kind, number, len(data)) + data
        self.backlog += len(block)
        (self._urgent if urgent else self._ordered).append(block)
        self._waiting.set()

    def send_large(self, data: memoryview) -> int:
        """Send large data in parts, while other blocks go on; return its number. The data must not change any more."""
        number = next(self._numbers)
        self._large.append((number, data))
        self._waiting.set()
        return number

    def drop_large(self) -> None:
        """Do not send the rest of large data."""
        self._large.clear()
        self._at = 0

    async def write(self) -> None:
        """Write what is sent, until the connection ends with an OSError."""
        while True:
            await self._waiting.wait()
            self._waiting.clear()
            while self._urgent or ((self._ordered or self._large) and self._sent - self._reported < self._most):
                queue = self._urgent or self._ordered
                if queue:
                    block = queue.popleft()
                    self._writer.write(block)
                    if block[0] != FrameKind.RECEIVED:
                        self.backlog -= len(block)
                        self._count(len(block))
                if self._large and not self._urgent:
                    self._write_part()
                await self._writer.drain()

    def _count(self, nbytes: int) -> None:
        self._sent += nbytes
        self._marks.append((self._sent, time.monotonic()))

    def _report(self, total: int) -> None:
        """The far side has received so many bytes."""
        self._reported = total
        delay_s = 0.0
        while self._marks and self._marks[0][0] <= total:
            delay_s = time.monotonic() - self._marks.popleft()[1]
        if delay_s > BAD_S:
            self._most = max(self._most // 2, LEAST_BYTES)
        elif delay_s < GOOD_S:
            self._most = min(self._most * 2, MOST_BYTES)
        self._waiting.set()

    def _write_part(self) -> None:
        number, data = self._large[0]
        part = data[self._at : self._at + PART_BYTES]
        head = _PART.pack(self._at, len(data))
        self._writer.write(_HEADER.pack(FrameKind.PART, number, len(head) + len(part)) + head)
        self._writer.write(part)
        self._count(_HEADER.size + len(head) + len(part))
        self._at += len(part)
        if self._at >= len(data):
            self._large.popleft()
            self._at = 0

    def announce(self) -> None:
        """Write the agent's first bytes."""
        self._writer.write(BEGIN)

    async def begin(self) -> str:
        """Wait for the agent's first bytes; return what the machine has printed before them, or before its end."""
        try:
            return (await self._reader.readuntil(BEGIN))[: -len(BEGIN)].decode(errors="replace")
        except asyncio.IncompleteReadError as error:
            return error.partial.decode(errors="replace")
        except (asyncio.LimitOverrunError, OSError):
            return ""

    async def blocks(self) -> AsyncIterator[Block]:
        """Yield the blocks that arrive, until the connection ends."""
        while True:
            try:
                kind, number, size = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
                data = await self._reader.readexactly(size)
            except (asyncio.IncompleteReadError, OSError):
                return
            if kind == FrameKind.RECEIVED:
                self._report(*_TOTAL.unpack(data))
                continue
            self._received += _HEADER.size + size
            if self._received >= self._last_report + REPORT_BYTES:
                self._last_report = self._received
                self._urgent.append(_HEADER.pack(FrameKind.RECEIVED, 0, _TOTAL.size) + _TOTAL.pack(self._last_report))
                self._waiting.set()
            yield Block(FrameKind(kind), number, data)

    def close(self) -> None:
        """Close the connection; what has not been written yet is lost."""
        self._writer.transport.abort()


class Large:
    """Large data that has arrived or is arriving, by number, each in shared memory.

    It is freed when it is complete, no frame that has come needs it, and no other will.
    """

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}
        self._missing: dict[int, int] = {}  # bytes that are still to come
        self._uses: Counter[int] = Counter()  # frames that have come and are not passed on yet
        self._forgotten: set[int] = set()

    def add(self, number: int, data: bytes) -> bool:
        """Store a part; return whether all have come now."""
        offset, size = _PART.unpack_from(data)
        if number not in self._fds:
            self._fds[number], self._missing[number] = shared_memory(size), size
        view = memoryview(data)[_PART.size :]
        self._missing[number] -= len(view)
        while view.nbytes:
            done = os.pwrite(self._fds[number], view, offset)
            view, offset = view[done:], offset + done
        self._tidy(number)
        return self.complete(number)

    def complete(self, number: int) -> bool:
        """Whether all parts have come."""
        return self._missing.get(number) == 0

    def size(self, number: int) -> int:
        """Return the size of complete data in bytes."""
        return os.fstat(self._fds[number]).st_size

    def fd(self, number: int) -> int:
        """Return a new file descriptor of complete data."""
        return os.dup(self._fds[number])

    def read(self, number: int) -> bytes:
        """Return complete data."""
        with mmap.mmap(self._fds[number], 0, prot=mmap.PROT_READ) as memory:
            return bytes(memory)

    def use(self, number: int) -> None:
        """A frame has come that needs it."""
        self._uses[number] += 1

    def release(self, number: int) -> None:
        """Such a frame has been passed on, or nobody receives it."""
        self._uses[number] -= 1
        self._tidy(number)

    def forget(self, number: int) -> None:
        """No other frame will need it."""
        self._forgotten.add(number)
        self._tidy(number)

    def _tidy(self, number: int) -> None:
        if number in self._forgotten and not self._uses[number] and self.complete(number):
            os.close(self._fds.pop(number))
            del self._missing[number], self._uses[number]
            self._forgotten.remove(number)

    def clear(self) -> None:
        """Free all data."""
        for fd in self._fds.values():
            os.close(fd)
        for kept in (self._fds, self._missing, self._uses, self._forgotten):
            kept.clear()
