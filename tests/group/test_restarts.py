"""A group with `restarts`: after a rank's end, all ranks are replaced within the run, and the function starts again."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cells as in_cells
import pytest
from doings import failure

import labkit as lab
from labkit.group.processes import RankPool
from labkit.recording.schema import ENDED

pytestmark = pytest.mark.processes

COUNT = "TORCHELASTIC_RESTART_COUNT"
# In attempt 0, rank 1 ends in some way; the results are those of attempt 1.
ENDS = """
    import os, signal, threading

    def f(end):
        attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
        print("attempt", attempt, flush=True)
        if attempt == 0:
            if rank == 1:
                exec(end)
            threading.Event().wait()
        return attempt, rank
"""


@pytest.fixture(scope="module")
def ranks(start: str) -> Iterator[lab.Group]:
    with lab.Group(3, runtime="bare", start=start, restarts=2, timeout_s=200) as group:
        yield group


@pytest.fixture(scope="module")
def forked() -> Iterator[lab.Group]:
    with lab.Group(2, runtime="bare", restarts=2, timeout_s=200) as group:
        yield group


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "os._exit(3)", "raise ValueError('once')", "exit(1)"])
def test_the_function_starts_again_on_fresh_ranks(end: str, ranks: lab.Group, cells: in_cells.Cells, capsys) -> None:
    cells(ENDS)
    before = set(ranks.run(os.getpid).results)
    run = ranks.run(cells.f, end)
    assert run.results == [(1, 0), (1, 1), (1, 2)]
    assert not before & set(ranks.run(os.getpid).results)
    assert run.output.splitlines() == [f"[rank {rank}] attempt {attempt}" for rank in range(3) for attempt in range(2)]
    assert [(s.rank, s.value) for s in run.trace.scalars if s.name == ENDED] == [(1, 1.0)]
    assert len(run.trace.restarts_ns) == 1
    said = capsys.readouterr().out
    assert "labkit: rank 1 failed: " in said
    assert said.count("(restart 1 of 2)") == 1
    assert ranks.run(os.getenv, COUNT).results == ["0"] * 3, "of the run that begins"


def test_the_picture_has_all_of_an_attempt_before_the_next_one(
    ranks: lab.Group, cells: in_cells.Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Any] = []

    class Picture:
        interval_s = 1000.0

        def begin(self, *_: Any) -> None: ...

        def update(self, _: int, new: lab.Trace, *__: Any) -> None:
            said.extend((s.name, s.rank, s.value) for s in new.scalars)

        def restart(self, _: int) -> None:
            said.append("restart")

        def end(self, trace: lab.Trace, stopped: str) -> None: ...

    monkeypatch.setattr(lab.Group, "picture", Picture)
    cells("""
        import os, threading
        import labkit as lab

        def f():
            lab.record(attempt=int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
                os._exit(3)
            return threading.Event().wait() if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else None
    """)
    ranks.watch(cells.f)
    assert ("attempt", 1, 0.0) in said
    assert said[-2:] == [(ENDED, 1, 1.0), "restart"]


def test_the_error_after_the_last_restart_says_how_many_there_were(ranks: lab.Group, cells: in_cells.Cells) -> None:
    cells("""
        import os
        def f():
            print("here", flush=True)
            if os.environ["RANK"] == "2":
                raise ValueError(os.environ["TORCHELASTIC_RESTART_COUNT"])
    """)
    error = failure(ranks, cells.f)
    assert (error.restarts, error.rank, error.failures[0].headline) == (2, 2, "ValueError: 2")
    assert "fresh ranks 2 times" in str(error)
    assert len(error.run.trace.restarts_ns) == 2
    assert len([s for s in error.run.trace.scalars if s.name == ENDED]) == 3
    assert error.run.output.count("here") == 9


def test_the_last_line_of_ranks_that_are_replaced_ends_there(ranks: lab.Group, cells: in_cells.Cells) -> None:
    cells("""
        import os
        def f():
            attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
            print(attempt, end=" " if attempt == "0" else "!", flush=True)
            if attempt == "0":
                raise ValueError
    """)
    assert ranks[1:2].run(cells.f).output.splitlines() == ["[rank 1] 0 ", "[rank 1] 1!"]


def test_a_part_of_the_ranks(ranks: lab.Group, cells: in_cells.Cells) -> None:
    cells(ENDS)
    assert ranks[1:3].run(cells.f, "os._exit(1)").results == [(1, 1), (1, 2)]


def test_a_rank_that_dies_between_two_runs(forked: lab.Group) -> None:
    pids = forked.run(os.getpid).results
    os.kill(pids[1], 9)
    assert not set(forked.run(os.getpid).results) & set(pids)


def test_no_restart_after_the_time_limit_which_counts_all_attempts(cells: in_cells.Cells) -> None:
    cells("""
        import os, time
        def f():
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                raise ValueError
            time.sleep(600)
    """)
    with lab.Group(2, runtime="bare", restarts=2, timeout_s=2.0) as group, pytest.raises(lab.RunTimeoutError) as caught:
        group.run(cells.f)
    assert len(caught.value.run.trace.restarts_ns) == 1


@pytest.mark.parametrize("error", [lab.DeadlockError, lab.RankError])
def test_no_restart_after_a_deadlock(error: type[lab.RunError], cells: in_cells.Cells) -> None:
    pytest.importorskip("torch")
    cells("""
        import torch, torch.distributed as dist
        def f(all_wait):
            if all_wait or dist.get_rank() == 0:
                dist.recv(torch.ones(1), 1 - dist.get_rank())
    """)
    with lab.Group(2, restarts=2) as group, pytest.raises(error) as caught:
        group.run(cells.f, error is lab.DeadlockError)
    assert caught.value.run.trace.restarts_ns == ()


def test_a_cell_does_not_start_again(forked: lab.Group) -> None:
    with pytest.raises(lab.RankError) as caught:
        forked.run_cell("import os; os._exit(1)", "<ipython-input-7-test>", "cell 7")
    assert caught.value.restarts == 0


def test_stop_while_ranks_are_replaced(cells: in_cells.Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    cells(ENDS)
    with lab.Group(2, runtime="bare", restarts=2) as group:
        group.run(int)
        start = RankPool.start

        def stopped(pool: RankPool) -> None:
            start(pool)
            raise KeyboardInterrupt

        monkeypatch.setattr(RankPool, "start", stopped)
        with pytest.raises(lab.Stopped) as caught:
            group.run(cells.f, "os._exit(1)")
        monkeypatch.undo()
        assert caught.value.run.output.splitlines() == ["[rank 0] attempt 0", "[rank 1] attempt 0"]
        assert [s.rank for s in caught.value.run.trace.scalars] == [1]
        assert group.run(cells.f, "os._exit(1)").results == [(1, 0), (1, 1)]


def test_a_group_that_another_thread_closes_does_not_start_again(cells: in_cells.Cells, tmp_path: Path) -> None:
    cells("""
        import threading
        def f(path):
            path.touch()
            threading.Event().wait()
    """)
    group, path = lab.Group(2, runtime="bare", restarts=2), tmp_path / "running"

    def close() -> None:
        while not path.exists():
            time.sleep(0.01)
        group.close()

    thread = threading.Thread(target=close)
    thread.start()
    with pytest.raises(lab.LabError, match="closed in another thread while f was running"):
        group.run(cells.f, path)
    thread.join()


def test_a_training_goes_on_from_its_checkpoint(cells: in_cells.Cells, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    cells("""
        import os, torch, torch.distributed as dist, labkit as lab
        def train(folder, dies):
            path, total, first = folder / "saved.pt", torch.zeros(1), 0
            if path.exists():
                first, total = torch.load(path)
            for step in lab.steps(range(first, 6)):
                one = torch.ones(1)
                dist.all_reduce(one)
                total += one * step
                if step == dies and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
                    os.kill(os.getpid(), 9)
                if dist.get_rank() == 0:
                    torch.save((step + 1, total), path)
                dist.barrier()
            return total.item()
    """)
    with lab.Group(2, restarts=1) as group:
        run = group.run(cells.train, tmp_path, 3)
    assert run.results == [30.0, 30.0]
    assert 2 <= len(run.trace.step_bounds()) <= 3, "those of the last attempt"
    assert len(run.trace.filter(kind="step")) > 2 * len(run.trace.step_bounds())


@pytest.mark.parametrize("restarts", [-1, 1.5, "3", True])
def test_restarts_is_a_whole_number(restarts: object) -> None:
    with pytest.raises((TypeError, ValueError), match="restarts="):
        lab.Group(2, runtime="bare", restarts=restarts)
