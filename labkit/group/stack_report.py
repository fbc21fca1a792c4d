"""The stacks of ranks in words: tracebacks that are cut to the student's frames."""

from __future__ import annotations

import linecache
import re
from collections.abc import Sequence

import psutil

from labkit.group.output import cell_label
from labkit.launch.stack_dump import LIMIT_S, Frame, crashed_in, stacks_of
from labkit.launch.starters import RankProcess
from labkit.recording.record import is_students

__all__ = ["Stacks", "crash", "readable"]


class Stacks(dict[str, str]):
    """The stacks by rank name; printed, a report."""

    def __repr__(self) -> str:
        return "\n\n".join(f"{name} {text}" for name, text in self.items())


def crash(process: RankProcess) -> str:
    """Where the student's code was when a rank crashed in C code, as a traceback; "" if it did not run."""
    half = re.sub(r"^ +", lambda spaces: spaces[0][::2], _stack(crashed_in(process)), flags=re.MULTILINE)  # indented by two
    return f"Traceback (most recent call last):\n{half}" if half else ""


def readable(raw: str, pid: int) -> str:
    """A rank's stacks as a report in the form of tracebacks: the student's frames, and the frame that they called.

    Args:
        raw: the stacks from `launch.stack_dump.ask`.
        pid: the rank's process, whose state is reported if it did not answer.
    """
    if not raw:
        return f"does not answer: {_state(pid)}"
    stacks = [text for _, frames in stacks_of(raw) if (text := _stack(frames))]
    return (
        "is idle: no function of yours is running" if not stacks else "is here:\n" + "\n  and on another thread:\n".join(stacks)
    )


def _state(pid: int) -> str:
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "its process is gone"
    if status == psutil.STATUS_STOPPED:
        return "its process was stopped by a signal (SIGSTOP); SIGCONT resumes it"
    return f"its process is {status}, and did not answer within {LIMIT_S:.0f} s"


def _stack(frames: Sequence[Frame]) -> str:
    """One stack; "" if it contains none of the student's frames."""
    last = max((i for i, frame in enumerate(frames) if is_students(frame.file)), default=-1)
    if last < 0:
        return ""
    lines = []
    for i, frame in enumerate(frames):
        students = is_students(frame.file)
        if students or i == last + 1:
            lines.append(f'    File "{cell_label(frame.file)}", line {frame.line}, in {frame.function}')
            if students and (source := linecache.getline(frame.file, frame.line).strip()):
                lines.append(f"        {source}")
    return "\n".join(lines)
