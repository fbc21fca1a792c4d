"""Where a rank writes and the notebook reads: a ring of fixed-size records in shared memory.

The rank never waits for a reader, and needs no thread or system call to be read: the notebook looks at the same memory whenever
it likes, also while the rank is blocked in C++ and after it was killed. Layout of the buffer:

    header (64 bytes)    bytes of the names area in use; how many operations found no pending slot; when the rank was seen alive
    pending (64 slots)   operations issued and not yet completed: what a stuck or killed rank was doing
    names (256 KiB)      interned strings: span names, places in the code, process groups; a name may have its place beside it
    records              a ring; record i lies in slot i % capacity and is whole once its commit field reads i
"""

from __future__ import annotations

import itertools
import struct
import threading
from _thread import get_native_id
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

__all__ = [
    "CALL", "COMMUNICATION", "COMPUTE", "KINDS", "MEMORY", "MEMORY_KINDS", "ON_CUDA", "OPEN", "RING_BYTES", "ROOTED", "SCALAR",
    "SERVE", "STEP", "STEPS_IN_ALL", "STREAM", "SUM", "TENSORFLOW", "TIMED", "Pending", "RingReader", "RingWriter",
    "place_and_name", "record_dtype",
]  # fmt: skip

KINDS: Final = ("compute", "communication", "step", "scalar", "call")
COMPUTE, COMMUNICATION, STEP, SCALAR, CALL = range(len(KINDS))
ON_CUDA, OPEN, SUM = 1, 2, 4  # flags: timed by the GPU; not completed when the trace was made; stands for several (`thin`)
FLAGS_SHIFT: Final = 16  # they share a word with the kind
SERVE: Final = "serve "  # how the entry begins that an RPC rank makes in the table of what is pending while it computes a call
TENSORFLOW: Final = "tensorflow"  # the group of what TensorFlow waits in: who has come to it, TensorFlow alone knows
STREAM: Final = 0xFFFFFFFF  # in place of the thread that is blocked: a GPU's stream is, and the rank goes on
TIMED: Final = 0xFFFFFFFE  # likewise: it is blocked until a time is up
ROOTED: Final = -2  # in place of a peer, of a collective from or to one rank, its root: this minus that rank
STEPS_IN_ALL: Final = "steps in all"  # the scalar by which `steps` says how long its loop will be
MEMORY: Final = (
    "memory: "  # how the scalars begin that `track_memory` writes, in bytes; then one of these, from what stays to what goes
)
MEMORY_KINDS: Final = ("parameters", "optimizer state", "gradients", "gathered parameters", "activations", "other")

# A compute span fills only the head, in one pack; a communication fills the tail first. The commit number comes last in the
# head, so that a reader in another process never takes a half-written record for a whole one.
HEAD: Final = struct.Struct("<qqIIq")  # start_ns, end_ns, name, kind | flags << FLAGS_SHIFT, commit
TAIL: Final = struct.Struct("<qqqqIIiI")  # wait_start_ns, wait_end_ns, nbytes, match, line, group, peer, what
WORD: Final = struct.Struct("<q")
RECORD_BYTES: Final = HEAD.size + TAIL.size
COMMIT_OFFSET: Final = HEAD.size - WORD.size

# The start comes last: it says that the slot is in use.
PENDING: Final = struct.Struct(
    "<qIIqqIIIiq"
)  # wait_start_ns, thread, what, nbytes, match, name, line, group, peer, start_ns (0: free)
PENDING_WAIT: Final = struct.Struct("<qI")
PENDING_START: Final = PENDING.size - 8
PENDING_SLOTS: Final = 64

CAPACITY: Final = 1 << 18  # a power of two: the slot is a mask away; at 0.4 µs a span the notebook has 0.1 s to look
HEADWAY: Final = CAPACITY // 8  # records that a reader who was overtaken leaves to the rank, which may write them while it copies
IN_FLIGHT: Final = 64  # records that the rank's threads may be writing at one moment
HEADER_BYTES: Final = 64
UNNOTED_AT: Final = 4
ALIVE_AT: Final = 8
NAMES_BYTES: Final = 1 << 18
LONGEST_NAME: Final = 1000  # bytes; what is longer is cut
_AT: Final = "\0"  # between the place of a name and the name
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
        self._unnoted = 0
        self.name("")

    def name(self, text: str) -> int:
        """The number of an interned string; 0, the empty string, once the area is full."""
        number = self._ids.get(text)
        if number is not None:
            return number
        with self._names_lock:
            if text in self._ids:
                return self._ids[text]
            data = text.encode(errors="replace")[:LONGEST_NAME]
            if self._used + len(data) + 2 > NAMES_BYTES:
                return 0
            at = NAMES_AT + self._used
            struct.pack_into("<H", self.buffer, at, len(data))
            self.buffer[at + 2 : at + 2 + len(data)] = data
            self._used += len(data) + 2
            struct.pack_into("<I", self.buffer, 0, self._used)
            self._ids[text] = len(self._ids)
            return self._ids[text]

    def placed(self, name: str, place: str) -> str:
        """A name with a place in the code beside it, at no cost for each record; without one, once half of the area is full."""
        return f"{place}{_AT}{name}" if place and self._used < NAMES_BYTES // 2 else name

    def write(self, name: str, kind: int, start_ns: int, end_ns: int, *, flags: int = 0) -> None:
        """Keep one finished span; `flags` is 0 or `ON_CUDA`."""
        name_id = self.name(name)
        number = self.next_record()
        at = RECORDS_AT + (number & (CAPACITY - 1)) * RECORD_BYTES
        HEAD.pack_into(self.buffer, at, start_ns, end_ns, name_id, kind | flags << FLAGS_SHIFT, number)

    def write_scalar(self, name: str, at_ns: int, value: float) -> None:
        """Keep one value of a curve; it travels in the bits of end_ns."""
        (bits,) = WORD.unpack(struct.pack("<d", value))
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
        what: str = "",
        flags: int = 0,
    ) -> None:
        """Keep one finished communication; see `labkit.trace.Span` for the meaning of each number."""
        name_id, line_id, group_id, what_id = self.name(name), self.name(line), self.name(group), self.name(what)
        number = self.next_record()
        at = RECORDS_AT + (number & (CAPACITY - 1)) * RECORD_BYTES
        WORD.pack_into(self.buffer, at + COMMIT_OFFSET, 0)  # the record that was here loses its tail before its head
        TAIL.pack_into(self.buffer, at + HEAD.size, wait_start_ns, wait_end_ns, nbytes, match, line_id, group_id, peer, what_id)
        HEAD.pack_into(self.buffer, at, start_ns, end_ns, name_id, COMMUNICATION | flags << FLAGS_SHIFT, number)

    def pend(
        self,
        name: str,
        start_ns: int,
        *,
        nbytes: int = 0,
        peer: int = -1,
        group: str = "",
        match: int = 0,
        line: str = "",
        what: str = "",
    ) -> int:
        """Note that an operation was issued.

        Returns:
            the slot that `waiting` and `unpend` ask for; -1, which they ignore, where `PENDING_SLOTS` are pending already.
        """
        try:
            slot = self._free.popleft()
        except IndexError:
            self._unnoted += 1
            struct.pack_into("<I", self.buffer, UNNOTED_AT, self._unnoted)
            return -1
        at = PENDING_AT + slot * PENDING.size
        ids = self.name(name), self.name(line), self.name(group)
        PENDING.pack_into(self.buffer, at, 0, get_native_id(), self.name(what), nbytes, match, *ids, peer, start_ns)
        return slot

    def waiting(self, slot: int, since_ns: int, thread: int = 0) -> None:
        """Note that a thread (default: this one), or another (`STREAM`, `TIMED`), is blocked until an operation completes."""
        if slot >= 0:
            PENDING_WAIT.pack_into(self.buffer, PENDING_AT + slot * PENDING.size, since_ns, thread or get_native_id())

    def unpend(self, slot: int) -> None:
        """Note that a pending operation has completed."""
        if slot >= 0:
            WORD.pack_into(self.buffer, PENDING_AT + slot * PENDING.size + PENDING_START, 0)
            self._free.append(slot)

    def alive(self, now_ns: int) -> None:
        """Note that the rank is alive: who reads the ring after its death knows about when it died."""
        WORD.pack_into(self.buffer, ALIVE_AT, now_ns)

    def has(self, number: int) -> bool:
        """Whether a record was written; or one a whole ring later, in its place."""
        return _commit_at(self.buffer, number) >= number


@dataclass(frozen=True, slots=True)
class Pending:
    """An operation that a rank issued and that has not completed: what it is waiting for, or what runs beside it.

    The numbers mean what they mean in `labkit.trace.Span`; `wait_start_ns` is 0 while the rank is not blocked in it, and `thread`
    is the system's number of the thread that is, or that issued it.
    """

    name: str
    start_ns: int
    wait_start_ns: int
    nbytes: int
    peer: int
    group: str
    match: int
    line: str
    what: str = ""
    thread: int = 0


class RingReader:
    """The notebook's end of one rank's ring.

    Args:
        buffer: the memory that the rank writes.
        first: the number of the record to begin with.
    """

    def __init__(self, buffer: Any, first: int = 1) -> None:
        import numpy  # here, not above: ranks import this module, and a bare rank does without numpy

        self.buffer = buffer
        self._numpy = numpy
        self._dtype = record_dtype()
        self._nothing = numpy.empty(0, self._dtype)
        # Records as rows of words: copied so, they take a twentieth of the time that numpy needs field by field.
        words = RECORD_BYTES // WORD.size
        self._words = numpy.frombuffer(buffer, numpy.int64, CAPACITY * words, RECORDS_AT).reshape(CAPACITY, words)
        self._commits = self._words[:, COMMIT_OFFSET // WORD.size]
        self._next = first
        self.dropped = 0  # records overwritten before they were read
        self._names: list[str] = []
        self._names_read = 0

    def names(self) -> list[str]:
        """All strings interned so far; a record's numbers index this list, if it was read before."""
        (used,) = struct.unpack_from("<I", self.buffer, 0)
        while self._names_read < used:
            at = NAMES_AT + self._names_read
            (size,) = struct.unpack_from("<H", self.buffer, at)
            # A name that was cut may end within a character.
            self._names.append(bytes(self.buffer[at + 2 : at + 2 + size]).decode(errors="ignore"))
            self._names_read += size + 2
        return self._names

    @property
    def unnoted(self) -> int:
        """How many operations so far were not noted as pending, because too many were already."""
        count: int = struct.unpack_from("<I", self.buffer, UNNOTED_AT)[0]
        return count

    @property
    def next_record(self) -> int:
        """The number of the record that will be read next."""
        return self._next

    @property
    def alive_ns(self) -> int:
        """When the rank was last known to be alive; 0 where nobody says."""
        value: int = WORD.unpack_from(self.buffer, ALIVE_AT)[0]
        return value

    def pending(self) -> list[Pending]:
        """The operations issued and not completed at this moment, oldest first."""
        found = []
        for slot in range(PENDING_SLOTS):
            at = PENDING_AT + slot * PENDING.size
            (before,) = WORD.unpack_from(self.buffer, at + PENDING_START)
            if not before:  # as most are, and a run looks at all of them twenty times a second
                continue
            wait_start_ns, thread, what, nbytes, match, name, line, group, peer, start_ns = PENDING.unpack_from(self.buffer, at)
            (after,) = WORD.unpack_from(self.buffer, at + PENDING_START)
            if before == start_ns == after:  # else it was freed, and perhaps taken again, while we looked
                names = self.names()
                texts = names[group], match, names[line], names[what]
                found.append(Pending(names[name], start_ns, wait_start_ns, nbytes, peer, *texts, thread))
        return sorted(found, key=lambda p: p.start_ns)

    def read(self) -> Any:
        """The records completed since the last call: a copy, as an array of `record_dtype()`.

        The rank does not wait, so a record may change while it is looked at. It counts only if its commit number was right before
        the copy and after it, and the rank not near its slot; what was overwritten is counted in `dropped`.
        """
        np = self._numpy
        first = self._next
        commit = self._commit_at(first)
        if commit < first:
            return self._nothing
        if commit == first and self._commit_at(first + 1) <= first:
            alone = self._read_one(first)
            if alone is not None:
                return alone
        if commit > first:
            # The rank has gone once round: take up where there is time to copy before it comes again.
            first = max(first, self._newest(commit) + 1 - CAPACITY + HEADWAY)
        last = self._newest(first - 1)
        numbers = np.arange(first, last + 1)
        slots: Any = slice(first & (CAPACITY - 1), (last & (CAPACITY - 1)) + 1)
        if slots.start >= slots.stop:  # round the end of the ring
            slots = numbers & (CAPACITY - 1)
        finished = self._commits[slots] >= numbers
        records = self._words[slots].copy().view(self._dtype)[:, 0]
        whole = self._commits[slots] == numbers
        oldest_safe = self._newest(last) + 1 - CAPACITY + IN_FLIGHT
        if first < oldest_safe or not (finished.all() and whole.all()):
            whole &= numbers >= oldest_safe
            # What is not finished, another thread is writing, which took its number and was then held up: it will be read later.
            end = len(numbers) if finished.all() else int(finished.argmin())
            records, last = records[:end][whole[:end]], first + end - 1
        self.dropped += last + 1 - self._next - len(records)
        self._next = last + 1
        return records

    def _read_one(self, number: int) -> Any:
        """The only record there is to read, in a fifth of the time that many take; None if it must be read as many are."""
        at = RECORDS_AT + (number & (CAPACITY - 1)) * RECORD_BYTES
        copy = bytearray(self.buffer[at : at + RECORD_BYTES])
        half_round = number + CAPACITY // 2
        if self._commit_at(half_round) >= half_round:  # the rank may have come to the slot while we copied
            return None
        self._next = number + 1
        return self._numpy.frombuffer(copy, self._dtype)

    def _commit_at(self, number: int) -> int:
        return _commit_at(self.buffer, number)

    def _newest(self, low: int) -> int:
        """The newest record written after `low`, within a ring's length of it: by strides that double, then bisection."""
        end, step = low + CAPACITY + 1, 1
        while low + step < end and self._commit_at(low + step) >= low + step:
            low, step = low + step, step * 2
        high = min(low + step, end)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._commit_at(middle) >= middle else (low, middle)
        return low


def place_and_name(text: str) -> tuple[str, str]:
    """The two parts of an interned name; "" for the place of one that has none."""
    place, _, name = text.rpartition(_AT)
    return place, name


def _commit_at(buffer: Any, number: int) -> int:
    at = RECORDS_AT + (number & (CAPACITY - 1)) * RECORD_BYTES + COMMIT_OFFSET
    value: int = WORD.unpack_from(buffer, at)[0]
    return value


def record_dtype() -> Any:
    """The numpy dtype of a record."""
    import numpy as np

    return np.dtype(
        [
            ("start_ns", "<i8"), ("end_ns", "<i8"), ("name", "<u4"), ("kind", "<u2"), ("flags", "<u2"), ("commit", "<i8"),
            ("wait_start_ns", "<i8"), ("wait_end_ns", "<i8"), ("nbytes", "<i8"), ("match", "<i8"),
            ("line", "<u4"), ("group", "<u4"), ("peer", "<i4"), ("what", "<u4"),
        ]
    )  # fmt: skip
