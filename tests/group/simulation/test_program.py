"""Programs as data: spans become marks between events, in the order in which things happened."""

from __future__ import annotations

import pickle

from labkit.costs.device import Kernel
from labkit.group.simulation.program import Communication, Elapsed, Mark, Memory, Program, Wait, with_marks
from labkit.recording.schema import Span


def span(name: str, start_ns: int, end_ns: int, kind: str = "compute") -> Span:
    return Span(0, name, kind, start_ns, end_ns)


def kernel(name: str) -> Kernel:
    return Kernel(name, 1, 2, 3)


def test_marks_surround_what_happened_in_their_spans() -> None:
    spans = [
        span("outer", 10, 40), span("inner", 10, 20), span("step", 10, 40, "step"),
        span("step", 40, 60, "step"), span("empty", 50, 50),
    ]  # fmt: skip
    events = [(5, kernel("a")), (15, kernel("b")), (30, kernel("c")), (45, kernel("d"))]
    found = with_marks(events, spans)
    assert [(e.name, e.begins) if isinstance(e, Mark) else e.name for e in found if not isinstance(e, Wait)] == [
        "a", ("outer", True), ("step", True), ("inner", True), "b", ("inner", False), "c", ("outer", False), ("step", False),
        ("step", True), "d", ("step", False),
    ]  # fmt: skip


def test_measured_events_are_apart_as_long_as_they_were() -> None:
    events = [
        (5, Communication(0, "all_reduce", 8, (0, 1), "0")),
        (30, Communication(1, "all_reduce", 8, (0, 1), "0")),
        (32, Wait(1)),
    ]
    found = with_marks(events, [span("backward", 10, 40)], measured=True)
    assert sum(event.ns for event in found if isinstance(event, Elapsed)) == 35
    assert [event for event in found if not isinstance(event, Elapsed)] == [
        events[0][1], Mark("backward", "compute", True), events[1][1], Wait(1), Mark("backward", "compute", False),
        Wait(0),
    ]  # fmt: skip
    late = with_marks([(20, events[0][1])], [span("backward", 10, 40)], measured=True)
    assert late[-2:] == (Wait(0), Mark("backward", "compute", False))


def test_a_program_finds_its_kernels_communications_and_peers() -> None:
    events = (
        Memory(7), kernel("a"), Communication(0, "all_reduce", 8, (0, 1, 2), "0"), Memory(5), kernel("b"), Wait(0),
        Communication(1, "send", 8, (0, 2), "0", peer=2),
    )  # fmt: skip
    program = Program(0, 3, events)
    assert [k.name for k in program.kernels] == ["a", "b"]
    assert [c.number for c in program.communications] == [0, 1]
    assert program.peers == {2}
    assert pickle.loads(pickle.dumps(program)) == program
