"""A ring of fixed-size records in shared memory, written by a rank and read by the notebook.

The rank never waits for a reader, and reading takes no thread or system call in the rank. The notebook can read the
memory at any time, even while the rank is blocked in C++ or after it was killed. Layout of the buffer:

    header (64 bytes)    bytes in use in the names area; how many operations found no pending slot; when the rank was
                         last known to be alive; which names found no room (`NO_ROOM`); how many of its threads serve
                         calls
    pending (1024 slots) operations issued and not yet completed: what a stuck or killed rank was doing
    names (1 MiB)        interned strings: span names, lines of code, process groups; a name may be stored together with
                         its line
    records              a ring; record i is in slot i % capacity and is complete once its commit field is i
"""

from __future__ import annotations

import itertools
import struct
import threading
from _thread import get_native_id
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from labkit.recording.record_writers import compiled_pend, compiled_write_communication
from labkit.recording.ring_layout import (  # fmt: skip
    ALIVE_AT,
    CAPACITY,
    COMMIT_OFFSET,
    HEAD,
    HEADWAY,
    IN_FLIGHT,
    LONGEST_NAME,
    NAMES_AT,
    NAMES_BYTES,
    NO_ROOM,
    NO_ROOM_AT,
    PENDING,
    PENDING_AT,
    PENDING_ORDER,
    PENDING_SLOTS,
    PENDING_START,
    PENDING_WAIT,
    PLACED_LIMIT,
    RECORD_BYTES,
    RECORDS_AT,
    SCALARS_LIMIT,
    SERVING_AT,
    SIGNATURES_LIMIT,
    SPANS_LIMIT,
    UNNOTED_AT,
    WORD,
    record_dtype,
)
from labkit.recording.schema import CPU, SCALAR, Field, Pending

__all__ = ["OTHER_SCALARS", "OTHER_SPANS", "RingReader", "RingWriter", "pending_of", "place_and_name"]

_pack_head = HEAD.pack_into
OTHER_SPANS, OTHER_SCALARS = "(other spans)", "(other values)"
_AT: Final = "\0"  # separates a name's line of code from the name


class RingWriter:
    """The rank's end of its ring; thread-safe.

    Args:
        buffer: writable shared memory: `RING_BYTES` bytes, initially zero.
    """

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        # Returns the number and the offset of the next record, in one step under the GIL.
        self.next_slot = zip(itertools.count(1), _places(), strict=False).__next__
        self.ids: dict[str, int] = {}
        self._used = 0
        self._names_lock = threading.Lock()
        self._free = deque(reversed(range(PENDING_SLOTS)))  # reuses the same few slots: untouched memory costs nothing
        self._unnoted = self._no_room = 0
        self.communications = self.failures = 0  # how many were written; how many of these had failed
        self.serving_threads: set[int] = set()  # threads that are executing a call from another rank
        self.name("")

    def name(self, text: str) -> int:
        """Return the number of an interned string; 0, which is the empty string, once the area is full."""
        number = self.ids.get(text)
        if number is not None:
            return number
        with self._names_lock:
            if text in self.ids:
                return self.ids[text]
            data = text.encode(errors="replace")[:LONGEST_NAME]
            if self._used + len(data) + 2 > NAMES_BYTES:
                self._note_no_room("groups")
                return 0
            at = NAMES_AT + self._used
            struct.pack_into("<H", self.buffer, at, len(data))
            self.buffer[at + 2 : at + 2 + len(data)] = data
            self._used += len(data) + 2
            struct.pack_into("<I", self.buffer, 0, self._used)
            self.ids[text] = len(self.ids)
            return self.ids[text]

    def _note_no_room(self, kind: str) -> None:
        self._no_room |= 1 << NO_ROOM.index(kind)
        struct.pack_into("<I", self.buffer, NO_ROOM_AT, self._no_room)

    def placed(self, name: str, place: str = "") -> str:
        """Return a span's name with its line of code; without it if there are many names, `OTHER_SPANS` if too many."""
        if place and self._used < PLACED_LIMIT:
            return f"{place}{_AT}{name}"
        return self._known_or(name, SPANS_LIMIT, OTHER_SPANS, "spans")

    def _known_or(self, name: str, limit: int, instead: str, kind: str) -> str:
        """Return a name if it is known or there is room for it; otherwise `instead`."""
        if self._used < limit or name in self.ids:
            return name
        self._note_no_room(kind)
        return instead

    def write(self, name: str, kind: int, start_ns: int, end_ns: int, *, device: int = CPU, flags: int = 0) -> None:
        """Record a finished span."""
        ids = self.ids
        name_id = ids[name] if name in ids else self.name(name)
        number, at = self.next_slot()
        _pack_head(self.buffer, at, start_ns, end_ns, name_id, kind, device, flags, number)

    def write_scalar(self, name: str, at_ns: int, value: float) -> None:
        """Record one value of a curve; it is stored in the bits of end_ns."""
        (bits,) = WORD.unpack(struct.pack("<d", value))
        self.write(self._known_or(name, SCALARS_LIMIT, OTHER_SCALARS, "values"), SCALAR, at_ns, bits)

    write_communication = compiled_write_communication()
    pend = compiled_pend()

    def rare_name(self, text: str, kind: str) -> int:
        """Return the number of a string that the program chooses; that of "" if its kind has no room left."""
        return self.name(self._known_or(text, SIGNATURES_LIMIT, "", kind))

    def free_slot(self) -> int:
        """Return a free slot for a pending operation; -1 if all are taken."""
        try:
            return self._free.pop()
        except IndexError:
            self._unnoted += 1
            struct.pack_into("<I", self.buffer, UNNOTED_AT, self._unnoted)
            return -1

    def waiting(self, slot: int, since_ns: int, thread: int = 0) -> None:
        """Record that a thread (default: this one), or `STREAM` or `TIMED`, is blocked until an operation completes."""
        if slot >= 0:
            PENDING_WAIT.pack_into(self.buffer, PENDING_AT + slot * PENDING.size, since_ns, thread or get_native_id())

    def unpend(self, slot: int) -> None:
        """Record that a pending operation has completed."""
        if slot >= 0:
            WORD.pack_into(self.buffer, PENDING_AT + slot * PENDING.size + PENDING_START, 0)
            self._free.append(slot)

    @property
    def in_progress(self) -> bool:
        """Whether operations are pending."""
        return len(self._free) < PENDING_SLOTS

    def alive(self, now_ns: int) -> None:
        """Record that the rank is alive: after its death, readers know approximately when it died."""
        WORD.pack_into(self.buffer, ALIVE_AT, now_ns)

    def serving(self, threads: int) -> None:
        """Record how many threads of this rank execute calls from other ranks, even after its function has returned."""
        struct.pack_into("<I", self.buffer, SERVING_AT, threads)

    def has(self, number: int) -> bool:
        """Return whether a record was written, or the one that replaces it a whole ring later."""
        return _commit_at(self.buffer, number) >= number


class RingReader:
    """The notebook's end of one rank's ring.

    Args:
        buffer: the memory that the rank writes to.
        first: the number of the first record to read.
    """

    def __init__(self, buffer: Any, first: int = 1) -> None:
        import numpy  # imported here because ranks import this module, and a bare rank runs without numpy

        self.buffer = buffer
        self._numpy = numpy
        self._dtype = record_dtype()
        self._nothing = numpy.empty(0, self._dtype)
        # Records as rows of words: copying these takes a twentieth of the time that numpy needs field by field.
        words = RECORD_BYTES // WORD.size
        self._pending_starts = numpy.ndarray(PENDING_SLOTS, numpy.int64, buffer, PENDING_AT + PENDING_START, PENDING.size)
        self._words = numpy.frombuffer(buffer, numpy.int64, CAPACITY * words, RECORDS_AT).reshape(CAPACITY, words)
        self._commits = self._words[:, COMMIT_OFFSET // WORD.size]
        self._next = first
        self.dropped = 0  # records overwritten before they were read
        self._names: list[str] = []
        self._names_read = 0

    def names(self) -> list[str]:
        """Return all strings interned so far; the numbers in a record that was read before this call are its indices.

        Raises:
            ValueError: the names area is damaged.
        """
        (used,) = struct.unpack_from("<I", self.buffer, 0)
        if used > NAMES_BYTES:
            raise ValueError("its names are damaged")
        while self._names_read < used:
            at = NAMES_AT + self._names_read
            (size,) = struct.unpack_from("<H", self.buffer, at)
            # A cut name may end inside a character.
            self._names.append(bytes(self.buffer[at + 2 : at + 2 + size]).decode(errors="ignore"))
            self._names_read += size + 2
        return self._names

    @property
    def unnoted(self) -> int:
        """How many operations so far were not recorded as pending, because no slot was free."""
        count: int = struct.unpack_from("<I", self.buffer, UNNOTED_AT)[0]
        return count

    @property
    def no_room(self) -> list[str]:
        """The kinds of names, from `NO_ROOM`, that have found no room."""
        bits: int = struct.unpack_from("<I", self.buffer, NO_ROOM_AT)[0]
        return [kind for place, kind in enumerate(NO_ROOM) if bits >> place & 1] if bits else []

    @property
    def next_record(self) -> int:
        """The number of the next record to read."""
        return self._next

    @property
    def serving(self) -> int:
        """How many threads of the rank execute calls from other ranks."""
        count: int = struct.unpack_from("<I", self.buffer, SERVING_AT)[0]
        return count

    @property
    def alive_ns(self) -> int:
        """When the rank was last known to be alive; 0 if it was never recorded."""
        value: int = WORD.unpack_from(self.buffer, ALIVE_AT)[0]
        return value

    def pending(self) -> list[Pending]:
        """Return the operations that are issued and not completed at this moment, oldest first."""
        found = []
        for slot in self._numpy.flatnonzero(self._pending_starts).tolist():
            at = PENDING_AT + slot * PENDING.size
            (before,) = WORD.unpack_from(self.buffer, at + PENDING_START)
            wait_start_ns, thread, *values, start_ns = PENDING.unpack_from(self.buffer, at)
            (after,) = WORD.unpack_from(self.buffer, at + PENDING_START)
            if before and before == start_ns == after:  # otherwise it was freed, and perhaps reused, meanwhile
                given = zip(PENDING_ORDER, values, strict=True)
                found.append(pending_of(given, self.names(), start_ns, wait_start_ns, thread))
        return sorted(found, key=lambda p: p.start_ns)

    def read(self) -> Any:
        """Return a copy of the records completed since the last call, as an array of `record_dtype()`.

        The rank does not wait, so a record may change during the copy. A record is returned only if its commit number
        was right before and after the copy, and the rank was not close to its slot. Overwritten records are counted in
        `dropped`.
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
            # The rank has lapped the reader: resume where there is time to copy before it comes round again.
            first = max(first, self._newest(commit) + 1 - CAPACITY + HEADWAY)
        last = self._newest(first - 1)
        numbers = np.arange(first, last + 1)
        slots: Any = slice(first & (CAPACITY - 1), (last & (CAPACITY - 1)) + 1)
        if slots.start >= slots.stop:  # wraps around the end of the ring
            slots = numbers & (CAPACITY - 1)
        finished = self._commits[slots] >= numbers
        records = self._words[slots].copy().view(self._dtype)[:, 0]
        whole = self._commits[slots] == numbers
        oldest_safe = self._newest(last) + 1 - CAPACITY + IN_FLIGHT
        if first < oldest_safe or not (finished.all() and whole.all()):
            whole &= numbers >= oldest_safe
            # An unfinished record belongs to a thread that took its number and was then delayed: it will be read later.
            end = len(numbers) if finished.all() else int(finished.argmin())
            records, last = records[:end][whole[:end]], first + end - 1
        self.dropped += last + 1 - self._next - len(records)
        self._next = last + 1
        return records

    def _read_one(self, number: int) -> Any:
        """Return the only unread record, in a fifth of the usual time; None if it must be read in the usual way."""
        at = RECORDS_AT + (number & (CAPACITY - 1)) * RECORD_BYTES
        copy = bytearray(self.buffer[at : at + RECORD_BYTES])
        half_round = number + CAPACITY // 2
        if self._commit_at(half_round) >= half_round:  # the rank may have reached the slot during the copy
            return None
        self._next = number + 1
        return self._numpy.frombuffer(copy, self._dtype)

    def _commit_at(self, number: int) -> int:
        return _commit_at(self.buffer, number)

    def _newest(self, low: int) -> int:
        """Find the newest record after `low`, at most a ring's length later, by doubling strides and then bisection."""
        end, step = low + CAPACITY + 1, 1
        while low + step < end and self._commit_at(low + step) >= low + step:
            low, step = low + step, step * 2
        high = min(low + step, end)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._commit_at(middle) >= middle else (low, middle)
        return low


def place_and_name(text: str) -> tuple[str, str]:
    """Split an interned name into its line of code, which is "" if it has none, and the name."""
    place, _, name = text.rpartition(_AT)
    return place, name


def pending_of(
    given: Iterable[tuple[Field, int]], names: Sequence[str], start_ns: int, wait_start_ns: int = 0, thread: int = 0
) -> Pending:
    """Build a pending operation from its fields as stored in memory, where strings are indices into `names`."""
    values: dict[str, Any] = {f.name: names[value] if f.is_text else value for f, value in given}
    return Pending(start_ns=start_ns, wait_start_ns=wait_start_ns, thread=thread, **values)


def _places() -> Iterator[int]:
    """Return the offsets of records in memory, starting with record number 1 and cycling endlessly."""
    ring = range(RECORDS_AT, RECORDS_AT + CAPACITY * RECORD_BYTES, RECORD_BYTES)
    return itertools.chain(ring[1:], itertools.chain.from_iterable(itertools.repeat(ring)))


def _commit_at(buffer: Any, number: int) -> int:
    at = RECORDS_AT + (number & (CAPACITY - 1)) * RECORD_BYTES + COMMIT_OFFSET
    value: int = WORD.unpack_from(buffer, at)[0]
    return value
