"""The stacks of ranks in words: tracebacks that are cut to the student's frames."""

from __future__ import annotations

import re
from collections.abc import Sequence

from labkit.group.output import cell_label
from labkit.launch.frames import Owner, StackFrame
from labkit.launch.rank_process import Status
from labkit.launch.stack_dump import LIMIT_S
from labkit.launch.thread_states import RankThreads


class Stacks(dict[str, str]):
    """The stacks by rank name; printed, a report."""

    def __repr__(self) -> str:
        return "\n\n".join(f"{name} {text}" for name, text in self.items())


def crash(frames: Sequence[StackFrame]) -> str:
    """Where the student's code was when a rank crashed in C code, as a traceback; "" if it did not run."""
    half = re.sub(r"^ +", lambda spaces: spaces[0][::2], _stack(frames), flags=re.MULTILINE)  # a traceback is indented by two
    return f"Traceback (most recent call last):\n{half}" if half else ""


def readable(threads: RankThreads, status: Status) -> str:
    """A rank's stacks as a report in the form of tracebacks: the student's frames, and the frame that they called.

    The state of its process is reported if it did not answer.
    """
    if threads.main is None:
        return f"does not answer: {_state(status)}"
    stacks = [text for thread in (threads.main, *threads.others) if (text := _stack(thread.frames))]
    return (
        "is idle: no function of yours is running" if not stacks else "is here:\n" + "\n  and on another thread:\n".join(stacks)
    )


def _state(status: Status) -> str:
    if status.state == "gone":
        return "its process is gone"
    if status.frozen:
        return "its process was stopped by a signal (SIGSTOP); SIGCONT resumes it"
    return f"its process is {status.state}, and did not answer within {LIMIT_S:.0f} s"


def _stack(frames: Sequence[StackFrame]) -> str:
    """One stack; "" if it contains none of the student's frames."""
    last = max((i for i, frame in enumerate(frames) if frame.own is Owner.STUDENT), default=-1)
    lines = []
    for i, frame in enumerate(frames):
        students = frame.own is Owner.STUDENT
        if students or 0 <= last == i - 1:
            lines.append(f'    File "{cell_label(frame.file)}", line {frame.line}, in {frame.function}')
            lines += [f"        {frame.source}"] if students and frame.source else []
    return "\n".join(lines)
