"""What figures and other functions accept as a run: a `Run`, any object with a trace, or a trace itself."""

from __future__ import annotations

import reprlib
from typing import Protocol

from labkit.errors.exceptions import LabError
from labkit.tracing.trace import Trace


class HasTrace(Protocol):
    """A `Run`, or any other object with a trace."""

    @property
    def trace(self) -> Trace:
        """The spans of all ranks."""


def trace_of(run: HasTrace | Trace, function: str) -> Trace:
    """The trace of a run, which must not be empty.

    Args:
        run: a run or a trace.
        function: the name of the calling function, for error messages.

    Raises:
        LabError: the trace is empty.
        TypeError: `run` is neither a run nor a trace.
    """
    trace = run if isinstance(run, Trace) else getattr(run, "trace", None)
    if not isinstance(trace, Trace):
        if isinstance(run, list | tuple):
            hint = f"; pass several runs as {function}(a, b)" if function == "timeline" else "; pass one run"
        else:
            hint = "; a group's last run is group.last_run" if hasattr(run, "last_run") else ""
        raise TypeError(
            f"{function}({reprlib.repr(run)}): expected a run, as group.run and group.watch return it, or a trace{hint}"
        )
    if not len(trace) or trace.duration_ns <= 0:
        raise LabError(f"{function}: the ranks recorded nothing (run.trace has {len(trace)} spans)")
    return trace
