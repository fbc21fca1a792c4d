"""What a run leaves unfinished never reaches the next: fresh ranks serve that one, and a line says why. Healthy
ranks stay."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import cells as in_cells
import pytest

import labkit as lab
from labkit.ipc.ranks_cell import cell_filename

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402  # after the check that it is there
import torch.distributed.rpc as rpc  # noqa: E402

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def callers() -> Iterator[lab.Group]:
    with lab.Group(["caller", "callee"], runtime="rpc", timeout_s=200) as group:
        yield group


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.removeprefix("labkit: ") for line in capsys.readouterr().out.splitlines() if line.startswith("labkit: ")]


def exchange() -> tuple[float, float]:
    """What rank 1 receives from rank 0, and a sum over both."""
    got, total = torch.zeros(1), torch.ones(1)
    if dist.get_rank() == 0:
        dist.send(torch.full((1,), 2.0), 1)
    else:
        dist.recv(got, 0)
    dist.all_reduce(total)
    return got.item(), total.item()


def send_only() -> None:
    if dist.get_rank() == 0:
        dist.isend(torch.full((1,), 111.0), 1)


def receive_only() -> None:
    if dist.get_rank() == 1:
        dist.irecv(torch.zeros(1), 0)


def receive_from_anybody() -> None:
    if dist.get_rank() == 1:
        dist.irecv(torch.zeros(1))


def reduce_alone() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.full((1,), 111.0), async_op=True)


def group_with_a_limit() -> Any:
    """Both ranks, with a time limit that holds once the group exists: on a busy machine, creating it may take
    longer."""
    from datetime import timedelta

    part = dist.new_group([0, 1])
    dist.barrier(group=part)
    dist.distributed_c10d._set_pg_timeout(timedelta(milliseconds=200), part)
    return part


def reduce_and_give_up() -> None:
    part = group_with_a_limit()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1), group=part)


@pytest.mark.parametrize(
    ("function", "line", "words"),
    [
        (send_only, 2, "rank 0 left send to rank 1 {} behind, which nobody has received"),
        (receive_only, 2, "rank 1 left recv from rank 0 {} behind, for which nobody has sent anything"),
        (receive_from_anybody, 2, "rank 1 left recv {} behind, for which nobody has sent anything"),
        (reduce_alone, 2, "rank 0 left all_reduce {} behind, to which rank 1 did not come"),
        (reduce_and_give_up, 4, "all_reduce {} did not complete on rank 0"),
    ],
)
def test_unfinished_operations_do_not_reach_the_next_run(
    two: lab.Group, function: Callable[[], None], line: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = two.run(os.getpid).results
    two.run(function)
    place = f"(test_unfinished.py, line {function.__code__.co_firstlineno + line})"
    assert said(capsys) == [f"{words.format(place)}. The next run starts fresh ranks, which know nothing of it."]
    assert two.run(exchange).results == [(0.0, 2.0), (2.0, 2.0)]
    assert not set(before) & set(two.run(os.getpid).results)


def test_a_work_that_failed_is_recorded_as_failed_and_the_run_continues(two: lab.Group) -> None:
    def train() -> tuple[bool, float]:
        part = group_with_a_limit()
        failed = False
        if dist.get_rank() == 0:
            work = dist.all_reduce(torch.ones(1), group=part, async_op=True)
            assert work is not None
            try:
                work.wait()
            except RuntimeError:
                failed = True
        total = torch.ones(1)
        dist.all_reduce(total)
        return failed, total.item()

    run = two.run(train)
    assert run.results == [(True, 2.0), (False, 2.0)]
    reduced = [(span.rank, span.group == "world", span.done) for span in run.trace.spans if span.name == "all_reduce"]
    assert sorted(reduced) == [(0, False, False), (0, True, True), (1, True, True)]


def reduce_without_waiting() -> None:
    dist.all_reduce(torch.ones(100_000), async_op=True)


def keep_a_work() -> None:
    globals()["kept"] = dist.all_reduce(torch.ones(3), async_op=True)


def serve_on_a_thread() -> None:
    """Continues after the run, as a server does."""

    def serve() -> None:
        while True:
            got = torch.zeros(1)
            dist.recv(got, 0, tag=9)
            dist.send(2 * got, 0, tag=10)

    if dist.get_rank() == 1:
        threading.Thread(target=serve, daemon=True).start()


def ask_the_thread() -> float | None:
    if dist.get_rank() != 0:
        return None
    dist.send(torch.full((1,), 21.0), 1, tag=9)
    got = torch.zeros(1)
    dist.recv(got, 1, tag=10)
    return got.item()


def test_ranks_without_unfinished_operations_stay(
    two: lab.Group, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("labkit.group.unfinished.COMPLETE_S", 60.0)  # even on a busy machine
    before = two.run(os.getpid).results
    for function in (reduce_without_waiting, keep_a_work, exchange, serve_on_a_thread):
        two.run(function)
    assert [two.run(ask_the_thread).results for _ in range(2)] == [[42.0, None]] * 2
    assert two.run(os.getpid).results == before
    (fault,) = said(capsys)
    assert "never waited for" in fault, "that of reduce_without_waiting"


def wait_for_release(path: str) -> int:
    import time

    while not os.path.exists(path):
        time.sleep(0.01)
    return os.getpid()


def call_and_forget(path: str) -> None:
    rpc.rpc_async("callee", wait_for_release, (path,))


def test_a_remote_call_that_nobody_waits_for(
    callers: lab.Group, tmp_path: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there"
    there.touch()
    before = callers.run(os.getpid).results
    with monkeypatch.context() as patch:
        patch.setattr("labkit.group.unfinished.CALL_S", 60.0)
        callers["caller"].run(call_and_forget, str(there))
    assert callers.run(os.getpid).results == before, "it has come back"
    assert said(capsys) == []
    callers["caller"].run(call_and_forget, str(tmp_path / "nowhere"))
    place = f"(test_unfinished.py, line {call_and_forget.__code__.co_firstlineno + 1})"
    assert said(capsys) == [
        f"caller left rpc_async wait_for_release {place} unfinished. The next run starts fresh ranks, which know nothing of it."
    ]
    assert not set(before) & set(callers.run(os.getpid).results)


def cell(group: lab.Group, number: int, source: str) -> None:
    group.run_cell(source, cell_filename(number), f"cell {number}")


SEND = """
import torch, torch.distributed as dist
if dist.get_rank() == 0:
    work = dist.isend(torch.full((1,), 7.0), 1)
"""
RECEIVE = """
got = torch.zeros(1)
if dist.get_rank() == 1:
    dist.recv(got, 0)
else:
    work.wait()
"""


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Any:
    return in_cells.new_main(monkeypatch)


@pytest.mark.usefixtures("main")
def test_a_cell_may_receive_what_an_earlier_one_has_sent(two: lab.Group, capsys: pytest.CaptureFixture[str]) -> None:
    before = two.run(os.getpid).results
    cell(two, 1, SEND)
    reported = "rank 0 left send to rank 1 (cell 1, line 4) behind, which nobody has received."
    assert said(capsys) == [f"{reported} A later %%ranks cell may finish it. The next `run` starts fresh ranks."]
    cell(two, 2, RECEIVE + "if dist.get_rank() == 1: print(got.item())")
    assert "[rank 1] 7.0" in capsys.readouterr().out
    assert two.run(os.getpid).results == before, "nothing is left: the ranks stay"
    assert said(capsys) == []


@pytest.mark.usefixtures("main")
def test_unfinished_operations_of_a_cell_do_not_reach_a_run(two: lab.Group, capsys: pytest.CaptureFixture[str]) -> None:
    cell(two, 1, SEND)
    said(capsys)
    assert two.run(exchange).results == [(0.0, 2.0), (2.0, 2.0)]
    reported = "rank 0 left send to rank 1 (cell 1, line 4) behind, which nobody has received."
    assert said(capsys)[0] == f"{reported} This run starts fresh ranks."  # and a line lists the lost names of cells
