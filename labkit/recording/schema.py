"""The fields of a span, each declared once: the ring's layout, the columns and the trace with its files derive from it.

A field is an attribute of `Span`. Its annotation says where a record in the ring stores it:

    Head("q")        in every record
    Tail("q")        in the record of a communication, a few in others (`recording/ring_buffer.py`); else the default
    Flag(OPEN)       one bit of the record's `flags`, set if the value is not the default
    OfRank("i")      not in the ring: the reader knows it

The letter is a type code of Python's `struct` module. Strings are interned, and records hold their numbers. An
attribute of `Pending` with the same name is also stored in the table of pending operations.

A record has four more fields, which no span has: the `value` of a scalar, the blocked `thread`, `flags`, and `commit`,
the record's number (`recording/ring_buffer.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Annotated, Any, Final, Literal, get_type_hints

from labkit.recording.operations import OperationType, type_of

# Saved traces hold the numbers of kinds, flags and devices, and no names: new ones come last.
KINDS: Final = ("compute", "communication", "step", "scalar", "call", "wait")  # all spans, but scalars and waits
COMPUTE, COMMUNICATION, STEP, SCALAR, CALL, WAIT = range(len(KINDS))

# Flags of a record. A flag that is not a field of `Span` matters only to readers of the ring.
OPEN: Final = 1 << 0  # it has not completed, or failed
AUTOMATIC: Final = 1 << 1  # labkit records it without the program's help
MEASURED: Final = 1 << 2  # a profiler observed it running: nothing blocks it meanwhile
UNSHOWN: Final = 1 << 3  # it is not part of any trace
UNSIZED: Final = 1 << 4  # it moved an unknown number of bytes
SERVED: Final = 1 << 5  # it is on a thread that executes a call from another rank
OWN_THREAD: Final = 1 << 6  # it is on another thread that does not execute the rank's function
THROUGH_HOST: Final = 1 << 7  # gloo moved a GPU's data, through the host's memory
UNWAITED: Final = 1 << 8  # of a wait's record: the program has dropped the operation, and never waited for it

CPU, CUDA, NUMBERED = range(3)  # devices: timed by the host; timed by a GPU; the first of TensorFlow's "CPU:<n>"
STREAM: Final = 0xFFFFFFFF  # in place of the blocked thread: a GPU's stream is blocked, and the rank continues
TIMED: Final = 0xFFFFFFFE  # in place of the blocked thread: it is blocked until a set time has passed

# Names with a special meaning.
READING: Final = "reading TensorFlow's profiler"  # labkit's own compute span
DATA: Final = "data"  # a compute span in which the rank waits for its next batch
OPTIMIZER: Final = "optimizer"  # a compute span: an optimizer's step
STEPS_IN_ALL: Final = "steps in all"  # the scalar with which `steps` announces the length of its loop
UNKNOWN: Final = "unknown: its machine does not answer"  # a call span in which nothing is known of a rank
ENDED: Final = "rank failed"  # the scalar that marks when a rank failed or its process ended
MEMORY: Final = "memory: "  # prefix of `track_memory`'s scalars, in bytes; then one of these, long-lived kinds first
MEMORY_KINDS: Final = ("parameters", "optimizer state", "gradients", "buckets", "gathered parameters", "activations", "other")


@dataclass(frozen=True, slots=True)
class Field:
    """One entry of the schema: an attribute of `Span`, and how a record stores it."""

    place: Literal["head", "tail", "flag", "of rank"]  # see the top of this file
    code: str = ""  # a type code of Python's `struct` module; "" for a flag
    bit: int = 0  # of the record's flags, for a flag
    is_time: bool = False  # whether it is a time on the clock of the rank's machine; in a tail, 0 if it does not apply
    name: str = ""  # of the attribute
    default: Any = None  # the value of a span that does not specify one; `dataclasses.MISSING` if every span must
    is_text: bool = False  # whether it is an interned string


Head, Tail, OfRank = partial(Field, "head"), partial(Field, "tail"), partial(Field, "of rank")


def Flag(bit: int) -> Field:  # noqa: N802 (written like Head, Tail and OfRank)
    """A field in one bit of the record's flags."""
    return Field("flag", bit=bit)


@dataclass(frozen=True, slots=True)
class Span:
    """An activity of a rank, from `start_ns` to `end_ns` on the machine's monotonic clock (`time.perf_counter_ns`).

    Args:
        rank: the rank's number.
        name: the name of the activity: "forward", "all_reduce", ...
        kind: "compute", "communication", "step" (one iteration of `steps`, or what an optimizer's step ends) or "call"
            (the whole function).
        start_ns: when it began; for a communication, when it was issued.
        end_ns: when it ended; for a communication, when it completed.
        wait_start_ns: when the rank began to block until the communication completes; 0 if it never did.
        wait_end_ns: when it stopped blocking.
        nbytes: the size of the message, or of the rank's tensors in a collective; 0 if unknown.
        peer: the other rank of a message; -1 for all other spans.
        group: the process group, or the two ends of a message; "" for what a rank does alone.
        match: the number of the operation within its group; spans of several ranks with the same group and match belong
            to one operation.
        line: the student's line that issued it: "cell 5, line 12" or "train.py, line 12"; for a compute span, the line
            where the rank first used its name in the run.
        device: "cpu"; "cuda" if the GPU took the times; "CPU:1" on a rank with several TensorFlow devices.
        done: False for an operation that had not completed; it ends where the observed time ends.
        automatic: True for a compute span or a step that labkit records without the program's help: a served call, a
            forward pass.
        measured: True for operations as TensorFlow's profiler observed them running: nothing blocks them meanwhile.
        sized: False for a communication that moved an unknown number of bytes; `nbytes` is then 0.
        served: True if it computed, or was blocked, on a thread of the rank that executes a call from another rank.
        signature: for a collective, what must match on all ranks: "float32 [4, 3], product, root 1"; for a message, its
            tensor.
        root: the root of a broadcast, scatter, gather or reduce; -1 for all other spans.
        count: how many activities it represents: more than 1 only in the live picture of a rank that records fast.
        backend_ns: when the backend had completed a communication that an emulated link then held back; 0 if it is not
            known: then it is `end_ns`.
        issue_delay_ns: where ranks outnumber cores, how long the thread that issued a communication had waited for a
            core since it began, when it issued it; otherwise 0. Only the difference of two values of one thread counts.
            The call of the rank's function has it, too, as of its beginning.
        wait_delay_ns: the same for the thread that waited for it, at the end of its wait; 0 if none waited. A step and
            the call of the rank's function have it as of their end.
        own_thread: True if it computed, or was issued, on a thread of its own, such as one that loads data: neither
            that of the rank's function nor one that executes a call from another rank.
        through_host: True for a communication of GPU tensors by gloo: it includes their copies to the host and back.
        waited: False for an asynchronous operation that the program never waited for: what follows may have run before
            it completed.
    """

    rank: Annotated[int, OfRank("i")]
    name: Annotated[str, Head("I")]
    kind: Annotated[str, Head("B")]
    start_ns: Annotated[int, Head("q", is_time=True)]
    end_ns: Annotated[int, Head("q", is_time=True)]
    wait_start_ns: Annotated[int, Tail("q", is_time=True)] = 0
    wait_end_ns: Annotated[int, Tail("q", is_time=True)] = 0
    nbytes: Annotated[int, Tail("q")] = 0
    peer: Annotated[int, Tail("i")] = -1
    group: Annotated[str, Tail("I")] = ""
    match: Annotated[int, Tail("q")] = 0
    line: Annotated[str, Head("I")] = ""
    device: Annotated[str, Head("B")] = "cpu"
    done: Annotated[bool, Flag(OPEN)] = True
    automatic: Annotated[bool, Flag(AUTOMATIC)] = False
    measured: Annotated[bool, Flag(MEASURED)] = False
    sized: Annotated[bool, Flag(UNSIZED)] = True
    served: Annotated[bool, Flag(SERVED)] = False
    signature: Annotated[str, Tail("I")] = ""
    root: Annotated[int, Tail("i")] = -1
    count: Annotated[int, Tail("I")] = 1
    backend_ns: Annotated[int, Tail("q", is_time=True)] = 0
    issue_delay_ns: Annotated[int, Tail("q")] = 0
    wait_delay_ns: Annotated[int, Tail("q")] = 0
    own_thread: Annotated[bool, Flag(OWN_THREAD)] = False
    through_host: Annotated[bool, Flag(THROUGH_HOST)] = False
    waited: Annotated[bool, Flag(UNWAITED)] = True

    @property
    def duration_ns(self) -> int:
        """The duration in nanoseconds."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True)
class Pending:
    """An operation that a rank has issued and that has not completed: the rank waits for it, or computes meanwhile.

    Fields that `Span` has, too, have the same meaning as there, and are stored in the same way.
    """

    name: str
    start_ns: int
    wait_start_ns: int = 0  # since when the rank has been blocked in it; 0 while it is not
    nbytes: int = 0
    peer: int = -1
    group: str = ""
    match: int = 0
    line: str = ""
    signature: str = ""
    thread: int = 0  # the native id of the thread that is blocked in it, or that issued it
    root: int = -1

    @property
    def type(self) -> OperationType:
        """The type of the operation."""
        return type_of(self.name)


def flags_of(span: Span) -> int:
    """Return the flags that a record stores for a span."""
    flags = 0
    for field in FIELDS:
        if field.place == "flag" and bool(getattr(span, field.name)) is not field.default:
            flags |= field.bit
    return flags


def device_code(device: str) -> int:
    """Return the number that a record stores for a device."""
    _, _, number = device.partition(":")
    return NUMBERED + int(number) if number else CUDA if device == "cuda" else CPU


def device_name(code: int) -> str:
    """Return the device that a record's number stands for."""
    return f"CPU:{code - NUMBERED}" if code >= NUMBERED else "cuda" if code == CUDA else "cpu"


# Strings with few possible values: how to encode them as numbers, and how to decode these.
CODES: Final[dict[str, tuple[Callable[[str], int], Callable[[int], str]]]] = {
    "kind": (KINDS.index, KINDS.__getitem__),
    "device": (device_code, device_name),
}


def _fields() -> Iterator[Field]:
    hints = get_type_hints(Span, include_extras=True)
    for f in fields(Span):
        hint = hints[f.name]
        is_text = hint.__origin__ is str and f.name not in CODES
        yield replace(hint.__metadata__[0], name=f.name, default=f.default, is_text=is_text)


FIELDS: Final = tuple(_fields())
PENDING_FIELDS: Final = tuple(f for f in FIELDS if f.name in {own.name for own in fields(Pending)})
