"""Explains why a process ended: its exit code, its signal, or the kernel's out-of-memory (OOM) killer.

Code compares a `Cause`, not the sentences that students read. `control_group_folders` finds the limits of a container.
"""

from __future__ import annotations

import enum
import re
import signal
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final


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


SAMPLE_EVERY_S: Final = 1.0  # seconds between reads of the counters; a kill counts as recent for up to twice as long

_SIGNALS: Final = {
    "SIGKILL": (Cause.KILLED, "sent by this or another process; if by none of yours, the machine probably ran out of memory"),
    "SIGSEGV": (Cause.CRASHED, "segmentation fault: C or C++ code accessed memory outside its address space"),
    "SIGABRT": (Cause.ABORTED, "C or C++ code aborted; its message is in the rank's output"),
    "SIGBUS": (
        Cause.CRASHED,
        "access to shared memory or a mapped file that no longer exists, often because the disk or /dev/shm is full",
    ),
    "SIGFPE": (Cause.CRASHED, "integer division by zero in C or C++ code"),
    "SIGILL": (Cause.CRASHED, "an instruction that this processor does not support"),
}
_REMEDY = "use smaller batches, a smaller model or fewer ranks"
_OUT_OF_MEMORY = {
    "group": f"out of memory: the kernel's OOM killer ended it; {_REMEDY}",
    "machine": f"probably out of memory: the kernel's OOM killer ended a process on this machine just then; {_REMEDY}",
}


class OOMKillCounters:
    """The kernel's counters of OOM kills, sampled regularly: did they rise when a rank was killed?

    One counts the kills in the control group of this process and its ranks, the other those on the whole machine.

    Source: "memory.events" in the kernel's Documentation/admin-guide/cgroup-v2.rst; "memory.oom_control" in
    cgroup-v1/memory.rst.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._counters = _own_group(root), root / "proc/vmstat"
        self._sampled_s = 0.0
        self._last = self._before = self._read()

    def sample(self, now_s: float) -> None:
        """Read the counters, if the last sample is at least `SAMPLE_EVERY_S` old by this monotonic clock."""
        if now_s - self._sampled_s >= SAMPLE_EVERY_S:
            self._sampled_s, self._before, self._last = now_s, self._last, self._read()

    def recent(self) -> str:
        """Return where the OOM killer was active in the last seconds: "group", "machine" or ""."""
        # Compared with the sample before the last: a large process takes a while to end after it was killed.
        for where, before, now in zip(("group", "machine"), self._before, self._read(), strict=True):
            if before is not None and now is not None:  # the group's counter counts every kill in it: it decides alone
                return where if now > before else ""
        return ""

    def _read(self) -> list[int | None]:
        return [_count(path) for path in self._counters]


def explain_exit(code: int | None, oom_kills: str = "", lost: str = "") -> tuple[Cause, str]:
    """Say why a process ended, as a value and in words.

    A negative exit code is the number of the signal that ended it; it is None if its machine is lost: `lost` says
    which, and how that was noticed. `oom_kills` is as `OOMKillCounters.recent`.
    """
    if code is None:
        return Cause.LOST_MACHINE, f"its machine {lost}"
    if code >= 0:
        return Cause.EXITED, f"the process ended with exit code {code} (os._exit, or a library that ended the process)"
    name = signal.Signals(-code).name if -code in {s.value for s in signal.Signals} else f"signal {-code}"
    cause, reason = _SIGNALS.get(name, (Cause.SIGNALLED, ""))
    if cause is Cause.KILLED and oom_kills:
        cause, reason = Cause.OUT_OF_MEMORY, _OUT_OF_MEMORY[oom_kills]
    return cause, f"killed by {name}" + (f" ({reason})" if reason else "")


def _own_group(root: Path) -> Path | None:
    files = (
        folder / name for folder in control_group_folders("memory", root) for name in ("memory.events", "memory.oom_control")
    )
    return next((file for file in files if _count(file) is not None), None)


def _count(file: Path | None) -> int | None:
    try:
        found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE) if file is not None else None
    except OSError:
        return None
    return int(found[1]) if found else None


def control_group_folders(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """The folders of this process's control groups, the innermost first: a limit of any of them holds for the process.

    Folders of version 1 have the controller; in those of version 2 its files may be missing. A container may see only a
    part of the hierarchy: the groups outside have no folder. Systems without control groups have none.

    The controller is "cpu" or "memory".

    Source: cgroups(7) and proc_pid_mountinfo(5).
    """
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:  # not Linux
        return
    paths: dict[str, PurePosixPath] = {}  # of this process, by controller; "" is version 2
    for group in groups:
        _, controllers, path = group.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), PurePosixPath(path)))
    for mount in mounts:
        place, _, file_system = mount.partition(" - ")
        _, _, _, inside, mounted, *_ = place.split(" ")
        kind, _, options = file_system.split(" ", 2)
        wanted = {"cgroup": controller, "cgroup2": ""}.get(kind, kind)
        if wanted not in paths or (wanted and wanted not in options.split(",")):
            continue
        # Without a namespace for control groups, a container's path begins outside what is mounted.
        own, top = paths[wanted], root / mounted.lstrip("/")
        below = own.relative_to(inside) if own.is_relative_to(inside) else PurePosixPath()
        yield from (top / part for part in (below, *below.parents))
