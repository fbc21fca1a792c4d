"""`Program`: what one rank does, in the order in which it does it; plain data without times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from labkit.costs.device import Kernel
from labkit.recording.events import Scalar
from labkit.recording.schema import Span


@dataclass(frozen=True, slots=True)
class Memory:
    """Tensors are allocated or freed."""

    live_bytes: int  # bytes of all tensors of the rank that exist from now on


@dataclass(frozen=True, slots=True)
class Communication:
    """A collective or a message that the rank issues."""

    number: int  # the index of this communication among all of the rank
    name: str  # as in the trace of a real run: "all_reduce", "send"
    nbytes: int  # the rank's input or output, whichever is larger, in bytes
    group: tuple[int, ...]  # the global ranks of the process group; for a message, the sender and the receiver
    process_group: str  # torch's name of the process group, the same on all its ranks, with its axis in a device mesh
    peer: int = -1  # the global rank at the other end of a message; -1 for a collective
    root: int = -1  # the global rank of a rooted collective's root; -1 for all others
    tag: int = 0
    line: str = ""  # the student's line that issued it; "" if there is none


@dataclass(frozen=True, slots=True)
class Wait:
    """The rank cannot go on before a communication has completed."""

    communication: int


@dataclass(frozen=True, slots=True)
class Mark:
    """The begin or the end of a span: one of the program's, a phase of training, or a step."""

    name: str  # the name of the span: "forward", "step"
    kind: str  # "compute" or "step"
    begins: bool  # whether it begins here; otherwise it ends
    line: str = ""  # the student's line of the span


@dataclass(frozen=True, slots=True)
class OnStream:
    """What follows is issued on another stream of the device."""

    stream: int  # the number of the stream; 0 is the default stream


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """A stream records an event, or waits for one: what follows on it begins after what preceded the event."""

    number: int  # the number of the event
    stream: int  # the number of the stream
    waits: bool  # whether the stream waits for it; otherwise the stream records it


@dataclass(frozen=True, slots=True)
class Value:
    """The program records a value: of `lab.record`, or of `lab.track_memory`."""

    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Elapsed:
    """Time that passes, where it was measured."""

    ns: int  # how long, in ns; negative if what passed before contains time that a real rank does not need


Event = Kernel | Memory | Elapsed | Communication | Wait | Mark | OnStream | StreamEvent | Value


@dataclass(frozen=True, slots=True)
class Program:
    """What one rank does."""

    rank: int
    size: int
    events: tuple[Event, ...]  # everything that the rank does, in program order

    @property
    def kernels(self) -> list[Kernel]:
        """The kernels, in program order."""
        return [event for event in self.events if isinstance(event, Kernel)]

    @property
    def communications(self) -> list[Communication]:
        """The communications, in the order in which they are issued."""
        return [event for event in self.events if isinstance(event, Communication)]

    @property
    def peers(self) -> set[int]:
        """The global ranks with which the rank exchanges messages."""
        return {communication.peer for communication in self.communications if communication.peer >= 0}


def with_marks(
    events: Iterable[tuple[int, Event]], spans: Sequence[Span], values: Iterable[Scalar] = (), *, measured: bool = False
) -> tuple[Event, ...]:
    """Insert the begins and ends of spans, and recorded values, between events, and return all in their order.

    All are of one rank and on one clock; events come with the time in ns at which they were recorded. If `measured`,
    time passes between events as long as it did; otherwise only kernels say how long they take.
    """
    # At one moment, ends come first, an inner span ends before an outer one, and begins after it.
    timed: list[tuple[tuple[int, int, int], Event]] = []
    for span in spans:
        length_ns = span.end_ns - span.start_ns
        if length_ns:
            timed.append(((span.start_ns, 2, -length_ns), Mark(span.name, span.kind, True, span.line)))
            timed.append(((span.end_ns, 0, length_ns), Mark(span.name, span.kind, False, span.line)))
    timed += [((at_ns, 1, 0), event) for at_ns, event in events]
    timed += [((value.time_ns, 1, 0), Value(value.name, value.value)) for value in values]
    timed.sort(key=lambda pair: pair[0])
    if not measured:
        return tuple(event for _, event in timed)
    found: list[Event] = []
    last_ns = timed[0][0][0] if timed else 0
    for (at_ns, *_), event in timed:
        found += [Elapsed(at_ns - last_ns), event]
        last_ns = at_ns
    return tuple(_with_waits(found))


def _with_waits(events: Sequence[Event]) -> list[Event]:
    """Let communications for which nothing is known to wait be waited for at the end of the pass that issued them.

    DistributedDataParallel waits in this way: torch's C++ code waits for futures, which nobody can observe.
    """
    waited = {event.communication for event in events if isinstance(event, Wait)}
    found: list[Event] = []
    open_ones: list[list[int]] = [[]]  # for each mark that has begun: the communications
    for event in events:
        if isinstance(event, Mark) and event.begins:
            open_ones.append([])
        elif isinstance(event, Mark) and len(open_ones) > 1:
            found += map(Wait, open_ones.pop())
        elif isinstance(event, Communication) and event.number not in waited:
            open_ones[-1].append(event.number)
        found.append(event)
    return found + [Wait(number) for numbers in open_ones for number in numbers]
