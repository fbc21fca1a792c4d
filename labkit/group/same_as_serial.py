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
from labkit.tracing.verdict import MOST_NAMES, Verdict

ROUNDING: Final = 1e-3  # relative to the serial gradient: sums in another order differ by less
SMALL: Final = 1e-3  # of all gradients: those that are 0 but for rounding, as of a bias before a norm, are anything
DRIFT: Final = 1e-3  # the same of parameters after several steps
TINY: Final = 1e-30


class _Training(NamedTuple):
    """What one rank has noted of its training.

    Args:
        steps: optimizer steps.
        samples: how often each sample came before the first step; empty if that is not known.
        before: the digests of the parameters before the first step, by name.
        gradients: sketches of the gradients of the first step.
        after: sketches of the parameters after the last step.
    """

    steps: int
    samples: Counter[int]
    before: dict[str, int]
    gradients: dict[str, Any]
    after: dict[str, Any]


@public_api
def same_as_serial(train: Callable[..., Any], /, *args: Any, ranks: Sequence[int] = (1, 2, 4), **kwargs: Any) -> Verdict:
    """Run a training on one rank and on several, and say how samples, gradients and parameters differ, and why.

    This is for programs that divide a batch of fixed size over their ranks, so that each number of ranks must give the
    same gradients. Compared are the rows of the model's first input before the first step; the gradients with which the
    first optimizer steps first; and the parameters at the end. Where a program cannot be compared, as one with a batch
    of fixed size for each rank or with sharded parameters, that is said instead.

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
        refused = _incomparable(serial, several)
        found = [] if refused else _differences(serial, several)
        compared.append(f"{counted(len(several), 'rank')}: {refused or _in_words(serial, several, same=not found)}")
        faults = faults or found  # those of more ranks have the same causes
    return Verdict(tuple(faults), "\n".join(compared))


def _runs(train: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], ranks: Sequence[int]) -> Iterator[Run]:
    for number in ranks:
        with Group(number, devices="cpu") as group:
            yield group.run(train, *args, check=True, **kwargs)


def _training(run: Run, rank: int) -> _Training:
    facts = run.facts.get(rank, ())
    samples = Counter(row for fact in facts if fact.kind is FactKind.SAMPLES for row in fact.values["rows"])
    first = [fact for fact in facts if fact.kind is FactKind.PARAMETERS and fact.step == 0]
    before = {name: digest for fact in first for name, digest in fact.values.items()}
    return _Training(
        max((fact.step for fact in facts), default=0), samples, before,
        _sketches(facts, FactKind.FIRST_GRADIENTS), _sketches(facts, FactKind.LAST_VALUES),
    )  # fmt: skip


def _sketches(facts: Sequence[Fact], kind: FactKind) -> dict[str, Any]:
    of_kind = [fact.values for fact in facts if fact.kind is kind]
    return {name: np.array(sketch) for name, sketch in of_kind[0].items() if sketch is not None} if of_kind else {}


def _incomparable(serial: _Training, several: Sequence[_Training]) -> str:
    """Why trainings cannot be compared; "" if they can."""
    if not serial.gradients or not all(one.gradients for one in several):
        return "not comparable, because no optimizer of torch began a step with gradients of 32 bits that are not sharded."
    if any(one.before.keys() != serial.before.keys() for one in several):
        return "not comparable, because the optimizer has other parameters than on one rank."
    other = [rank for rank, one in enumerate(several) if one.before != serial.before]
    if other:
        where = listed((f"rank {rank}" for rank in other), most=MOST_NAMES)
        return f"not comparable, because training begins with other parameters on {where}: set the same seed on all ranks."
    whole, parts = serial.samples, [one.samples for one in several]
    together = sum(parts, Counter[int]())
    if together.total() == len(several) * whole.total() and any(part != whole for part in parts):
        sizes = f"{whole.total()} samples on one rank, and {together.total()} on {len(several)}"
        return f"not comparable, because the batch grows with the ranks ({sizes}): divide its size by their number."
    if together and together.keys() - whole.keys():
        return "not comparable, because the samples are others than on one rank: set the same seed, and divide each batch."
    return ""


def _differences(serial: _Training, several: Sequence[_Training]) -> list[SilentFault]:
    samples = list(_samples(serial, several))
    gradients = _gradients(serial, several)
    return [*samples, *(fault for fault in gradients if fault.certain or not samples)]  # other samples, other gradients


def _samples(serial: _Training, several: Sequence[_Training]) -> Iterator[SilentFault]:
    """Find samples that several ranks had, or none."""
    whole, parts = serial.samples, [one.samples for one in several]
    together, every = sum(parts, Counter[int]()), tuple(range(len(several)))
    missing, again = (whole - together).total(), (together - whole).total()
    if whole and all(part == whole for part in parts):
        sentence = f"Each of {len(several)} ranks had all {whole.total()} samples of the first step."
        yield SilentFault(FaultKind.NOT_DIVIDED, every, "", sentence)
    elif together and (missing or again):
        came_again = f", and {again} came again" if again else ""
        sentence = f"On {len(several)} ranks, {missing} of {whole.total()} samples of the first step never came{came_again}."
        yield SilentFault(FaultKind.OTHER_SAMPLES, every, "", sentence)


def _gradients(serial: _Training, several: Sequence[_Training]) -> Iterator[SilentFault]:
    every = tuple(range(len(several)))
    lacking = [name for name in serial.gradients if not all(name in one.gradients for one in several)]
    if lacking:
        sentence = f"On {len(several)} ranks, not all ranks have gradients of {listed(lacking, most=MOST_NAMES)}."
        yield SilentFault(FaultKind.NOT_AVERAGED, every, "", sentence, tuple(lacking))
    names = [name for name, gradient in serial.gradients.items() if name not in lacking and np.any(gradient)]
    least = SMALL * float(np.linalg.norm(_joined(serial, names)))
    differing = [name for name in names if any(_far(one.gradients[name], serial.gradients[name], least) for one in several)]
    if differing:
        kind, said = _pattern(_joined(serial, differing), [_joined(one, differing) for one in several])
        sizes = [one.samples.total() for one in several]
        if kind is FaultKind.OTHER_GRADIENTS and len(set(sizes)) > 1:
            kind, said = FaultKind.UNEQUAL_PARTS, f"{said}; the ranks had {listed(sizes)} samples"
        which = "all gradients" if len(differing) == len(names) else f"the gradients of {listed(differing, most=MOST_NAMES)}"
        sentence = f"On {len(several)} ranks, {which} of the first step {said}."
        yield SilentFault(kind, every, "", sentence, tuple(differing))


def _pattern(whole: NDArray[np.float64], own: Sequence[NDArray[np.float64]]) -> tuple[FaultKind, str]:
    """Say how the gradients of each rank differ from those on one rank; all are sketches of the same tensors."""
    factors = [float(one @ whole / (whole @ whole)) for one in own]
    least = float(np.linalg.norm(whole))
    multiples = not any(_far(one, factor * whole, least) for one, factor in zip(own, factors, strict=True))
    alike = not any(_far(one, own[0], least) for one in own)
    if alike and multiples:
        summed = math.isclose(factors[0], len(own), rel_tol=ROUNDING)
        return FaultKind.SUM_FOR_MEAN if summed else FaultKind.SCALED, f"are {factors[0]:.3g} times those on one rank"
    if alike:
        return FaultKind.OTHER_GRADIENTS, "are equal on all ranks, but not a multiple of those on one rank"
    if not _far(np.mean(own, axis=0), whole):
        return FaultKind.NOT_AVERAGED, "differ from rank to rank, and their mean is that on one rank"
    if multiples and len(whole) > SKETCH:  # a bias of one element is always a multiple
        return FaultKind.SCALED, f"are {listed(f'{factor:.3g}' for factor in factors)} times those on one rank"
    return FaultKind.OTHER_GRADIENTS, "differ from rank to rank"


def _joined(training: _Training, names: Sequence[str]) -> NDArray[np.float64]:
    return np.concatenate([np.empty(0), *(training.gradients[name] for name in names)])


def _far(one: NDArray[np.float64], other: NDArray[np.float64], least: float = 0.0) -> bool:
    """Whether two sketches differ by more than rounding does, relative to the second one's size, or to `least`."""
    return bool(np.linalg.norm(one - other) > ROUNDING * max(float(np.linalg.norm(other)), least))


def _in_words(serial: _Training, several: Sequence[_Training], *, same: bool) -> str:
    if not same:
        return "not the same as one rank."
    apart = [_apart(one.after[name], after) for one in several for name, after in serial.after.items() if name in one.after]
    worst = float(np.max(apart, initial=0.0))
    differ = f"differ by {worst:.1g} of their size" if math.isfinite(worst) else "are not finite"
    ends = f"After {counted(serial.steps, 'step')}, parameters {differ}"
    samples = f"the {serial.samples.total()} samples and " if serial.samples else ""
    if worst <= DRIFT:
        return f"the same as one rank: {samples}the gradients of the first step. {ends}."
    return f"{samples}the gradients of the first step are the same as on one rank. {ends}."


def _apart(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    return float(np.linalg.norm(one - other) / max(float(np.linalg.norm(other)), TINY))
