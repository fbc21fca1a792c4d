"""`press_stop`: presses Stop in a lesson that a program executes, where nobody can press it."""

from __future__ import annotations

import _thread
import math
import threading

from labkit.errors.wrong_calls import check_number, public_api
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
    check_number(after_s, f"press_stop({after_s!r}): expected a number of seconds from 0", at_least=0, below=math.inf)
    if not notebook_path():
        timer = threading.Timer(float(after_s), _thread.interrupt_main)
        timer.daemon = True
        timer.start()
