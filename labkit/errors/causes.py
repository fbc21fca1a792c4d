"""The causes of failures, as values: code compares causes, not the sentences that students read."""

from __future__ import annotations

import enum


class Cause(enum.Enum):
    """Why a rank failed."""

    RAISED = enum.auto()  # its code, or a library that it called, raised an error
    NOT_IMPLEMENTED = enum.auto()  # its code raised NotImplementedError: it is not written yet
    LOST_CONNECTION = enum.auto()  # a library reported that the connection to another rank was lost
    AFTER_LOST_CONNECTION = enum.auto()  # its code caught such an error and raised another one
    UNREADABLE_RESULT = enum.auto()  # it returned an object that the notebook cannot unpickle
    DEADLOCK = enum.auto()  # other ranks wait for it without end
    EXITED = enum.auto()  # its process exited
    OUT_OF_MEMORY = enum.auto()  # the kernel's OOM killer ended its process
    KILLED = enum.auto()  # another process sent SIGKILL
    ABORTED = enum.auto()  # SIGABRT: C or C++ code aborted
    CRASHED = enum.auto()  # SIGSEGV, SIGBUS, SIGFPE or SIGILL
    SIGNALLED = enum.auto()  # another signal
    LOST_MACHINE = enum.auto()  # its machine does not answer any more

    @property
    def is_consequence(self) -> bool:
        """Whether another rank's end caused the failure."""
        return self in (Cause.LOST_CONNECTION, Cause.AFTER_LOST_CONNECTION)
