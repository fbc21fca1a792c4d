"""The error of a function called by RPC: one traceback from caller to callee, without torch's frames."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import cells as in_cells
import pytest
from doings import waiting

import labkit as lab
from labkit.ipc.tracebacks import remote_error, sent_error

TRACEBACK = """Traceback (most recent call last):
  File "cell 5", line 7, in served
    raise ValueError("no")
ValueError: no
"""


class Info:
    def __repr__(self) -> str:
        return "WorkerInfo(id=1, name=shard1)"


def received(headline: str = "ValueError: no", traceback: str = TRACEBACK) -> str:
    """The error as torch raises it on the other side."""
    return sent_error(Info(), headline, traceback).encode().decode("unicode_escape")


AT = "\n\nAt:\n  /torch/distributed/rpc/internal.py(236): _handle_exception\n"


@pytest.mark.parametrize(
    "text",
    [
        received(),
        f"ValueError: ValueError: {received()}{AT}",
        f"KeyError: {f'KeyError: {received()!r}{AT}'!r}",
        f"RuntimeError: Failed to create original exception type. Original exception on remote side was {received()}{AT}",
    ],
    ids=["to_here", "rpc_sync", "quoted twice", "of a type that torch cannot make"],
)
def test_a_callees_report_is_found_in_any_wrapping(text: str) -> None:
    error = remote_error(text)
    assert error is not None
    assert error.headline == "ValueError: no (on shard1)"
    assert error.traceback.splitlines() == ["on shard1:", *TRACEBACK.splitlines()[1:]]


def test_special_characters_and_backslashes_are_unchanged() -> None:
    error = remote_error(received("ValueError: größer als C:\\new π"))
    assert error is not None
    assert error.headline == "ValueError: größer als C:\\new π (on shard1)"


def test_several_tracebacks_stay_apart() -> None:
    both = f"{TRACEBACK}\nDuring handling of the above exception, another exception occurred:\n\n{TRACEBACK}"
    error = remote_error(received(traceback=both))
    assert error is not None
    assert error.traceback.count("Traceback (most recent call last):") == 2


@pytest.mark.parametrize("text", ["ValueError: no", "On WorkerInfo(", "said: On WorkerInfo(id=1, name=x) nothing"])
def test_other_messages_are_unchanged(text: str) -> None:
    assert remote_error(text) is None


def test_frames_that_torch_lists_itself_are_left_out() -> None:
    frame = '  File "/x/site-packages/torch/a.py", line 2, in run\n    f()\n    ^^^\n'
    error = remote_error(f"On WorkerInfo(id=0, name=ps):\nKeyError(3)\nTraceback (most recent call last):\n{frame}KeyError: 3\n")
    assert error is not None
    assert error.traceback == "on ps:\nKeyError: 3"


# On real ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[lab.Group]:
    pytest.importorskip("torch")
    with lab.Group(["master", "shard1", "shard2"], runtime="rpc", timeout_s=200) as group:
        yield group


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> in_cells.Cells:
    return in_cells.Cells(in_cells.new_main(monkeypatch))("""
        import os, signal
        import torch.distributed.rpc as rpc
        class Odd(Exception):
            def __init__(self, a, b): super().__init__(f"{a} and {b}")
        def missing(): return {}["missing"]
        def odd(): raise Odd(1, 2)
        def middle(): return rpc.rpc_sync("shard2", missing)
        def leave(): raise SystemExit(3)
        def die(): os.kill(os.getpid(), signal.SIGKILL)
        def call(how, function):
            if how == "sync":
                return rpc.rpc_sync("shard1", function)
            if how == "async":
                return rpc.rpc_async("shard1", function).wait()
            return rpc.remote("shard1", function).to_here()
    """)


def failure(ranks: lab.Group, cells: in_cells.Cells, *args: object) -> lab.RankError:
    with pytest.raises(lab.RankError) as caught:
        ranks["master"].run(cells.call, *args)
    return caught.value


@pytest.mark.parametrize(("how", "line"), [("sync", 13), ("async", 15), ("remote", 16)])
@pytest.mark.processes
def test_one_traceback_leads_from_the_caller_to_the_callee(
    ranks: lab.Group, cells: in_cells.Cells, how: str, line: int, capfd: pytest.CaptureFixture[str]
) -> None:
    error = failure(ranks, cells, how, cells.missing)
    assert error.failures[0].headline == "KeyError: 'missing' (on shard1)"
    lines = [text for text in error.failures[0].traceback.splitlines() if "^" not in text]
    assert lines[:2] == ["Traceback (most recent call last):", f'  File "<ipython-input-1-test>", line {line}, in call']
    assert lines[3:] == [
        "on shard1:",
        '  File "<ipython-input-1-test>", line 6, in missing',
        '    def missing(): return {}["missing"]',
        "KeyError: 'missing'",
    ]
    assert capfd.readouterr().out == "[shard1] missing failed: KeyError: 'missing'\n", (
        "a line, since nobody may look at the error"
    )


@pytest.mark.processes
def test_nested_calls_give_one_traceback(ranks: lab.Group, cells: in_cells.Cells) -> None:
    error = failure(ranks, cells, "sync", cells.middle)
    assert error.failures[0].headline == "KeyError: 'missing' (on shard2)"
    text = error.failures[0].traceback
    assert [line.strip() for line in text.splitlines() if line.startswith(("  File", "on"))] == [
        'File "<ipython-input-1-test>", line 13, in call',
        "on shard1:",
        'File "<ipython-input-1-test>", line 8, in middle',
        "on shard2:",
        'File "<ipython-input-1-test>", line 6, in missing',
    ]
    assert text.count("KeyError") == 1


@pytest.mark.processes
def test_an_error_that_torch_cannot_recreate_is_unchanged(ranks: lab.Group, cells: in_cells.Cells) -> None:
    error = failure(ranks, cells, "sync", cells.odd)
    assert error.failures[0].headline == "Odd: 1 and 2 (on shard1)"
    assert error.failures[0].traceback.splitlines()[-1] == "Odd: 1 and 2"


@pytest.mark.processes
def test_a_callee_that_calls_exit_fails_and_its_caller_does_not_exit(ranks: lab.Group, cells: in_cells.Cells) -> None:
    error = failure(ranks, cells, "sync", cells.leave)
    assert error.failures[0].name == "master"
    assert error.failures[0].headline == "the function called exit(3) (on shard1)"
    assert error.failures[0].traceback.splitlines()[-1] == "SystemExit: 3"


@pytest.mark.processes
def test_a_callee_that_dies_is_the_cause_and_its_caller_was_waiting(
    ranks: lab.Group, cells: in_cells.Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections close before its end is noticed, on a busy machine long before."""
    monkeypatch.setattr("labkit.group.run.CAUSE_S", 0)
    error = failure(ranks, cells, "sync", cells.die)
    assert error.failures[0].name == "shard1"
    assert error.failures[0].last == "It was serving die."
    assert len(error.failures) == 1
    assert len(error.others) == 1
    waited = waiting("master", "rpc_sync die", "<ipython-input-1-test>, line 13", names=ranks.names, peer=1)
    assert waited.fullmatch(error.others[0])


@pytest.mark.processes
def test_a_call_fails_whose_callee_has_left_without_answering(ranks: lab.Group, cells: in_cells.Cells, tmp_path: Path) -> None:
    cells("""
        import pathlib, sys, threading, time, traceback
        def names(thread):
            return [frame.f_code.co_name for frame, _ in traceback.walk_stack(sys._current_frames()[thread.ident])]
        def answer(file, number):
            if number == 3:
                file.touch()
                while "shutdown" not in names(threading.main_thread()):
                    time.sleep(0.01)
            return number
        def program(file):
            if rpc.get_worker_info().id == 0:
                for number in range(10):
                    rpc.rpc_sync("shard1", int)
                    rpc.rpc_sync("shard1", answer, args=(file, number))
            while not file.exists():
                time.sleep(0.01)
            rpc.shutdown(graceful=False)
    """)
    with pytest.raises(lab.RankError) as caught:
        ranks.run(cells.program, tmp_path / "called")
    assert [failure.name for failure in caught.value.failures] == ["master"]
    assert caught.value.others == ["shard1 had returned", "shard2 had returned"]
