"""Detects when messages complete that no thread of the student's waits for yet.

gloo reports the completion of a send or receive only to a thread that waits for it, and only to one thread. After a
grace period, a thread of labkit's waits for the message; the student's `wait` then waits for that thread.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import time
from typing import Final, Protocol

from labkit.recording.record import clock

# No cost for programs that wait at once, as `send` and `recv` do; completions are noticed late by up to this time.
GRACE_NS: Final = 500_000
EXIT_LIMIT_S: Final = 0.5  # for threads to notice that their messages have failed


class Attended(Protocol):
    """A message that a thread may wait for."""

    @property
    def start_ns(self) -> int:
        """When it was issued."""

    def claim(self) -> bool:
        """Whether the caller must wait for it: True for the first caller."""

    def attend(self) -> None:
        """Block until it has completed or failed, and record which."""

    def give_up(self) -> None:
        """Make it fail."""


class Attendant:
    """Threads that wait for messages: one for each pending message that no other thread waits for."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Attended] = queue.SimpleQueue()
        self._attended: set[Attended] = set()  # each holds a thread
        self._free = 0  # threads that are not blocked in a message
        self._closed = False
        self._lock = threading.Lock()
        atexit.register(self._let_go)

    def watch(self, message: Attended) -> None:
        """Make sure that a thread waits for the message."""
        self._messages.put(message)
        if not self._free:
            self._more()

    def _more(self) -> None:
        with self._lock:
            if not self._free:
                # Where no thread can be started, as at the end of a script in Python 3.12, a message is only noted as
                # complete when the program waits for it, or when a thread is free.
                with contextlib.suppress(RuntimeError):
                    threading.Thread(target=self._serve, name="labkit-messages", daemon=True).start()
                    self._free += 1

    def _serve(self) -> None:
        while True:
            message = self._messages.get()
            early_ns = message.start_ns + GRACE_NS - clock()
            if early_ns > 0:
                time.sleep(early_ns / 1e9)
            if not self._closed and message.claim():
                with self._lock:
                    self._free -= 1
                    self._attended.add(message)
                self._more()  # later messages may complete before this one
                message.attend()
                with self._lock:
                    self._attended.discard(message)
                    self._free += 1
            del message  # releases its tensors

    def _let_go(self) -> None:
        """Let all threads return from C++: one that returns while the interpreter exits would abort the process."""
        self._closed = True
        with self._lock:
            messages = list(self._attended)
        for message in messages:
            message.give_up()
        until = time.monotonic() + EXIT_LIMIT_S
        while self._attended and time.monotonic() < until:
            time.sleep(0.001)
