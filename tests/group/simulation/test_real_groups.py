"""Simulated ranks communicate as real ones: what groups of 2 and 4 record is the oracle for names, bytes and order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import simulated_programs
from communications import real_communications, simulated_communications

import labkit as lab
from labkit.group.simulation.program import Mark, Program
from labkit.group.simulation.simulate import programs_of

pytestmark = pytest.mark.processes
SIZES = (2, 4)


@pytest.fixture(scope="module", params=SIZES)
def group(request: pytest.FixtureRequest) -> Iterator[lab.Group]:
    with lab.Group(request.param, devices="cpu") as group:
        group.run(int)
        yield group


@pytest.mark.parametrize("function", simulated_programs.PROGRAMS)
def test_communications_and_spans_equal_those_of_a_real_group(group: lab.Group, function: Callable[[], None]) -> None:
    real = group.run(function).trace
    programs = programs_of(function, (), {}, ranks=len(group))
    assert {0, len(group) - 1} <= programs.keys()
    for rank, program in programs.items():
        communications = simulated_communications(program)
        assert len(communications) > 5
        assert communications == real_communications(real, rank)
        spans = sorted(
            (s for s in real.filter(rank=rank) if s.kind in ("compute", "step")), key=lambda s: (s.start_ns, -s.end_ns)
        )
        marks = [event for event in program.events if isinstance(event, Mark)]
        assert [(m.name, m.kind, m.line) for m in marks if m.begins] == [(s.name, s.kind, s.line) for s in spans]
        assert 2 * len(spans) == len(marks)
    assert_executed_ranks_match(programs)


def assert_executed_ranks_match(programs: dict[int, Program]) -> None:
    """Executed ranks of one process group issue the same collectives in it, and each message has a receiver."""
    issued: dict[Any, dict[int, list[tuple[str, int]]]] = defaultdict(lambda: defaultdict(list))
    for rank, program in programs.items():
        for c in program.communications:
            name = "message" if c.peer >= 0 else c.name
            issued[c.process_group, c.group, c.tag][rank].append((name, c.nbytes if c.root < 0 else 0))  # a root has all parts
    for (_, ranks, _), by_rank in issued.items():
        assert by_rank.keys() == programs.keys() & set(ranks)
        first, *others = by_rank.values()
        assert others == [first] * len(others)
