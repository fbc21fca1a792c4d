"""`TimeLimit` stops the student's code in this process if it takes too long, for instance in an endless loop."""

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

AGAIN_S: Final = 0.5  # seconds until the error is raised again, in case the code has caught it


class OutOfTimeError(BaseException):
    """The time limit has passed. It is no `Exception`, so that the student's `except Exception` does not catch it."""


class TimeLimit:
    """A context manager that raises `OutOfTimeError` in its thread after a time limit.

    On the main thread a signal raises it, which also interrupts waits (`time.sleep`, locks). On other threads Python
    raises it between two bytecode instructions, so blocked code continues until it returns. C code is never
    interrupted.

    Args:
        limit_s: the limit in seconds; time inside `paused` does not count.
    """

    def __init__(self, limit_s: float) -> None:
        self._left_s = limit_s
        self._deadline_s = 0.0  # on `time.monotonic`
        self._changed = threading.Condition()
        self._paused = self._over = self._late = False
        self._thread = threading.get_ident()
        self._by_signal = threading.current_thread() is threading.main_thread()
        self._before: Any = None
        self._timer = threading.Thread(target=self._wait_and_raise, daemon=True)

    def __enter__(self) -> Self:
        if self._by_signal:
            self._before = signal.signal(signal.SIGALRM, self._alarmed)
        self._deadline_s = time.monotonic() + self._left_s
        try:
            self._timer.start()
        except OutOfTimeError:  # the thread took so long to start; `with` calls no `__exit__` now
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop: raise no error from now on. It can be called more than once."""
        self._over = True
        with self._changed:  # no signal is sent after this
            self._changed.notify()
        self._timer.join()
        if self._by_signal and self._before is not None:
            time.sleep(0)  # lets Python deliver a signal that is still pending; `_alarmed` ignores it
            before, self._before = self._before, None
            signal.signal(signal.SIGALRM, before)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock inside the `with` block, for code that has its own limit."""
        with self._changed:
            self._paused, self._left_s = True, self._deadline_s - time.monotonic()
        try:
            yield
        finally:
            with self._changed:
                self._paused, self._deadline_s = False, time.monotonic() + self._left_s
                self._changed.notify()

    def _wait_and_raise(self) -> None:
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
        if not self._late and callable(self._before):  # an alarm that other code has set
            self._before(number, frame)
