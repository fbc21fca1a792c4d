"""Stop at every moment of a run, in every runtime: the prompt is back, nothing is left, and the next run works.

`StopAt` raises SIGINT at the n-th place where Python checks for signals: when a function begins, and after a call into
C. So a test can walk through all of them, one run for each.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest
from lifetime_cases import (
    LARGE,
    computing,
    hang,
    in_a_collective,
    in_a_strategy,
    in_an_rpc,
    in_tensorflow,
    measure_and_make,
    rank,
)
from pressed_stop import stop_when_printed
from processes import GONE_LIMIT_S, START, left_after

import labkit as lab
from labkit.errors.exceptions import Stopped
from labkit.group.output import Output
from labkit.group.processes import RankPool
from labkit.group.run import Execution
from labkit.ipc import pickling
from labkit.ipc.channel import Channel
from labkit.plots.live.live import Live

# A Stop where Python ignores exceptions.
pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]

RUNTIMES = ("bare", "torch", "rpc", "tensorflow")
# How many moments of a run a test tries. All of them, some 1,300, take minutes: LABKIT_STOP_MOMENTS=10000 tries them.
MOMENTS = int(os.environ.get("LABKIT_STOP_MOMENTS", "20"))


@pytest.fixture(scope="module", params=[*[(r, "fork") for r in RUNTIMES], ("bare", "spawn")], ids="-".join)
def group(request: pytest.FixtureRequest) -> Iterator[lab.Group]:
    runtime, start = request.param
    pytest.importorskip("tensorflow" if runtime == "tensorflow" else "torch" if runtime != "bare" else "os")
    with lab.Group(2, runtime=runtime, start=start, timeout_s=200) as group:
        yield group


def stop() -> None:
    """What the kernel's Stop does: it interrupts the main thread, from any thread."""
    os.kill(os.getpid(), signal.SIGINT)


class StopAt:
    """Counts the places where Python checks for signals, and presses Stop at one of them. Used with `sys.setprofile`.

    Args:
        number: which one; 0 only counts.
    """

    def __init__(self, number: int) -> None:
        self.number, self.count, self.where = number, 0, ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event in ("call", "c_return"):
            self.count += 1
            if self.count == self.number:
                sys.setprofile(None)
                self.where = f"{event} in {frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
                signal.raise_signal(signal.SIGINT)

    def during(self, act: Callable[[], Any]) -> bool:
        """Call it; returns whether it raised KeyboardInterrupt."""
        sys.setprofile(self)
        try:
            act()
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(None)
        return False


def of_group(group: lab.Group) -> list[int]:
    return [] if group._pool is None else [p.pid for p in group._pool._processes]


def works_again(group: lab.Group, before: list[int], where: str) -> None:
    """The next run works, and the previous processes have ended or serve it."""
    try:
        assert group.run(rank).results == [0, 1], where
    except lab.LabError as error:
        raise AssertionError(f"after a Stop at {where}") from error
    assert not left_after(GONE_LIMIT_S, set(before) - set(of_group(group))), where


def moments(count: int, most: int) -> range:
    return range(1, count + 1, max(1, count // most))


@pytest.mark.parametrize("fresh", [True, False], ids=["ranks start", "ranks are there"])
@pytest.mark.parametrize("start", START)
def test_stop_at_any_moment_of_a_run(start: str, fresh: bool) -> None:
    with lab.Group(2, runtime="bare", start=start, timeout_s=200) as group:

        def prepare() -> None:
            if fresh:
                group._end()
            else:
                group.run(rank)

        group.run(rank)
        prepare()
        counted = StopAt(0)
        counted.during(lambda: group.run(rank))
        for number in moments(counted.count, MOMENTS if start == "fork" else max(1, MOMENTS // 5)):
            prepare()
            before, one = of_group(group), StopAt(number)
            one.during(lambda: group.run(rank))
            works_again(group, before, one.where)


def test_a_second_stop_at_any_moment_of_the_cleanup(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first Stop is handled; after it comes a second one."""
    second = StopAt(0)

    def feed(output: Output, number: int, data: bytes) -> None:
        monkeypatch.setattr(Output, "feed", real)  # once
        sys.setprofile(second)
        signal.raise_signal(signal.SIGINT)

    real = Output.feed
    with lab.Group(2, runtime="bare", start="fork", timeout_s=200) as group:
        total = 0
        number = 0
        while number <= total:
            group.run(rank)
            before = of_group(group)
            second = StopAt(number)
            monkeypatch.setattr(Output, "feed", feed)
            stopped = False
            try:
                group.run(hang)
            except KeyboardInterrupt:  # not pytest.raises, in whose own functions the second one could come
                stopped = True
            finally:
                sys.setprofile(None)
            assert stopped
            works_again(group, before, second.where)
            total = total or second.count
            number += max(1, total // MOMENTS)
    assert total > 50


# Known moments, in every runtime


def stop_in(patch: pytest.MonkeyPatch, owner: Any, name: str, *, after: bool = False, nth: int = 1) -> None:
    """Press Stop when the n-th call of a function on the notebook's side begins, or when it returns."""
    real = getattr(owner, name)
    calls = 0

    def stopped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth and not after:
            stop()
        value = real(*args, **kwargs)
        if calls == nth and after:
            stop()
        return value

    patch.setattr(owner, name, staticmethod(stopped) if isinstance(owner.__dict__.get(name), staticmethod) else stopped)


# The first frame with arguments, after two each of `RankConfig`, `Offers` and `NewFilters`.
ARGUMENTS = 7
KNOWN: dict[str, tuple[Any, str, bool, int]] = {
    "ranks are started": (RankPool, "_start", False, 1),
    "ranks have been started": (RankPool, "_start", True, 1),
    "ranks say what they offer": (RankPool, "_answers", False, 1),
    "ranks are set up": (RankPool, "_answers", False, 2),
    "arguments are copied": (pickling, "_fill", False, 1),
    "arguments are sent": (Channel, "send_frame", False, ARGUMENTS),
    "arguments have been sent to one rank": (Channel, "send_frame", True, ARGUMENTS),
    "results come": (pickling, "unpack", False, 1),
    "results have come from one rank": (pickling, "unpack", True, 1),
    "the run is being finished": (Execution, "_finish", False, 1),
    "prints are being shown": (Output, "finish", False, 1),
}


@pytest.mark.parametrize("moment", KNOWN)
def test_stop_at_a_known_moment_with_large_arguments_and_results(moment: str, group: lab.Group) -> None:
    owner, name, after, nth = KNOWN[moment]
    group._end()
    argument = np.zeros(LARGE, np.uint8), bytes(LARGE)
    with pytest.MonkeyPatch.context() as patch:
        stop_in(patch, owner, name, after=after, nth=nth)
        with pytest.raises(KeyboardInterrupt):
            group.run(measure_and_make, *argument)
    gc.collect()
    assert not segments(), "the arguments' shared memory"
    works_again(group, [], moment)


def fail() -> None:
    os._exit(3)


def test_stop_while_the_ranks_of_a_failed_run_are_ended_has_no_frames_of_labkit(group: lab.Group) -> None:
    before = of_group(group)
    with pytest.MonkeyPatch.context() as patch:
        stop_in(patch, RankPool, "end", after=True, nth=1)
        with pytest.raises(KeyboardInterrupt) as caught:
            group.run(fail)
    assert isinstance(caught.value, Stopped)
    works_again(group, before, "while ended")


def segments() -> list[str]:
    """Shared memory of arguments that this process still holds: segments of their size."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the folder itself, which is closed again
            path = os.readlink(f"/proc/self/fd/{fd}")
            if "memfd:labkit" in path and os.stat(f"/proc/self/fd/{fd}").st_size == LARGE:
                found.append(path)
    return found


WHERE: dict[str, tuple[Callable[[], None], ...]] = {
    "bare": (hang, computing),
    "torch": (hang, computing, in_a_collective),
    "rpc": (hang, computing, in_an_rpc),
    "tensorflow": (hang, computing, in_tensorflow, in_a_strategy),
}


def test_stop_while_ranks_are_busy(group: lab.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    for function in WHERE[group.runtime]:
        group.run(rank)
        before = of_group(group)
        stop_when_printed(monkeypatch, 2)
        with pytest.raises(Stopped) as caught:
            group.run(function)
        assert caught.value.name == function.__name__
        assert not isinstance(caught.value, Exception), "`except Exception` in a loop of runs does not swallow it"
        works_again(group, before, function.__name__)


class Screen:
    """Presses Stop while a picture is drawn: the first, a later one, or the last."""

    def __init__(self, when: str) -> None:
        self._when = when
        self._shown = 0

    def begin(self, *_: Any) -> None:
        self._at("begin")

    def show(self, *_: Any) -> None:
        self._shown += 1
        self._at(f"show {self._shown}")

    def end(self, *_: Any) -> None:
        self._at("end")

    def _at(self, what: str) -> None:
        if what == self._when:
            stop()


@pytest.mark.parametrize("when", ["begin", "show 1", "show 2", "end"])
def test_stop_while_the_picture_is_drawn(when: str, group: lab.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab.Group, "picture", lambda: Live(Screen(when)))
    monkeypatch.setattr(Live, "interval_s", 0.01)
    group.run(rank)
    before = of_group(group)
    with pytest.raises(KeyboardInterrupt):
        group.watch(hang if when == "show 2" else rank)
    works_again(group, before, f"drawing, {when}")
