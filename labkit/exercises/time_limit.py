"""`TimeLimit`: ends the student's code in this process when it takes too long, in a loop that never ends, say."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final, Self

__all__ = ["OutOfTimeError", "TimeLimit"]

AGAIN_S: Final = 0.5  # code that catches everything, in a loop, is told again


class OutOfTimeError(BaseException):
    """The time is over. No `Exception`: the student's `except Exception` must not catch it."""


class TimeLimit:
    """Raises `OutOfTimeError` in the thread that has entered it once that has taken too long.

    On the main thread a signal does it, which also ends waiting (`time.sleep`, locks). Elsewhere Python raises between two steps
    of its own, and code that is blocked goes on until it is not. Code in C is never cut short.

    Args:
        limit_s: seconds, without those inside `paused`.
    """

    def __init__(self, limit_s: float) -> None:
        self._left_s = limit_s
        self._deadline_s = 0.0  # on `time.monotonic`
        self._changed = threading.Condition()
        self._paused = self._over = self._late = False
        self._thread = threading.get_ident()
        self._by_signal = threading.current_thread() is threading.main_thread()
        self._before: Any = None
        self._watch = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        if self._by_signal:
            self._before = signal.signal(signal.SIGALRM, self._alarmed)
        self._deadline_s = time.monotonic() + self._left_s
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Raise nothing from now on. Calling it again does no harm."""
        self._over = True
        with self._changed:  # no signal is sent after this
            self._changed.notify()
        self._watch.join()
        if self._by_signal and self._before is not None:
            time.sleep(0)  # one that was sent before is delivered, and passed over
            before, self._before = self._before, None
            signal.signal(signal.SIGALRM, before)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """For what has a limit of its own."""
        with self._changed:
            self._paused, self._left_s = True, self._deadline_s - time.monotonic()
        try:
            yield
        finally:
            with self._changed:
                self._paused, self._deadline_s = False, time.monotonic() + self._left_s
                self._changed.notify()

    def _look(self) -> None:
        with self._changed:
            while not self._over:
                left_s = None if self._paused else self._deadline_s - time.monotonic()
                if left_s is None or left_s > 0:
                    self._changed.wait(left_s)
                    continue
                self._late = True
                if self._by_signal:
                    signal.pthread_kill(self._thread, signal.SIGALRM)
                else:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(OutOfTimeError))
                self._changed.wait(AGAIN_S)

    def _alarmed(self, number: int, frame: FrameType | None) -> None:
        if self._late and not self._over:
            raise OutOfTimeError
        if not self._late and callable(self._before):  # an alarm that somebody else has set
            self._before(number, frame)
