"""Compiled programs communicate as uncompiled ones do, and their operations are recorded."""

from __future__ import annotations

from collections.abc import Iterator

import compiled_cases as cases
import pytest
import torch

import labkit as lab
from labkit.group.group import Group
from labkit.group.run import Run

pytestmark = pytest.mark.processes

MESSAGES = ["send", "recv", "all_reduce", "barrier"]


@pytest.fixture(scope="module")
def pair() -> Iterator[Group]:
    with Group(2) as group:
        yield group


def names(run: Run) -> list[str]:
    return [s.name for s in run.trace if s.kind == "communication" and s.rank == 0]


def check_results(run: Run, count: int) -> None:
    for results in run.results:
        assert len(results) == count
        for compiled, plain in results:
            torch.testing.assert_close(compiled, plain)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_results_and_records_are_those_of_the_uncompiled_program(pair: Group, backend: str) -> None:
    run = pair.run(cases.compiled_and_not, backend, cases.functional, cases.with_graph_breaks, cases.ddp)
    check_results(run, 3)
    seen = names(run)
    assert seen[:4] == ["all_reduce", "all_gather_into_tensor"] * 2
    assert seen[4:12] == MESSAGES * 2
    assert seen[12:].count("all_reduce") == 2 * 2  # DDP's buckets: one per step
    lines = {s.line.split(",")[0] for s in run.trace if s.kind == "communication"}
    assert lines == {"compiled_cases.py"}  # not a file that the compiler has written


def test_a_collective_is_part_of_the_graph(pair: Group) -> None:
    check_results(pair.run(cases.compiled_and_not, "eager", cases.in_one_graph, fullgraph=True), 1)


def test_ddp_is_optimized_in_each_of_its_modes(pair: Group) -> None:
    check_results(pair.run(cases.compiled_and_not, "aot_eager", cases.ddp_in_each_mode), 1)


def test_fsdp_is_compiled(pair: Group) -> None:
    run = pair.run(cases.compiled_and_not, "aot_eager", cases.fsdp)
    check_results(run, 1)
    assert {"all_gather_into_tensor", "reduce_scatter_tensor"} <= set(names(run))


def in_spans() -> float:
    def inner(x: torch.Tensor) -> torch.Tensor:
        with lab.span("in a compiled function"):
            return 2 * x

    decorated = lab.span("around a compiled function")(inner)
    return sum(torch.compile(function, backend="eager")(torch.ones(1)).item() for function in (inner, decorated))


def test_a_span_in_a_compiled_function(pair: Group) -> None:
    assert in_spans() == 4.0, "outside a group"
    run = pair.run(in_spans)
    assert run.results == [4.0] * 2
    recorded = sorted(s.name for s in run.trace.filter(rank=0, kind="compute"))
    assert recorded == ["around a compiled function", "in a compiled function", "in a compiled function"]
