"""`explain`: one paragraph that says what limits a run, chosen from its numbers."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

import numpy as np

from labkit.errors.exceptions import LabError
from labkit.errors.lists import counted, listed
from labkit.errors.units import bytes_in_words, percent, time_in_words
from labkit.errors.wrong_calls import public_api
from labkit.plots.what_helps import in_words
from labkit.recording.cores import load_of_others, usable_cores
from labkit.recording.rank_facts import FactKind
from labkit.recording.schema import COMMUNICATION
from labkit.replaying.gains import Gain, Questions, like_others, twice_as_fast
from labkit.tracing.limits import SMALL_BYTES, Finding, Limit, limit_of
from labkit.tracing.overlapping import after_backward, needed_at_once
from labkit.tracing.run_argument import HasTrace, trace_of
from labkit.tracing.silent_faults import faults_in
from labkit.tracing.trace import Trace

__all__ = ["Explanation", "explain"]

NOTICED = 0.02  # a smaller share of the time is not worth a sentence
DIFFER = 0.05  # a mean and a median that are closer are not worth two numbers
OFTEN = 0.5  # of the waiting: the late rank was outside of spans
MOSTLY = 0.5  # of the time of all operations
FULL = 0.8  # of the cores: with so many ranks computing on average, none is free


class Overlap(Enum):
    """Whether most of the communication could run beside compute."""

    POSSIBLE = "gradients travel after the backward pass"
    EXCLUDED = "what follows needs the results at once"
    UNKNOWN = "what needs the results is not known"


AT_ONCE: Final = (
    "The next layer needs each result at once, so that compute cannot hide these messages. A faster link helps, or fewer "
    "layers that are split over ranks."
)
ADVICE: Final = {
    Overlap.POSSIBLE: "Send fewer bytes, send them less often, or send gradients while the backward pass computes the others.",
    Overlap.EXCLUDED: AT_ONCE,
    Overlap.UNKNOWN: "Send fewer bytes, or send them less often.",
}


@dataclass(frozen=True, repr=False)
class Explanation:
    """What limits a run. A notebook shows it at the end of the cell; `print` shows the same as text.

    Args:
        text: the paragraph.
        finding: the numbers behind it.
    """

    text: str
    finding: Finding

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        unbroken = html.escape(self.text, quote=False).replace(" %", "&nbsp;%")
        return f'<div style="max-width:72ch">{unbroken}</div>'


@dataclass(frozen=True, slots=True)
class _Conditions:
    """What a trace does not show of the run.

    Args:
        cores: the cores that its ranks share; None if they are not this machine's.
        load: the machine's load at the end of the run, where other programs cause most of it; else 0.
        threads: with how many threads all ranks together compute; 0 if unknown.
        loaders: the DataLoaders that they iterated over: line and number of workers on each rank.
    """

    cores: float | None = None
    load: float = 0.0
    threads: int = 0
    loaders: tuple[tuple[str, int], ...] = ()


@public_api
def explain(run: HasTrace | Trace) -> Explanation:
    """Say in one paragraph what limits a run, and what could make it faster.

    Where the run can be replayed, a sentence says what the change that fits would save. Nothing is advised that the
    order of the work excludes: results of tensor parallelism are needed at once, so that compute cannot hide them.
    A fault that makes results wrong is said before anything about time.

    The first step is left out, as it is slower than the others, and so are steps in which labkit reads TensorFlow's
    profiler. The largest loss of the ranks' time decides: waiting for data, exposed communication (limited by latency
    or by bandwidth), a rank that comes late, ranks that work one after another, remote calls that are under way, or
    time in which nothing was recorded.

    Args:
        run: a run or a trace.

    Raises:
        LabError: the ranks recorded nothing.
        TypeError: something other than a run or a trace was given.
    """
    trace = trace_of(run, "explain")
    finding = limit_of(trace)
    conditions = _Conditions() if isinstance(run, Trace) or trace.origin else _conditions(run, trace)
    faults = [fault for fault in faults_in(trace) if fault.certain]
    wrong = dict.fromkeys([*(fault.sentence for fault in faults), *(fault.cure for fault in faults)])
    found = [*_sentences(finding, trace.ranks, conditions, _overlap(trace)), _predicted(trace, finding)]
    machine = _machine(len(trace.ranks), conditions)
    sentences = [*wrong, machine, *found] if conditions.load else [*wrong, *found, machine]
    return Explanation(" ".join(filter(None, sentences)), finding)


def _overlap(trace: Trace) -> Overlap:
    """Whether most of the communication could run beside compute."""
    data = trace.columns.data
    took_ns = np.where((data["kind"] == COMMUNICATION) & ~trace.columns.around, data["end_ns"] - trace.ready(), 0)
    for overlap, rows in ((Overlap.EXCLUDED, needed_at_once(trace)), (Overlap.POSSIBLE, after_backward(trace))):
        if took_ns[rows].sum() > MOSTLY * took_ns.sum():
            return overlap
    return Overlap.UNKNOWN


def _predicted(trace: Trace, f: Finding) -> str:
    """What the change that fits the limit would save by replay, as `what_helps` says it; "" if that is not known."""
    try:
        questions = Questions(trace, "explain")
        gains = questions.gains([gain for gain in _asked(questions, f) if gain is not None])
    except LabError:  # it cannot be replayed
        return ""
    said = [f'"{gain.change}" {in_words(gain, gains)}' for gain in gains.gains]
    return f"Predicted by replay{', per step' if gains.steps else ''}: {listed(said)}." if said else ""


def _asked(questions: Questions, f: Finding) -> Iterator[Gain | None]:
    match f.limit:
        case Limit.LATE_RANK:
            yield questions.ask(*like_others(questions.trace, f.late_rank))
        case Limit.LATENCY | Limit.BANDWIDTH:
            yield questions.without_communication()
            yield questions.beside_backward()
        case Limit.COMPUTE | Limit.TURNS:
            for asked in twice_as_fast(questions.graph):
                yield questions.ask(*asked)
                return


def _conditions(run: HasTrace, trace: Trace) -> _Conditions:
    facts = [fact for own in getattr(run, "facts", {}).values() for fact in own]
    threads = sum(fact.values["threads"] for fact in facts if fact.kind is FactKind.RUN)
    loaders = {(fact.line, fact.values["workers"]): None for fact in facts if fact.kind is FactKind.LOADER}
    cores = trace.cores or usable_cores()
    load = load_of_others(getattr(run, "load", 0.0), cores, max(threads, len(trace.ranks)))
    return _Conditions(cores, load, threads, tuple(loaders))


def _sentences(f: Finding, ranks: Sequence[str], conditions: _Conditions, overlap: Overlap = Overlap.UNKNOWN) -> list[str]:
    everybody = "The rank" if len(ranks) == 1 else "The ranks"
    spent = [f"{everybody} computed for {percent(f.compute)} of it"]
    spent += [f"waited for data for {percent(f.data)}"] if f.data >= NOTICED else []
    spent += [f"communicated for {percent(f.exposed)} with nothing to compute"] if f.exposed >= NOTICED else []
    spent += [f"waited for each other for {percent(f.waiting)}"] if f.waiting >= NOTICED else []
    spent += [f"did nothing for {percent(f.standing)} while others computed"] if f.standing >= NOTICED else []
    absent = f"recorded nothing for {percent(f.absent)} while others communicated or waited"
    spent += [absent] if f.absent >= NOTICED else []
    spent += [f"waited for labkit to read TensorFlow's profiler for {percent(f.reading)}"] if f.reading >= NOTICED else []
    lasted = f"It took {time_in_words(f.duration_ns)}."
    if f.steps:
        mean_ns = f.mean_step_ns
        median = f", {time_in_words(f.step_ns)} in the median" if abs(mean_ns - f.step_ns) > DIFFER * mean_ns else ""
        lasted = f"A step took {time_in_words(mean_ns)} on average{median}."
    found = [lasted, f"{', '.join(spent[:-1])} and {spent[-1]}." if len(spent) > 1 else f"{spent[0]}."]
    found.append(_advice(f, ranks, conditions, overlap))
    if f.overlap >= NOTICED and f.limit in (Limit.COMPUTE, Limit.BANDWIDTH, Limit.LATENCY):
        found.append(f"Communication hidden behind computing took another {percent(f.overlap)}.")
    return found


def _advice(f: Finding, ranks: Sequence[str], conditions: _Conditions, overlap: Overlap = Overlap.UNKNOWN) -> str:
    cores, busy = conditions.cores, conditions.load > 0
    match f.limit:
        case Limit.COMPUTE if cores is not None and conditions.threads > max(cores, len(ranks)):
            return (
                f"The ranks compute with {conditions.threads} threads on {counted(cores, 'core')}, so that threads wait for one "
                "another. Compare with one thread for each rank: torch.set_num_threads(1), or threads=1 of the group."
            )
        case Limit.COMPUTE if busy:
            return "What limits the run when the machine is quiet cannot be told from these times."
        case Limit.COMPUTE if not f.messages:
            return "Only faster computing makes this run faster."
        case Limit.COMPUTE:
            return "Communication does not limit this run: only faster cores, or more of them, make it faster."
        case Limit.DATA:
            return f"{_limits(f, 'Reading data')}. {_prepare_data(len(ranks), conditions)}"
        case Limit.LATE_RANK:
            others = "the other rank does" if len(ranks) == 2 else "the others do"
            cause = f"Find out what it does more, or more slowly, than {others}."
            if busy:
                cause = "On a machine as busy as this one, other programs may have taken its core: look again when it is quiet."
            if f.late_data - f.data > OFTEN * f.waiting:
                cause = f"It waited for data for {percent(f.late_data)} of the time."
            elif f.absent > OFTEN * f.waiting:
                cause += " It recorded nothing meanwhile: put `with lab.span(...)` around that code to see it."
            return (
                f"{percent(f.late_share)} of the waiting in collectives was for {ranks[f.late_rank]}, which came "
                f"{time_in_words(f.late_ns)} after the first (median). {cause}"
            )
        case Limit.UNEVEN_RANKS:
            return (
                "The waiting was not for one rank alone: they came late in turns, because the time that each needs varies from "
                "step to step. A busy machine does that, and so do batches of unequal work."
            )
        case Limit.TURNS if cores is not None and 1 < cores < len(ranks) and f.working > FULL * cores:
            return (
                f"While any rank computed, {f.working:.1f} of {len(ranks)} did on average, which takes nearly all of the "
                f"{cores:g} cores: on this machine, smaller pieces of work would not make the run faster."
            )
        case Limit.TURNS:
            return (
                f"While any rank computed, {f.working:.1f} of {len(ranks)} did on average: the others needed its results first. "
                "Smaller pieces of work (micro-batches, asynchronous calls) let more of them compute at the same time."
            )
        case Limit.CALLS:
            large, less = "", ""
            if f.call_bytes > SMALL_BYTES:
                large, less = f" with {bytes_in_words(f.call_bytes)}", " send less with each,"
            return (
                f"For {percent(f.under_way)} of the time, ranks waited for remote calls while no rank computed: the calls were "
                f"under way. A call{large} took {time_in_words(f.call_ns)} (median). Make fewer calls,{less} or start several "
                "with rpc_async before you wait for the first."
            )
        case Limit.LATENCY:
            return (
                f"{_limits(f, 'Latency')}: {_messages(f)}, and even a small one takes {time_in_words(f.latency_ns)} (median). "
                f"{AT_ONCE if overlap is Overlap.EXCLUDED else 'Send fewer and larger messages.'}"
            )
        case Limit.BANDWIDTH:
            return (
                f"{_limits(f, 'Bandwidth')}: {_messages(f)} at {bytes_in_words(f.nbytes / f.transfer_ns * 1e9)} per second. "
                f"{ADVICE[overlap]}"
            )
        case Limit.UNRECORDED:
            return (
                f"For {percent(f.unrecorded)} of the time nothing was recorded: code outside of spans, such as loading data, or "
                "ranks with nothing left to do. Put `with lab.span(...)` around the code to see it."
            )


def _prepare_data(ranks: int, conditions: _Conditions) -> str:
    """What may make reading data faster."""
    if not conditions.loaders:
        return (
            "Prepare batches while the ranks compute: `dataset.prefetch` and `map(..., num_parallel_calls=...)` of tf.data, "
            "workers of a DataLoader or PyDataset; or keep them in memory."
        )
    line, workers = max(conditions.loaders, key=lambda loader: loader[1])
    which = f"The DataLoader{f' ({line})' if line else ''} has num_workers={workers}"
    if not workers:
        return f"{which}: each rank makes its own batches, and computes nothing meanwhile. Workers make them beside it."
    if conditions.cores is not None and ranks * (workers + 1) > conditions.cores:
        processes = f"{ranks * (workers + 1)} processes for {counted(conditions.cores, 'core')}"
        cure = "Compare with fewer workers: they take cores from the ranks and from one another."
        return f"{which}, which makes {processes}. {cure}"
    return f"{which}, which do not keep up: use more of them, or do less for each batch."


def _limits(f: Finding, limit: str) -> str:
    if f.compute > 0.5:
        return f"Computing takes most of the time; {limit.lower()} limits the rest"
    return f"{limit} limits this run"


def _messages(f: Finding) -> str:
    """How much each rank sent: "each rank took part in 8 operations per step, of 1.72 MB"."""
    count, nbytes = (f.messages / f.steps, f.nbytes / f.steps) if f.steps else (f.messages, f.nbytes)
    often = f"{count:.0f}" if abs(count - round(count)) < 0.05 else f"{count:.1f}"
    operations = f"{often} operation{'' if often == '1' else 's'}"
    return f"each rank took part in {operations} {'per step' if f.steps else 'in all'} with {bytes_in_words(nbytes)} of data"


def _machine(ranks: int, conditions: _Conditions) -> str:
    """Why times may be longer than the program explains; "" if nothing is known of it."""
    cores = conditions.cores
    if cores is not None and conditions.load:
        busy = f"Other programs keep this machine busy (load {conditions.load:.0f} on {counted(cores, 'core')})"
        return f"{busy}, so all times are longer than usual."
    if cores is not None and cores < ranks:
        return f"{ranks} ranks share {counted(cores, 'core')}, so all times are longer than with a core for each rank."
    return ""
