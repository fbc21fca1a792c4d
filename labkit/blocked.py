"""Notices that a rank is blocked inside TensorFlow, whose collectives labkit does not see, and notes since when and where.

A thread of the rank looks at its main thread a few times a second. Blocked means: the process hardly computes, and the main
thread has stayed in one and the same call of TensorFlow's. A rank that sleeps, or waits for a file, is not meant.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from types import FrameType
from typing import Final

from labkit.record import Recorder, clock, student_line
from labkit.ring import TENSORFLOW, RingWriter

__all__ = ["Watch", "watch_tensorflow"]

LOOK_EVERY_S: Final = 0.25
IDLE_SHARE: Final = 0.1  # of one core: TensorFlow's own threads, which poll, take a fiftieth of this
NAME: Final = "TensorFlow"  # what the note says the rank waits in
_TENSORFLOW: Final = f"{os.sep}tensorflow{os.sep}"


class Watch:
    """What is known about one rank from look to look.

    Args:
        ring: where "blocked since" is noted, and taken back.
    """

    def __init__(self, ring: RingWriter) -> None:
        self._ring = ring
        self._now_ns = self._cpu_ns = 0
        self._call: FrameType | None = None  # TensorFlow's, that the main thread was in at the last look
        self._slot: int | None = None

    def look(self, now_ns: int, cpu_ns: int, innermost: FrameType | None) -> None:
        """Take note of how things are.

        Args:
            now_ns: this moment, on `time.perf_counter_ns`.
            cpu_ns: what the process has computed so far, all threads together.
            innermost: the frame that the main thread is in.
        """
        idle = cpu_ns - self._cpu_ns < IDLE_SHARE * (now_ns - self._now_ns)
        call = innermost if idle and innermost is not None and _TENSORFLOW in innermost.f_code.co_filename else None
        blocked = call is not None and call is self._call
        if blocked and self._slot is None:
            self._slot = self._ring.pend(NAME, self._now_ns, group=TENSORFLOW, line=student_line(call))
            self._ring.waiting(self._slot, self._now_ns)
        elif not blocked and self._slot is not None:
            self._ring.unpend(self._slot)
            self._slot = None
        # A frame is held only while its call may be blocked: it keeps everything alive that the call was given.
        self._call, self._now_ns, self._cpu_ns = call, now_ns, cpu_ns


def watch_tensorflow(recorder: Recorder) -> None:
    """Look at this process's main thread from now on."""
    main = threading.main_thread().ident
    watch = Watch(recorder.ring)

    def look_for_ever() -> None:
        while True:
            watch.look(clock(), time.process_time_ns(), sys._current_frames().get(main or 0))
            time.sleep(LOOK_EVERY_S)

    threading.Thread(target=look_for_ever, name="labkit-blocked", daemon=True).start()
