"""Where a rank writes and the notebook reads: a ring of fixed-size records in shared memory.

The rank never waits for a reader, and needs no thread or system call to be read: the notebook looks at the same memory
whenever it likes, also while the rank is blocked in C++ and after it was killed. Layout of the buffer:

    header (64 bytes)    bytes of the names area in use; how many operations found no pending slot; when the rank was
                         seen alive; which names found no room (`NO_ROOM`); how many of its threads serve calls
    pending (1024 slots) operations issued and not yet completed: what a stuck or killed rank was doing
    names (1 MiB)        interned strings: span names, places in the code, process groups; a name may have its place
                         beside it
    records              a ring; record i is in slot i % capacity and is whole once its commit field reads i
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
_AT: Final = "\0"  # between the place of a name and the name


class RingWriter:
    """The rank's end. Any thread may write.

    Args:
        buffer: writable shared memory of `RING_BYTES` bytes, zeroed.
    """

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        # The number of the next record and its place, in one step under the interpreter's lock.
        self.next_slot = zip(itertools.count(1), _places(), strict=False).__next__
        self.ids: dict[str, int] = {}
        self._used = 0
        self._names_lock = threading.Lock()
        self._free = deque(reversed(range(PENDING_SLOTS)))  # the same few slots again and again: untouched memory costs nothing
        self._unnoted = self._no_room = 0
        self.communications = self.failures = 0  # that were written; how many of them had failed
        self.serving_threads: set[int] = set()  # those that are in a call of another rank now
        self.name("")

    def name(self, text: str) -> int:
        """The number of an interned string; 0, the empty string, once the area is full."""
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
        """A span's name with its line of code; without it if there are many names, `OTHER_SPANS` if too many."""
        if place and self._used < PLACED_LIMIT:
            return f"{place}{_AT}{name}"
        return self._known_or(name, SPANS_LIMIT, OTHER_SPANS, "spans")

    def _known_or(self, name: str, limit: int, instead: str, kind: str) -> str:
        """A name, if it is known or there is room for it; else another."""
        if self._used < limit or name in self.ids:
            return name
        self._note_no_room(kind)
        return instead

    def write(self, name: str, kind: int, start_ns: int, end_ns: int, *, device: int = CPU, flags: int = 0) -> None:
        """Keep one finished span."""
        ids = self.ids
        name_id = ids[name] if name in ids else self.name(name)
        number, at = self.next_slot()
        _pack_head(self.buffer, at, start_ns, end_ns, name_id, kind, device, flags, number)

    def write_scalar(self, name: str, at_ns: int, value: float) -> None:
        """Keep one value of a curve; it travels in the bits of end_ns."""
        (bits,) = WORD.unpack(struct.pack("<d", value))
        self.write(self._known_or(name, SCALARS_LIMIT, OTHER_SCALARS, "values"), SCALAR, at_ns, bits)

    write_communication = compiled_write_communication()
    pend = compiled_pend()

    def rare_name(self, text: str, kind: str) -> int:
        """The number of a text that the program chooses; that of "" if there is no room for its kind any more."""
        return self.name(self._known_or(text, SIGNATURES_LIMIT, "", kind))

    def free_slot(self) -> int:
        """One for an operation under way; -1 where all are taken."""
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
        """Note that a pending operation has completed."""
        if slot >= 0:
            WORD.pack_into(self.buffer, PENDING_AT + slot * PENDING.size + PENDING_START, 0)
            self._free.append(slot)

    @property
    def in_progress(self) -> bool:
        """Whether operations are pending."""
        return len(self._free) < PENDING_SLOTS

    def alive(self, now_ns: int) -> None:
        """Note that the rank is alive: who reads the ring after its death knows about when it died."""
        WORD.pack_into(self.buffer, ALIVE_AT, now_ns)

    def serving(self, threads: int) -> None:
        """Note how many threads of this rank do what other ranks call, also when its function has returned."""
        struct.pack_into("<I", self.buffer, SERVING_AT, threads)

    def has(self, number: int) -> bool:
        """Whether a record was written; or one a whole ring later, in its place."""
        return _commit_at(self.buffer, number) >= number


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
        self._pending_starts = numpy.ndarray(PENDING_SLOTS, numpy.int64, buffer, PENDING_AT + PENDING_START, PENDING.size)
        self._words = numpy.frombuffer(buffer, numpy.int64, CAPACITY * words, RECORDS_AT).reshape(CAPACITY, words)
        self._commits = self._words[:, COMMIT_OFFSET // WORD.size]
        self._next = first
        self.dropped = 0  # records overwritten before they were read
        self._names: list[str] = []
        self._names_read = 0

    def names(self) -> list[str]:
        """All strings interned so far; a record's numbers index this list, if it was read before."""
        (used,) = struct.unpack_from("<I", self.buffer, 0)
        if used > NAMES_BYTES:
            raise ValueError("its names are damaged")
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
    def no_room(self) -> list[str]:
        """The kinds of names, of `NO_ROOM`, for which there has been no room."""
        bits: int = struct.unpack_from("<I", self.buffer, NO_ROOM_AT)[0]
        return [kind for place, kind in enumerate(NO_ROOM) if bits >> place & 1] if bits else []

    @property
    def next_record(self) -> int:
        """The number of the record that will be read next."""
        return self._next

    @property
    def serving(self) -> int:
        """How many threads of the rank do what other ranks call."""
        count: int = struct.unpack_from("<I", self.buffer, SERVING_AT)[0]
        return count

    @property
    def alive_ns(self) -> int:
        """When the rank was last known to be alive; 0 where nobody says."""
        value: int = WORD.unpack_from(self.buffer, ALIVE_AT)[0]
        return value

    def pending(self) -> list[Pending]:
        """The operations issued and not completed at this moment, oldest first."""
        found = []
        for slot in self._numpy.flatnonzero(self._pending_starts).tolist():
            at = PENDING_AT + slot * PENDING.size
            (before,) = WORD.unpack_from(self.buffer, at + PENDING_START)
            wait_start_ns, thread, *values, start_ns = PENDING.unpack_from(self.buffer, at)
            (after,) = WORD.unpack_from(self.buffer, at + PENDING_START)
            if before and before == start_ns == after:  # else it was freed, and perhaps taken again, while we looked
                given = zip(PENDING_ORDER, values, strict=True)
                found.append(pending_of(given, self.names(), start_ns, wait_start_ns, thread))
        return sorted(found, key=lambda p: p.start_ns)

    def read(self) -> Any:
        """The records completed since the last call: a copy, as an array of `record_dtype()`.

        The rank does not wait, so a record may change while it is looked at. It counts only if its commit number was
        right before the copy and after it, and the rank not near its slot; what was overwritten is counted in
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
            # What is not finished, another thread is writing, which took its number and was then held up: it will be
            # read later.
            end = len(numbers) if finished.all() else int(finished.argmin())
            records, last = records[:end][whole[:end]], first + end - 1
        self.dropped += last + 1 - self._next - len(records)
        self._next = last + 1
        return records

    def _read_one(self, number: int) -> Any:
        """The only unread record, in a fifth of the usual time; None if it must be read in the usual way."""
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
        """The newest record written after `low`, at most a ring's length later: by doubling strides, then bisection."""
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


def pending_of(
    given: Iterable[tuple[Field, int]], names: Sequence[str], start_ns: int, wait_start_ns: int = 0, thread: int = 0
) -> Pending:
    """An operation whose fields are as the memory has them, texts as numbers of `names`."""
    values: dict[str, Any] = {f.name: names[value] if f.is_text else value for f, value in given}
    return Pending(start_ns=start_ns, wait_start_ns=wait_start_ns, thread=thread, **values)


def _places() -> Iterator[int]:
    """Where in the memory records lie, from the one with the number 1 on, again and again."""
    ring = range(RECORDS_AT, RECORDS_AT + CAPACITY * RECORD_BYTES, RECORD_BYTES)
    return itertools.chain(ring[1:], itertools.chain.from_iterable(itertools.repeat(ring)))


def _commit_at(buffer: Any, number: int) -> int:
    at = RECORDS_AT + (number & (CAPACITY - 1)) * RECORD_BYTES + COMMIT_OFFSET
    value: int = WORD.unpack_from(buffer, at)[0]
    return value
