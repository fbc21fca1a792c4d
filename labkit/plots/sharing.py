"""What distorts times because ranks shared it, cores or GPUs, and the line with which figures say so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from labkit.errors.lists import counted, listed
from labkit.plots.view import View
from labkit.recording.schema import COMMUNICATION, CUDA, OWN_THREAD, SERVED, THROUGH_HOST
from labkit.tracing.trace import Trace

SUBSTANTIAL: Final = 0.15  # of the ranks' time: with less, `own_cores` hardly changes a step


def lacking_cores(trace: Trace) -> float:
    """Return the share of the calls' time in which ranks could have run but had no core; 0 if it was not recorded.

    It is recorded where ranks outnumber cores. On a GPU, its kernels determine what a picture shows.
    """
    data = trace.columns.data
    if (data["device"] == CUDA).any():
        return 0.0
    lacked_ns = recorded_ns = 0
    functions = data[data["flags"] & (SERVED | OWN_THREAD) == 0]
    for rank in range(len(trace.ranks)):
        own = functions[functions["rank"] == rank]
        at_ns = np.concatenate([own["start_ns"], np.where(own["kind"] == COMMUNICATION, own["wait_end_ns"], own["end_ns"])])
        delay_ns = np.concatenate([own["issue_delay_ns"], own["wait_delay_ns"]])  # each since the thread began
        at_ns, delay_ns = at_ns[delay_ns > 0], delay_ns[delay_ns > 0]
        if len(at_ns):
            first, last = at_ns.argmin(), at_ns.argmax()
            lacked_ns += max(int(delay_ns[last] - delay_ns[first]), 0)
            recorded_ns += int(at_ns[last] - at_ns[first])
    return lacked_ns / max(recorded_ns, 1)


def sharing_in_words(views: Sequence[View]) -> str:
    """Return a line about the runs with distorted times, because ranks shared cores or GPUs; "" if there are none."""
    if any((view.whole.columns.data["flags"] & THROUGH_HOST != 0).any() for view in views):
        return "gloo moved GPU tensors through the host's memory: communication includes these copies"
    distorted = [view for view in views if lacking_cores(view.whole) > SUBSTANTIAL]
    if not distorted:
        return ""
    trace = max((view.whole for view in distorted), key=lambda trace: len(trace.ranks))
    cores = counted(trace.cores, "core") if trace.cores else "cores"
    whose = f"{listed(view.label for view in distorted)}: " if len(distorted) < len(views) else ""
    cure = "" if any(view.whole.replayed for view in views) else "; lab.replay(run, own_cores=True) shows it"
    return f"{whose}{len(trace.ranks)} ranks shared {cores}: what overlaps here may not overlap on cores of their own{cure}"
