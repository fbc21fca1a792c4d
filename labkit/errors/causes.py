"""Why a rank failed, as a value: code compares causes, and never the sentences that students read."""

from __future__ import annotations

import enum

__all__ = ["Cause"]


class Cause(enum.Enum):
    """Why a rank failed. It is found where the failure is, and travels with it."""

    RAISED = enum.auto()  # its code, or a library that it called, raised an error
    NOT_IMPLEMENTED = enum.auto()  # its code raised NotImplementedError: it is not written yet
    LOST_CONNECTION = enum.auto()  # a library found that another rank was gone
    AFTER_LOST_CONNECTION = enum.auto()  # its code caught such an error, and raised one of its own
    UNREADABLE_RESULT = enum.auto()  # it returned something that the notebook cannot unpickle
    DEADLOCK = enum.auto()  # others wait for it, and it will never come
    EXITED = enum.auto()  # its process exited
    OUT_OF_MEMORY = enum.auto()  # the kernel's OOM killer ended its process
    KILLED = enum.auto()  # SIGKILL from anybody else
    ABORTED = enum.auto()  # SIGABRT: C or C++ code gave up
    CRASHED = enum.auto()  # SIGSEGV, SIGBUS, SIGFPE or SIGILL
    SIGNALLED = enum.auto()  # another signal

    @property
    def is_consequence(self) -> bool:
        """Whether it comes of another rank's end."""
        return self in (Cause.LOST_CONNECTION, Cause.AFTER_LOST_CONNECTION)
