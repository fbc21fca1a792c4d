"""Why a process ended, in words."""

from __future__ import annotations

import signal

__all__ = ["explain_exit"]

_CAUSES = {
    "SIGKILL": "killed from outside; if nobody did, the machine ran out of memory",
    "SIGSEGV": "a crash in C or C++ code: an address that is not its own",
    "SIGABRT": "C or C++ code gave up; what it said stands in the rank's output",
    "SIGBUS": "shared memory or a mapped file that is no longer there, often because the disk or /dev/shm is full",
    "SIGFPE": "an integer division by zero in C or C++ code",
    "SIGILL": "an instruction this processor does not know",
}


def explain_exit(code: int) -> str:
    """Why a process ended, by its exit code: a negative one is the signal that ended it."""
    if code >= 0:
        return f"the process ended with exit code {code} (os._exit, or a library that gave up)"
    name = signal.Signals(-code).name if -code in {s.value for s in signal.Signals} else f"signal {-code}"
    return f"killed by {name}" + (f" ({_CAUSES[name]})" if name in _CAUSES else "")
