"""Why a process ended, in words; whether the kernel's memory killer was at work."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["MemoryKiller", "OutOfMemoryKills", "explain_exit"]

LOOK_EVERY_S: Final = 1.0  # at the kernel's counters: a strike is told of if it was not older than twice that

_CAUSES = {
    "SIGKILL": "killed from outside; if nobody did, the machine ran out of memory",
    "SIGSEGV": "a crash in C or C++ code: an address that is not its own",
    "SIGABRT": "C or C++ code gave up; what it said stands in the rank's output",
    "SIGBUS": "shared memory or a mapped file that is no longer there, often because the disk or /dev/shm is full",
    "SIGFPE": "an integer division by zero in C or C++ code",
    "SIGILL": "an instruction this processor does not know",
}
_REMEDY = "smaller batches, a smaller model or fewer ranks need less"
_OUT_OF_MEMORY = {
    "group": f"out of memory: the kernel's memory killer ended it; {_REMEDY}",
    "machine": f"out of memory, by all signs: the kernel's memory killer ended a process of this machine just then; {_REMEDY}",
}


@dataclass(frozen=True, slots=True)
class OutOfMemoryKills:
    """How often the kernel's memory killer has struck so far; None where this kernel does not say.

    Args:
        group: in the control group that this process and its ranks belong to.
        machine: on the whole machine.
    """

    group: int | None
    machine: int | None

    def since(self, before: OutOfMemoryKills) -> str:
        """Where it has struck since: "group", "machine", or "" where it has not, or that is not known."""
        if self.group is not None and before.group is not None:
            return "group" if self.group > before.group else ""  # it counts its own, whoever was short of memory
        if self.machine is not None and before.machine is not None and self.machine > before.machine:
            return "machine"
        return ""


class MemoryKiller:
    """The kernel's counters, looked at now and then, so that it is known whether they rose when a rank was killed.

    Args:
        root: where the file system begins; a test has one of its own.

    Source: "memory.events" in the kernel's Documentation/admin-guide/cgroup-v2.rst; "memory.oom_control" in cgroup-v1/memory.rst.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._counters = _own_group(root), root / "proc/vmstat"
        self._looked_s = 0.0
        self._last = self._before = self._read()

    def look(self, now_s: float) -> None:
        """Take note of how things are, if it is time to."""
        if now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s, self._before, self._last = now_s, self._last, self._read()

    def struck(self) -> str:
        """Where it struck a moment ago: "group", "machine", or ""."""
        return self._read().since(self._before)  # not the last: a large process takes a while to end once it is struck

    def _read(self) -> OutOfMemoryKills:
        return OutOfMemoryKills(*(_count(path) for path in self._counters))


def explain_exit(code: int, struck: str = "") -> str:
    """Why a process ended.

    Args:
        code: its exit code: a negative one is the signal that ended it.
        struck: where the memory killer struck at that moment; see `MemoryKiller.struck`.
    """
    if code >= 0:
        return f"the process ended with exit code {code} (os._exit, or a library that gave up)"
    name = signal.Signals(-code).name if -code in {s.value for s in signal.Signals} else f"signal {-code}"
    cause = _OUT_OF_MEMORY[struck] if name == "SIGKILL" and struck else _CAUSES.get(name)
    return f"killed by {name}" + (f" ({cause})" if cause else "")


def _own_group(root: Path) -> Path | None:
    """The file that counts the strikes in this process's control group."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            file = root / "sys/fs/cgroup/memory" / path.lstrip("/") / "memory.oom_control"
        elif not controllers:
            file = root / "sys/fs/cgroup" / path.lstrip("/") / "memory.events"
        else:
            continue
        if _count(file) is not None:
            return file
    return None


def _count(file: Path | None) -> int | None:
    try:
        found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE) if file is not None else None
    except OSError:
        return None
    return int(found[1]) if found else None
