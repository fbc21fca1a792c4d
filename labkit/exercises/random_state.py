"""Keeps the notebook's random number generators as they are while a judge seeds and uses them."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

__all__ = ["unchanged_generators"]


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
