"""Steps that optimizers end: where each begins and ends, with one optimizer, several, or `lab.steps`."""

from __future__ import annotations

import mmap

import pytest

from labkit.recording.record import AutomaticSteps
from labkit.recording.ring_buffer import RING_BYTES, RingReader, RingWriter
from labkit.recording.schema import STEP
from labkit.tracing.trace import Trace, from_records


class Optimizer:
    pass


class Ring:
    """A ring with its steps, and optimizers by number."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, RING_BYTES)
        self.writer = RingWriter(self.memory)
        self.now_ns = 0
        self.steps = AutomaticSteps(lambda: self.now_ns, self.write)
        self.optimizers: dict[int, Optimizer] = {}

    def trace(self) -> Trace:
        reader = RingReader(self.memory)
        records = reader.read()
        return from_records([records], [reader.names()], ["rank 0"])

    def recorded(self) -> list[tuple[int, int]]:
        return [(span.start_ns, span.end_ns) for span in self.trace().filter(kind="step")]

    def write(self, start_ns: int, end_ns: int, flags: int) -> None:
        self.writer.write("step", STEP, start_ns, end_ns, flags=flags)

    def works(self, at_ns: int) -> None:
        self.now_ns = at_ns
        self.steps.working()

    def step(self, optimizer: int, start_ns: int, end_ns: int) -> None:
        which = self.optimizers.setdefault(optimizer, Optimizer())
        self.now_ns = start_ns
        self.steps.optimizer_begins(which)
        self.now_ns = end_ns
        self.steps.optimizer_ends(which)


@pytest.fixture
def ring() -> Ring:
    return Ring()


def test_each_step_of_one_optimizer_begins_where_the_one_before_ended(ring: Ring) -> None:
    ring.works(10)  # a forward pass
    ring.works(14)  # the backward pass
    ring.step(1, 18, 20)
    ring.works(25)
    ring.step(1, 28, 30)
    assert ring.recorded() == [(10, 20)], "another optimizer might still belong to the second step"
    ring.steps.end_step()
    assert ring.recorded() == [(10, 20), (20, 30)]
    assert all(span.automatic for span in ring.trace().filter(kind="step"))


def test_two_optimizers_that_step_in_turn_make_one_step(ring: Ring) -> None:
    for begin in (100, 200, 300):
        ring.works(begin)
        ring.step(1, begin + 10, begin + 20)
        ring.step(2, begin + 30, begin + 40)
    ring.steps.end_step()
    assert ring.recorded() == [(100, 140), (140, 240), (240, 340)]


def test_an_optimizer_that_steps_more_often_makes_more_steps(ring: Ring) -> None:
    for optimizer, end in ((1, 20), (1, 30), (1, 40), (2, 50), (1, 60)):
        ring.step(optimizer, end - 5, end)
    ring.steps.end_step()
    assert ring.recorded() == [(15, 20), (20, 30), (30, 50), (50, 60)]


def test_optimizers_that_are_created_for_each_step_make_steps(ring: Ring) -> None:
    for number in range(4):
        begin = 100 * number + 100
        ring.step(1, begin + 10, begin + 20)
        ring.step(2, begin + 30, begin + 40)
        old, ring.optimizers = ring.optimizers, {1: Optimizer(), 2: Optimizer()}  # at other places in memory
        del old
    ring.steps.end_step()
    assert ring.recorded() == [(110, 140), (140, 240), (240, 340), (340, 440)]


def test_without_an_optimizer_there_is_no_step(ring: Ring) -> None:
    ring.works(10)
    ring.steps.end_step()
    assert ring.recorded() == []


def test_a_run_begins_anew(ring: Ring) -> None:
    ring.step(1, 10, 20)
    ring.steps.end_step()
    ring.steps.begin_run()
    ring.step(1, 110, 120)
    ring.steps.end_step()
    assert ring.recorded() == [(10, 20), (110, 120)]


def test_a_program_that_marks_its_steps_has_only_these(ring: Ring) -> None:
    ring.step(1, 10, 20)
    ring.step(1, 25, 30)  # the first of both is recorded already
    ring.steps.marked()
    ring.step(1, 35, 40)
    ring.writer.write("step", STEP, 32, 42)
    ring.steps.end_step()
    assert ring.recorded() == [(32, 42)]
    assert RingReader(ring.memory).read()["end_ns"].tolist() == [20, 42], "nor does it write others from then on"
