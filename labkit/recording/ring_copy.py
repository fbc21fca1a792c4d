"""Copies what is new in a rank's ring to another machine, where a `RingReader` reads the copy like the ring itself.

`RingTap` is on the rank's machine. It makes a message of what is new, in parts if there is much. `RingCopy` is on the
notebook's machine. It writes these messages, in their order, into a ring of the same layout, and converts all times.

The order in which the two read and write matters, and the test in `tests/recording/test_ring_copy.py` shows it:

    An operation ends: the rank writes its record, then frees its slot. The tap looks at the slots first and at the
    records afterwards, and the copy writes the records first. So the operation is always in one of the two
    (`test_an_operation_is_pending_or_recorded_at_any_time`). The tap looks again only when all of this was sent.
    A record that is not finished hides later ones. While it does, the tap keeps the operations that have ended
    (`test_an_operation_stays_pending_while_its_record_is_hidden`).
    A record refers to a name. The rank writes the name first; the tap looks at the names last, and sends them first
    (`test_names_arrive_before_the_records_that_refer_to_them`).
    Someone reads the copy while it is written. Records and slots are invalid while they change, as in a rank's ring
    (`test_another_thread_reads_the_copy_while_it_is_written`). Header words change in one step.
"""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

from labkit.recording.clock import Clock
from labkit.recording.ring_buffer import (  # fmt: skip
    ALIVE_AT,
    CAPACITY,
    HEADER_BYTES,
    LOST_AT,
    NAMES_AT,
    NAMES_BYTES,
    NO_ROOM_AT,
    PENDING_AT,
    PENDING_SLOTS,
    RECORD_BYTES,
    RECORDS_AT,
    SERVING_AT,
    UNNOTED_AT,
    WORD,
    RingReader,
    record_dtype,
)
from labkit.recording.schema import FIELDS

RECORD_WORDS: Final = RECORD_BYTES // WORD.size
# Records that are invalid at the same time while they are written. A reader that is almost lapped loses them.
TOGETHER: Final = 4096


class _Header(NamedTuple):
    """Words of the ring's header, each with its value; `names` is the size of the names that have been sent."""

    lost: int = 0
    alive_ns: int = 0
    names: int = 0
    unnoted: int = 0
    no_room: int = 0
    serving: int = 0


_HEADER: Final = struct.Struct("<2q4I")
_SIZES: Final = struct.Struct("<3I")  # bytes of names, records, changed slots; these follow in this order
_START: Final = _HEADER.size + _SIZES.size


class RingTap:
    """Reads a rank's ring for a copy on another machine."""

    def __init__(self, ring: Any) -> None:
        import numpy  # imported here because ranks import this package, and a bare rank runs without numpy

        self._numpy, self._ring, self._reader = numpy, ring, RingReader(ring)
        self._slots = numpy.zeros((PENDING_SLOTS, RECORD_WORDS), numpy.int64)  # as last sent; zeros are free
        self._seen = self._sent = _Header()
        # What was seen and not yet sent: bytes of names; records; slots, each behind its number. In this order.
        self._left: list[Any] = [numpy.empty((0, 1), numpy.uint8)]

    @property
    def behind(self) -> bool:
        """Whether the limit has left something unsent of what the last call of `news` has seen."""
        return any(len(rows) for rows in self._left)

    def news(self, limit_bytes: int) -> bytes:
        """Return what is new since the last call, as a message for `RingCopy.apply`; b"" if nothing is.

        The limit holds if it suffices for one record.
        """
        if not self.behind:
            self._look()
        room = limit_bytes - _START
        parts: list[Any] = []
        for place, rows in enumerate(self._left):
            count = min(max(room // (rows.itemsize * rows.shape[1]), 0), len(rows))
            if not count and not any(map(len, parts)):
                count = min(1, len(rows))
            parts.append(rows[:count])
            self._left[place] = rows[count:]
            room = room - parts[-1].nbytes if count == len(rows) else 0
        header = self._sent._replace(lost=self._seen.lost)
        if not len(self._left[0]):
            header = header._replace(names=self._seen.names)
        if not self.behind:
            header = self._seen
        if header == self._sent and not any(map(len, parts)):
            return b""
        self._sent = header
        return b"".join([_HEADER.pack(*header), _SIZES.pack(*map(len, parts)), *parts])

    def _look(self) -> None:
        np, reader = self._numpy, self._reader
        slots = np.zeros_like(self._slots)
        numbers, rows = reader.slots_in_use()
        slots[numbers] = rows
        alive_ns, unnoted, serving = reader.alive_ns, reader.unnoted, reader.serving
        (no_room,) = struct.unpack_from("<I", self._ring, NO_ROOM_AT)
        newest = reader.newest()
        records = reader.read()
        started, before = slots[:, -1], self._slots[:, -1]
        if reader.next_record <= newest:
            ended = (before != 0) & (started != before)
            slots[ended] = self._slots[ended]
        names = reader.names_bytes
        since, until = (NAMES_AT + min(size, NAMES_BYTES) for size in (self._seen.names, names))
        changed = np.flatnonzero((slots != self._slots).any(axis=1))
        self._left = [
            np.frombuffer(bytes(self._ring[since:until]), np.uint8).reshape(-1, 1),
            records.view(np.int64).reshape(len(records), RECORD_WORDS),
            np.column_stack([changed, slots[changed]]),
        ]
        self._slots = slots
        self._seen = _Header(reader.dropped, alive_ns, names, unnoted, no_room, serving)


class RingCopy:
    """Writes the messages of a `RingTap` into a ring on this machine, zero at first, with this machine's times."""

    def __init__(self, ring: Any, clock: Clock) -> None:
        import numpy as np  # imported here because ranks import this package, and a bare rank runs without numpy

        self._numpy, self._clock, self._ring = np, clock, ring
        # Through arrays, since `struct` would clear a word before it writes it.
        self._longs = np.frombuffer(ring, np.int64, HEADER_BYTES // 8)
        self._ints = np.frombuffer(ring, np.uint32, HEADER_BYTES // 4)
        self._slots = np.frombuffer(ring, np.int64, PENDING_SLOTS * RECORD_WORDS, PENDING_AT).reshape(-1, RECORD_WORDS)
        self._records = np.frombuffer(ring, np.int64, CAPACITY * RECORD_WORDS, RECORDS_AT).reshape(-1, RECORD_WORDS)
        offsets = {name: offset for name, (_, offset, *_) in record_dtype().fields.items()}
        self._times = [offsets[f.name] // WORD.size for f in FIELDS if f.is_time]
        self._next = 1  # the number of the next record
        self._names = 0  # bytes of names so far

    def apply(self, news: bytes) -> None:
        """Write a message into the ring."""
        np, header, sizes = self._numpy, _Header(*_HEADER.unpack_from(news)), _SIZES.unpack_from(news, _HEADER.size)
        names, records, slots = sizes
        self._longs[LOST_AT // 8] = header.lost
        at = NAMES_AT + self._names
        self._ring[at : at + names] = news[_START : _START + names]
        self._names += names
        self._ints[0] = header.names
        at = _START + names
        self._write(np.frombuffer(news, np.int64, records * RECORD_WORDS, at).reshape(-1, RECORD_WORDS).copy())
        at += records * RECORD_BYTES
        self._change(np.frombuffer(news, np.int64, slots * (1 + RECORD_WORDS), at).reshape(-1, 1 + RECORD_WORDS).copy())
        self._longs[ALIVE_AT // 8] = header.alive_ns and self._clock.here(header.alive_ns)
        for place, value in ((UNNOTED_AT, header.unnoted), (NO_ROOM_AT, header.no_room), (SERVING_AT, header.serving)):
            self._ints[place // 4] = value

    def _convert(self, rows: Any) -> None:
        """Convert the times in records, given as words; 0 stays 0."""
        for column in self._times:
            given = self._numpy.flatnonzero(rows[:, column])
            if len(given):
                which = given if len(given) < len(rows) else slice(None)
                rows[which, column] = self._clock.here_all(rows[which, column])

    def _write(self, rows: Any) -> None:
        """Append records, given as words."""
        self._convert(rows)
        rows[:, -1] = 0
        while len(rows):
            slot = self._next & (CAPACITY - 1)
            count = min(len(rows), TOGETHER, CAPACITY - slot)
            these, rows = rows[:count], rows[count:]
            written = slice(slot, slot + count)
            self._records[written, -1] = 0
            self._records[written] = these
            self._records[written, -1] = self._numpy.arange(self._next, self._next + count)
            self._next += count

    def _change(self, rows: Any) -> None:
        """Write slots of pending operations, given as words behind their numbers."""
        slots, rows = rows[:, 0], rows[:, 1:]
        self._convert(rows)
        # An operation that was pending before stays valid: it has only begun or ended to block a thread.
        self._slots[slots[self._slots[slots, -1] != rows[:, -1]], -1] = 0
        self._slots[slots, :-1] = rows[:, :-1]
        self._slots[slots, -1] = rows[:, -1]
