"""The steps of a program without `lab.steps`: a step ends with the optimizer's step.

The first step begins with the run's first forward pass, backward pass or batch; each other step where the one before
ended, so that evaluations and logging count too. Programs with several optimizers, such as a GAN, step each of them in
turn: a step ends when one of them is about to step a second time, at the end of the latest optimizer's step. An
optimizer that has been deleted steps no more: it also ends the step, for programs that create one for each step.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

from labkit.recording.ring_buffer import RingWriter
from labkit.recording.schema import AUTOMATIC, STEP

__all__ = ["OptimizerSteps"]


class OptimizerSteps:
    """Records the steps of one rank.

    Args:
        ring: the ring to write to.
    """

    def __init__(self, ring: RingWriter) -> None:
        self._ring = ring
        self.begin_run()

    def begin_run(self) -> None:
        """Forget the previous run."""
        self._marked = False  # whether `lab.steps` marks this run's steps
        self._start_ns = self._end_ns = 0  # of the step in progress; 0: not yet
        self._stepped: list[ref[Any]] = []  # the optimizers that have stepped in it

    def end_run(self) -> None:
        """Record the last step: no optimizer will step again."""
        self._close()

    def marked(self) -> None:
        """Note that the program marks its steps itself."""
        self._marked = True

    def working(self, now_ns: int) -> None:
        """Note that a step is in progress, if none was."""
        if not self._start_ns:
            self._start_ns = now_ns

    def optimizer_begins(self, optimizer: Any, now_ns: int) -> None:
        """Note that an optimizer begins to step.

        Args:
            optimizer: the optimizer.
            now_ns: the time.
        """
        if any(stepped() in (None, optimizer) for stepped in self._stepped):
            self._close()
        self.working(now_ns)

    def optimizer_ends(self, optimizer: Any, now_ns: int) -> None:
        """Note that an optimizer has stepped; arguments as for `optimizer_begins`."""
        self._stepped.append(ref(optimizer))
        self._end_ns = now_ns

    def _close(self) -> None:
        if self._stepped:
            if not self._marked:
                self._ring.write("step", STEP, self._start_ns, self._end_ns, flags=AUTOMATIC)
            self._start_ns, self._stepped = self._end_ns, []
