"""Messages as arrows in a timeline, from sender to receiver, where there are few enough to distinguish them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from labkit.plots.bars import COMMUNICATION_LANE, COMPUTE_LANE
from labkit.plots.rows import Row
from labkit.recording.operations import RECV, REPLY, SEND, SERVE, TO_HERE, VALUE, OperationType, type_of
from labkit.recording.schema import COMMUNICATION, COMPUTE, CUDA, OPEN
from labkit.tracing.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOUR: Final = "#F4F5F7"  # light, in a dark outline: visible on bars, and on light and dark pages
OUTLINE: Final = "#16191F"
APART_PX: Final = 16  # with fewer pixels of width per message between the same two ranks, no arrows are drawn
PASSING_PX: Final = 64  # the same for the messages that pass over one rank's row on their way between other ranks
MOST: Final = 200  # arrows in one figure


@dataclass(frozen=True, slots=True)
class MessageArrow:
    """A message, a remote call or its reply, from one rank to another."""

    source: int  # the sending rank
    sent_ns: int  # when it was sent
    destination: int  # the receiving rank
    arrived_ns: int  # when it arrived
    call: bool = False  # True for a remote procedure call, which arrives when the callee starts to execute it
    on_cuda: bool = False  # whether it was sent between GPUs
    span: int = -1  # index of the sender's span in the trace's columns


def messages(trace: Trace) -> list[MessageArrow]:
    """The messages and remote procedure calls whose two ends are both in the trace.

    Where the ranks' clocks differ, a message may seem to arrive before it was sent. It is left as it is if their error
    explains that.
    """
    data, names, ready = trace.columns.data, trace.columns.names, trace.ready()
    complete = (data["kind"] == COMMUNICATION) & (data["peer"] >= 0) & (data["group"] != 0) & (data["flags"] & OPEN == 0)
    ends: dict[tuple[int, int], dict[OperationType, int]] = {}
    for i in np.flatnonzero(complete).tolist():
        row = data[i]
        ends.setdefault((int(row["group"]), int(row["match"])), {})[type_of(names[row["name"]])] = i
    found = []
    for both in ends.values():
        if SEND in both and RECV in both:
            send, recv = data[both[SEND]], data[both[RECV]]
            cuda, at = bool(send["device"] == CUDA), both[SEND]
            found.append(
                MessageArrow(int(send["rank"]), int(ready[at]), int(recv["rank"]), int(recv["end_ns"]), on_cuda=cuda, span=at)
            )
        elif VALUE in both and TO_HERE in both:  # a remote call's value, fetched from its owner
            value, fetch, since = data[both[VALUE]], data[both[TO_HERE]], ready[both[TO_HERE]]
            fetched = int(value["rank"]), int(since), int(fetch["rank"]), int(fetch["end_ns"])
            found.append(MessageArrow(*fetched, span=both[VALUE]))
        elif REPLY in both and len(both) > 1:
            call = next(i for kind, i in both.items() if kind is not REPLY)
            found += _call_and_reply(trace, call, both[REPLY])
    return [
        m
        for m in found
        if m.source != m.destination
        and m.sent_ns <= m.arrived_ns + trace.clock_error_ns
        and all(trace.start_ns <= time_ns <= trace.end_ns for time_ns in (m.sent_ns, m.arrived_ns))
    ]


def _call_and_reply(trace: Trace, call_at: int, reply_at: int) -> list[MessageArrow]:
    """A call arrives when the callee starts to serve it: in the last matching span that ended before the reply."""
    data, names = trace.columns.data, trace.columns.names
    call, reply = data[call_at], data[reply_at]
    caller, callee = int(call["rank"]), int(reply["rank"])
    served = trace.columns.name_id(SERVE.recorded(REPLY.function_in(names[reply["name"]])))
    before = (
        (data["kind"] == COMPUTE) & (data["name"] == served) & (data["rank"] == callee) & (data["end_ns"] <= reply["start_ns"])
    )
    back = MessageArrow(callee, int(reply["start_ns"]), caller, int(call["end_ns"]), span=reply_at)
    if not before.any():
        return [back]
    begun = int(data["start_ns"][before][data["end_ns"][before].argmax()])
    return [MessageArrow(caller, int(call["start_ns"]), callee, begun, call=True, span=call_at), back]


def draw_messages(ax: Axes, trace: Trace, rows: list[Row], top: float, unit_ns: float, width_px: float) -> bool:
    """Draw arrows between the rows of a trace, if few enough to distinguish them; return whether any was drawn.

    X is in units of `unit_ns` since the trace's start, y in rows, the first of which begins at `top`. The trace's
    duration is `width_px` wide.
    """
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.patheffects import withStroke

    data = trace.columns.data
    if ((data["kind"] == COMMUNICATION) & (data["peer"] >= 0)).sum() > 3 * MOST:
        return False  # a message has two or three spans
    found = messages(trace)
    places = [
        (
            _middle(rows, m.source, m.on_cuda, COMMUNICATION_LANE),
            _middle(rows, m.destination, m.on_cuda, COMPUTE_LANE if m.call else COMMUNICATION_LANE),
        )
        for m in found
    ]
    shown = [(m, start, end) for m, (start, end) in zip(found, places, strict=True) if start is not None and end is not None]
    pairs = Counter(tuple(sorted((m.source, m.destination))) for m in found)
    passed = Counter(row for _, *ends in shown for row in range(int(min(ends)) + 1, int(max(ends))))
    if (
        not shown
        or len(found) > MOST
        or max(pairs.values()) > width_px / APART_PX
        or max(passed.values(), default=0) > width_px / PASSING_PX
    ):
        return False
    for m, start, end in shown:
        x = [(t - trace.start_ns) / unit_ns for t in (m.sent_ns, m.arrived_ns)]
        thin = 1.0 if abs(int(start) - int(end)) == 1 else 0.7  # an arrow over the rows of other ranks hides less of them
        arrow = FancyArrowPatch(
            (x[0], top + start), (x[1], top + end), arrowstyle="-|>", mutation_scale=6, linewidth=0.8 * thin, color=COLOUR,
            zorder=4, shrinkA=0, shrinkB=0, label="message",
            path_effects=[withStroke(linewidth=1.8 * thin, foreground=OUTLINE)],
        )  # fmt: skip
        ax.add_patch(arrow)
    return True


def _middle(rows: list[Row], rank: int, on_cuda: bool, lane: tuple[float, float]) -> float | None:
    for number, row in enumerate(rows):
        if row.shows(rank, on_cuda):
            return number + lane[0] + lane[1] / 2
    return None
