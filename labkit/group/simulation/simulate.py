"""`simulate`: a program as one of many ranks, on devices and links that this machine does not have."""

from __future__ import annotations

import inspect
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from labkit.costs.device import Device
from labkit.costs.link import Link
from labkit.costs.network import Network
from labkit.errors.wrong_calls import check_number, public_api
from labkit.group.group import Group
from labkit.group.simulation.program import Program, with_marks
from labkit.group.simulation.program_graph import simulated_trace
from labkit.ipc.code_names import name_of
from labkit.recording.cores import usable_cores
from labkit.recording.record import clock
from labkit.tracing.step_times import step_ms
from labkit.tracing.trace import Trace

MOST_RANKS: Final = 1 << 18  # of which a small program takes half a minute; torch and each communication list all of them
TRIES: Final = 60
AT_ONCE: Final = 4  # ranks, even on fewer cores: to start a group takes longer than a small program
PATIENCE_S: Final = 15.0  # after which a line tells how far it is; Jupyter shows it on red, which looks like an error
WIDEST: Final = 72  # characters of such a line: each covers the one before
LINK: Final = Link(gbit_per_s=1000, latency_us=100)  # slow enough to be what an operation waits for


@dataclass(frozen=True, repr=False, eq=False)
class Simulation:
    """A program as `simulate` computed it. Figures and `step_ms` accept it as a run."""

    size: int  # the number of simulated ranks
    programs: Mapping[int, Program]  # what each executed rank does, by rank; plain data, without times
    trace: Trace  # when the executed ranks, or those of `show=`, do it

    @property
    def step_ms(self) -> float:
        """The median duration of a step in milliseconds; see `labkit.step_ms`."""
        return step_ms(self)

    def __repr__(self) -> str:
        return f"<Simulation of {self.size:,} ranks, {len(self.programs)} executed>"


@public_api
def simulate(
    function: Callable[..., Any],
    *args: Any,
    ranks: int,
    link: Link | Network,
    device: Device | None = None,
    show: Sequence[int] = (),
    measured: bool = False,
    **kwargs: Any,
) -> Simulation:
    """Compute how a function would run on many ranks: `lab.simulate(train, ranks=1024, link=lab.Link.nvlink4)`.

    The function is the same as for `Group.run`, in plain torch. A few ranks execute it, on tensors that have a shape,
    but no data: the first, the last, one at random, and those with which these exchange messages. The other ranks of a
    collective are taken to do the same. Which kernels run, what is sent, and which memory is used is exact. Times
    follow from models: of the device (`Device`), and of the link as in emulated groups (docs/simulate.md).

        network = lab.Network(nodes=128, inside=lab.Link.nvlink4, between=lab.Link.infiniband_ndr)
        sim = lab.simulate(train, ranks=1024, link=network)
        lab.step_ms(sim), lab.sent_mb(sim), lab.memory_mb(sim)
        lab.timeline(sim)

    Figures say "simulated" in their title. Memory is that of all tensors, as "other"; where the function uses
    `labkit.track_memory`, by kind, and "other" is the rest. With `measured=True`, only what it tracks is known.

    Args:
        function: the function that each rank calls.
        args: its arguments.
        ranks: the number of ranks, at most 262,144.
        link: the link between all ranks, or the network of their nodes.
        device: the device of each rank; default: `Device.h100`.
        show: the ranks that figures show; default: all that are executed.
        measured: whether the executed ranks have real tensors, one rank after the other on this machine's CPU, and only
            the communication is simulated. What a real group of 2 or 4 ranks takes, each on a core of its own, shows
            how far to believe it. `device` does not apply.
        kwargs: its named arguments.

    Raises:
        LabError: ranks wait for one another for ever.
        RankError: the function failed as one of the ranks, or does what cannot be simulated, such as a condition on
            the value of a tensor; the error names the line.
        TypeError, ValueError: an invalid argument.
    """
    expected = f"simulate(ranks={ranks!r}): expected a whole number from 1 to {MOST_RANKS:,}"
    check_number(ranks, expected, whole=True, at_least=1, below=MOST_RANKS + 1)
    if not callable(function):
        raise TypeError(f"simulate({function!r}): expected a function, as in simulate(train, ranks=1024, link=...)")
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        raise TypeError(f"simulate({name_of(function)}): expected a function that does its work when it is called, no generator")
    if not isinstance(link, Link | Network):
        raise TypeError(f"simulate(link={link!r}): expected a lab.Link or a lab.Network")
    if device is not None and not isinstance(device, Device):
        raise TypeError(f"simulate(device={device!r}): expected a lab.Device, as in device=lab.Device.h100")
    show = tuple(show)  # an iterator could be read only once
    for rank in show:
        check_number(rank, f"simulate(show={show!r}): expected ranks from 0 to {ranks - 1}", whole=True, at_least=0, below=ranks)
    if isinstance(link, Network):
        link = link.of(ranks)
    if measured and device is not None:
        raise ValueError("simulate(measured=True, device=...): expected one of both, since this machine is then the device")
    computes = None if measured else device or Device.h100
    gpus = computes is not None and computes.runs_ahead
    programs = programs_of(function, args, kwargs, ranks=ranks, also=show, measured=measured, gpus=gpus)
    note = f"Simulated, not run: {len(programs)} of {ranks:,} ranks were executed, the others copy one of them."
    name = name_of(function)
    late_ns = _lateness_ns() if measured else 0
    trace = simulated_trace(programs, computes, link, name=name, show=show, notes=[note], late_ns=late_ns)
    return Simulation(ranks, programs, trace)


def _lateness_ns() -> int:
    """Return how much longer a communication takes in a real group on this machine than its link's model says.

    It is measured with all-reduces of a single number between two ranks.
    """
    with Group(2, devices="cpu", threads=1, link=LINK) as group:
        taken_ns = min(float(median(of_rank)) for of_rank in group.run(_reduce).results)
    return max(round(taken_ns - LINK.seconds("all_reduce", 4, 2) * 1e9), 0)


def _reduce() -> list[int]:
    import torch
    import torch.distributed as dist

    number, found = torch.ones(1), []
    for _ in range(TRIES):
        start_ns = clock()
        dist.all_reduce(number)
        found.append(clock() - start_ns)
    return found[TRIES // 3 :]


def programs_of(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    ranks: int,
    also: Sequence[int] = (),
    measured: bool = False,
    gpus: bool = True,
) -> dict[int, Program]:
    """Execute a function as those ranks of many that stand for all; return their programs by rank.

    These are the first rank, the last, those of `also`, and every rank that exchanges messages with one of them; if
    there are none, also one at random. A collective has all its ranks do the same. If `measured`, tensors have data,
    and one rank at a time is executed, so that the programs say how long they take on this machine. `gpus` says whether
    devices are GPUs.
    """
    wanted = {0, ranks - 1, *also}
    programs: dict[int, Program] = {}
    since_s, wrote = time.monotonic(), False
    while new := sorted(wanted - programs.keys())[: 1 if measured else max(int(usable_cores()), AT_ONCE)]:
        programs |= execute_ranks(function, args, kwargs, new, ranks, measured=measured, gpus=gpus)
        wanted |= {peer for rank in new for peer in programs[rank].peers}
        if not any(program.peers for program in programs.values()):
            wanted.add(random.Random(ranks).randrange(ranks))  # the same in each simulation
        if time.monotonic() - since_s > PATIENCE_S and wanted - programs.keys():
            text = f"{len(programs):,} ranks executed, of {ranks:,} at most"
            print(f"\rsimulate: {text:<{WIDEST}}", end="", file=sys.stderr, flush=True)
            wrote = True
    if wrote:
        print(f"\rsimulate: {f'{len(programs):,} ranks executed':<{WIDEST}}", file=sys.stderr)
    return dict(sorted(programs.items()))


def execute_ranks(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    ranks: Sequence[int],
    size: int,
    *,
    measured: bool = False,
    gpus: bool = True,
) -> dict[int, Program]:
    """Execute a function as the given ranks of `size`, at the same time."""

    def executed(*args: Any, **kwargs: Any) -> Any:
        from labkit.group.simulation.fake_rank import execute

        return execute(function, args, kwargs, ranks, size, measured, gpus)

    executed.__name__ = name_of(function)  # by which messages call it
    with Group([f"rank {rank}" for rank in ranks], devices="cpu", threads=1) as group:
        run = group.run(executed, *args, **kwargs)
    programs = {}
    for number, rank in enumerate(ranks):
        trace = run.trace.filter(rank=number)
        spans = [span for span in trace if span.kind in ("compute", "step")]
        programs[rank] = Program(rank, size, with_marks(run.results[number], spans, trace.scalars, measured=measured))
    return programs
