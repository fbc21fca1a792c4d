"""`Measurement`: a measured value with its spread, and what distorted it: other programs, or too few cores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from labkit.errors.lists import counted
from labkit.errors.wrong_calls import one_number
from labkit.recording.cores import load_of_others, machine_load, usable_cores
from labkit.recording.rank_facts import FactKind
from labkit.recording.schema import COMMUNICATION, CUDA, OWN_THREAD, SERVED
from labkit.tracing.step_times import HasTrace, spread_ns, step_ms, trace_of
from labkit.tracing.trace import Trace

UNITS_OF_TIME: Final = {"s": 1e9, "ms": 1e6, "µs": 1e3}  # in nanoseconds
MOST_RANKS: Final = 8  # of a lesson: where the run is not known, so much of the load may be the student's own


@dataclass(frozen=True, slots=True)
class Measurement:
    """A measured value."""

    value: float  # of several measurements or steps, the median
    # the smallest and the largest measurement; of one run, the quartiles of its steps; both `value` if unknown
    low: float
    high: float
    busy: str = ""  # what `busy_machine` says of it

    def too_close(self, other: Measurement) -> bool:
        """Whether the difference of two measurements is inside their spread."""
        return self.low <= other.high and other.low <= self.high

    def in_words(self, shown: Callable[[float], str]) -> str:
        """Return the value and its spread, if it has one: "127 ms (124 ms to 133 ms)"."""
        spread = f" ({shown(self.low)} to {shown(self.high)})" if self.low < self.high else ""
        return shown(self.value) + spread


def is_run(given: Any) -> bool:
    """Whether something is a run or a trace."""
    return isinstance(given, Trace) or isinstance(getattr(given, "trace", None), Trace)


def measurement_of(given: Any, unit: str, function: str) -> Measurement | None:
    """Return what was measured: a number in `unit`; the steps of a run or a trace; a list of either. Else None.

    Errors, which name the calling `function`, say that a run has no steps, or that the unit is not one of time.
    """
    if is_run(given):
        return _of_steps(given, unit, function)
    if not isinstance(given, list | tuple):
        number = one_number(given)
        return None if number is None else Measurement(number, number, number)
    each = [measurement_of(one, unit, function) for one in given]
    found = [one for one in each if one is not None]
    if not found or len(found) < len(each):
        return None
    values = [one.value for one in found]
    busy = next((one.busy for one in found if one.busy), "")
    return Measurement(float(np.median(values)), min(values), max(values), busy)


def _of_steps(run: HasTrace | Trace, unit: str, function: str) -> Measurement:
    if unit not in UNITS_OF_TIME:
        raise TypeError(f"{function}: a run is measured by the time of its steps, which is not in {unit or 'plain numbers'}")
    value = step_ms(run) * 1e6 / UNITS_OF_TIME[unit]
    low_ns, _, high_ns = spread_ns(trace_of(run, function))
    return Measurement(value, low_ns / UNITS_OF_TIME[unit], high_ns / UNITS_OF_TIME[unit], busy_machine(run))


def busy_machine(run: HasTrace | Trace | None = None) -> str:
    """Return a warning if other programs kept the machine busy during a run, or, without a run, until now; else "".

    It reads "This machine was busy (load 6 on 2 cores): run it again".
    """
    cores = usable_cores()  # of this machine, as the load: emulated machines share them, and `Trace.cores` is their sum
    if run is None:
        load = load_of_others(machine_load(), cores, MOST_RANKS)
    else:
        facts = [fact for of_rank in getattr(run, "facts", {}).values() for fact in of_rank]
        threads = sum(fact.values["threads"] for fact in facts if fact.kind is FactKind.RUN)
        ranks = len(trace_of(run, "busy_machine").ranks)
        load = load_of_others(getattr(run, "load", 0.0), cores, max(threads, ranks))
    return f"This machine was busy (load {load:.0f} on {counted(cores, 'core')}): run it again" if load else ""


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
