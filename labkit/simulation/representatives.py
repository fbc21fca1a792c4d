"""Which ranks of a simulated run are executed, and their execution: the others do the same as one of these."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from labkit.group.group import Group
from labkit.simulation.program import Program, with_marks

__all__ = ["execute_ranks", "programs_of"]


def programs_of(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, ranks: int, also: Sequence[int] = ()
) -> dict[int, Program]:
    """Execute a function as those ranks of many that stand for all.

    These are the first rank, the last, one at random, and every rank that exchanges messages with one of them. A
    collective has all its ranks do the same.

    Args:
        function: the function.
        args: its arguments.
        kwargs: its named arguments.
        ranks: the number of ranks.
        also: more ranks to execute.

    Returns:
        the programs of the executed ranks, by rank.

    Raises:
        RankError: the function failed, or does what cannot be simulated.
    """
    wanted = {0, ranks - 1, random.Random(ranks).randrange(ranks), *also}  # the same ranks in each simulation
    programs: dict[int, Program] = {}
    while new := sorted(wanted - programs.keys()):
        programs |= execute_ranks(function, args, kwargs, new, ranks)
        wanted |= {peer for program in programs.values() for peer in program.peers}
    return dict(sorted(programs.items()))


def execute_ranks(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], ranks: Sequence[int], size: int
) -> dict[int, Program]:
    """Execute a function as the given ranks of `size`, as many at a time as the machine has cores.

    Arguments as for `programs_of`.
    """
    from labkit.simulation.fake_rank import execute

    programs = {}
    at_once = os.cpu_count() or 1
    for first in range(0, len(ranks), at_once):
        some = ranks[first : first + at_once]
        with Group([f"rank {rank}" for rank in some], devices="cpu", threads=1) as group:
            run = group.run(execute, function, tuple(args), dict(kwargs), some, size)
        for number, rank in enumerate(some):
            trace = run.trace.filter(rank=number)
            spans = [span for span in trace if span.kind in ("compute", "step")]
            programs[rank] = Program(rank, size, with_marks(run.results[number], spans, trace.scalars))
    return programs
