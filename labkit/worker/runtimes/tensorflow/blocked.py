"""Notices that a rank is blocked inside TensorFlow, whose collectives labkit does not see: in what, since when and where.

A thread of the rank looks at its main thread a few times a second. Blocked means: the process hardly computes, and the main
thread has stayed in one and the same call of TensorFlow's. A rank that sleeps, or waits for a file, is not meant.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Final

from labkit.recording.group_keys import TENSORFLOW
from labkit.recording.record import Recorder, clock, here, student_line
from labkit.recording.ring_buffer import RingWriter
from labkit.worker.runtimes.tensorflow.calls import call_within, describe

__all__ = ["Watch", "starting_servers", "watch_tensorflow"]

LOOK_EVERY_S: Final = 0.25
DESCRIBE_EVERY_NS: Final = 2_000_000_000  # queues grow shorter
IDLE_SHARE: Final = 0.1  # of one core: TensorFlow's own threads, which poll, take a fiftieth of this


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
        self._words = ""  # what it waits in
        self._since_ns = self._described_ns = 0

    def look(self, now_ns: int, cpu_ns: int, innermost: FrameType | None) -> None:
        """Take note of how things are.

        Args:
            now_ns: this moment, on `time.perf_counter_ns`.
            cpu_ns: what the process has computed so far, all threads together.
            innermost: the frame that the main thread is in.
        """
        idle = cpu_ns - self._cpu_ns < IDLE_SHARE * (now_ns - self._now_ns)
        call = call_within(innermost) if idle else None
        blocked = call is not None and call is self._call
        if not blocked:
            self._take_back()
        elif innermost is not None:
            if self._slot is None:
                self._since_ns = self._now_ns
            if self._slot is None or now_ns - self._described_ns > DESCRIBE_EVERY_NS:
                self._described_ns = now_ns
                self._note(innermost)
        # A frame is held only while its call may be blocked: it keeps everything alive that the call was given.
        self._call, self._now_ns, self._cpu_ns = call, now_ns, cpu_ns

    def _note(self, innermost: FrameType) -> None:
        words = describe(innermost)
        if self._slot is not None and words == self._words:
            return
        self._take_back()
        self._words = words
        self._slot = self._ring.pend(words, self._since_ns, group=TENSORFLOW, line=student_line(innermost))
        self._ring.waiting(self._slot, self._since_ns)

    def _take_back(self) -> None:
        if self._slot is not None:
            self._ring.unpend(self._slot)
            self._slot = None


def watch_tensorflow(recorder: Recorder) -> None:
    """Look at this process's main thread from now on."""
    main = threading.main_thread().ident
    watch = Watch(recorder.ring)

    def look_for_ever() -> None:
        while True:
            watch.look(clock(), time.process_time_ns(), sys._current_frames().get(main or 0))
            time.sleep(LOOK_EVERY_S)

    threading.Thread(target=look_for_ever, name="labkit-blocked", daemon=True).start()


@contextlib.contextmanager
def starting_servers() -> Iterator[None]:
    """Note that this thread is blocked until all ranks have started their servers; TensorFlow lets no other thread look then."""
    recorder = here.recorder
    if recorder is None:
        yield
        return
    now_ns, frame = clock(), sys._getframe(2)  # beyond contextlib's
    slot = recorder.ring.pend(describe(frame), now_ns, group=TENSORFLOW, line=student_line(frame))
    recorder.ring.waiting(slot, now_ns)
    try:
        yield
    finally:
        recorder.ring.unpend(slot)
