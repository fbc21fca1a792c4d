"""A ring of fixed-size records in shared memory, written by a rank and read by the notebook.

The rank never waits for a reader. The notebook can read the memory at any time, even while the rank is blocked in C++
or after it was killed. The fields and their types come from the schema. Layout of the buffer:

    header (64 bytes)    bytes in use in the names area; how many operations found no pending slot; when the rank was
                         last known to be alive; which names found no room (`NO_ROOM`); how many of its threads serve
                         calls; in a copy on another machine, how many records were lost before they reached it
    pending (1024 slots) operations issued and not yet completed: what a stuck or killed rank was doing
    names (1 MiB)        interned strings: names, lines of code, process groups
    records              a ring; record i is in slot i % capacity and is complete once its commit field is i

A pending operation is a record as well. Its commit field is the time of its issue; 0 says that its slot is free.

What can go wrong, and the test in `tests/recording/test_ring_buffer.py` that shows it:

    Threads of the rank write at once. `next_slot` gives each its own number, in one step under the GIL; a thread may
    then be delayed for long. The reader stops in front of the unfinished record, and reads it later
    (`test_an_unfinished_record_delays_the_later_ones_and_is_not_lost`).
    The reader copies a record while it is overwritten. `commit` is written last, and cleared first: a record counts
    only if its commit was right before and after the copy (`test_what_changes_while_it_is_copied_is_dropped`,
    `test_a_record_that_is_half_overwritten_is_not_read`).
    The rank laps the reader. The reader skips ahead by `HEADWAY`, so that it is not lapped again at once, and counts
    what it lost. Up to `IN_FLIGHT` threads may be in the middle of slots that still look complete, so it does not trust
    those (`test_what_was_overwritten_is_counted_exactly`).
    A pending operation ends, and another takes its slot, while the reader looks
    (`test_a_pending_operation_that_is_half_written_is_not_seen`).
    A name is added while the reader looks how many there are. This number is stored and loaded in one step
    (`test_the_number_of_names_never_becomes_smaller_while_the_rank_adds_one`).
    A program makes up names without end. Those that tell who waits for whom still find room
    (`test_operations_keep_their_names_with_any_number_of_spans_and_curves`).
    The rank is killed (`test_another_process_reads_whole_records_while_the_rank_writes_and_after_it_was_killed`), or
    forks: the child gets memory of its own that nobody reads, so it stops recording (in `test_record.py`:
    `test_a_worker_that_a_rank_forks_records_nothing`).

Processes that a rank forks, such as DataLoader workers, are kept from writing to memory shared with the notebook.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import struct
import threading
import weakref
from _thread import get_ident, get_native_id
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final

from labkit.recording.cores import no_delays
from labkit.recording.schema import (  # fmt: skip
    COMMUNICATION,
    COMPUTE,
    CPU,
    FIELDS,
    OPEN,
    OWN_THREAD,
    PENDING_FIELDS,
    SCALAR,
    SERVED,
    WAIT,
    Pending,
)

DTYPES: Final = {"q": "<i8", "d": "<f8", "i": "<i4", "I": "<u4", "H": "<u2", "B": "u1"}  # numpy's types for these letters

_OWN: Final = {"value": "d", "thread": "I", "flags": "H", "commit": "q"}  # fields of a record that no span has
_CODES: Final = _OWN | {f.name: f.code for f in FIELDS if f.place != "flag"}
_IN_ALL: Final = {f.name for f in FIELDS if f.place == "head"} | {"flags"}
TAIL_FIELDS: Final = tuple(f for f in FIELDS if f.place == "tail")
# The fields of a record, in the order in which the writers pass them. Each lies at a multiple of its size, so that a
# processor writes it in one step. `commit` comes last, since it completes a record.
RECORD_FIELDS: Final = (
    "start_ns", "end_ns", "wait_end_ns", "backend_ns", "issue_delay_ns", "wait_delay_ns", "nbytes", "match", "value",
    "wait_start_ns", "thread",  # these two change while an operation is pending
    "name", "line", "group", "signature", "peer", "root", "count", "flags", "kind", "device", "commit",
)  # fmt: skip
assert set(RECORD_FIELDS) == _CODES.keys() - {f.name for f in FIELDS if f.place == "of rank"}, "a field has no place"


def _struct(given: Collection[str]) -> struct.Struct:
    """Return the layout of a record. It writes `commit`, the fields that are given, and zeros for the others."""
    codes = {name: _CODES[name] for name in RECORD_FIELDS[:-1]}
    text = "<" + "".join(code if name in given else f"{struct.calcsize(code)}x" for name, code in codes.items())
    return struct.Struct(f"{text}{-struct.calcsize(text) % 8}xq")


def _offset(name: str) -> int:
    before = RECORD_FIELDS[: RECORD_FIELDS.index(name)]
    return struct.calcsize("<" + "".join(_CODES[field] for field in before))


# One per kind of record. All have the same size; a field that a kind does not have is 0 in memory, and `RingReader`
# replaces this by the field's default.
COMMUNICATION_RECORD: Final = _struct(set(RECORD_FIELDS) - {"value", "thread"})
PENDING_RECORD: Final = _struct({f.name for f in PENDING_FIELDS} | {"thread"})
SPAN_RECORD: Final = _struct(_IN_ALL)
PART_RECORD: Final = _struct(_IN_ALL | {"issue_delay_ns", "wait_delay_ns"})
SCALAR_RECORD: Final = _struct(_IN_ALL | {"value"})
WAIT_RECORD: Final = _struct(_IN_ALL | {"group", "match"})
WORD: Final = struct.Struct("<q")
RECORD_BYTES: Final = COMMUNICATION_RECORD.size
COMMIT_OFFSET: Final = RECORD_BYTES - WORD.size
PENDING_WAIT: Final = struct.Struct("<qI")  # wait_start_ns, thread
PENDING_WAIT_OFFSET: Final = _offset("wait_start_ns")

PENDING_SLOTS: Final = 1024  # a program may issue an all_reduce for each parameter before it waits for the first
CAPACITY: Final = 1 << 18  # a power of two, so a mask gives the slot; at 0.5 µs per span the notebook has 0.1 s to read it
HEADWAY: Final = CAPACITY // 8  # records that an overtaken reader skips, since the rank may overwrite them during the copy
IN_FLIGHT: Final = 64  # records that the rank's threads may be writing at the same time
HEADER_BYTES: Final = 64
UNNOTED_AT: Final = 4
ALIVE_AT: Final = 8
NO_ROOM_AT: Final = 16
SERVING_AT: Final = 20
LOST_AT: Final = 24
NAMES_BYTES: Final = 1 << 20
LONGEST_NAME: Final = 1000  # bytes; longer names are cut
# A student's program may create any number of span names. The names of operations, groups and lines must still find
# room: without them, nobody can see who waits for whom. So each kind of name is stored only while less than this part
# of the area is in use. In order: lines of spans, names of spans, curves, signatures of operations.
LINES_LIMIT, SPANS_LIMIT, SCALARS_LIMIT, SIGNATURES_LIMIT = (NAMES_BYTES * eighths // 8 for eighths in (2, 4, 5, 6))
NO_ROOM: Final = ("spans", "values", "sizes", "groups")  # the kinds of names that were not stored; one header bit each
PENDING_AT: Final = HEADER_BYTES
NAMES_AT: Final = PENDING_AT + PENDING_SLOTS * RECORD_BYTES
RECORDS_AT: Final = NAMES_AT + NAMES_BYTES
RING_BYTES: Final = RECORDS_AT + CAPACITY * RECORD_BYTES  # untouched pages cost nothing


def record_dtype() -> Any:
    """Return the numpy dtype of a record."""
    import numpy as np  # imported here because ranks import this module, and a bare rank runs without numpy

    offsets = [*map(_offset, RECORD_FIELDS[:-1]), COMMIT_OFFSET]
    formats = [DTYPES[_CODES[name]] for name in RECORD_FIELDS]
    return np.dtype({"names": RECORD_FIELDS, "formats": formats, "offsets": offsets, "itemsize": RECORD_BYTES})


MAP_FIXED: Final = 0x10  # the same on Linux and macOS; Python's mmap module does not define it


def keep_from_forks(memory: mmap.mmap) -> None:
    """Give every process forked from now on its own zeroed pages in place of this memory.

    A forked process inherits spans, process groups and hooks that refer to this memory, and it continues the rank's
    numbering of records. They keep working, but write to memory that nobody reads. Closed memory is left alone.
    """
    if not hasattr(os, "register_at_fork"):
        return
    map_memory = ctypes.CDLL(None, use_errno=True).mmap
    map_memory.restype = ctypes.c_void_p
    map_memory.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    address, nbytes = ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory)
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
    mapped = weakref.ref(memory)  # a fork hook lives as long as the process; it must not keep the memory alive

    def replace() -> None:
        memory = mapped()
        if memory is None or memory.closed:
            return  # something else may be mapped at this address by now
        if map_memory(address, nbytes, protection, flags, -1, 0) != address:
            os._exit(1)  # out of memory; continuing would corrupt the rank's records

    os.register_at_fork(after_in_child=replace)


_pack_part = PART_RECORD.pack_into
_pack_span, _pack_scalar, _pack_communication = SPAN_RECORD.pack_into, SCALAR_RECORD.pack_into, COMMUNICATION_RECORD.pack_into
_pack_pending, _pack_wait = PENDING_RECORD.pack_into, WAIT_RECORD.pack_into
OTHER_SPANS, OTHER_SCALARS = "(other spans)", "(other values)"


class RingWriter:
    """The rank's end of its ring, `RING_BYTES` of shared memory that are zero at first; thread-safe."""

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
        self.thread_delay = no_delays  # returns what tells how long this thread has waited for a core
        self.main_thread = threading.main_thread().ident  # which runs the rank's function
        self.serving_threads: set[int] = set()  # threads that are executing a call from another rank
        # Set by `labkit.worker.comm`: whether this thread executes part of a backward pass, for which the main
        # thread waits.
        self.in_backward: Callable[[], bool] = lambda: False
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
            self._store(0, self._used)
            self.ids[text] = len(self.ids)
            return self.ids[text]

    def _store(self, at: int, value: int) -> None:
        """Store a number of the header in one step: `pack_into` clears it first, which a reader may see."""
        memoryview(self.buffer)[at : at + 4].cast("I")[0] = value

    def _note_no_room(self, kind: str) -> None:
        self._no_room |= 1 << NO_ROOM.index(kind)
        self._store(NO_ROOM_AT, self._no_room)

    def span_name(self, text: str) -> int:
        """Return the number of a span's name; that of `OTHER_SPANS` if there are too many names."""
        return self.name(self._known_or(text, SPANS_LIMIT, OTHER_SPANS, "spans"))

    def span_line(self, text: str) -> int:
        """Return the number of a span's line of code; 0, which is the empty string, if there are many names."""
        return self.name(text) if self._used < LINES_LIMIT or text in self.ids else 0

    def _known_or(self, name: str, limit: int, instead: str, kind: str) -> str:
        if self._used < limit or name in self.ids:
            return name
        self._note_no_room(kind)
        return instead

    def write(
        self, name: str, kind: int, start_ns: int, end_ns: int, *, line: str = "", device: int = CPU, flags: int = 0
    ) -> None:
        """Record a finished span that is no communication."""
        name_id = self.span_name(name) if kind == COMPUTE else self.name(name)
        line_id = self.span_line(line)
        number, at = self.next_slot()
        _pack_span(self.buffer, at, start_ns, end_ns, name_id, line_id, flags, kind, device, number)

    def write_part(self, name: str, kind: int, start_ns: int, end_ns: int, *, flags: int = 0, begin_delay_ns: int = 0) -> None:
        """Record a step or a call that ends now, and how long this thread has waited for a core until its two ends."""
        name_id, delay_ns = self.name(name), self.thread_delay()()
        number, at = self.next_slot()
        _pack_part(self.buffer, at, start_ns, end_ns, begin_delay_ns, delay_ns, name_id, 0, flags, kind, CPU, number)

    def write_scalar(self, name: str, at_ns: int, value: float) -> None:
        """Record one value of a curve."""
        name_id = self.name(self._known_or(name, SCALARS_LIMIT, OTHER_SCALARS, "values"))
        number, at = self.next_slot()
        _pack_scalar(self.buffer, at, at_ns, at_ns, value, name_id, 0, 0, SCALAR, CPU, number)

    def write_communication(
        self, name: str, start_ns: int, end_ns: int, *, wait_start_ns: int = 0, wait_end_ns: int = 0, nbytes: int = 0,
        peer: int = -1, root: int = -1, group: str = "", match: int = 0, line: str = "", signature: str = "",
        device: int = CPU, flags: int = 0, backend_ns: int = 0, issue_delay_ns: int = 0, wait_delay_ns: int = 0,
    ) -> None:  # fmt: skip
        """Record one finished communication; see `recording.schema.Span` for the meaning of each value."""
        self.communications += 1
        self.failures += flags & OPEN != 0
        texts = self.name(name), self.name(line), self.name(group), self._signature(signature)
        number, at = self.next_slot()
        _pack_communication(
            self.buffer, at, start_ns, end_ns, wait_end_ns, backend_ns, issue_delay_ns, wait_delay_ns, nbytes, match,
            wait_start_ns, *texts, peer, root, 1, flags, COMMUNICATION, device, number,
        )  # fmt: skip

    def write_wait(self, group: str, match: int, at_ns: int, flags: int = 0) -> None:
        """Record that the rank's function waited for an operation that was complete already, or never (`UNWAITED`)."""
        if not flags and self.thread_flags():
            return
        group_id = self.name(group)
        number, at = self.next_slot()
        _pack_wait(self.buffer, at, at_ns, at_ns, match, 0, 0, group_id, flags, WAIT, CPU, number)

    def thread_flags(self) -> int:
        """Return the flags of what this thread records: 0 if it executes the rank's function, or its backward pass."""
        thread = get_ident()
        if thread == self.main_thread:
            return 0
        if thread in self.serving_threads:
            return SERVED
        return 0 if self.in_backward() else OWN_THREAD

    def pend(
        self, name: str, start_ns: int, *, nbytes: int = 0, peer: int = -1, root: int = -1, group: str = "", match: int = 0,
        line: str = "", signature: str = "",
    ) -> int:  # fmt: skip
        """Note that an operation was issued; return its slot, or -1, which `waiting` and `unpend` ignore."""
        try:
            slot = self._free.pop()
        except IndexError:
            slot = -1
            self._unnoted += 1
            self._store(UNNOTED_AT, self._unnoted)
        else:
            texts = self.name(name), self.name(line), self.name(group), self._signature(signature)
            _pack_pending(
                self.buffer, PENDING_AT + slot * RECORD_BYTES, start_ns, nbytes, match, 0, get_native_id(), *texts,
                peer, root, start_ns,
            )  # fmt: skip
        return slot

    def _signature(self, text: str) -> int:
        return self.name(self._known_or(text, SIGNATURES_LIMIT, "", "sizes"))

    def waiting(self, slot: int, since_ns: int, thread: int = 0) -> None:
        """Record that a thread (default: this one), or `STREAM` or `TIMED`, is blocked until an operation completes."""
        if slot >= 0:
            at = PENDING_AT + slot * RECORD_BYTES + PENDING_WAIT_OFFSET
            PENDING_WAIT.pack_into(self.buffer, at, since_ns, thread or get_native_id())

    def unpend(self, slot: int) -> None:
        """Record that a pending operation has completed."""
        if slot >= 0:
            WORD.pack_into(self.buffer, PENDING_AT + slot * RECORD_BYTES + COMMIT_OFFSET, 0)
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
        self._store(SERVING_AT, threads)

    def has(self, number: int) -> bool:
        """Return whether a record was written, or the one that replaces it a whole ring later."""
        return _commit_at(self.buffer, number) >= number


class RingReader:
    """The notebook's end of one rank's ring; `first` is the number of the first record to read."""

    def __init__(self, buffer: Any, first: int = 1) -> None:
        import numpy  # imported here because ranks import this module, and a bare rank runs without numpy

        self.buffer = buffer
        self._numpy = numpy
        self._dtype = record_dtype()
        self._nothing = numpy.empty(0, self._dtype)
        # Of records that lack these fields: there they are 0 in memory.
        self._defaults = [(f.name, f.default) for f in TAIL_FIELDS if f.default not in (0, "")]
        # Records as rows of words: copying these takes a twentieth of the time that numpy needs field by field.
        words = RECORD_BYTES // WORD.size
        self._slots = numpy.frombuffer(buffer, numpy.int64, PENDING_SLOTS * words, PENDING_AT).reshape(PENDING_SLOTS, words)
        self._words = numpy.frombuffer(buffer, numpy.int64, CAPACITY * words, RECORDS_AT).reshape(CAPACITY, words)
        self._commits = self._words[:, COMMIT_OFFSET // WORD.size]
        self._next = first
        self._overwritten = 0  # records overwritten before they were read
        self._names: list[str] = []
        self._names_read = 0
        self._names_used = numpy.frombuffer(buffer, numpy.uint32, 1)  # is loaded at once, unlike by `unpack_from`

    def names(self) -> list[str]:
        """Return all strings interned so far; the numbers in a record that was read before are its indices."""
        used = self.names_bytes
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
    def names_bytes(self) -> int:
        """The bytes in use in the names area."""
        return int(self._names_used[0])

    def _header(self, at: int) -> int:
        value: int = struct.unpack_from("<I", self.buffer, at)[0]
        return value

    @property
    def unnoted(self) -> int:
        """How many operations so far were not recorded as pending, because no slot was free."""
        return self._header(UNNOTED_AT)

    @property
    def no_room(self) -> list[str]:
        """The kinds of names, from `NO_ROOM`, that have found no room."""
        return [kind for place, kind in enumerate(NO_ROOM) if self._header(NO_ROOM_AT) >> place & 1]

    @property
    def dropped(self) -> int:
        """How many records were overwritten before they were read, here or where this ring was copied from."""
        lost: int = WORD.unpack_from(self.buffer, LOST_AT)[0]
        return self._overwritten + lost

    @property
    def next_record(self) -> int:
        """The number of the next record to read."""
        return self._next

    @property
    def serving(self) -> int:
        """How many threads of the rank execute calls from other ranks."""
        return self._header(SERVING_AT)

    @property
    def alive_ns(self) -> int:
        """When the rank was last known to be alive; 0 if it was never recorded."""
        value: int = WORD.unpack_from(self.buffer, ALIVE_AT)[0]
        return value

    def pending(self) -> list[Pending]:
        """Return the operations that are issued and not completed at this moment, oldest first."""
        _, rows = self.slots_in_use()
        names = self.names()
        return sorted((pending_of(row, names) for row in rows.view(self._dtype)[:, 0]), key=lambda p: p.start_ns)

    def slots_in_use(self) -> tuple[Any, Any]:
        """Return the numbers of the slots that hold a pending operation, and these records as rows of words.

        A slot that was freed or taken during the copy is left out.
        """
        before = self._slots[:, -1].copy()
        numbers = self._numpy.flatnonzero(before)
        rows = self._slots[numbers]
        whole = (rows[:, -1] == before[numbers]) & (self._slots[numbers, -1] == before[numbers])
        return numbers[whole], rows[whole]

    def newest(self) -> int:
        """Return the number of a finished record behind which none was finished, or was so only during this call.

        If `next_record` is not beyond it after `read`, then finished records lie behind one that is not finished.
        """
        newest = self._newest(max(self._next - 1, self._commit_at(self._next)))
        others = range(newest + 1, newest + 1 + IN_FLIGHT)
        return max((number for number in others if self._commit_at(number) >= number), default=newest)

    def read(self) -> Any:
        """Return a copy of the records completed since the last call, as an array of `record_dtype()`.

        The rank does not wait, so a record may change during the copy. A record is returned only if its commit number
        was right before and after the copy, and the rank was not close to its slot. Overwritten records are counted in
        `dropped`. Each record has a value in each field; what its kind does not have is the default.
        """
        np = self._numpy
        first = self._next
        commit = self._commit_at(first)
        if commit < first:
            return self._nothing
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
        others = records["kind"] != COMMUNICATION
        for name, default in self._defaults:
            records[name][others] = default
        self._overwritten += last + 1 - self._next - len(records)
        self._next = last + 1
        return records

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


def pending_of(row: Any, names: Sequence[str]) -> Pending:
    """Return the operation that a row of `record_dtype()` describes; strings are in `names`."""
    values: dict[str, Any] = {f.name: names[row[f.name]] if f.is_text else int(row[f.name]) for f in PENDING_FIELDS}
    return Pending(**values, thread=int(row["thread"]))


def _places() -> Iterator[int]:
    """Return the offsets of records in memory, starting with record number 1 and cycling endlessly."""
    ring = range(RECORDS_AT, RECORDS_AT + CAPACITY * RECORD_BYTES, RECORD_BYTES)
    return itertools.chain(ring[1:], itertools.chain.from_iterable(itertools.repeat(ring)))


def _commit_at(buffer: Any, number: int) -> int:
    at = RECORDS_AT + (number & (CAPACITY - 1)) * RECORD_BYTES + COMMIT_OFFSET
    value: int = WORD.unpack_from(buffer, at)[0]
    return value
