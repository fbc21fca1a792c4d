"""The fields of a span, each declared once: the ring's layout, the columns, the trace and its files follow from here.

A field is an attribute of `Span`. Its annotation says where a record in the ring keeps it:

    Head("q")        in every record, written in one step: its size is fixed
    Tail("q")        in the record of a communication; other spans have the default
    Flag(OPEN)       one bit, set where the value is not the default
    OfRank("i")      not in the ring: the reader knows it

The letter is a type of Python's `struct` module. A text is interned, and the record holds its number. An attribute of
`Pending` with the same name is in the table of operations under way as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Any, Final, get_type_hints

from labkit.recording.operations import OperationType, type_of

__all__ = [
    "AUTOMATIC", "CALL", "CODES", "COMMUNICATION", "COMPUTE", "CPU", "CUDA", "FIELDS", "KINDS", "MEASURED", "MEMORY",
    "MEMORY_KINDS", "NUMBERED", "OPEN", "PENDING_FIELDS", "READING", "ROOTED", "SCALAR", "SERVED", "STEP",
    "STEPS_IN_ALL", "STREAM", "SUM", "TIMED", "UNSHOWN", "UNSIZED", "Field", "Flag", "Head", "OfRank",
    "Pending", "Span", "Tail", "device_code", "flags_of",
]  # fmt: skip

KINDS: Final = ("compute", "communication", "step", "scalar", "call")
COMPUTE, COMMUNICATION, STEP, SCALAR, CALL = range(len(KINDS))

# Flags of a record. A flag that is no field of `Span` concerns only who reads the ring.
OPEN: Final = 1 << 0  # it has not completed, or failed
SUM: Final = 1 << 1  # it stands for as many as `nbytes` says
AUTOMATIC: Final = 1 << 2  # labkit records it without the program's help
MEASURED: Final = 1 << 3  # a profiler saw it run: nothing blocks it meanwhile
UNSHOWN: Final = 1 << 4  # it is part of no trace
UNSIZED: Final = 1 << 5  # nobody knows how many bytes it moved
SERVED: Final = 1 << 6  # on a thread that does what another rank has called

CPU, CUDA, NUMBERED = range(3)  # devices: where the host takes the times; where a GPU does; the first of TensorFlow's "CPU:<n>"
ROOTED: Final = -2  # in place of a peer, of a collective from or to one rank, its root: this minus that rank
STREAM: Final = 0xFFFFFFFF  # in place of the thread that is blocked: a GPU's stream is, and the rank goes on
TIMED: Final = 0xFFFFFFFE  # likewise: it is blocked until a time is up

# Names that mean something.
READING: Final = "reading TensorFlow's profiler"  # a compute span of labkit's own
STEPS_IN_ALL: Final = "steps in all"  # the scalar by which `steps` says how long its loop will be
MEMORY: Final = "memory: "  # how the scalars of `track_memory` begin, in bytes; then one of these, from what stays to what goes
MEMORY_KINDS: Final = ("parameters", "optimizer state", "gradients", "gathered parameters", "activations", "other")


@dataclass(frozen=True, slots=True)
class Head:
    """In every record. The span's own write fills the head in one step, so a new field belongs into the tail."""

    code: str


@dataclass(frozen=True, slots=True)
class Tail:
    """In the record of a communication.

    Args:
        code: of Python's `struct` module, 4 or 8 bytes long.
        few: of a text: None where it always finds room, else the word of `NO_ROOM` for texts that a program makes up at
            will.
    """

    code: str
    few: str | None = None


@dataclass(frozen=True, slots=True)
class Flag:
    """One bit of the record's flags."""

    bit: int


@dataclass(frozen=True, slots=True)
class OfRank:
    """Not in the ring."""

    code: str


@dataclass(frozen=True, slots=True)
class Span:
    """Something a rank did, from `start_ns` to `end_ns` on the machine's monotonic clock (`time.perf_counter_ns`).

    Args:
        rank: the number of the rank.
        name: what it did: "forward", "all_reduce", ...
        kind: "compute", "communication", "step" (one iteration of `steps`) or "call" (the whole function).
        start_ns: when it began; for a communication, when it was issued.
        end_ns: when it was over; for a communication, when it completed.
        wait_start_ns: when the rank began to be blocked until a communication completes; 0 if it never was.
        wait_end_ns: when it was no longer blocked.
        nbytes: size of the message or of the rank's tensors in a collective; 0 if unknown.
        peer: the other rank of a message; -1 for a collective, and -2 - r for one from or to a single rank r, its
            `root`.
        group: the process group, or the two ends of a message; "" for what one rank does alone.
        match: the number of the operation within its group; spans of several ranks with the same group and match are
            one.
        line: where the student's code issued it: "cell 5, line 12" or "train.py, line 12"; of a compute span, where the
            rank first used its name in the run.
        device: "cpu", or "cuda" where the times were taken by the GPU; "CPU:1" of a rank with several of TensorFlow's
            devices.
        done: False for an operation that had not completed; it ends where the time looked at ends.
        automatic: True for a compute span that labkit records without the program's help, such as a call that is
            served.
        measured: True for operations as TensorFlow's profiler saw them run: nothing blocks them meanwhile.
        sized: False for a communication that moved bytes, nobody knows how many; `nbytes` is 0.
        served: True where a thread of the rank that does what another rank has called computed, or was blocked.
        signature: of a collective, what all ranks must give alike: "float32 [4, 3], product, root 1"; of a message, its
            tensor.
    """

    rank: Annotated[int, OfRank("i")]
    name: Annotated[str, Head("I")]
    kind: Annotated[str, Head("B")]
    start_ns: Annotated[int, Head("q")]
    end_ns: Annotated[int, Head("q")]
    wait_start_ns: Annotated[int, Tail("q")] = 0
    wait_end_ns: Annotated[int, Tail("q")] = 0
    nbytes: Annotated[int, Tail("q")] = 0
    peer: Annotated[int, Tail("i")] = -1
    group: Annotated[str, Tail("I")] = ""
    match: Annotated[int, Tail("q")] = 0
    line: Annotated[str, Tail("I")] = ""
    device: Annotated[str, Head("B")] = "cpu"
    done: Annotated[bool, Flag(OPEN)] = True
    automatic: Annotated[bool, Flag(AUTOMATIC)] = False
    measured: Annotated[bool, Flag(MEASURED)] = False
    sized: Annotated[bool, Flag(UNSIZED)] = True
    served: Annotated[bool, Flag(SERVED)] = False
    signature: Annotated[str, Tail("I", few="sizes")] = ""

    @property
    def duration_ns(self) -> int:
        """Length in nanoseconds."""
        return self.end_ns - self.start_ns

    @property
    def root(self) -> int:
        """The rank that a broadcast or a scatter comes from, or that a gather or a reduce goes to; -1 for the rest."""
        return ROOTED - self.peer if self.peer <= ROOTED else -1


@dataclass(frozen=True, slots=True)
class Pending:
    """An operation that a rank issued and that has not completed: what it is waiting for, or what runs beside it.

    The fields mean what they mean in `Span`, and are kept as there.

    Args:
        wait_start_ns: since when the rank is blocked in it; 0 while it is not.
        thread: the system's number of the thread that is blocked in it, or that issued it.
    """

    name: str
    start_ns: int
    wait_start_ns: int = 0
    nbytes: int = 0
    peer: int = -1
    group: str = ""
    match: int = 0
    line: str = ""
    signature: str = ""
    thread: int = 0

    @property
    def type(self) -> OperationType:
        """What it is."""
        return type_of(self.name)

    @property
    def in_words(self) -> str:
        """What messages call it."""
        return self.type.in_words(self.name)


@dataclass(frozen=True, slots=True)
class Field:
    """One entry of the schema.

    Args:
        name: of the attribute.
        place: where a record keeps it.
        default: what a span has that says nothing else; `dataclasses.MISSING` where it must.
        is_text: whether it is interned.
    """

    name: str
    place: Head | Tail | Flag | OfRank
    default: Any
    is_text: bool

    @property
    def code(self) -> str:
        """Its type as a number: a letter of `struct`."""
        assert not isinstance(self.place, Flag), f"{self.name} is one bit"
        return self.place.code

    @property
    def is_time(self) -> bool:
        """Whether it is a moment on the clock of the rank's machine; 0 where there was none."""
        return self.name.endswith("_ns")


def flags_of(span: Span) -> int:
    """The bits that a record keeps of a span."""
    flags = 0
    for field in FIELDS:
        if isinstance(field.place, Flag) and bool(getattr(span, field.name)) is not field.default:
            flags |= field.place.bit
    return flags


def device_code(device: str) -> int:
    """The number that a record keeps of a device."""
    _, _, number = device.partition(":")
    return NUMBERED + int(number) if number else CUDA if device == "cuda" else CPU


def device_name(code: int) -> str:
    """The device of such a number."""
    return f"CPU:{code - NUMBERED}" if code >= NUMBERED else "cuda" if code == CUDA else "cpu"


# Texts of which there are only a few: how they become a number, and back.
CODES: Final[dict[str, tuple[Callable[[str], int], Callable[[int], str]]]] = {
    "kind": (KINDS.index, KINDS.__getitem__),
    "device": (device_code, device_name),
}


def _fields() -> Iterator[Field]:
    hints = get_type_hints(Span, include_extras=True)
    for f in fields(Span):
        hint = hints[f.name]
        yield Field(f.name, hint.__metadata__[0], f.default, hint.__origin__ is str and f.name not in CODES)


FIELDS: Final = tuple(_fields())
PENDING_FIELDS: Final = tuple(f for f in FIELDS if f.name in {own.name for own in fields(Pending)})
