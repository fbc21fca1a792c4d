"""When the executed ranks do what: from programs without times to a trace, computed by the engine of replay.

Two orders differ in what waits. On a CPU, the host computes: a rank does everything in program order, and a wait blocks
it. On a GPU, the host runs ahead: each stream does its part in program order, waits for a communication if the program
says so or if it uses the data, and for other streams if it was told to. In both, a communication begins when all ranks
have come to it and their links are free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from labkit.costs.device import Device
from labkit.costs.link import Link
from labkit.costs.network import Network, nodes_over
from labkit.errors.exceptions import LabError
from labkit.group.simulation.program import Program
from labkit.group.simulation.program_graph import ProgramGraph
from labkit.recording.events import Columns, Scalar
from labkit.recording.schema import COMMUNICATION
from labkit.tracing.replaying.times import Times, play
from labkit.tracing.trace import Trace

TIMES: Final = ("start_ns", "end_ns", "wait_start_ns", "wait_end_ns")  # as in `tracing.replaying.graph.ThreadEvents.times`


def simulated_trace(
    programs: Mapping[int, Program],
    device: Device | None,
    link: Link | Network | None,
    *,
    name: str,
    show: Sequence[int] = (),
    notes: Sequence[str] = (),
    late_ns: int = 0,
) -> Trace:
    """Compute the times of executed ranks.

    Args:
        programs: what these ranks do, by rank.
        device: the device of each rank; None for a CPU on which the programs were measured.
        link: the link or the network; None if communication takes no time.
        name: the name of the function.
        show: the ranks that the trace has; default: all that were executed.
        notes: notes for the reader.
        late_ns: how much longer a communication takes than on the link.

    Raises:
        LabError: ranks wait for one another for ever.
    """
    whole = ProgramGraph(programs, device, link, name, late_ns)
    try:
        times = play(whole.graph, whole.rules)
    except LabError:
        raise LabError("simulate: ranks wait for one another for ever, as they communicate in different orders") from None
    size, shown = whole.size, sorted(set(show) or programs)
    nodes = nodes_over(link, size)
    place = np.full(size + 1, len(shown))  # ranks that are not shown have this number
    place[shown], place[-1] = range(len(shown)), -1  # -1 stands for no rank
    data, at_ns = _data(whole, times)
    columns = whole.graph.trace.columns
    chosen = np.array([bool(text) for text in columns.names], bool)[data["name"]] & (place[data["rank"]] < len(shown))
    data = data[chosen]
    for field in ("rank", "peer", "root"):
        data[field] = place[data[field]]
    names = [whole.key_of_pair(text, place) for text in columns.names]
    values = [
        Scalar(int(place[rank]), text, int(at_ns[row, 0]), value)
        for row, rank, text, value in whole.values
        if place[rank] < len(shown)
    ]
    return Trace(
        Columns(data, names), values, ranks=[f"rank {rank}" for rank in shown], simulated=size, link=link, notes=notes,
        nodes=[nodes[rank] for rank in shown] if nodes else (),
    )  # fmt: skip


def _data(whole: ProgramGraph, times: Times) -> tuple[Any, Any]:
    """Return the rows of all spans with their times, and these as an array of shape (spans, 4)."""
    data = whole.graph.trace.columns.data.copy()
    at_ns = np.array([time or 0 for time in times.at_ns], np.int64).reshape(-1, 4)
    for row in whole.waits_of_other_streams:
        at_ns[row, 2:] = 0
    for row, communication in whole.stream_waits:  # the first time that the default stream has to wait
        since_ns, until_ns = at_ns[row, 2:]
        if communication >= 0 and until_ns > since_ns and not at_ns[communication, 3]:
            at_ns[communication, 2:] = since_ns, until_ns
    at_ns[at_ns[:, 3] <= at_ns[:, 2], 2:] = 0
    for column, name in enumerate(TIMES):
        data[name] = at_ns[:, column]
    travels = data["kind"] == COMMUNICATION
    data["wait_start_ns"][~travels] = data["wait_end_ns"][~travels] = 0
    return data, at_ns
