"""The random numbers of judges: their seeds, and the notebook's generators, which stay as they are meanwhile."""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, Final, TypeVar

import numpy as np

Case = TypeVar("Case")
OTHER_CASES: Final = 3  # of a calculation
VARIABLE: Final = "LABKIT_EXERCISE_SEED"  # in the environment, which the ranks copy: a judge's code runs there, too


@contextlib.contextmanager
def unchanged_generators() -> Iterator[None]:
    """Restore the generators of Python, numpy and torch at the end of the `with` block.

    TensorFlow's are not touched: no judge uses TensorFlow in the notebook's process.
    """
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  # the student's own, whichever they use
    torch: Any = sys.modules.get("torch")
    of_torch = None if torch is None else torch.get_rng_state()
    of_gpus = torch.cuda.get_rng_state_all() if torch is not None and torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002
        if torch is not None:
            torch.set_rng_state(of_torch)
        if of_gpus:
            torch.cuda.set_rng_state_all(of_gpus)


@contextlib.contextmanager
def other_inputs(seed: int) -> Iterator[None]:
    """Let judges make other inputs in the `with` block; the seed 0 stands for those of the lesson."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(seed)
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def other_cases(make: Callable[[Random], Case]) -> list[Case]:
    """Return cases made at random from the seed of `check`; none for the seed of the lesson."""
    seed = int(os.environ.get(VARIABLE, "0"))
    return [make(Random(OTHER_CASES * seed + i)) for i in range(OTHER_CASES)] if seed else []


def case_random() -> Random:
    """Return the generator of cases that are drawn at random: another one each time for the seed of the lesson."""
    return Random(case_seed(0) or None)


def case_seed(seed: int) -> int:
    """Return the seed for a judge's generator, which depends on the seed of `check`.

    `seed` is that in the lesson; different generators of an exercise have different ones, below 10,000.
    """
    return seed + 10_000 * int(os.environ.get(VARIABLE, "0"))
