"""Refuses traces that cannot be replayed, each with the reason."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.errors.exceptions import LabError
from labkit.errors.lists import listed
from labkit.recording.group_keys import GroupKind, kind_of, ranks_of
from labkit.recording.operations import RECV, SEND, type_of
from labkit.recording.schema import COMMUNICATION, CUDA, MEASURED, NUMBERED, OPEN
from labkit.tracing.trace import Trace


def check_replayable(trace: Trace, function: str) -> None:
    """Check that a trace has all that replay needs.

    Args:
        trace: the trace, which is not empty.
        function: the name of the calling function, for error messages.

    Raises:
        LabError: it cannot be replayed.
    """
    if reason := _reason(trace):
        raise LabError(f"{function}: {reason}")


def _reason(trace: Trace) -> str:
    data, names = trace.columns.data, trace.columns.names
    travels = data[(data["kind"] == COMMUNICATION) & ~trace.columns.around]
    kinds = [kind_of(name) for name in names]
    if trace.simulated:
        return "this trace was simulated; simulate the changed program, or the same with another link or device"
    if any(trace.dropped):
        return f"{sum(trace.dropped)} records of this run were lost, so that the order of events is not known"
    tensorflow = np.array([kind is GroupKind.TENSORFLOW for kind in kinds], bool)[data["group"]]
    if ((data["flags"] & MEASURED) != 0).any() or (data["device"] >= NUMBERED).any() or tensorflow.any():
        return "TensorFlow's runs cannot be replayed: which operations its threads wait for is not recorded"
    if (data["device"] == CUDA).any():
        return "runs on a GPU cannot be replayed: what its streams wait for is not recorded"
    if opened := _named(trace, travels["name"][(travels["flags"] & OPEN) != 0]):
        return f"{opened} had not completed when the recording ended, so that its duration is not known"
    outside = (travels["start_ns"] < trace.start_ns) | (travels["end_ns"] > trace.end_ns)
    if cut := _named(trace, travels["name"][outside]):
        return f"this part of the run begins or ends in the middle of {cut}; replay the whole run"
    if lonely := _named(trace, _incomplete(trace, travels)):
        return f"some ranks of {lonely} are not in this trace; replay the trace of all ranks"
    return ""


def _named(trace: Trace, name_numbers: NDArray[Any]) -> str:
    return listed(dict.fromkeys(trace.columns.names[number] for number in name_numbers.tolist()), most=3)


def _incomplete(trace: Trace, travels: NDArray[Any]) -> NDArray[Any]:
    """Return the names of operations that fewer ranks recorded than others of the group, or only one end of two."""
    names = trace.columns.names
    is_message = np.array([type_of(name) in (SEND, RECV) for name in names], bool)
    of_ranks = np.array([kind_of(name) is GroupKind.COLLECTIVE for name in names], bool)
    rows = travels[of_ranks[travels["group"]] | is_message[travels["name"]]]
    keys = list(zip(rows["group"].tolist(), rows["match"].tolist(), strict=True))
    came = Counter(keys)
    expected = dict.fromkeys(rows["group"][is_message[rows["name"]]].tolist(), 2)
    for (group, _), count in came.items():
        listed_ranks = ranks_of(names[group])
        least = len(listed_ranks) if listed_ranks else len(trace.ranks) if names[group] == "world" else 0
        expected[group] = max(expected.get(group, 0), count, least)
    fewer = np.array([came[key] < expected[key[0]] for key in keys], bool)
    found: NDArray[Any] = rows["name"][fewer]
    return found
