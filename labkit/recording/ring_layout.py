"""The layout of a rank's shared memory: which bytes of a record hold which field.

The fields and their types come from the schema. Here is their order, in which the writers pass them. Each field lies at
a multiple of its size, so that a processor writes it in one step. `commit` comes last, since it completes a record.
A slot for a pending operation holds a record, too.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from typing import Any, Final

from labkit.recording.schema import FIELDS, PENDING_FIELDS, Flag, Head, OfRank, Tail

DTYPES: Final = {"q": "<i8", "d": "<f8", "i": "<i4", "I": "<u4", "H": "<u2", "B": "u1"}  # numpy's types for these letters

_OWN: Final = {"value": "d", "thread": "I", "flags": "H", "commit": "q"}  # fields of a record that no span has
_CODES: Final = _OWN | {f.name: f.code for f in FIELDS if not isinstance(f.place, Flag)}
_IN_ALL: Final = {f.name for f in FIELDS if isinstance(f.place, Head)} | {"flags"}
TAIL_FIELDS: Final = tuple(f for f in FIELDS if isinstance(f.place, Tail))
RECORD_FIELDS: Final = (
    "start_ns", "end_ns", "wait_end_ns", "backend_ns", "issue_delay_ns", "wait_delay_ns", "nbytes", "match", "value",
    "wait_start_ns", "thread",  # these two change while an operation is pending
    "name", "line", "group", "signature", "peer", "root", "count", "flags", "kind", "device", "commit",
)  # fmt: skip
assert set(RECORD_FIELDS) == _CODES.keys() - {f.name for f in FIELDS if isinstance(f.place, OfRank)}, "a field has no place"


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
