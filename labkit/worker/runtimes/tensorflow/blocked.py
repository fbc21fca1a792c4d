"""Detects that a rank is blocked inside TensorFlow, whose collectives labkit does not see: in which call, since when.

A thread checks the rank's main thread a few times a second. The rank is blocked if the process hardly computes and the
main thread has stayed in the same call of TensorFlow. A rank that sleeps or waits for a file does not count as blocked.
The call is found in the Python frames, which are internals of TensorFlow and may change.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Final

from labkit.errors.exceptions import OWN_CODE
from labkit.recording.group_keys import TENSORFLOW
from labkit.recording.record import Recorder, clock, here, is_students, student_line
from labkit.recording.ring_buffer import RingWriter

CHECK_EVERY_S: Final = 0.25
IDLE_SHARE: Final = 0.1  # of one core; TensorFlow's polling threads use a fiftieth of this

NAME: Final = "TensorFlow"
UNTIL_STARTED: Final = "(until all ranks have started their servers)"
_TENSORFLOW: Final = f"{os.sep}tensorflow{os.sep}"
_LOCKS: Final = re.compile(r"[/\\](threading|queue|pool)\.py$")  # Python's modules in which TensorFlow waits
_WRAPPERS: Final = ("traceback_utils.py", "dispatch.py", "deprecation.py", "tf_decorator.py", "tf_contextlib.py")
_PUBLIC: Final = {
    "CollectiveAllReduceStrategy": "MultiWorkerMirroredStrategy", "ParameterServerStrategyV2": "ParameterServerStrategy",
    "StrategyBase": "Strategy", "VariableMetaclass": "Variable",
}  # fmt: skip


class BlockedCall:
    """Records in the ring, from check to check, that a rank is blocked in a call of TensorFlow."""

    def __init__(self, ring: RingWriter) -> None:
        self._ring = ring
        self._now_ns = self._cpu_ns = 0
        self._call: FrameType | None = None  # TensorFlow's frame in which the main thread was at the last check
        self._slot: int | None = None

    def check(self, now_ns: int, cpu_ns: int, innermost: FrameType | None) -> None:
        """Check whether the main thread is blocked, and update the record."""
        idle = cpu_ns - self._cpu_ns < IDLE_SHARE * (now_ns - self._now_ns)
        call = call_within(innermost) if idle else None
        blocked = call is not None and call is self._call
        if blocked and self._slot is None and innermost is not None:
            name, line = describe(innermost), student_line(innermost)
            self._slot = self._ring.pend(name, self._now_ns, group=TENSORFLOW, line=line)
            self._ring.waiting(self._slot, self._now_ns)
        elif not blocked and self._slot is not None:
            self._ring.unpend(self._slot)
            self._slot = None
        # Keep a reference to the frame only while its call may be blocked: it keeps all arguments of the call alive.
        self._call, self._now_ns, self._cpu_ns = call, now_ns, cpu_ns


def detect_blocked_calls(recorder: Recorder) -> None:
    """Start a thread that checks this process's main thread from now on."""
    main = threading.main_thread().ident
    blocked_call = BlockedCall(recorder.ring)

    def check_regularly() -> None:
        while True:
            blocked_call.check(clock(), time.process_time_ns(), sys._current_frames().get(main or 0))
            time.sleep(CHECK_EVERY_S)

    threading.Thread(target=check_regularly, name="labkit-blocked", daemon=True).start()


@contextlib.contextmanager
def starting_servers() -> Iterator[None]:
    """Record that this thread waits until all ranks have started their servers; TensorFlow holds the GIL meanwhile.

    Only the main thread's call counts: another thread of a chief's tries again to reach a worker that has ended.
    """
    recorder = here.recorder
    if recorder is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    now_ns, frame = clock(), sys._getframe(2)  # the caller, beyond contextlib's frames
    slot = recorder.ring.pend(f"{describe(frame)} {UNTIL_STARTED}", now_ns, group=TENSORFLOW, line=student_line(frame))
    recorder.ring.waiting(slot, now_ns)
    try:
        yield
    finally:
        recorder.ring.unpend(slot)


def call_within(innermost: FrameType | None) -> FrameType | None:
    """Return the frame of TensorFlow in which a thread is, also if that waits for a Python lock; None without one."""
    frame = innermost
    while frame is not None:
        file = frame.f_code.co_filename
        if _is_tensorflows(file):
            return frame
        if not (_LOCKS.search(file) or file.startswith(OWN_CODE)):
            return None
        frame = frame.f_back
    return None


def _is_tensorflows(file: str) -> bool:
    """Whether a file belongs to TensorFlow, not to this package or to a program in a folder named "tensorflow"."""
    return _TENSORFLOW in file and not is_students(file) and not file.startswith(OWN_CODE)


def describe(innermost: FrameType) -> str:
    """Return the function that the student called and a thread is in, given its innermost frame."""
    called = traced = ""
    frame: FrameType | None = innermost
    while frame is not None and not is_students(frame.f_code.co_filename):
        file = frame.f_code.co_filename
        if _is_tensorflows(file) and not file.endswith(_WRAPPERS):
            called = frame.f_code.co_qualname
        traced = traced or _traced(frame)
        frame = frame.f_back
    called = traced or _short(called)
    return f"{NAME}'s {called}" if called else NAME


def _short(qualified: str) -> str:
    """Shorten a qualified name to the public one, such as `Strategy.reduce`, without constructors and decorators."""
    called, _, _ = qualified.partition(".<locals>")
    owner, dot, method = called.removesuffix(".__init__").removesuffix(".__call__").partition(".")
    return f"{_PUBLIC.get(owner, owner)}{dot}{method}"


def _traced(frame: FrameType) -> str:
    """Return the name of the student's function if this frame runs its graph; else ""."""
    if not frame.f_code.co_filename.endswith("polymorphic_function.py") or frame.f_code.co_name != "__call__":
        return ""
    function = getattr(frame.f_locals.get("self"), "python_function", None)
    name = getattr(function, "__name__", "")
    return "tf.function" if name == "<lambda>" else str(name)
