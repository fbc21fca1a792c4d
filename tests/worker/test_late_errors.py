"""Errors that come late: a child process that dies while a rank reports an error is its cause; a rank whose CUDA
context is broken is replaced. CUDA is simulated."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import labkit as lab
from labkit.errors.exceptions import RankError
from labkit.errors.exit_reasons import Cause
from labkit.recording.record import here
from labkit.worker import late_errors
from labkit.worker.late_errors import context_error, without_child_deaths

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
    monkeypatch.setattr(late_errors.time, "sleep", lambda _: None)
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


class DiedError(Exception):
    """What the handler raises, as torch's does."""


def died(*_: object) -> None:
    raise DiedError


@pytest.fixture
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGCHLD, died)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("handler")
def test_a_death_is_the_cause_and_interrupts_nothing() -> None:
    reported = ConnectionResetError("lost")
    with without_child_deaths() as cause_of:
        os.kill(os.getpid(), signal.SIGCHLD)
        assert isinstance(cause_of(reported), DiedError)
        os.kill(os.getpid(), signal.SIGCHLD)  # a second worker
    assert signal.getsignal(signal.SIGCHLD) is died


@pytest.mark.usefixtures("handler")
def test_without_a_death_the_error_is_the_cause() -> None:
    reported = ValueError()
    with without_child_deaths() as cause_of:
        assert cause_of(reported) is reported


@pytest.mark.usefixtures("handler")
def test_a_signal_that_no_program_handles_is_left_alone() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    reported = ConnectionResetError("of another rank")
    with without_child_deaths() as cause_of:
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
        assert cause_of(reported) is reported


def lose(when: str) -> None:
    """Fail, and let a child process die while the error is reported, or just before."""

    class LostError(Exception):
        def __str__(self) -> str:
            if when == "during":
                os.kill(os.getpid(), signal.SIGCHLD)
            return "a connection"

    signal.signal(signal.SIGCHLD, died)
    if when == "before":
        look = signal.getsignal

        def look_late(number: int) -> object:
            signal.getsignal = look
            os.kill(os.getpid(), signal.SIGCHLD)
            return look(number)

        signal.getsignal = look_late  # type: ignore[assignment]  # with which a report begins
    raise LostError


@pytest.mark.parametrize(("when", "headline"), [("during", "LostError: a connection"), ("before", "DiedError")])
@pytest.mark.processes
def test_a_rank_reports_its_error_whenever_a_child_process_dies(when: str, headline: str) -> None:
    with lab.Group(1, runtime="bare") as group, pytest.raises(lab.RankError) as caught:
        group.run(lose, when)
    (failure,) = caught.value.failures
    assert failure.headline.endswith(f".{headline}")
    assert failure.cause is Cause.RAISED


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(3)"])
@pytest.mark.processes
def test_a_worker_of_a_data_loader_that_dies(end: str) -> None:
    def load(end: str) -> None:
        from torch.utils.data import DataLoader, Dataset

        class Ends(Dataset[int]):
            def __len__(self) -> int:
                return 40

            def __getitem__(self, i: int) -> int:
                import os  # noqa: F401  # `end` uses both
                import signal  # noqa: F401

                if i == 20:
                    exec(end)
                return i

        for _ in DataLoader(Ends(), batch_size=4, num_workers=2):
            pass

    with lab.Group(2) as group:
        for _ in range(3):
            with pytest.raises(lab.RankError) as caught:
                group.run(load, end)
            for failure in caught.value.failures:
                assert failure.headline.startswith("RuntimeError: DataLoader worker (pid")
                assert failure.cause is Cause.RAISED
                assert ", in load\n" in failure.traceback
