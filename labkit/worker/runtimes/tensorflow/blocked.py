"""Detects that a rank is blocked inside TensorFlow, whose collectives labkit does not see: in which call, since when.

A thread checks the rank's main thread a few times a second. The rank is blocked if the process hardly computes and the
main thread has stayed in the same call of TensorFlow. A rank that sleeps or waits for a file does not count as blocked.
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

CHECK_EVERY_S: Final = 0.25
DESCRIBE_EVERY_NS: Final = 2_000_000_000  # the description is updated, because queues may have become shorter
IDLE_SHARE: Final = 0.1  # of one core; TensorFlow's polling threads use a fiftieth of this


# Set once this rank reads from tf.data's service. Its client may rest for seconds until the dispatcher reports the end
# of the data, also if another reader has returned.
_service: Final = threading.Event()

reads_from_a_service: Final = _service.set


class BlockedCall:
    """Records in the ring, from check to check, that a rank is blocked in a call of TensorFlow.

    Args:
        ring: the rank's ring.
    """

    def __init__(self, ring: RingWriter) -> None:
        self._ring = ring
        self._now_ns = self._cpu_ns = 0
        self._call: FrameType | None = None  # TensorFlow's frame in which the main thread was at the last check
        self._slot: int | None = None
        self._description = ""
        self._since_ns = self._described_ns = 0

    def check(self, now_ns: int, cpu_ns: int, innermost: FrameType | None) -> None:
        """Check whether the main thread is blocked, and update the record.

        Args:
            now_ns: the time in ns, on the clock of `time.perf_counter_ns`.
            cpu_ns: the CPU time of all threads of the process so far, in ns.
            innermost: the innermost frame of the main thread.
        """
        idle = cpu_ns - self._cpu_ns < IDLE_SHARE * (now_ns - self._now_ns)
        call = call_within(innermost) if idle and not _service.is_set() else None
        blocked = call is not None and call is self._call
        if not blocked:
            self._remove()
        elif innermost is not None:
            if self._slot is None:
                self._since_ns = self._now_ns
            if self._slot is None or now_ns - self._described_ns > DESCRIBE_EVERY_NS:
                self._described_ns = now_ns
                self._record(innermost)
        # Keep a reference to the frame only while its call may be blocked: it keeps all arguments of the call alive.
        self._call, self._now_ns, self._cpu_ns = call, now_ns, cpu_ns

    def _record(self, innermost: FrameType) -> None:
        description = describe(innermost)
        if self._slot is not None and description == self._description:
            return
        self._remove()
        self._description = description
        self._slot = self._ring.pend(description, self._since_ns, group=TENSORFLOW, line=student_line(innermost))
        self._ring.waiting(self._slot, self._since_ns)

    def _remove(self) -> None:
        if self._slot is not None:
            self._ring.unpend(self._slot)
            self._slot = None


def detect_blocked_calls(recorder: Recorder) -> None:
    """Start a thread that checks this process's main thread from now on.

    Args:
        recorder: this rank's recorder.
    """
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
    slot = recorder.ring.pend(describe(frame), now_ns, group=TENSORFLOW, line=student_line(frame))
    recorder.ring.waiting(slot, now_ns)
    try:
        yield
    finally:
        recorder.ring.unpend(slot)
