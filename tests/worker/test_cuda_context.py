"""A rank whose CUDA context is broken is replaced, and the run that broke it is reported. CUDA is simulated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import labkit as lab
from labkit.errors.exceptions import RankError
from labkit.recording.record import here
from labkit.worker import cuda_context
from labkit.worker.cuda_context import context_error

ASSERT = "CUDA error: device-side assert triggered"


class Stream:
    """A stream that is busy for some queries, and then done or failed."""

    def __init__(self, busy: int = 0, fails: bool = False) -> None:
        self.busy, self.fails, self.asked = busy, fails, 0

    def query(self) -> bool:
        self.asked += 1
        if self.busy:
            self.busy -= 1
            return False
        if self.fails:
            raise RuntimeError(ASSERT)
        return True


def pretend_cuda(stream: Stream, *, capturing: bool = False) -> dict[str, Any]:
    return {
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: capturing,
        "current_stream": lambda: stream,
    }


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    stream = Stream()
    for name, value in pretend_cuda(stream).items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(cuda_context.time, "sleep", lambda _: None)
    return stream


def test_without_cuda() -> None:
    assert context_error() is None


def test_a_stream_that_works(stream: Stream) -> None:
    assert context_error() is None
    assert stream.asked == 1


def test_a_context_that_a_kernel_broke(stream: Stream) -> None:
    stream.fails = True
    assert str(context_error()) == ASSERT


def test_a_kernel_that_is_still_running_is_waited_for_if_asked(stream: Stream) -> None:
    stream.busy, stream.fails = 3, True
    assert context_error() is None
    assert str(context_error(wait_s=60)) == ASSERT


def test_a_graph_during_capture_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(fails=True)
    for name, value in pretend_cuda(stream, capturing=True).items():
        monkeypatch.setattr(torch.cuda, name, value)
    assert context_error() is None
    assert stream.asked == 0


@pytest.fixture(scope="module")
def pair() -> Iterator[lab.Group]:
    with lab.Group(2) as group:
        yield group


class Clock:
    """Replaces the device clock of a rank with a GPU."""

    def flush(self, limit_s: float = 10.0) -> float:
        return limit_s


def break_cuda(*, by_returning: bool) -> int:
    vars(torch.cuda).update(pretend_cuda(Stream(fails=True)))
    if not by_returning:
        raise RuntimeError(ASSERT)
    assert here.recorder is not None
    here.recorder.device_clock = Clock()
    return 1


def process_id() -> int:
    import os

    return os.getpid()


@pytest.mark.usefixtures("patient")
@pytest.mark.processes
def test_ranks_whose_context_is_broken_are_replaced(pair: lab.Group) -> None:
    before = pair.run(process_id).results
    with pytest.raises(RankError, match="rank 0 failed: RuntimeError: CUDA error: device-side assert triggered"):
        pair.run(break_cuda, by_returning=False)
    assert not set(before) & set(pair.run(process_id).results)


@pytest.mark.processes
def test_a_kernel_that_fails_after_the_function_returned_fails_its_own_run(pair: lab.Group) -> None:
    with pytest.raises(RankError, match=r"break_cuda\(\) returned, and then a CUDA kernel that it had started failed: .*assert"):
        pair.run(break_cuda, by_returning=True)
    assert len(pair.run(process_id).results) == 2
