"""Where a rank writes and the notebook reads: a ring of fixed-size records in shared memory.

The rank never waits for a reader, and needs no thread or system call to be read: the notebook looks at the same memory whenever
it likes, also while the rank is blocked in C++ and after it was killed. Layout of the buffer:

    header (64 bytes)    bytes of the names area in use; state word
    pending (64 slots)   operations issued and not yet completed: what a stuck or killed rank was doing
    names (256 KiB)      interned strings: span names, places in the code, process groups
    records              a ring; record i lies in slot i % capacity and is whole once its commit field reads i
"""

from __future__ import annotations

import itertools
import struct
import threading
from collections import deque
from typing import Any, Final

__all__ = ["CALL", "COMMUNICATION", "COMPUTE", "KINDS", "RING_BYTES", "SCALAR", "STEP", "Pending", "RingReader", "RingWriter", "record_dtype"]

KINDS: Final = ("compute", "communication", "step", "scalar", "call")
COMPUTE, COMMUNICATION, STEP, SCALAR, CALL = range(len(KINDS))

# A compute span fills only the head, in one pack; a communication fills the tail first. The commit number comes last in the
# head, so that a reader in another process never takes a half-written record for a whole one.
HEAD: Final = struct.Struct("<qqIIq")  # start_ns, end_ns, name, kind, commit
TAIL: Final = struct.Struct("<qqqqIIii")  # wait_start_ns, wait_end_ns, nbytes, match, line, group, peer, flags
RECORD_BYTES: Final = HEAD.size + TAIL.size
COMMIT_OFFSET: Final = HEAD.size - 8

# start_ns (0: free), wait_start_ns, nbytes, match, name, line, group, peer
PENDING: Final = struct.Struct("<qqqqIIIi")
PENDING_SLOTS: Final = 64

CAPACITY: Final = 1 << 17  # a power of two: the slot is a mask away; at 1 µs a span the notebook has 0.13 s to look
HEADER_BYTES: Final = 64
NAMES_BYTES: Final = 1 << 18
PENDING_AT: Final = HEADER_BYTES
NAMES_AT: Final = PENDING_AT + PENDING_SLOTS * PENDING.size
RECORDS_AT: Final = NAMES_AT + NAMES_BYTES
RING_BYTES: Final = RECORDS_AT + CAPACITY * RECORD_BYTES  # untouched pages cost nothing

assert HEAD.size == 32 and TAIL.size == 48


class RingWriter:
    """The rank's end. Any thread may write.

    Args:
        buffer: writable shared memory of `RING_BYTES` bytes, zeroed.
    """

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        self.next_record = itertools.count(1).__next__  # atomic under the interpreter's lock
        self._ids: dict[str, int] = {}
        self._used = 0
        self._names_lock = threading.Lock()
        self._free = deque(range(PENDING_SLOTS))
        self.name("")

    def name(self, text: str) -> int:
        """The number of an interned string; 0, the empty string, once the area is full."""
        number = self._ids.get(text)
        if number is not None:
            return number
        with self._names_lock:
            if text in self._ids:
                return self._ids[text]
            data = text.encode(errors="replace")[:1000]
            if self._used + len(data) + 2 > NAMES_BYTES:
                return 0
            at = NAMES_AT + self._used
            struct.pack_into("<H", self.buffer, at, len(data))
            self.buffer[at + 2 : at + 2 + len(data)] = data
            self._used += len(data) + 2
            struct.pack_into("<I", self.buffer, 0, self._used)
            self._ids[text] = len(self._ids)
            return self._ids[text]

    def write(self, name: str, kind: int, start_ns: int, end_ns: int) -> None:
        """Keep one finished span."""
        number = self.next_record()
        at = RECORDS_AT + (number & (CAPACITY - 1)) * RECORD_BYTES
        HEAD.pack_into(self.buffer, at, start_ns, end_ns, self.name(name), kind, number)

    def write_scalar(self, name: str, at_ns: int, value: float) -> None:
        """Keep one value of a curve; it travels in the bits of end_ns."""
        (bits,) = struct.unpack("<q", struct.pack("<d", value))
        self.write(name, SCALAR, at_ns, bits)

    def write_communication(
        self,
        name: str,
        start_ns: int,
        end_ns: int,
        *,
        wait_start_ns: int = 0,
        wait_end_ns: int = 0,
        nbytes: int = 0,
        peer: int = -1,
        group: str = "",
        match: int = 0,
        line: str = "",
        flags: int = 0,
    ) -> None:
        """Keep one finished communication; see `labkit.trace.Span` for the meaning of each number."""
        number = self.next_record()
        at = RECORDS_AT + (number & (CAPACITY - 1)) * RECORD_BYTES
        TAIL.pack_into(
            self.buffer, at + HEAD.size,
            wait_start_ns, wait_end_ns, nbytes, match, self.name(line), self.name(group), peer, flags,
        )  # fmt: skip
        HEAD.pack_into(self.buffer, at, start_ns, end_ns, self.name(name), COMMUNICATION, number)

    def pend(
        self, name: str, start_ns: int, *, nbytes: int = 0, peer: int = -1, group: str = "", match: int = 0, line: str = ""
    ) -> int:
        """Note that an operation was issued; the number returned goes to `waiting` and `unpend`. -1 where 64 are pending already."""
        try:
            slot = self._free.popleft()
        except IndexError:
            return -1
        at = PENDING_AT + slot * PENDING.size
        ids = self.name(name), self.name(line), self.name(group)
        PENDING.pack_into(self.buffer, at, start_ns, 0, nbytes, match, *ids, peer)
        return slot

    def waiting(self, slot: int, since_ns: int) -> None:
        """Note that the rank is now blocked until a pending operation completes."""
        if slot >= 0:
            struct.pack_into("<q", self.buffer, PENDING_AT + slot * PENDING.size + 8, since_ns)

    def unpend(self, slot: int) -> None:
        """Note that a pending operation has completed."""
        if slot >= 0:
            struct.pack_into("<q", self.buffer, PENDING_AT + slot * PENDING.size, 0)
            self._free.append(slot)


class Pending:
    """An operation that a rank issued and that has not completed: what it is waiting for, or what runs beside it."""

    __slots__ = ("group", "line", "match", "name", "nbytes", "peer", "start_ns", "wait_start_ns")

    def __init__(self, values: tuple[int, ...], names: list[str]) -> None:
        self.start_ns, self.wait_start_ns, self.nbytes, self.match = values[:4]
        self.name, self.line, self.group = (names[i] if i < len(names) else "" for i in values[4:7])
        self.peer = values[7]


class RingReader:
    """The notebook's end of one rank's ring.

    Args:
        buffer: the memory that the rank writes.
    """

    def __init__(self, buffer: Any) -> None:
        import numpy  # here, not above: ranks import this module, and a bare rank does without numpy

        self.buffer = buffer
        self._numpy = numpy
        self._records = numpy.frombuffer(buffer, record_dtype(), CAPACITY, RECORDS_AT)
        self._next = 1
        self.dropped = 0  # records overwritten before they were read
        self._names: list[str] = []
        self._names_read = 0

    def names(self) -> list[str]:
        """All strings interned so far; a record's numbers index this list."""
        (used,) = struct.unpack_from("<I", self.buffer, 0)
        while self._names_read < used:
            at = NAMES_AT + self._names_read
            (size,) = struct.unpack_from("<H", self.buffer, at)
            self._names.append(bytes(self.buffer[at + 2 : at + 2 + size]).decode())
            self._names_read += size + 2
        return self._names

    def pending(self) -> list[Pending]:
        """The operations issued and not completed at this moment, oldest first."""
        names = self.names()
        slots = (PENDING.unpack_from(self.buffer, PENDING_AT + i * PENDING.size) for i in range(PENDING_SLOTS))
        return sorted((Pending(v, names) for v in slots if v[0]), key=lambda p: p.start_ns)

    def read(self) -> Any:
        """The records completed since the last call: a copy, as an array of `record_dtype()`."""
        for _ in range(3):
            first = self._next
            commit = self._commit_at(first)
            if commit > first:
                # The rank has gone once round, so this record is lost; take up half a ring behind the newest, with room to spare.
                self._next = commit - CAPACITY // 2
                self.dropped += self._next - first
                continue
            last = self._last_whole()
            slot, count = first & (CAPACITY - 1), last - first + 1
            head = self._records[slot : slot + count]
            records = self._numpy.concatenate([head, self._records[: count - len(head)]])
            self._next = last + 1
            whole = records["commit"] == self._numpy.arange(first, last + 1)
            self.dropped += int(count - whole.sum())  # overwritten while they were copied
            return records[whole]
        return self._records[:0].copy()

    def _commit_at(self, number: int) -> int:
        at = RECORDS_AT + (number & (CAPACITY - 1)) * RECORD_BYTES + COMMIT_OFFSET
        value: int = struct.unpack_from("<q", self.buffer, at)[0]
        return value

    def _last_whole(self) -> int:
        """The newest record such that all up to it are whole: strides that double, then bisection."""
        low, step = self._next - 1, 1
        while step < CAPACITY and self._commit_at(low + step) == low + step:
            low, step = low + step, step * 2
        high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._commit_at(middle) == middle else (low, middle)
        return low


def record_dtype() -> Any:
    """The numpy dtype of a record."""
    import numpy as np

    return np.dtype(
        [
            ("start_ns", "<i8"), ("end_ns", "<i8"), ("name", "<u4"), ("kind", "<u4"), ("commit", "<i8"),
            ("wait_start_ns", "<i8"), ("wait_end_ns", "<i8"), ("nbytes", "<i8"), ("match", "<i8"),
            ("line", "<u4"), ("group", "<u4"), ("peer", "<i4"), ("flags", "<i4"),
        ]
    )  # fmt: skip
