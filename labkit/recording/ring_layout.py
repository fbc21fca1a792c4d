"""The layout of a rank's shared memory, derived from the schema of a span."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, Final

from labkit.recording.schema import FIELDS, PENDING_FIELDS, Field, Head, Tail

__all__ = [
    "ALIVE_AT", "CAPACITY", "COMMIT_OFFSET", "DTYPES", "HEAD", "HEADWAY", "IN_FLIGHT", "LONGEST_NAME", "NAMES_AT",
    "NAMES_BYTES", "NO_ROOM", "NO_ROOM_AT", "PENDING", "PENDING_AT", "PENDING_ORDER", "PENDING_SLOTS", "PENDING_START",
    "PENDING_WAIT", "PLACED_LIMIT", "RECORDS_AT", "RECORD_BYTES", "RING_BYTES", "SCALARS_LIMIT", "SERVING_AT",
    "SIGNATURES_LIMIT", "SPANS_LIMIT", "TAIL", "TAIL_FIELDS", "UNNOTED_AT", "WORD", "record_dtype",
]  # fmt: skip

DTYPES: Final = {"q": "<i8", "i": "<i4", "I": "<u4", "H": "<u2", "B": "u1"}  # numpy's types for the letters of `struct`


def _largest_first(fields: Iterable[Field]) -> list[Field]:
    """Sort fields by size: each then starts at a multiple of its size, and a processor writes it in one step."""
    return sorted(fields, key=lambda f: -struct.calcsize(f.code))


def _letters(fields: Iterable[Field]) -> str:
    """Return the `struct` format of the fields, padded to whole words of 8 bytes."""
    letters = "<" + "".join(f.code for f in fields)
    return letters + "x" * (-struct.calcsize(letters) % 8)


# A compute span writes only the head, in one pack; a communication writes the tail first. The commit number comes last
# in the head, so that a reader in another process never mistakes a half-written record for a complete one.
_HEAD_FIELDS: Final = _largest_first(f for f in FIELDS if isinstance(f.place, Head))
TAIL_FIELDS: Final = _largest_first(f for f in FIELDS if isinstance(f.place, Tail))
HEAD: Final = struct.Struct("<" + "".join(f.code for f in _HEAD_FIELDS) + "Hq")  # ..., flags, commit
TAIL: Final = struct.Struct(_letters(TAIL_FIELDS))
WORD: Final = struct.Struct("<q")
RECORD_BYTES: Final = HEAD.size + TAIL.size
COMMIT_OFFSET: Final = HEAD.size - WORD.size

# The time of issue comes last; it is 0 in a free slot. The fields that `PENDING_WAIT` writes by itself come first.
PENDING_ORDER: Final = _largest_first(f for f in PENDING_FIELDS if f.name not in ("start_ns", "wait_start_ns"))
PENDING_WAIT: Final = struct.Struct("<qI4x")  # wait_start_ns, thread
PENDING: Final = struct.Struct(PENDING_WAIT.format + _letters(PENDING_ORDER)[1:] + "q")
PENDING_START: Final = PENDING.size - 8
PENDING_SLOTS: Final = 1024  # a program may issue an all_reduce for each parameter before it waits for the first

CAPACITY: Final = 1 << 18  # a power of two, so a mask gives the slot; at 0.4 µs per span the notebook has 0.1 s to read it
HEADWAY: Final = CAPACITY // 8  # records that an overtaken reader skips, since the rank may overwrite them during the copy
IN_FLIGHT: Final = 64  # records that the rank's threads may be writing at the same time
HEADER_BYTES: Final = 64
UNNOTED_AT: Final = 4
ALIVE_AT: Final = 8
NO_ROOM_AT: Final = 16
SERVING_AT: Final = 20
NAMES_BYTES: Final = 1 << 20
LONGEST_NAME: Final = 1000  # bytes; longer names are cut
# A student's program may create any number of span names. The names of operations, groups and lines must still find
# room: without them, nobody can see who waits for whom. So each kind of name is stored only while less than this part
# of the area is in use. In order: spans with their line of code, spans by name alone, curves, signatures of operations.
PLACED_LIMIT, SPANS_LIMIT, SCALARS_LIMIT, SIGNATURES_LIMIT = (NAMES_BYTES * eighths // 8 for eighths in (2, 4, 5, 6))
NO_ROOM: Final = ("spans", "values", "sizes", "groups")  # the kinds of names that were not stored; one header bit each
PENDING_AT: Final = HEADER_BYTES
NAMES_AT: Final = PENDING_AT + PENDING_SLOTS * PENDING.size
RECORDS_AT: Final = NAMES_AT + NAMES_BYTES
RING_BYTES: Final = RECORDS_AT + CAPACITY * RECORD_BYTES  # untouched pages cost nothing

assert [f.name for f in _HEAD_FIELDS] == ["start_ns", "end_ns", "name", "kind", "device"]


def record_dtype() -> Any:
    """Return the numpy dtype of a record."""
    import numpy as np  # imported here because ranks import this module, and a bare rank runs without numpy

    letters = [(f.name, f.code) for f in _HEAD_FIELDS] + [("flags", "H"), ("commit", "q")]
    letters += [(f.name, f.code) for f in TAIL_FIELDS]
    offsets = [struct.calcsize("<" + "".join(code for _, code in letters[:i])) for i in range(len(letters))]
    names, codes = zip(*letters, strict=True)
    formats = [DTYPES[code] for code in codes]
    return np.dtype({"names": list(names), "formats": formats, "offsets": offsets, "itemsize": RECORD_BYTES})
