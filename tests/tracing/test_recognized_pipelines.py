"""Pipelines are recognized by their messages, and nothing else is taken for one."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import labkit as lab
from labkit.recording.group_keys import pair_key
from labkit.recording.schema import Span
from labkit.tracing.patterns import Pipeline, pipeline_of, slowest_stage
from labkit.tracing.replaying.explain import explain
from labkit.tracing.trace import Trace

from synthetic import Book  # isort: skip


def stages(
    ranks: int, parts: int, *, slow: float = 2.0, sends: int = 1, more: tuple[int, int] | None = None, early: bool = False
) -> Trace:
    """GPipe on ranks whose passes take 2 ms, those of rank 1 `slow`; a message takes none.

    There are `sends` messages for each micro-batch, and as many `more` between two ranks in each step. With `early`,
    ranks send before they have received, as in the exchange of borders.
    """
    book, at, numbers = Book(), 0.0, itertools.count()

    def send(source: int, target: int, sent: float, asked: float, end: float) -> None:
        key = {"group": pair_key(source, target, 0), "match": next(numbers), "nbytes": 8}
        book.travel(source, "send", sent, end, peer=target, **key)
        book.travel(target, "recv", asked, end, wait=(asked, end), peer=source, **key)

    for _ in range(4):
        ready = [at] * ranks
        for name, way in (("forward", range(ranks)), ("backward", range(ranks)[::-1])):
            for _ in range(parts):
                here = at
                for before, rank in zip([None, *way], way, strict=False):
                    begin = max(here, ready[rank])
                    for _ in range(0 if before is None else sends):
                        send(before, rank, ready[rank] if early else here, ready[rank], begin)
                    here = ready[rank] = book.compute(rank, name, begin, begin + (slow if rank == 1 else 2.0))
        end = max(ready)
        for _ in range(parts if more else 0):
            send(*more, end, end, end)
        for rank in range(ranks):
            book.whole(rank, "step", at, end + 1)
        at = end + 1
    return book.trace(ranks)


@pytest.mark.parametrize(
    ("shape", "chains"),
    [
        ({"ranks": 4, "parts": 3}, ((0, 1, 2, 3),)),
        ({"ranks": 2, "parts": 1}, ((0, 1),)),
        ({"ranks": 4, "parts": 3, "sends": 2}, None),  # how many messages a micro-batch has is not known
        ({"ranks": 4, "parts": 3, "more": (0, 3)}, None),
        ({"ranks": 4, "parts": 3, "more": (3, 0)}, None),
        ({"ranks": 4, "parts": 3, "more": (0, 1)}, None),
        ({"ranks": 4, "parts": 3, "early": True}, None),
    ],
)
def test_a_pipeline_is_recognized_only_if_that_is_certain(shape: dict[str, Any], chains: Any) -> None:
    assert pipeline_of(stages(**shape)) == (None if chains is None else Pipeline(chains, shape["parts"]))


def test_two_pipelines_beside_one_another() -> None:
    one = stages(2, 3)
    other = [replace(span, rank=span.rank + 2, group=span.group and pair_key(*pair_of(span), 0)) for span in one.spans]
    both = Trace([*one.spans, *other], ranks=[f"rank {rank}" for rank in range(4)])
    assert pipeline_of(both) == Pipeline(((0, 1), (2, 3)), 3)


def pair_of(span: Span) -> tuple[int, int]:
    ends = span.rank + 2, span.peer + 2
    return ends if span.name == "send" else ends[::-1]


def test_equal_stages_are_told_their_bubble() -> None:
    """(4 − 1) / (4 + 4 − 1), and one millisecond of 29 in which nobody computes."""
    text = explain(stages(4, 4)).text
    assert "This is a pipeline of 4 stages and 4 micro-batches: equal stages leave a bubble of 43 %; 45 % were measured." in text
    assert "The stages are about equal. With 8 micro-batches, it would be 27 %, if messages took no time." in text
    assert "cores" not in text


def test_the_slowest_stage_sets_the_pace() -> None:
    trace = stages(4, 4, slow=6.0)
    assert slowest_stage(trace, Pipeline(((0, 1, 2, 3),), 4)) == (1, 3.0)
    text = explain(trace).text
    assert "The stage of rank 1 computes 3.0 times as long as the other stages do on average, and sets the pace" in text
    assert '"rank 1 as fast as the others" saves' in text


def by_hand() -> None:
    rank = dist.get_rank()
    stage = nn.Linear(4, 4)
    for _ in lab.steps(range(3)):
        outputs = []
        for _ in range(2):
            x = torch.ones(2, 4)
            if rank:
                dist.recv(x, 0)
                outputs.append((x.requires_grad_(), stage(x)))
            else:
                outputs.append((x, stage(x)))
                dist.send(outputs[-1][1].detach(), 1)
        for x, y in outputs:
            gradient = torch.ones_like(y)
            if not rank:
                dist.recv(gradient, 1)
            y.backward(gradient)
            if rank:
                assert x.grad is not None
                dist.send(x.grad, 0)


def by_torch() -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank, ends = dist.get_rank(), torch.ones(2, 4, requires_grad=True)
    stage = PipelineStage(nn.Linear(4, 4), rank, 2, torch.device("cpu"), input_args=ends, output_args=ends)
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    for _ in lab.steps(range(3)):
        schedule.step(*([torch.ones(4, 4)] if rank == 0 else []), **({"target": torch.ones(4, 4)} if rank else {}))


def swapped() -> None:
    """Neighbours exchange their borders, then compute: no pipeline."""
    rank, border, layer = dist.get_rank(), torch.zeros(4), nn.Linear(4, 4)
    for _ in lab.steps(range(3)):
        for _ in range(2):
            work = [dist.isend(torch.ones(4), 1 - rank), dist.irecv(border, 1 - rank)]
            for one in work:
                one.wait()
            layer(border.clone()).sum().backward()


@pytest.mark.processes
@pytest.mark.parametrize(("program", "found"), [(by_hand, True), (by_torch, True), (swapped, False)])
def test_real_programs(program: Any, found: bool) -> None:
    with lab.Group(2) as group:
        trace = group.run(program).trace
    assert pipeline_of(trace) == (Pipeline(((0, 1),), 2) if found else None)
