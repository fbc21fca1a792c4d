"""While a rank reports an error, the deaths of its child processes raise no other; they may be the error's cause.

Once a program has used a `DataLoader` with workers, torch handles SIGCHLD: when a worker has died, the handler raises
an error in the main thread, wherever that is. A worker that dies also breaks its connection, and either comes first.
"""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any, Final

LIMIT_S: Final = 1.0  # for the signal to arrive after a connection broke: the kernel closes files first


class ChildDeaths:
    """A block in which the program's own handler of SIGCHLD is not called; for the main thread."""

    def __init__(self) -> None:
        self._handler: Any = None
        self._came = False

    def __enter__(self) -> ChildDeaths:
        handler = signal.getsignal(signal.SIGCHLD)
        if callable(handler):
            self._handler = handler
            signal.signal(signal.SIGCHLD, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGCHLD, self._handler)

    def _note(self, _signal: int, _frame: FrameType | None) -> None:
        self._came = True

    def cause_of(self, error: BaseException) -> BaseException:
        """Return what the program's handler raises, if a child process has died just now; `error` otherwise."""
        if self._handler is None:
            return error
        until = time.monotonic() + (LIMIT_S if isinstance(error, (ConnectionError, EOFError)) else 0)
        while not self._came and time.monotonic() < until:
            time.sleep(0.001)
        if self._came:
            try:
                self._handler(signal.SIGCHLD, None)
            except Exception as death:  # noqa: BLE001  # whatever the handler raises
                return death
        return error
