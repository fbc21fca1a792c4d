"""`group.stacks()`: where every rank is, also one that is blocked in C++ or holds the interpreter's lock."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import cells as in_cells
import pytest

import labkit as lab
from labkit.output import Output
from labkit.ring import Pending
from labkit.stacks import readable

RAW = """Thread 0x00007f2b4c9fd700 (most recent call first):
  File "{threading}", line 327 in wait
  File "{threading}", line 1002 in _bootstrap

Current thread 0x00007f2b4d1fe740 (most recent call first):
  File "{library}", line 2930 in all_reduce
  File "{library}", line 83 in wrapper
  File "{mine}", line 4 in average
  File "{mine}", line 9 in train
  File "{labkit}", line 168 in _timed
  File "<string>", line 1 in <module>
"""
PLACES = {
    "library": os.path.join(os.path.dirname(os.__file__), "site-packages", "torch", "distributed_c10d.py"),
    "mine": os.path.join(os.path.dirname(__file__), "no_such_cell.py"),
    "labkit": lab.__file__,
    "threading": threading.__file__,
}


@pytest.fixture(scope="module", params=["fork", "spawn"])
def ranks(request: pytest.FixtureRequest) -> Iterator[lab.Group]:
    with lab.Group(2, runtime="bare", start=request.param, timeout_s=60) as group:
        yield group


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> in_cells.Cells:
    return in_cells.Cells(in_cells.new_main(monkeypatch))


def test_a_stack_is_cut_to_the_students_frames_and_what_they_called() -> None:
    assert readable(RAW.format(**PLACES), 1).splitlines() == [
        "is here:",
        '    File "no_such_cell.py", line 9, in train',
        '    File "no_such_cell.py", line 4, in average',
        '    File "distributed_c10d.py", line 83, in wrapper',
    ]


def test_a_rank_that_does_nothing_is_idle() -> None:
    assert readable(RAW.format(**PLACES | {"mine": PLACES["labkit"]}), 1) == "is idle: no function of yours is running"


class UntilPrinted:
    """Looks at a group as soon as all its ranks have printed something."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, group: lab.Group) -> None:
        self.stacks: Any = None
        seen: set[int] = set()
        feed = Output.feed

        def feed_and_look(output: Output, rank: int, data: bytes) -> None:
            feed(output, rank, data)
            seen.add(rank)
            if len(seen) == len(group):
                monkeypatch.setattr(Output, "feed", feed)
                self.stacks = group.stacks()
                signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(Output, "feed", feed_and_look)


class UntilBlocked:
    """A picture that looks at a group as soon as a rank waits for a communication; from another thread, as a student would."""

    interval_s = 0.01

    def __init__(self, group: lab.Group) -> None:
        self._group = group
        self.stacks: Any = None

    def begin(self, *_: Any) -> None:
        """Nothing."""

    def update(self, _now_ns: int, _new: Any, pending: Sequence[Sequence[Pending]], _loads: Any) -> None:
        if self.stacks is None and any(p.wait_start_ns for of_rank in pending for p in of_rank):
            thread = threading.Thread(target=self._look)
            thread.start()
            thread.join()
            signal.raise_signal(signal.SIGINT)

    def _look(self) -> None:
        self.stacks = self._group.stacks()

    def end(self, *_: Any) -> None:
        """Nothing."""


WHERE = {
    "in Python": "while True: pass",
    "waiting for a lock": "threading.Event().wait()",
    "in C without the interpreter's lock": "ctypes.CDLL(None).pause()",
    "in C with the interpreter's lock": "sum(range(10 ** 13))",
}


@pytest.mark.parametrize("where", WHERE)
def test_ranks_that_are_blocked_say_where(
    where: str, ranks: lab.Group, cells: in_cells.Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells(f"""
        import ctypes, threading
        def inner():
            print("here")
            {WHERE[where]}
        def outer():
            inner()
    """)
    look = UntilPrinted(monkeypatch, ranks)
    with pytest.raises(KeyboardInterrupt):
        ranks.run(cells.outer)
    assert list(look.stacks) == ["rank 0", "rank 1"]
    for text in look.stacks.values():
        lines = [line.strip() for line in text.splitlines()]
        assert lines[0] == "is here:"
        assert "in outer" in lines[1]
        assert lines[2] == "inner()"
        assert "in inner" in lines[3]
        assert lines[4] == WHERE[where]
    assert repr(look.stacks).startswith("rank 0 is here:")


def test_between_two_runs_ranks_are_idle(ranks: lab.Group) -> None:
    ranks.run(int)
    assert dict(ranks.stacks()) == dict.fromkeys(["rank 0", "rank 1"], "is idle: no function of yours is running")


def test_a_rank_that_was_stopped_by_a_signal_does_not_answer(ranks: lab.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = ranks.run(os.getpid).results
    monkeypatch.setattr("labkit.stacks.LIMIT_S", 0.2)
    os.kill(pids[1], signal.SIGSTOP)
    try:
        stacks = ranks.stacks()
    finally:
        os.kill(pids[1], signal.SIGCONT)
    assert stacks["rank 0"].startswith("is idle")
    assert stacks["rank 1"] == ("does not answer: its process was stopped by a signal (SIGSTOP); SIGCONT lets it go on")
    assert ranks.run(os.getpid).results == pids, "nothing was hurt"


def test_without_ranks_there_are_no_stacks() -> None:
    group = lab.Group(2, runtime="bare")
    with pytest.raises(lab.LabError, match="no ranks at this moment"):
        group.stacks()
    group.close()


def test_in_a_collective(monkeypatch: pytest.MonkeyPatch, cells: in_cells.Cells) -> None:
    pytest.importorskip("torch")
    cells("""
        import torch
        import torch.distributed as dist
        def f():
            if dist.get_rank() == 1:
                while True: pass
            dist.all_reduce(torch.ones(1))
    """)
    with lab.Group(2, timeout_s=60) as group:
        look = UntilBlocked(group)
        monkeypatch.setattr(lab.Group, "picture", lambda: look)
        with pytest.raises(KeyboardInterrupt):
            group.watch(cells.f)
    assert "dist.all_reduce(torch.ones(1))" in look.stacks["rank 0"]
    assert "while True: pass" in look.stacks["rank 1"]
