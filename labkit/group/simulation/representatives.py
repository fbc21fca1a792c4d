"""Which ranks of a simulated run are executed, and their execution: the others do the same as one of these."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Final

from labkit.errors.units import clock_time
from labkit.group.group import Group
from labkit.group.simulation.program import Program, with_marks
from labkit.ipc.code_names import name_of
from labkit.recording.cores import usable_cores

AT_ONCE: Final = 4  # ranks, even on fewer cores: to start a group takes longer than a small program
PATIENCE_S: Final = 15.0  # after which a line tells how far it is; Jupyter shows it on red, which looks like an error
WIDEST: Final = 72  # characters of such a line: each covers the one before
MOST_STEPS: Final = 1_000_000  # in looking ahead, a second: more only where almost all ranks are known already


def programs_of(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    ranks: int,
    also: Sequence[int] = (),
    measured: bool = False,
) -> dict[int, Program]:
    """Execute a function as those ranks of many that stand for all.

    These are the first rank, the last, and every rank that exchanges messages with one of them; if there are none, also
    one at random. A collective has all its ranks do the same.

    Args:
        function: the function.
        args: its arguments.
        kwargs: its named arguments.
        ranks: the number of ranks.
        also: more ranks to execute.
        measured: whether tensors have data, and one rank at a time is executed, so that the programs say how long they
            take on this machine.

    Returns:
        the programs of the executed ranks, by rank.

    Raises:
        RankError: the function failed, or does what cannot be simulated.
    """
    wanted = {0, ranks - 1, *also}
    programs: dict[int, Program] = {}
    since_s, wrote = time.monotonic(), False
    while new := sorted(wanted - programs.keys())[: _at_once(measured)]:
        programs |= execute_ranks(function, args, kwargs, new, ranks, measured=measured)
        wanted |= {peer for rank in new for peer in programs[rank].peers}
        if not any(program.peers for program in programs.values()):
            wanted.add(random.Random(ranks).randrange(ranks))  # the same in each simulation
        passed_s, done, missing = time.monotonic() - since_s, len(programs), wanted - programs.keys()
        if passed_s > PATIENCE_S and missing:
            distances = {peer - rank for rank in new for peer in programs[rank].peers}
            most = done + len(_reached(missing, distances, programs.keys(), ranks))
            text = f"{done:,} of {'up to ' * (most > len(wanted))}{most:,} ranks executed"
            text += f", about {clock_time(passed_s / done * (most - done))} left"
            print(f"\rsimulate: {text:<{WIDEST}}", end="", file=sys.stderr, flush=True)
            wrote = True
    if wrote:
        print(f"\rsimulate: {f'{len(programs):,} ranks executed':<{WIDEST}}", file=sys.stderr)
    return dict(sorted(programs.items()))


def _reached(missing: Set[int], distances: Set[int], done: Set[int], ranks: int) -> Set[int]:
    """Return the ranks still to be executed, if each exchanges messages with ranks at these distances.

    In a ring, these are all. Whether a pipeline ends after a few stages shows only when its last stage is executed.
    """
    found = new = missing
    while new and len(found) * len(distances) < MOST_STEPS:
        new = {rank + distance for rank in new for distance in distances if 0 <= rank + distance < ranks} - found - done
        found = found | new
    return found


def _at_once(measured: bool) -> int:
    return 1 if measured else max(int(usable_cores()), AT_ONCE)


class _SimulatedExecution:
    """A function that is executed as one of many ranks; messages call it by the function's name."""

    def __init__(self, function: Callable[..., Any], ranks: Sequence[int], size: int, measured: bool) -> None:
        self._function, self._ranks, self._size, self._measured = function, ranks, size, measured
        self.__name__ = name_of(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """In a rank: execute the function, and return what it did."""
        from labkit.group.simulation.fake_rank import execute

        return execute(self._function, args, kwargs, self._ranks, self._size, self._measured)


def execute_ranks(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    ranks: Sequence[int],
    size: int,
    *,
    measured: bool = False,
) -> dict[int, Program]:
    """Execute a function as the given ranks of `size`, at the same time.

    Arguments as for `programs_of`.
    """
    with Group([f"rank {rank}" for rank in ranks], devices="cpu", threads=1) as group:
        run = group.run(_SimulatedExecution(function, ranks, size, measured), *args, **kwargs)
    programs = {}
    for number, rank in enumerate(ranks):
        trace = run.trace.filter(rank=number)
        spans = [span for span in trace if span.kind in ("compute", "step")]
        programs[rank] = Program(rank, size, with_marks(run.results[number], spans, trace.scalars, measured=measured))
    return programs
