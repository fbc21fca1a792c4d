"""`same_as_serial`: the same training on one rank and on several, and what makes their gradients differ."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from labkit.errors.lists import counted, listed
from labkit.errors.wrong_calls import public_api
from labkit.group.group import Group
from labkit.group.run import Run
from labkit.recording.rank_facts import SKETCH, Fact, FactKind
from labkit.tracing.silent_faults import FaultKind, SilentFault
from labkit.tracing.verdict import MOST_NAMES, RunVerdict

ROUNDING: Final = 1e-3  # relative to the serial gradient: sums in another order differ by less
SMALL: Final = 1e-3  # of all gradients: those that are 0 but for rounding, as of a bias before a norm, are anything
DRIFT: Final = 1e-3  # the same of parameters after several steps
TINY: Final = 1e-30
FEW: Final = 2  # numbers are likely to be multiples of others by chance


class _First(NamedTuple):
    """By name: digests of an optimizer's parameters before its first step, and sketches of gradients, or None."""

    before: dict[str, int]
    gradients: dict[str, Any]


class _Training(NamedTuple):
    """What one rank has noted of its training."""

    steps: int  # optimizer steps
    samples: Counter[int]  # how often each sample came before the first step; empty if that is not known
    optimizers: list[_First]  # the first ones, in the order of their first steps
    after: dict[tuple[str, str], Any]  # sketches of the parameters after the last step


@public_api
def same_as_serial(train: Callable[..., Any], /, *args: Any, ranks: Sequence[int] = (1, 2, 4), **kwargs: Any) -> RunVerdict:
    """Run a training on one rank and on several, and say how samples, gradients and parameters differ, and why.

    This is for programs that divide a batch of fixed size over their ranks, so that each number of ranks must give the
    same gradients. Compared are samples, which are the rows of the model's first input before the first step; gradients
    with which each of the first four optimizers steps first; and parameters at the end. Where a program cannot be
    compared, as one with a batch of fixed size for each rank or with sharded parameters, that is said instead.

    Args:
        train: the function, with an optimizer of torch. It runs on CPUs, on new ranks.
        args: its arguments.
        ranks: the numbers of ranks; the first is 1.
        kwargs: its named arguments.

    Returns:
        the differences, with their cause if the pattern tells it.

    Raises:
        ValueError: `ranks` does not begin with 1, or names no other number.
        RunError: a run failed.
    """
    if len(ranks) < 2 or ranks[0] != 1:
        raise ValueError(f"same_as_serial(ranks={ranks!r}): expected 1 and other numbers of ranks, such as (1, 2, 4)")
    (serial,), *others = [[_training(run, rank) for rank in range(len(run.ranks))] for run in _runs(train, args, kwargs, ranks)]
    faults: list[SilentFault] = []
    compared = []
    for several in others:
        found, words = _compared(serial, several)
        compared.append(f"{counted(len(several), 'rank')}: {words}")
        known = {fault.kind for fault in faults}
        faults += [fault for fault in found if fault.kind not in known]  # the same of more ranks has the same cause
    return RunVerdict(tuple(sorted(faults, key=lambda fault: not fault.kind.certain)), "\n".join(compared))


def _runs(train: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], ranks: Sequence[int]) -> Iterator[Run]:
    for number in ranks:
        with Group(number, devices="cpu") as group:
            yield group.run(train, *args, check=True, **kwargs)


def _training(run: Run, rank: int) -> _Training:
    facts = run.facts.get(rank, ())
    rows = [fact.values["rows"] for fact in facts if fact.kind is FactKind.SAMPLES]
    samples = Counter[int]() if None in rows else Counter(row for of_pass in rows for row in of_pass)
    optimizers = [_first(one, facts) for one in facts if one.kind is FactKind.FIRST_GRADIENTS]
    last = [fact for fact in facts if fact.kind is FactKind.LAST_VALUES]
    after = {(one.of, name): np.array(sketch) for one in last for name, sketch in one.values.items() if sketch is not None}
    return _Training(max((fact.step for fact in facts), default=0), samples, optimizers, after)


def _first(one: Fact, facts: Sequence[Fact]) -> _First:
    same_step = [fact for fact in facts if fact.kind is FactKind.PARAMETERS and fact.step == one.step]
    before = {name: digest for fact in same_step if fact.of.endswith(one.of) for name, digest in fact.values.items()}
    return _First(before, {name: None if sketch is None else np.array(sketch) for name, sketch in one.values.items()})


def _compared(serial: _Training, several: Sequence[_Training]) -> tuple[list[SilentFault], str]:
    if why := _incomparable(serial, several):
        return [], f"not comparable, because {why}"
    others, found = _samples(serial.samples, [one.samples for one in several])
    same_samples, number, gradients = not others and not found, 0, None
    for first, *own in zip(serial.optimizers, *(one.optimizers for one in several), strict=False):
        if gradients or any(one.before != first.before for one in own):
            break  # what differs in one optimizer's step makes other gradients for the next
        number += 1
        gradients = _gradients(first, own, number, [one.samples.total() for one in several])
    unexplained = gradients is not None and not gradients.kind.certain
    if unexplained and others:
        return [], f"not comparable, because {others}"
    kinds = [fault.kind for fault in (found, gradients) if fault]
    if FaultKind.NOT_AVERAGED in kinds and not any(_apart(one.after, several[0].after) for one in several):
        return [], "not comparable, because gradients differ from rank to rank, but parameters are equal after the last step."
    if FaultKind.REPEATED_SAMPLES in kinds and not unexplained:
        found = None  # of a forward pass without a backward pass, as the one that gives lazy layers their shapes
    if FaultKind.OTHER_SAMPLES in kinds and unexplained:
        gradients = None
    faults = [fault for fault in (found, gradients) if fault]
    if gradients or FaultKind.OTHER_SAMPLES in kinds:
        return faults, "not the same as one rank."
    return faults, _in_words(serial, several, number, same_samples=same_samples)


def _incomparable(serial: _Training, several: Sequence[_Training]) -> str:
    every = [serial, *several]
    if not all(one.optimizers and one.optimizers[0].gradients for one in every):
        return "the first step of an optimizer of torch began without gradients, as with a closure, or there was none."
    firsts = [one.optimizers[0] for one in every]
    unread = {name: None for one in every for first in one.optimizers for name, value in first.gradients.items() if value is None}
    if unread:
        these = listed(unread, most=MOST_NAMES)
        return f"some gradients are sharded, sparse, complex, or computed with fewer than 32 bits: {these}."
    if any(one.before.keys() != firsts[0].before.keys() for one in firsts):
        return "the optimizer's parameters have other names than on one rank."
    other = [rank for rank, one in enumerate(firsts[1:]) if one.before != firsts[0].before]
    if other:
        where = listed((f"rank {rank}" for rank in other), most=MOST_NAMES)
        begins = f"training begins with other parameters on {where} than on one rank"
        return f"{begins}: if each rank has the whole model, set the same seed on all."
    sizes = [float(np.linalg.norm(_joined(first, list(first.gradients)))) for first in serial.optimizers]
    if not sizes[0] or not math.isfinite(sum(sizes)):
        return "the gradients on one rank are all 0, or not finite."
    return ""


def _samples(whole: Counter[int], parts: Sequence[Counter[int]]) -> tuple[str, SilentFault | None]:
    """Say why the samples tell nothing about gradients, or ""; and find those that several ranks had, or none."""
    together, ranks = sum(parts, Counter[int]()), len(parts)
    missing, again = whole - together, (together - whole).total()
    if not whole or not all(parts) or together == whole:
        return "", None
    if all(part == whole for part in parts):
        kind, sentence = FaultKind.NOT_DIVIDED, f"Each of {ranks} ranks had all {whole.total()} samples of the first step."
    elif together.total() == ranks * whole.total():
        sizes = f"{whole.total()} samples on one rank, and {together.total()} on {ranks}"
        return f"the batch grows with the ranks ({sizes}): divide its size by their number.", None
    elif together.keys() - whole.keys():
        return "the samples are not those of one rank: set the same seed, and divide each batch.", None
    elif missing:
        came_again = f", and {again} came again" if again else ""
        never = f"{missing.total()} of {whole.total()} samples of the first step never came"
        kind, sentence = FaultKind.OTHER_SAMPLES, f"On {ranks} ranks, {never}{came_again}."
    else:
        kind, sentence = FaultKind.REPEATED_SAMPLES, f"On {ranks} ranks, {counted(again, 'sample')} of the first step came again."
    return "", SilentFault(kind, tuple(range(ranks)), "", sentence)


def _gradients(serial: _First, several: Sequence[_First], number: int, sizes: Sequence[int]) -> SilentFault | None:
    """Find gradients of an optimizer that differ from those on one rank; one that a rank does not have is 0."""
    names = list(dict.fromkeys(name for one in (serial, *several) for name in one.gradients))
    least = SMALL * float(np.linalg.norm(_joined(serial, names)))
    differing = [n for n in names if any(_far(_joined(one, [n]), _joined(serial, [n]), least) for one in several)]
    if not differing:
        return None
    own = [_joined(one, differing) for one in several]
    kind, said = _pattern(_joined(serial, differing), own, sizes)
    which = "all gradients" if len(differing) == len(names) else f"the gradients of {listed(differing, most=MOST_NAMES)}"
    step = "the first step" if number == 1 else f"optimizer {number}'s first step"
    sentence = f"On {len(several)} ranks, {which} of {step} {said}."
    return SilentFault(kind, tuple(range(len(several))), "", sentence, tuple(differing))


def _pattern(whole: NDArray[np.float64], own: Sequence[NDArray[np.float64]], sizes: Sequence[int]) -> tuple[FaultKind, str]:
    """Say how the gradients of each rank differ from those on one rank; all are sketches of the same tensors."""
    if not np.isfinite(own).all():
        return FaultKind.LOSS, "are not finite"
    least, ranks = float(np.linalg.norm(whole)), len(own)
    factors = [float(one @ whole) / max(least**2, TINY) for one in own]
    multiples = not any(_far(one, factor * whole, least) for one, factor in zip(own, factors, strict=True))
    if not any(_far(one, own[0], least) for one in own):
        usual = [factor for factor in (ranks, 1 / ranks) if math.isclose(factors[0], factor, rel_tol=ROUNDING)]
        if multiples and factors[0] > 0 and (usual or np.count_nonzero(whole) > FEW):
            return FaultKind.SUM_FOR_MEAN if ranks in usual else FaultKind.SCALED, f"are {factors[0]:.3g} times those on one rank"
        said = "are equal on all ranks, but differ from those on one rank"
        if len(set(sizes)) > 1:
            return FaultKind.UNEQUAL_PARTS, f"{said}; the ranks had {listed(sizes)} samples"
        return FaultKind.OTHER_GRADIENTS, said
    means = [np.mean(own, axis=0), np.average(own, axis=0, weights=sizes if all(sizes) else None)]
    if not all(_far(mean, whole) for mean in means):
        return FaultKind.NOT_AVERAGED, "differ from rank to rank, and their mean is that on one rank"
    if multiples and len(whole) > SKETCH:  # a bias of one element is always a multiple
        return FaultKind.SCALED, f"are {listed(f'{factor:.3g}' for factor in factors)} times those on one rank"
    return FaultKind.NOT_AVERAGED, "differ from rank to rank"


def _joined(first: _First, names: Sequence[str]) -> NDArray[np.float64]:
    return np.concatenate([np.empty(0), *(first.gradients.get(name, np.zeros(SKETCH)) for name in names)])


def _far(one: NDArray[np.float64], other: NDArray[np.float64], least: float = 0.0) -> bool:
    """Whether two sketches differ by more than rounding does, relative to the second one's size, or to `least`."""
    return not np.linalg.norm(one - other) <= ROUNDING * max(float(np.linalg.norm(other)), least)  # nan is far


def _in_words(serial: _Training, several: Sequence[_Training], optimizers: int, *, same_samples: bool) -> str:
    worst = float(np.max([_apart(one.after, serial.after) for one in several]))
    differ = f"differ by {worst:.1g} of their size" if math.isfinite(worst) else "are not finite"
    ends = f"After {counted(serial.steps, 'step')}, parameters {differ}"
    samples = f"the {serial.samples.total()} samples and " if serial.samples and same_samples else ""
    gradients = "the gradients of the first step"
    if len(serial.optimizers) > 1:
        gradients = f"the first gradients of {optimizers} of {len(serial.optimizers)} optimizers"
    if worst <= DRIFT:
        return f"the same as one rank: {samples}{gradients}. {ends}."
    return f"{samples}{gradients} are the same as on one rank. {ends}."


def _apart(one: dict[tuple[str, str], Any], other: dict[tuple[str, str], Any]) -> float:
    """Return by how much all parameters together differ, relative to them: single ones may be anything, see `SMALL`."""
    both = [name for name in other if name in one]
    size = float(np.linalg.norm([np.linalg.norm(other[name]) for name in both]))
    return float(np.linalg.norm([np.linalg.norm(one[name] - other[name]) for name in both])) / max(size, TINY)
