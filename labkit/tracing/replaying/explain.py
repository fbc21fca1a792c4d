"""`explain`: one paragraph that says what limits a run, chosen from its numbers."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from labkit.errors.exceptions import LabError
from labkit.errors.lists import counted, listed
from labkit.errors.units import bytes_in_words, percent, time_in_words
from labkit.errors.wrong_calls import public_api
from labkit.recording.cores import usable_cores
from labkit.recording.rank_facts import FactKind
from labkit.recording.schema import COMMUNICATION
from labkit.tracing.ideal_pipeline import schedule
from labkit.tracing.limits import SMALL_BYTES, Limit, LimitFinding, limit_of
from labkit.tracing.patterns import Pipeline, after_backward, needed_at_once, pipeline_of, slowest_stage
from labkit.tracing.replaying.gains import (
    WITHOUT_COMMUNICATION,
    Gain,
    Gains,
    Questions,
    better_links,
    gain_in_words,
    like_others,
    twice_as_fast,
)
from labkit.tracing.silent_faults import faults_in
from labkit.tracing.step_times import HasTrace, lacking_cores, threads_and_load, trace_of
from labkit.tracing.trace import Trace

NOTICED = 0.02  # a smaller share of the time is not worth a sentence
DIFFER = 0.05  # a mean and a median that are closer are not worth two numbers
OFTEN = 0.5  # of the waiting: the late rank was outside of spans
MOSTLY = 0.5  # of the time of all operations
CROWDED = 2  # processes for each core: with more, these are said before another limit
UNEQUAL = 1.25  # a stage that computes so many times as long as the others' mean sets the pace of its pipeline

COMMUNICATES: Final = (Limit.LATENCY, Limit.BANDWIDTH, Limit.OVERHEAD)
WAITING: Final = (Limit.TURNS, Limit.LATE_RANK, Limit.UNEVEN_RANKS)


# What could be sent better, if compute could hide most of the communication, if it could not, and if that is not known.
BESIDE: Final = "Send fewer bytes, send them less often, or send gradients while the backward pass computes the others."
AT_ONCE: Final = (
    "The next layer needs each result at once, so that compute cannot hide these messages. A faster link helps, or fewer "
    "layers that are split over ranks."
)
LESS: Final = "Send fewer bytes, or send them less often."


@dataclass(frozen=True, repr=False)
class Explanation:
    """What limits a run. A notebook shows it at the end of the cell; `print` shows the same as text."""

    text: str
    finding: LimitFinding  # the numbers behind it

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        unbroken = html.escape(self.text, quote=False).replace(" %", "&nbsp;%")
        return f'<div style="max-width:72ch">{unbroken}</div>'


@dataclass(frozen=True, slots=True)
class _Conditions:
    """What a trace does not show of the run."""

    cores: float | None = None  # that its ranks share; None if they are not this machine's
    load: float = 0.0  # the machine's load at the end of the run, where other programs cause most of it; else 0
    threads: int = 0  # with how many all ranks together compute; 0 if unknown
    loaders: tuple[tuple[str, int], ...] = ()  # the DataLoaders over which they iterated: line, and workers on each rank
    lacking: float | None = None  # the share of the time in which functions waited for a core; None if not recorded


@public_api
def explain(run: HasTrace | Trace) -> Explanation:
    """Say in one paragraph what limits a run, and what could make it faster.

    Where the run can be replayed, a sentence says what the change that fits would save. Nothing is advised that the
    order of the work excludes: results of tensor parallelism are needed at once, so that compute cannot hide them.
    A fault that makes results wrong is said before anything about time.

    The first step is left out, as it is slower than the others, and so are steps in which labkit reads TensorFlow's
    profiler. The largest loss of the ranks' time decides: waiting for data, exposed communication (limited by latency,
    by bandwidth or by the overhead of each operation), a rank that comes late, ranks that work one after another, the
    bubble of a pipeline, remote calls that are under way, or time in which nothing was recorded.

    Args:
        run: a run or a trace.

    Raises:
        LabError: the ranks recorded nothing.
        TypeError: something other than a run or a trace was given.
    """
    trace = trace_of(run, "explain")
    finding = limit_of(trace)
    conditions = _Conditions() if isinstance(run, Trace) or trace.origin else _conditions(run, trace)
    faults = [fault for fault in faults_in(trace) if fault.kind.certain]
    wrong = dict.fromkeys([*(fault.sentence for fault in faults), *(fault.kind.cure for fault in faults)])
    pipeline = pipeline_of(trace) if finding.limit in WAITING else None
    gains = _gains(trace, finding, pipeline)
    if finding.limit in COMMUNICATES and gains is not None and _is_straggler(trace, finding, gains):
        finding = replace(finding, limit=Limit.LATE_RANK)
    advice = _advice(finding, trace.ranks, conditions, _sent_better(trace))
    if pipeline is not None:
        advice = _bubble(trace, finding, pipeline)
    elif finding.limit in COMMUNICATES and gains is not None:
        advice = _unproved(trace, finding, gains) or advice
    found = [*_sentences(finding, trace.ranks, advice), *_predicted(gains)]
    machine = _machine(len(trace.ranks), conditions)
    sentences = [*wrong, machine, *found] if conditions.load else [*wrong, *found, machine]
    return Explanation(" ".join(filter(None, sentences)), finding)


def _sent_better(trace: Trace) -> str:
    data = trace.columns.data
    took_ns = np.where((data["kind"] == COMMUNICATION) & ~trace.columns.around, data["end_ns"] - trace.ready(), 0)
    for cure, rows in ((AT_ONCE, needed_at_once(trace)), (BESIDE, after_backward(trace))):
        if took_ns[rows].sum() > MOSTLY * took_ns.sum():
            return cure
    return LESS


def _gains(trace: Trace, f: LimitFinding, pipeline: Pipeline | None) -> Gains | None:
    """What the changes that fit the limit would save by replay; None if that is not known."""
    try:
        questions = Questions(trace, "explain")
        return questions.gains(_asked(questions, f, pipeline))
    except LabError:  # it cannot be replayed
        return None


def _asked(questions: Questions, f: LimitFinding, pipeline: Pipeline | None) -> Iterator[Gain | None]:
    match f.limit:
        case _ if pipeline is not None:
            rank, ratio = slowest_stage(questions.trace, pipeline)
            if ratio >= UNEQUAL:
                yield questions.ask(*like_others(questions.trace, rank))
        case Limit.LATE_RANK:
            yield questions.ask(*like_others(questions.trace, f.late_rank))
        case Limit.LATENCY | Limit.BANDWIDTH | Limit.OVERHEAD:
            if f.late_share >= MOSTLY:
                yield questions.ask(*like_others(questions.trace, f.late_rank))
            yield questions.as_one_message()
            for asked in better_links(questions.trace):
                yield questions.ask(*asked)
            yield questions.without_communication()
            yield questions.beside_backward()
        case Limit.COMPUTE | Limit.TURNS:
            for asked in list(twice_as_fast(questions.graph))[:1]:
                yield questions.ask(*asked)
            if f.exposed >= NOTICED:
                yield questions.without_communication()


def _unproved(trace: Trace, f: LimitFinding, gains: Gains) -> str:
    """What is known of the communication if replay does not confirm that it limits the run by this; else ""."""
    if not _is_clear(gains, [WITHOUT_COMMUNICATION]):
        return f"In this run, {_messages(f)}. By replay, without it steps would be shorter by less than they differ anyway."
    better = [words for words, _ in better_links(trace)]
    if f.limit is Limit.OVERHEAD or not better or _is_clear(gains, better):
        return ""
    return f"{_limits(f, 'Communication')}: {_messages(f)}."


def _is_straggler(trace: Trace, f: LimitFinding, gains: Gains) -> bool:
    """Whether the rank that is usually late would save more at the pace of the others than any better network."""
    change, _ = like_others(trace, f.late_rank)
    saved = {gain.change: gain.saved_ns for gain in gains.gains}
    return _is_clear(gains, [change]) and saved[change] > saved.get(WITHOUT_COMMUNICATION, 0.0)


def _is_clear(gains: Gains, changes: Sequence[str]) -> bool:
    """Whether one of these changes saves a noticeable time that steps do not differ by anyway."""
    return any(g.change in changes and g.saved_ns >= NOTICED * gains.step_ns and not g.in_spread for g in gains.gains)


def _predicted(gains: Gains | None) -> Iterator[str]:
    """Gains in the words of `what_helps`, ideals apart from changes."""
    if gains is None:
        return
    each = ", per step" if gains.steps else ""
    for ideal, begin in ((False, "Predicted by replay"), (True, "Ideals that no change reaches, by replay")):
        said = [f'"{gain.change}" {gain_in_words(gain, gains)}' for gain in gains.gains if gain.ideal is ideal]
        if said:
            yield f"{begin}{each}: {listed(said)}."


def _bubble(trace: Trace, f: LimitFinding, pipeline: Pipeline) -> str:
    """What a pipeline loses: its bubble, beside that of equal stages."""
    stages, micro_batches = len(pipeline.chains[0]), pipeline.micro_batches
    few, many = (percent(schedule("gpipe", stages=stages, micro_batches=m).bubble) for m in (micro_batches, 2 * micro_batches))
    shape = f"a pipeline of {stages} stages and {micro_batches} micro-batch{'es' if micro_batches > 1 else ''}"
    said = f"This is {shape}: equal stages leave a bubble of {few}; {percent(1 - f.compute)} were measured."
    rank, ratio = slowest_stage(trace, pipeline)
    if ratio >= UNEQUAL:
        times = f"{ratio:.1f} times as long as the other stages do on average"
        return f"{said} The stage of {trace.ranks[rank]} computes {times}, and sets the pace: divide the layers more evenly."
    cores = " and each rank had a core" if lacking_cores(trace) >= NOTICED else ""
    more = f"With {2 * micro_batches} micro-batches, it would be {many}, if messages took no time{cores}."
    return f"{said} The stages are about equal. {more}"


def _conditions(run: HasTrace, trace: Trace) -> _Conditions:
    facts = [fact for own in getattr(run, "facts", {}).values() for fact in own]
    loaders = {(fact.line, fact.values["workers"]): None for fact in facts if fact.kind is FactKind.LOADER}
    threads, load = threads_and_load(run, trace)
    lacking = lacking_cores(trace) if trace.columns.data["issue_delay_ns"].any() else None
    return _Conditions(trace.cores or usable_cores(), load, threads, tuple(loaders), lacking)


def _sentences(f: LimitFinding, ranks: Sequence[str], advice: str) -> list[str]:
    parts = {
        "waited for data for {}": f.data,
        "communicated for {} with nothing to compute": f.exposed,
        "waited for each other for {}": f.waiting,
        "did nothing for {} while others computed": f.standing,
        "recorded nothing for {} while others communicated or waited": f.absent,
        "waited for labkit to read TensorFlow's profiler for {}": f.reading,
    }
    spent = [f"{'The rank' if len(ranks) == 1 else 'The ranks'} computed for {percent(f.compute)} of it"]
    spent += [words.format(percent(share)) for words, share in parts.items() if share >= NOTICED]
    lasted = f"It took {time_in_words(f.duration_ns)}."
    if f.steps:
        mean_ns = f.mean_step_ns
        median = f", {time_in_words(f.step_ns)} in the median" if abs(mean_ns - f.step_ns) > DIFFER * mean_ns else ""
        lasted = f"A step took {time_in_words(mean_ns)} on average{median}."
    found = [lasted, f"{listed(spent)}.", advice]
    if f.overlap >= NOTICED and f.limit in (Limit.COMPUTE, Limit.BANDWIDTH, Limit.LATENCY, Limit.OVERHEAD):
        found.append(f"Communication hidden behind computing took another {percent(f.overlap)}.")
    return found


def _advice(f: LimitFinding, ranks: Sequence[str], conditions: _Conditions, better: str = LESS) -> str:
    cores, busy = conditions.cores, conditions.load > 0
    if f.limit is not Limit.DATA and (crowded := _crowded(len(ranks), conditions, CROWDED)):
        return crowded
    match f.limit:
        case Limit.COMPUTE | Limit.UNEVEN_RANKS if cores is not None and conditions.threads > max(cores, len(ranks)):
            return (
                f"The ranks compute with {conditions.threads} threads on {counted(cores, 'core')}, so that threads wait for one "
                "another. Compare with one thread for each rank: torch.set_num_threads(1), or threads=1 of the group."
            )
        case Limit.COMPUTE if busy:
            return "What limits the run when the machine is quiet cannot be told from these times."
        case Limit.COMPUTE if not f.messages:
            return "Only faster computing makes this run faster."
        case Limit.COMPUTE if f.exposed + f.waiting < NOTICED:
            return "Communication does not limit this run: faster cores, or less to compute, make it faster."
        case Limit.COMPUTE:
            return "Computing takes most of the time: faster cores, or less to compute, make this run faster."
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
                "The waiting was not for one rank alone: different ranks came last, each time another one. A busy machine does "
                "that, and so do batches of unequal work."
            )
        case Limit.TURNS:
            return (
                f"While any rank computed, {f.working:.1f} of {len(ranks)} did on average; the others waited. If they need one "
                "another's results, smaller pieces of work (micro-batches, asynchronous calls) let more of them compute at the "
                "same time."
            )
        case Limit.CALLS:
            large = f" with {bytes_in_words(f.call_bytes)}" if f.call_bytes > SMALL_BYTES else ""
            less = " send less with each," if large else ""
            return (
                f"For {percent(f.under_way)} of the time, ranks waited for remote calls while no rank computed: the calls were "
                f"under way. A call{large} took {time_in_words(f.call_ns)} (median). Make fewer calls,{less} or start several "
                "with rpc_async before you wait for the first."
            )
        case Limit.LATENCY | Limit.OVERHEAD:
            latency = f.limit is Limit.LATENCY
            each = f"each takes {time_in_words(f.latency_ns)} (median), however small it is"
            if not latency:
                of_link = f", of which the link's latency is {time_in_words(f.latency_ns)}" if f.latency_ns else ""
                each = f"even a small one takes {time_in_words(f.operation_ns)} (median){of_link}"
            shared = ""
            if not latency and cores is not None and cores < len(ranks):
                shared = f" Each wakes threads of {len(ranks)} ranks on {counted(cores, 'core')}."
            return (
                f"{_limits(f, 'Latency' if latency else 'Overhead')}: {_messages(f)}, and {each}.{shared} "
                f"{AT_ONCE if better == AT_ONCE else 'Send fewer and larger messages.'}"
            )
        case Limit.BANDWIDTH:
            return (
                f"{_limits(f, 'Bandwidth')}: {_messages(f)} at {bytes_in_words(f.nbytes / f.transfer_ns * 1e9)} per second. "
                f"{better}"
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
    which, workers = _most_workers(conditions)
    if not workers:
        return f"{which}: each rank makes its own batches, and computes nothing meanwhile. Workers make them beside it."
    return _crowded(ranks, conditions) or f"{which}, which do not keep up: use more of them, or do less for each batch."


def _most_workers(conditions: _Conditions) -> tuple[str, int]:
    """The DataLoader with most workers, in words, and their number."""
    line, workers = max(conditions.loaders, key=lambda loader: loader[1], default=("", 0))
    return f"The DataLoader{f' ({line})' if line else ''} has num_workers={workers}", workers


def _crowded(ranks: int, conditions: _Conditions, most: float = 1) -> str:
    """That ranks and DataLoaders' workers are more than `most` for each core; "" if they are not."""
    which, workers = _most_workers(conditions)
    if not workers or conditions.cores is None or ranks * (workers + 1) <= most * conditions.cores:
        return ""
    processes = f"{ranks * (workers + 1)} processes for {counted(conditions.cores, 'core')}"
    cure = "Compare with fewer workers: where they compute, they take cores from the ranks and from one another."
    return f"{which}, which makes {processes}. {cure}"


def _limits(f: LimitFinding, limit: str) -> str:
    if f.compute > 0.5:
        return f"Computing takes most of the time; {limit.lower()} limits the rest"
    return f"{limit} limits this run"


def _messages(f: LimitFinding) -> str:
    """How much each rank sent: "each rank took part in 8 operations per step, of 1.72 MB"."""
    count, nbytes = (f.messages / f.steps, f.nbytes / f.steps) if f.steps else (f.messages, f.nbytes)
    often = f"{count:.0f}" if abs(count - round(count)) < 0.05 else f"{count:.1f}"
    operations = f"{often} operation{'' if often == '1' else 's'}"
    return f"each rank took part in {operations} {'per step' if f.steps else 'in all'} with {bytes_in_words(nbytes)} of data"


def _machine(ranks: int, conditions: _Conditions) -> str:
    """Why times may be longer than the program explains; "" if nothing is known of it."""
    cores, lacking = conditions.cores, conditions.lacking
    if cores is None or (not conditions.load and cores >= ranks):
        return ""
    if conditions.load:
        busy = f"Other programs keep this machine busy (load {conditions.load:.0f} on {counted(usable_cores(), 'core')})"
        return f"{busy}, so all times are longer than usual."
    share = f"{ranks} ranks share {counted(cores, 'core')}"
    if lacking is None:
        return f"{share}, which may make all times longer."
    return f"{share}: they waited for one for {percent(lacking)} of the time." if lacking >= NOTICED else ""
