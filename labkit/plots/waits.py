"""What ranks wait for, as a legend says it: for other ranks, or for other devices of the same rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from labkit.plots.bars import STYLES
from labkit.recording.events import device_number
from labkit.recording.schema import COMMUNICATION
from labkit.tracing.trace import Trace

ALONE: Final = "waiting"  # of a single rank without known devices, which cannot wait for another rank
_WORDS: Final = {
    (True, False): STYLES["waiting"].legend,
    (False, True): "waiting for another device",
    (True, True): "waiting for another rank or device",
}


def waiting_in_words(traces: Iterable[Trace]) -> str:
    """The legend's text for waiting: "waiting for another rank", "waiting for another device", or both."""
    found = [_waits_for(trace) for trace in traces]
    waits = any(ranks for ranks, _ in found), any(devices for _, devices in found)
    return _WORDS.get(waits, ALONE)


def legend_of(style: str, waiting: str) -> str:
    """The legend's text for a style, given that of `waiting_in_words` for waiting."""
    return waiting if style == "waiting" else STYLES[style].legend


def _waits_for(trace: Trace) -> tuple[bool, bool]:
    """Whether a rank may wait for another rank, and whether for another device of its own."""
    data = trace.columns.data
    travels = data[data["kind"] == COMMUNICATION]
    waits = travels["wait_end_ns"] > travels["wait_start_ns"]
    of_device = waits & (device_number(travels) > 0)  # devices are numbered if a rank has several
    if not of_device.any():
        return len(trace.ranks) > 1, False
    # In a group of devices of a single rank, no operation waits for another rank.
    groups = np.unique(travels["group"][of_device]).tolist()
    across = any(len(np.unique(travels["rank"][travels["group"] == group])) > 1 for group in groups)
    return len(trace.ranks) > 1 and (across or bool((waits & ~of_device).any())), True
