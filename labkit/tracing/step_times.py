"""The steps of a run, and what was measured: `step_ms`, `best_of`, values with their spread and what distorted them."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from labkit.costs.prediction import UNITS
from labkit.errors.exceptions import LabError
from labkit.errors.lists import counted
from labkit.errors.wrong_calls import check_number, one_number, public_api
from labkit.recording.cores import load_of_others, machine_load, usable_cores
from labkit.recording.rank_facts import FactKind
from labkit.recording.schema import COMMUNICATION, CUDA, OWN_THREAD, READING, SERVED
from labkit.tracing.intervals import Intervals
from labkit.tracing.trace import Trace

UNITS_OF_TIME: Final = {name: 1e9 * size for name, (base, size) in UNITS.items() if base == "s"}  # in nanoseconds
MOST_RANKS: Final = 8  # of a lesson: where the run is not known, so much of the load may be the student's own


def undisturbed_steps(trace: Trace) -> NDArray[np.int64]:
    """The numbers of the steps in which no rank reads TensorFlow's profiler; all numbers if there are no such steps."""
    bounds, data = trace.step_bounds(), trace.columns.data
    reads = data[data["name"] == trace.columns.name_id(READING)]
    disturbed = (reads["start_ns"] < bounds[:, 1:]) & (reads["end_ns"] > bounds[:, :1])
    own = np.flatnonzero(~disturbed.any(axis=1))
    return own if len(own) else np.arange(len(bounds))


def median_step(trace: Trace) -> int:
    """The number of the step of median length, if possible without a reading of TensorFlow's profiler."""
    own = undisturbed_steps(trace)
    return int(own[np.argsort(np.diff(steps_in_turn(trace))[own, 0], kind="stable")[len(own) // 2]])


def steps_in_turn(trace: Trace, rank: int | None = None) -> Intervals:
    """The bounds of each step, shape (steps, 2), in ns, without what overlaps the step before; with `rank`, its own.

    Each of `Trace.step_bounds` begins with the first rank, when others may still be in the step before: the sum of
    their lengths can be more than the time that the steps took.
    """
    bounds = trace.step_bounds(rank)
    bounds[1:, 0] = np.maximum(bounds[1:, 0], bounds[:-1, 1])
    return bounds


class HasTrace(Protocol):
    """A `Run`, or any other object with a trace."""

    @property
    def trace(self) -> Trace:
        """The spans of all ranks."""


def trace_of(run: HasTrace | Trace, function: str, *, whole: bool = False) -> Trace:
    """The trace of a run, which must not be empty; errors name the calling `function`.

    Of a run that was restarted, it is that of the last attempt, which alone makes sense as a training; `whole`: of all.
    """
    trace = run if isinstance(run, Trace) else getattr(run, "trace", None)
    if not isinstance(trace, Trace):
        if isinstance(run, list | tuple):
            hint = f"; pass several runs as {function}(a, b)" if function == "timeline" else "; pass one run"
        else:
            hint = "; a group's last run is group.last_run" if hasattr(run, "last_run") else ""
        raise TypeError(
            f"{function}({reprlib.repr(run)}): expected a run, as group.run and group.watch return it, or a trace{hint}"
        )
    if not len(trace) or trace.duration_ns <= 0:
        raise LabError(f"{function}: the ranks recorded nothing (run.trace has {len(trace)} spans)")
    return trace if whole else trace.last_attempt()


@public_api
def step_ms(run: HasTrace | Trace, rank: int | None = None) -> float:
    """Return the median duration of a run's steps in milliseconds.

    A step is one iteration of `lab.steps`; in a program without it, what an optimizer's step ends. If there are at
    least three, the first is left out, because it includes what is done only once. Without `rank`, a step lasts from
    when the last rank has ended the one before until the last rank has ended it; time between two loops does not count.

    Args:
        run: a run or a trace.
        rank: only the steps of this rank.

    Raises:
        LabError: there are no steps.
        TypeError: neither a run nor a trace, or a rank that is not a whole number.
        ValueError: there is no such rank.
    """
    trace = trace_of(run, "step_ms")
    lengths = step_lengths_ns(trace, rank)
    if not len(lengths):
        whose = "the ranks have" if rank is None else f"{trace.ranks[rank]} has"
        raise LabError(f"step_ms: {whose} recorded no steps; write `for batch in lab.steps(batches):` in the function")
    return float(np.median(lengths)) / 1e6


def step_lengths_ns(trace: Trace, rank: int | None = None) -> NDArray[np.int64]:
    """Return the lengths of the steps of which `step_ms` is the median; empty if there are none."""
    lengths: NDArray[np.int64] = np.diff(steps_in_turn(trace, rank))[:, 0]
    return lengths[1:] if len(lengths) > 2 else lengths


def spread_ns(trace: Trace) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile of the steps' lengths; zeros without steps."""
    lengths = step_lengths_ns(trace)
    if not len(lengths):
        return 0.0, 0.0, 0.0
    low, middle, high = np.percentile(lengths, [25, 50, 75]).tolist()
    return low, middle, high


@public_api
def best_of(
    tries: int,
    call: Callable[..., Any] | Mapping[Any, Callable[..., Any]],
    *args: Any,
    key: Callable[[Any], Any] = step_ms,
    **options: Any,
) -> Any:
    """Run the same several times and return the fastest run: other programs can only make a run slower.

    For example, `best_of(5, group.run, train, batches)` calls `group.run(train, batches)` five times and returns the
    run with the shortest median step. `best_of(5, {"near": near.run, "far": far.run}, train, batches)` compares two:
    they take turns, so that what disturbs one try disturbs its neighbour, too.

    Args:
        tries: how many times to call.
        call: usually `group.run`; or several functions by name, which are called in turn.
        args: its arguments.
        key: what to compare, a function of the result that returns a number; the smallest counts.
        options: its named arguments.

    Returns:
        the result of `call` for which `key` is smallest; of several functions, these results by name.

    Raises:
        TypeError: `tries` is not a whole number, `call` or `key` not a function, or `key` returns no number.
        ValueError: `tries` is less than 1, or there is no function.
        LabError: without `key`, a run has no steps.
    """
    expected = f"best_of({tries!r}, ...): expected the number of tries first, from 1, as in lab.best_of(5, group.run, train)"
    check_number(tries, expected, whole=True, at_least=1)
    calls = call if isinstance(call, Mapping) else {None: call}
    if not calls:
        raise ValueError("best_of({}): expected at least one function")
    for name, given in (*(("call", one) for one in calls.values()), ("key", key)):
        if not callable(given):
            raise TypeError(f"best_of({name}={given!r}): expected a function, as in lab.best_of(5, group.run, train)")
    results = [{name: one(*args, **options) for name, one in calls.items()} for _ in range(tries)]
    best = {name: min((result[name] for result in results), key=partial(_compared, key)) for name in calls}
    return best if isinstance(call, Mapping) else best[None]


def _compared(key: Callable[[Any], Any], result: Any) -> float:
    """What `key` says of a result; NaN, which is not less than anything, counts as slower than everything."""
    value = one_number(found := key(result))
    if value is None:
        raise TypeError(f"best_of(key=...): the key returned {found!r}; expected one number for each run, as from lab.step_ms")
    return math.inf if math.isnan(value) else value


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

    It reads "This machine was busy (load 6 on 2 cores): measure again".
    """
    if run is None:
        load = load_of_others(machine_load(), usable_cores(), MOST_RANKS)
    else:
        _, load = threads_and_load(run, trace_of(run, "busy_machine"))
    return f"This machine was busy (load {load:.0f} on {counted(usable_cores(), 'core')}): measure again" if load else ""


def threads_and_load(run: Any, trace: Trace) -> tuple[int, float]:
    """Return with how many threads the ranks of a run computed, and the load if other programs caused most of it, or 0.

    The threads are 0 if they are unknown. The load is this machine's, and so are the cores that it is compared with:
    emulated machines share them, and `Trace.cores` is their sum.
    """
    facts = [fact for of_rank in getattr(run, "facts", {}).values() for fact in of_rank]
    threads = sum(fact.values["threads"] for fact in facts if fact.kind is FactKind.RUN)
    return threads, load_of_others(getattr(run, "load", 0.0), usable_cores(), max(threads, len(trace.ranks)))


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
