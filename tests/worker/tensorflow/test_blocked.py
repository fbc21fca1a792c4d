"""When a rank counts as blocked inside TensorFlow: tested with fake frames and clocks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from labkit.recording.record import here, is_students
from labkit.recording.ring_buffer import RING_BYTES, RingReader, RingWriter
from labkit.recording.schema import Pending
from labkit.worker.runtimes.tensorflow import blocked
from labkit.worker.runtimes.tensorflow.blocked import BlockedCall

MS = 1_000_000
EXECUTE = "/site-packages/tensorflow/python/eager/execute.py"


class Rank:
    """A rank that is sampled every 250 ms."""

    def __init__(self) -> None:
        memory = bytearray(RING_BYTES)
        self.blocked, self._reader = BlockedCall(RingWriter(memory)), RingReader(memory)
        self._now_ms = self._cpu_ms = 1000.0
        self.look(None)  # the first look has nothing to compare with

    def look(self, frame: FrameType | None, *, computed_ms: float = 1.0) -> list[Pending]:
        self._now_ms += 250
        self._cpu_ms += computed_ms
        self.blocked.check(int(self._now_ms * MS), int(self._cpu_ms * MS), frame)
        return self._reader.pending()


def while_in_a_call(filename: str, action: Callable[[FrameType], None]) -> None:
    """Call `action` with the frame of a function of that file, called by the student's cell 3, line 5."""
    space: dict[str, Any] = {"sys": sys, "action": action}
    exec(compile("def call():\n    action(sys._getframe())", filename, "exec"), space)
    exec(compile("\n\n\ndef student():\n    call()", "/kernel/3.py", "exec"), space)
    space["student"]()


def call_of(filename: str) -> FrameType:
    frames: list[FrameType] = []
    while_in_a_call(filename, frames.append)
    return frames[0]


@pytest.fixture(autouse=True)
def _cell_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "files", {"/kernel/3.py": "cell 3"})
    is_students.cache_clear()


def test_the_same_call_in_two_samples_is_blocked_since_the_first() -> None:
    rank, call = Rank(), call_of(EXECUTE)
    assert rank.look(call) == []
    (pending,) = rank.look(call)
    assert (pending.name, pending.wait_start_ns) == ("TensorFlow's call", 1500 * MS)
    assert rank.look(call) == [pending], "noted once, however long it lasts"


def test_the_entry_is_removed() -> None:
    rank, call = Rank(), call_of(EXECUTE)
    rank.look(call)
    assert len(rank.look(call)) == 1
    assert rank.look(call_of(EXECUTE)) == [], "another call"
    assert len(rank.look(rank.blocked._call)) == 1, "and this one is blocked in turn"


@pytest.mark.parametrize(
    ("filename", "computed_ms"),
    [
        (EXECUTE, 26.0), ("/kernel/3.py", 0.0), ("/lib/python/threading.py", 0.0), ("/course/tensorflow/train.py", 0.0),
        (blocked.__file__, 0.0),
    ],
    ids=["computes", "a cell", "Python's", "a program in a folder of that name", "labkit's"],
)  # fmt: skip
def test_computing_sleeping_and_waiting_elsewhere_do_not_count(filename: str, computed_ms: float) -> None:
    rank, call = Rank(), call_of(filename)
    assert [rank.look(call, computed_ms=computed_ms) for _ in range(4)] == [[]] * 4


def test_the_line_is_the_students() -> None:
    rank, lines = Rank(), []

    def look(call: FrameType) -> None:
        rank.look(call)
        lines.extend(pending.line for pending in rank.look(call))

    while_in_a_call(EXECUTE, look)
    assert lines == ["cell 3, line 5"]


def test_a_rank_that_has_left_the_call_is_not_blocked() -> None:
    rank = Rank()
    assert [rank.look(None) for _ in range(3)] == [[]] * 3


def test_a_python_lock_inside_tensorflow_counts() -> None:
    rank = Rank()
    looks: list[list[Pending]] = []
    space: dict[str, Any] = {"sys": sys, "look": lambda frame: looks.extend([rank.look(frame), rank.look(frame)])}
    exec(compile("def wait():\n    look(sys._getframe())", threading.__file__, "exec"), space)
    exec(compile("def join():\n    wait()", EXECUTE, "exec"), space)
    space["join"]()
    assert [[pending.name for pending in looked] for looked in looks] == [[], ["TensorFlow's join"]]
