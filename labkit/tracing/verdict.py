"""`verdict`: which faults make a run's numbers wrong, from its trace and from the facts that its ranks have noted."""

from __future__ import annotations

import html
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from labkit.errors.lists import counted, listed
from labkit.errors.wrong_calls import public_api
from labkit.recording.operations import Traffic, type_of
from labkit.recording.rank_facts import Fact, FactKind
from labkit.tracing.silent_faults import FaultKind, SilentFault, at, exchanges_by_hand, faults_in, may_have_own_tasks
from labkit.tracing.step_times import trace_of
from labkit.tracing.trace import Trace

Facts = Mapping[int, Sequence[Fact]]  # by rank
BUFFERS_DIFFER: Final = 0.5  # of the standard deviation: batches of one kind of data differ by less
MOST_NAMES: Final = 4  # of tensors in a sentence
MOST_ELEMENTS: Final = 1_000_000  # of a result that is searched for nan
COMPARED: Final = {FactKind.PARAMETERS: "parameters", FactKind.GRADIENTS: "gradients", FactKind.INPUTS: "inputs"}


class CheckedRun(Protocol):
    """What a verdict is about: a `Run`."""

    ranks: tuple[str, ...]
    results: list[Any]
    facts: Facts

    @property
    def trace(self) -> Trace:
        """The spans of all ranks."""


@dataclass(frozen=True, repr=False)
class RunVerdict:
    """The faults of a run. A notebook shows it at the end of the cell; `print` shows the same as text."""

    faults: tuple[SilentFault, ...]  # the faults that are certain, then those that may be intended
    compared: str  # what was compared, in words

    def __repr__(self) -> str:
        return "\n".join([*map(str, self.faults), self.compared])

    def _repr_html_(self) -> str:
        return "".join(
            f'<div style="max-width:72ch;margin-bottom:.5em">{html.escape(line)}</div>' for line in repr(self).split("\n")
        )


@public_api
def verdict(run: CheckedRun) -> RunVerdict:
    """Say which faults make a run's numbers wrong, as far as they can be found without knowing the program.

    A run with `check=True` compares, in its first two steps and in every tenth, what must be equal on all ranks, and
    what must not: parameters, DistributedDataParallel's gradients, inputs, and what ranks give to all-reduces and
    all-gathers. Other runs show only faults that need no comparison.

    Args:
        run: the run.

    Returns:
        the faults. None found does not mean that there are none.

    Raises:
        TypeError: something other than a run was given.
    """
    trace = trace_of(run, "verdict")
    if not hasattr(run, "facts"):
        raise TypeError(f"verdict({run!r}): expected a run, such as group.run(train, check=True)")
    faults = sorted(faults_of(run, trace), key=lambda fault: not fault.kind.certain)
    return RunVerdict(tuple(faults), _compared(run.facts, faults))


def faults_of(run: CheckedRun, trace: Trace | None) -> list[SilentFault]:
    """Return the faults of a run; without its trace, those that the facts and the results show."""
    facts, ranks = run.facts, run.ranks
    gradients, shown = [*_gradients(facts, ranks), *_rates(facts, ranks)], [] if trace is None else faults_in(trace)
    if trace is not None and not exchanges_by_hand(trace):
        gradients += _bypassed(facts, ranks)
    found = [*gradients, *_inputs(facts, ranks), *_buffers(facts, ranks), *_unfed(facts, ranks)]
    if trace is not None and not any(fault.kind.certain for fault in [*gradients, *shown]):
        found += _parameters(facts, ranks, own_tasks=may_have_own_tasks(trace))
    if not any(fault.kind in (FaultKind.SAME_DATA, FaultKind.SAME_INPUTS) for fault in found):
        found += _operands(facts)
    types = [] if trace is None else [type_of(name) for name in trace.columns.names]
    averages = any(kind.collective and kind.traffic is not Traffic.TOGETHER for kind in types)
    passes = _samplers(facts, averages=averages)
    others = [*_seeds(facts), *_no_sync(facts), *_losses(facts, ranks), *_empty_replicas(facts, ranks)]
    return [*found, *shown, *passes, *others, *_results(run.results, ranks)]


def _aligned(facts: Facts, kind: FactKind) -> Iterator[dict[int, Fact]]:
    """Yield what the ranks have noted together: by rank, its fact of this kind, if all ranks concerned have one.

    Facts of another step, line or name are not of the same moment, because a rank has done more than others.
    """
    found: dict[tuple[Any, ...], dict[int, Fact]] = defaultdict(dict)
    for rank, own in facts.items():
        counts: Counter[tuple[Any, ...]] = Counter()
        for fact in own:
            if fact.kind is kind:
                which = fact.of, fact.ranks
                found[*which, counts[which]][rank] = fact
                counts[which] += 1
    for (_, ranks, _), together in found.items():
        moments = {(fact.step, fact.line, *fact.values) for fact in together.values()}
        if len(together) == len(ranks or facts) > 1 and len(moments) == 1:
            yield together


def _differing(together: Mapping[int, Fact]) -> list[str]:
    """Return the names of the tensors that all ranks have, and that differ."""
    own = [fact.values for fact in together.values()]
    return [name for name in own[0] if all(name in other for other in own) and len({other[name] for other in own}) > 1]


def _first(together: Mapping[int, Fact]) -> Fact:
    return together[min(together)]


def _gradients(facts: Facts, ranks: Sequence[str]) -> Iterator[SilentFault]:
    for together in _aligned(facts, FactKind.GRADIENTS):
        if names := _differing(together):
            line = _first(together).line
            unused = [name for name in _first(together).values if all(f.values.get(name) is None for f in together.values())]
            without = f" {_some(unused)} got none." if unused else ""
            sentence = (
                f"After the backward pass{at(line)}, gradients differ between {_of(together, ranks)}, although "
                f"DistributedDataParallel should have averaged them: {_some(names)}.{without}"
            )
            yield SilentFault(FaultKind.GRADIENTS_DIFFER, tuple(together), line, sentence, tuple(names))
            return


def _rates(facts: Facts, ranks: Sequence[str]) -> Iterator[SilentFault]:
    for together in _aligned(facts, FactKind.RATES):
        if names := _differing(together):
            rates = listed(f"{fact.values[names[0]]:.6g}" for fact in together.values())
            steps = _first(together).step
            when = f"After {counted(steps, 'step')}" if steps else "Before the first step"
            sentence = f"{when}, the learning rates of {_of(together, ranks)} differ: {rates}."
            yield SilentFault(FaultKind.OTHER_RATES, tuple(together), "", sentence)
            return


def _bypassed(facts: Facts, ranks: Sequence[str]) -> Iterator[SilentFault]:
    """Find models that were trained through the `module` of their DistributedDataParallel, so that nobody averages."""
    for line, of_line in _by_line(facts, FactKind.BYPASSED, lambda values: values["steps"]).items():
        sentence = (
            f"The forward pass{at(line)} called the module inside DistributedDataParallel on {_of(of_line, ranks)}, so "
            "that nothing averaged the gradients."
        )
        yield SilentFault(FaultKind.BYPASSED, tuple(of_line), line, sentence)


def _unfed(facts: Facts, ranks: Sequence[str]) -> Iterator[SilentFault]:
    """Find optimizers that never had a gradient, although the program trains."""
    passes = {rank: f.values["backward passes"] for rank, own in facts.items() for f in own if f.kind is FactKind.RUN}
    found = _by_line(facts, FactKind.NO_GRADIENTS, lambda values: values["steps"] > 1 and not values["others"])
    for line, of_line in found.items():
        if all(passes.get(rank) for rank in of_line):
            steps, backward = counted(_first(of_line).values["steps"], "time"), passes[min(of_line)]
            sentence = (
                f"The optimizer{at(line)} stepped {steps} on {_of(of_line, ranks)}, and its parameters never had a gradient, "
                f"although there were {backward} backward passes."
            )
            yield SilentFault(FaultKind.NO_GRADIENTS, tuple(of_line), line, sentence)


def _by_line(facts: Facts, kind: FactKind, wanted: Callable[[dict[str, Any]], Any]) -> dict[str, dict[int, Fact]]:
    """Return the facts of a kind whose values are wanted, by line and rank."""
    found: dict[str, dict[int, Fact]] = defaultdict(dict)
    for rank, own in facts.items():
        for fact in own:
            if fact.kind is kind and wanted(fact.values):
                found[fact.line][rank] = fact
    return found


def _inputs(facts: Facts, ranks: Sequence[str]) -> Iterator[SilentFault]:
    every = list(_aligned(facts, FactKind.INPUTS))
    known = all(value is not None for together in every for fact in together.values() for value in fact.values.values())
    if len(every) > 1 and known and not any(_differing(together) for together in every):
        together = every[0]
        line = _first(together).line
        # What is averaged in backward passes are gradients.
        averaged = [operands for operands in _aligned(facts, FactKind.OPERAND) if not _first(operands).line]
        same = bool(averaged) and not any(_differing(operands) for operands in averaged)
        work = ", and so were their gradients: together, these ranks do the work of one" if same else ""
        sentence = f"The model's inputs{at(line)} were the same on {_of(together, ranks)} in all compared passes{work}."
        yield SilentFault(FaultKind.SAME_DATA if same else FaultKind.SAME_INPUTS, tuple(together), line, sentence)
    for together in every:
        rows = [fact.values.get("rows") for fact in together.values()]
        if len(set(rows)) > 1:
            line = _first(together).line
            sentence = f"In one step, the inputs{at(line)} have {listed(rows)} rows on {_of(together, ranks)}."
            yield SilentFault(FaultKind.OTHER_BATCH_SIZES, tuple(together), line, sentence)
            return


def _parameters(facts: Facts, ranks: Sequence[str], *, own_tasks: bool) -> Iterator[SilentFault]:
    """Find replicas that drift apart: equal before the first step, different later, and never equal again."""
    of_optimizers: dict[tuple[Any, ...], list[dict[int, Fact]]] = defaultdict(list)
    for together in _aligned(facts, FactKind.PARAMETERS):
        of_optimizers[_first(together).of, _first(together).ranks].append(together)
    # After the run, one rank may have loaded other parameters, to save them.
    last = {(_first(t).of, _first(t).ranks): _differing(t) for t in _aligned(facts, FactKind.LAST_PARAMETERS)}
    for (optimizer, averaged), states in of_optimizers.items():
        differ = [_differing(together) for together in states]
        drifted = next((i for i, names in enumerate(differ) if names), 0)
        equal_again = not all(differ[drifted:]) or last.get((optimizer, averaged)) == []  # as by local SGD
        if not drifted or equal_again or (own_tasks and not averaged):
            continue
        together, names = states[drifted], differ[drifted]
        sentence = (
            f"The parameters were equal on {_of(together, ranks)} before the first step, and differ after "
            f"{counted(_first(together).step, 'step')}: {_some(names)}."
        )
        kind = FaultKind.REPLICAS_DIFFER if averaged else FaultKind.PARAMETERS_DIFFER
        yield SilentFault(kind, tuple(together), "", sentence, tuple(names))
        return


def _buffers(facts: Facts, ranks: Sequence[str]) -> Iterator[SilentFault]:
    last = {_first(together).of: together for together in _aligned(facts, FactKind.BUFFERS)}
    for together in last.values():
        names = []
        for name in _differing(together):
            means = [fact.values[name] for fact in together.values()]
            deviations = [fact.values.get(f"{name}, deviation", math.inf) for fact in together.values()]
            if max(means) - min(means) > BUFFERS_DIFFER * max(deviations):
                names.append(name)
        if names:
            means = [f"{fact.values[names[0]]:.3g}" for fact in together.values()]
            sentence = (
                f"After the last step, buffers differ between {_of(together, ranks)}: {_some(names)} ({names[0]} has the means "
                f"{listed(means)}). A saved model has those of one rank only."
            )
            yield SilentFault(FaultKind.BUFFERS_DIFFER, tuple(together), "", sentence, tuple(names))


def _operands(facts: Facts) -> Iterator[SilentFault]:
    of_lines: dict[tuple[str, str], list[dict[int, Fact]]] = defaultdict(list)
    for together in _aligned(facts, FactKind.OPERAND):
        fact = _first(together)
        of_lines[next(iter(fact.values)), fact.line].append(together)
    for (name, line), every in of_lines.items():
        if line and not any(_differing(together) for together in every):
            sentence = f"All ranks gave {name}{at(line)} the same numbers, bit by bit."
            yield SilentFault(FaultKind.SAME_OPERANDS, tuple(every[0]), line, sentence)


def _samplers(facts: Facts, *, averages: bool) -> Iterator[SilentFault]:
    passes = [fact for fact in facts[min(facts)] if fact.kind is FactKind.SAMPLER] if facts else []
    complete = [fact for fact in passes if fact.values["complete"]]
    trains = any(fact.values["trained"] for fact in passes)
    training = [f for f in complete if not f.values["evaluates"] and (f.values["trained"] or not trains)]
    # A program that sets the epoch again, to that of an earlier pass, wants the same order.
    alike = [(f.of, f.values["epoch"], f.values["set_epoch"], f.line) for f in training if f.values["shuffle"]]
    for (_, epoch, _, line), count in Counter(alike).items():
        if count > 1:
            sentence = f"{count} passes over a DistributedSampler{at(line)} had the same random order, that of epoch {epoch}."
            yield SilentFault(FaultKind.SAME_ORDER, tuple(facts), line, sentence)
    evaluating = [f for f in complete if averages and (f.values["evaluates"] or not trains)]
    for line, samples, size in dict.fromkeys((f.line, f.values["samples"], f.values["size"]) for f in evaluating):
        if samples > size:
            sentence = (
                f"A pass over a DistributedSampler{at(line)} that trained nothing had {samples} samples, for a data set of "
                f"{size}: {counted(samples - size, 'sample')} came twice."
            )
            yield SilentFault(FaultKind.PADDED_EVALUATION, tuple(facts), line, sentence)


def _seeds(facts: Facts) -> Iterator[SilentFault]:
    """Find samplers that shuffle with another seed on each rank, and so divide different orders of the data."""
    of_samplers: dict[tuple[str, str, int], dict[int, int]] = defaultdict(dict)
    for rank, own in facts.items():
        for fact in own:
            if fact.kind is FactKind.SAMPLER and fact.values["shuffle"] and fact.values["trained"]:
                of_samplers[fact.of, fact.line, fact.values["size"]].setdefault(rank, fact.values["seed"])
    for (_, line, _), seeds in of_samplers.items():
        if len(seeds) == len(facts) and len(set(seeds.values())) > 1:
            sentence = (
                f"The ranks' DistributedSamplers{at(line)} have the seeds {listed(seeds.values())}: some samples come twice in "
                "an epoch, others never."
            )
            yield SilentFault(FaultKind.OTHER_SEEDS, tuple(seeds), line, sentence)


def _no_sync(facts: Facts) -> Iterator[SilentFault]:
    for line, of_line in _by_line(facts, FactKind.NO_SYNC, bool).items():
        reductions = counted(_first(of_line).values["reductions"], "all-reduce")
        sentence = (
            f"Inside no_sync(){at(line)}, {reductions} of gradients took place all the same: the forward pass ran outside of it."
        )
        yield SilentFault(FaultKind.NO_SYNC, tuple(of_line), line, sentence)


def _losses(facts: Facts, ranks: Sequence[str]) -> Iterator[SilentFault]:
    for rank, own in facts.items():
        for fact in own:
            if fact.kind is FactKind.LOSS:
                when = f"{_name(ranks, rank)} after {counted(fact.step, 'step')}"
                sentence = f"The loss{at(fact.line)} was {fact.values['loss']} on {when}."
                yield SilentFault(FaultKind.LOSS, (rank,), fact.line, sentence)


def _empty_replicas(facts: Facts, ranks: Sequence[str]) -> Iterator[SilentFault]:
    for rank, own in facts.items():
        first: dict[str, Fact] = {}  # by line
        for fact in own:
            if fact.kind is FactKind.EMPTY_REPLICAS:
                first.setdefault(fact.line, fact)
        for line, fact in first.items():
            empty = listed([f"replica {number}" for number in fact.values["replicas"]], most=MOST_NAMES)
            sentence = (
                f"In batch {fact.step + 1} of a distributed dataset{at(line)}, {empty} of {_name(ranks, rank)} got no samples."
            )
            yield SilentFault(FaultKind.EMPTY_REPLICAS, (rank,), line, sentence)


def _results(results: Sequence[Any], ranks: Sequence[str]) -> Iterator[SilentFault]:
    if results and all(map(_has_nan, results)):  # a rank that has no result may return nan
        sentence = f"What {listed(ranks)} returned contains nan."
        yield SilentFault(FaultKind.NOT_FINITE, tuple(range(len(ranks))), "", sentence)


def _has_nan(value: Any, depth: int = 0) -> bool:
    """Whether a number, a tensor, an array, or one that a list or dict contains, is nan."""
    if isinstance(value, float):
        return math.isnan(value)
    if isinstance(value, dict | list | tuple) and depth < 2 and len(value) < MOST_ELEMENTS:
        return any(_has_nan(part, depth + 1) for part in (value.values() if isinstance(value, dict) else value))
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return value.is_floating_point() and value.numel() < MOST_ELEMENTS and bool(value.isnan().any())
    if isinstance(value, np.ndarray):
        return value.dtype.kind == "f" and value.size < MOST_ELEMENTS and bool(np.isnan(value).any())
    return False


def _compared(facts: Facts, faults: Sequence[SilentFault]) -> str:
    """Return what was compared, in words."""
    words = listed(word for kind, word in COMPARED.items() if any(_aligned(facts, kind)))
    if not words:
        return (
            "No parameters, gradients or inputs were compared: that needs check=True, several ranks that train one model, and an "
            "optimizer of torch."
        )
    runs = [fact for own in facts.values() for fact in own if fact.kind is FactKind.RUN]
    steps = max((fact.step for fact in runs), default=0)
    looked = max((fact.values["compared"] for fact in runs), default=0)
    when = f" in {min(looked, steps)} of {counted(steps, 'step')}" if steps else ""
    tensors = f"{words} of {counted(len(facts), 'rank')}{when}"
    apart = len({fact.step for fact in runs}) > 1 and not faults
    made = f" The ranks' optimizers made {listed(fact.step for fact in runs)} steps." if apart else ""
    return f"Compared: {tensors}." if faults else f"No fault was found in what was compared: {tensors}.{made}"


def _some(names: Sequence[str]) -> str:
    return listed(names, most=MOST_NAMES)


def _name(ranks: Sequence[str], rank: int) -> str:
    return ranks[rank] if rank < len(ranks) else f"rank {rank}"


def _of(together: Iterable[int], ranks: Sequence[str]) -> str:
    return listed((_name(ranks, rank) for rank in sorted(together)), most=MOST_NAMES)
