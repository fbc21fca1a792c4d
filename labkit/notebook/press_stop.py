"""`press_stop`: presses Stop in a lesson that a program executes, where nobody can press it."""

from __future__ import annotations

import _thread
import math
import numbers
import threading

from labkit.errors.wrong_calls import public_api
from labkit.group.output import notebook_path


@public_api
def press_stop(after_s: float = 1.0) -> None:
    """Interrupt the cell after some seconds, as ■ in the toolbar does, if a program executes the notebook.

    In a notebook that you have open in Jupyter or VS Code, this does nothing: press ■ yourself.

    Args:
        after_s: when to interrupt, in seconds from now.

    Raises:
        TypeError: not a number.
        ValueError: a negative or infinite number.
    """
    if not isinstance(after_s, numbers.Real) or isinstance(after_s, bool):
        raise TypeError(f"press_stop({after_s!r}): expected a number of seconds")
    if not (float(after_s) >= 0 and math.isfinite(after_s)):
        raise ValueError(f"press_stop({after_s!r}): expected a number of seconds from 0")
    if not notebook_path():
        timer = threading.Timer(float(after_s), _thread.interrupt_main)
        timer.daemon = True
        timer.start()
