"""The steps of a program without `lab.steps`: a step ends with the optimizer's step.

The first step begins with the run's first forward pass, backward pass or batch; each other step where the one before
ended, so that evaluations and logging count too. Programs with several optimizers, such as a GAN, step each of them in
turn: a step ends when one of them is about to step a second time, at the end of the latest optimizer's step. An
optimizer that has been deleted steps no more: it also ends the step, for programs that create one for each step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

from labkit.recording.schema import AUTOMATIC


class OptimizerSteps:
    """Records the steps of one rank.

    Args:
        now: returns the present moment, as `write` needs it.
        write: records a step: its start, its end, and its flags.
    """

    def __init__(self, now: Callable[[], Any], write: Callable[[Any, Any, int], None]) -> None:
        self._now, self._write = now, write
        self.begin_run()

    def begin_run(self) -> None:
        """Forget the previous run."""
        self._marked = False  # whether `lab.steps` marks this run's steps
        self._start = self._end = None  # of the step in progress; None: not yet
        self._stepped: list[ref[Any]] = []  # the optimizers that have stepped in it

    def end_run(self) -> None:
        """Record the last step: no optimizer will step again."""
        self._close()

    def marked(self) -> None:
        """Note that the program marks its steps itself."""
        self._marked = True

    def working(self) -> None:
        """Note that a step is in progress, if none was."""
        if self._start is None:
            self._start = self._now()

    def optimizer_begins(self, optimizer: Any) -> None:
        """Note that an optimizer begins to step."""
        if any(stepped() in (None, optimizer) for stepped in self._stepped):
            self._close()
        self.working()

    def optimizer_ends(self, optimizer: Any) -> None:
        """Note that an optimizer has stepped."""
        self._stepped.append(ref(optimizer))
        self._end = self._now()

    def _close(self) -> None:
        if self._stepped:
            if not self._marked:
                self._write(self._start, self._end, AUTOMATIC)
            self._start, self._stepped = self._end, []
