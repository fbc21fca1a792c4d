"""A child process that dies while a rank reports an error does not disturb the report, and is its cause."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

import labkit as lab
from labkit.errors.exit_reasons import Cause
from labkit.worker.child_deaths import ChildDeaths


class DiedError(Exception):
    """What the handler raises, as torch's does."""


def died(*_: object) -> None:
    raise DiedError


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGCHLD, died)
    yield
    signal.signal(signal.SIGCHLD, before)


def test_a_death_is_the_cause_and_interrupts_nothing() -> None:
    reported = ConnectionResetError("lost")
    with ChildDeaths() as deaths:
        os.kill(os.getpid(), signal.SIGCHLD)
        assert isinstance(deaths.cause_of(reported), DiedError)
        os.kill(os.getpid(), signal.SIGCHLD)  # a second worker
    assert signal.getsignal(signal.SIGCHLD) is died


def test_without_a_death_the_error_is_the_cause() -> None:
    reported = ValueError()
    with ChildDeaths() as deaths:
        assert deaths.cause_of(reported) is reported


def test_a_signal_that_no_program_handles_is_left_alone() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    reported = ConnectionResetError("of another rank")
    with ChildDeaths() as deaths:
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
        assert deaths.cause_of(reported) is reported


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
    pytest.importorskip("torch")

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
