"""Pipelines of `torch.distributed.pipelining`: the passes of their schedules are recorded in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from matplotlib.legend import Legend
from torch import nn

import labkit as lab
from labkit.group.group import Group
from labkit.group.run import Run
from labkit.plots.timeline import timeline
from labkit.plots.view import is_pipeline
from labkit.recording.schema import Span
from labkit.tracing.trace import Trace

RANKS, MICROBATCHES, WIDTH, ROWS = 2, 4, 8, 2


@pytest.fixture(scope="module")
def pair() -> Iterator[Group]:
    with Group(RANKS) as group:
        yield group


def train(schedule: str, per_rank: int = 1, opposite: bool = False) -> None:
    """One step of a pipeline, without a span."""
    from torch.distributed import pipelining
    from torch.distributed.pipelining import PipelineStage

    rank, size = dist.get_rank(), dist.get_world_size()
    numbers = [rank] if per_rank == 1 else [rank, 2 * size - 1 - rank if opposite else rank + size]
    stages = [PipelineStage(nn.Linear(WIDTH, WIDTH), n, per_rank * size, torch.device("cpu")) for n in numbers]
    made: Any = getattr(pipelining, schedule)(stages[0] if per_rank == 1 else stages, MICROBATCHES, loss_fn=nn.MSELoss())
    batch = torch.ones(MICROBATCHES * ROWS, WIDTH)
    inputs = (batch,) if 0 in numbers else ()
    target = {"target": batch} if per_rank * size - 1 in numbers else {}
    made.step(*inputs, **target)


def computed(trace: Trace, rank: int) -> list[str]:
    return [span.name for span in sorted(trace.filter(rank=rank, kind="compute"), key=lambda span: span.start_ns)]


@pytest.mark.parametrize(
    ("schedule", "per_rank", "ideal"),
    [("ScheduleGPipe", 1, "gpipe"), ("Schedule1F1B", 1, "1f1b"), ("ScheduleInterleaved1F1B", 2, "interleaved 1f1b")],
)
@pytest.mark.processes
def test_the_passes_are_those_of_the_ideal_schedule(pair: Group, schedule: str, per_rank: int, ideal: str) -> None:
    trace = pair.run(train, schedule, per_rank).trace
    expected = lab.schedule(ideal, stages=per_rank * RANKS, micro_batches=MICROBATCHES, ranks=RANKS)
    for rank in range(RANKS):
        assert computed(trace, rank) == computed(expected, rank)
    assert is_pipeline(trace)
    lines = {span.line for span in trace.filter(kind="compute")}
    assert lines == {f"test_pipelines.py, line {train.__code__.co_firstlineno + 12}"}, "where the program takes the step"


@pytest.mark.parametrize(("schedule", "opposite"), [("ScheduleInterleavedZeroBubble", False), ("ScheduleZBVZeroBubble", True)])
@pytest.mark.processes
def test_a_backward_pass_may_be_split_in_two(pair: Group, schedule: str, opposite: bool) -> None:
    trace = pair.run(train, schedule, 2, opposite).trace
    found = Counter(name for rank in range(RANKS) for name in computed(trace, rank))
    assert set(found.values()) == {1}
    for stage in range(2 * RANKS):
        for number in range(MICROBATCHES):
            assert found[f"forward {number} of stage {stage}"] == 1
            backward = f"backward {number} of stage {stage}"
            assert found[backward] + found[f"{backward}, inputs"] == 1
            assert found[f"{backward}, inputs"] == found[f"{backward}, weights"]
    assert any(name.endswith("weights") for name in found)


@pytest.mark.usefixtures("plain")
@pytest.mark.processes
def test_the_figure_shows_the_bubble_and_the_numbers(pair: Group) -> None:
    run: Run = pair.run(train, "Schedule1F1B")
    trace = run.trace.between(*_passes(run.trace))
    ax = timeline(trace)
    assert f"bubble {100 * trace.bubble:.0f} %" in ax.get_title(loc="left")
    said = {text.get_text() for legend in ax.figure.findobj(Legend) for text in legend.get_texts()}
    assert {"forward", "backward", "in the function, in no span"} <= said


def _passes(trace: Trace) -> tuple[int, int]:
    spans = trace.filter(kind="compute").spans
    return min(span.start_ns for span in spans), max(span.end_ns for span in spans)


def test_automatic_spans_make_nothing_else_idle() -> None:
    ms = 10**6
    spans = [
        Span(0, "train", "call", 0, 100 * ms),
        Span(0, "forward 0", "compute", 10 * ms, 20 * ms, automatic=True),
        Span(
            0, "recv", "communication", 20 * ms, 60 * ms, wait_start_ns=20 * ms, wait_end_ns=60 * ms, peer=1, group="p", match=1
        ),
        Span(1, "train", "call", 0, 50 * ms),
        Span(1, "send", "communication", 50 * ms, 60 * ms, peer=0, group="p", match=1),
    ]
    assert Trace(spans, ranks=["0", "1"]).shares()[0].compute_ns == 60 * ms
    of_the_program = [*spans, Span(0, "optimizer", "compute", 80 * ms, 90 * ms)]
    assert Trace(of_the_program, ranks=["0", "1"]).shares()[0].compute_ns == 20 * ms
