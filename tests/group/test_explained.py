"""Failures as the student reads them: the cause before its consequences, messages of all kinds, no frames of labkit."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cells as in_cells
import pytest
from doings import computing, failure

import labkit as lab
from labkit.errors.exit_reasons import Cause
from labkit.ipc.tracebacks import cause_of, headline, students_traceback


@pytest.fixture(scope="module")
def ranks() -> Iterator[lab.Group]:
    with lab.Group(2, runtime="bare", timeout_s=200) as group:
        yield group


# The cause first


@pytest.mark.processes
def test_a_lost_connection_is_never_the_cause_if_another_is_known(
    ranks: lab.Group, cells: in_cells.Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is reported first, and by two ranks; the rank that broke the connection says why only a little later."""
    cells("""
        import os, threading
        def f():
            if os.environ["RANK"] == "1":
                threading.Event().wait(0.2)
                raise ValueError("the cause")
            try:
                raise RuntimeError("Connection closed by peer [127.0.0.1]:1")
            except RuntimeError:
                raise KeyError("mine") from None
    """)
    for grace in ("GRACE_S", "CAUSE_S"):  # both ranks fail before the run is ended, even on a busy machine
        monkeypatch.setattr(f"labkit.group.run.{grace}", 60.0)
    error = failure(ranks, cells.f)
    assert error.failures[0].headline == "ValueError: the cause"
    assert len(error.failures) == 1
    assert error.others == ["rank 0: KeyError: 'mine'"]


@pytest.mark.processes
def test_a_lost_connection_without_a_known_cause_is_reported(ranks: lab.Group, cells: in_cells.Cells) -> None:
    cells("def f(): raise RuntimeError('[/build/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:1')")
    assert failure(ranks, cells.f).failures[0].headline == "RuntimeError: Connection closed by peer [127.0.0.1]:1"


@pytest.mark.parametrize(
    ("words", "lost"),
    [
        ("Read error [127.0.0.1]: Connection reset by peer", True),
        ("EOF: end of file (this error originated at tensorpipe/transport/uv/connection_impl.cc:132)", True),
        ("Collective ops is aborted by: FakeError", True),
        ("peer review", False),
    ],
)
def test_errors_that_mean_a_lost_connection(words: str, lost: bool) -> None:
    assert cause_of(RuntimeError(words)).is_consequence is lost


def test_the_cause_of_an_error() -> None:
    lost = RuntimeError("Connection closed by peer")
    own = ValueError("own")
    own.__context__ = lost
    assert cause_of(lost) is Cause.LOST_CONNECTION
    assert cause_of(own) is Cause.AFTER_LOST_CONNECTION
    assert cause_of(ValueError("own")) is Cause.RAISED
    assert cause_of(NotImplementedError()) is Cause.NOT_IMPLEMENTED


@pytest.mark.processes
def test_the_last_action_of_a_killed_rank(ranks: lab.Group, cells: in_cells.Cells) -> None:
    cells("""
        import os
        import labkit as lab
        def f():
            with lab.span("forward"): pass
            os.kill(os.getpid(), 9) if os.environ["RANK"] == "1" else None
    """)
    error = failure(ranks, cells.f)
    assert error.failures[0].last == f"{computing('It')}; its last span was forward."
    assert error.report().splitlines()[2] == error.failures[0].last


# Messages of all kinds


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07rest", "rest"),
        ("\x1b[2Jcleared", "cleared"),
        ("a\x00b\x08c\x07", "a\\x00b\\x08c\\x07"),
        ("50 %\r100 %", "50 %\\r100 %"),
        ("half a \ud800 pair", "half a \\ud800 pair"),
        ("größer π", "größer π"),
    ],
)
def test_control_characters_in_messages_are_escaped(message: str, shown: str) -> None:
    assert headline(ValueError(message)) == f"ValueError: {shown}"
    students_traceback(ValueError(message)).encode()


def test_torchs_own_stack_is_left_out() -> None:
    message = "sizes differ\nException raised from f at /build/A.cpp:3 (most recent call first):\nframe #0: a\nframe #1: b"
    assert students_traceback(RuntimeError(message)) == "RuntimeError: sizes differ\n"


@pytest.mark.processes
def test_omitted_frames_are_counted(ranks: lab.Group, cells: in_cells.Cells) -> None:
    cells("""
        def even(n): return odd(n + 1)
        def odd(n): return even(n + 1)
        def f(): return even(0)
    """)
    text = failure(ranks, cells.f).failures[0].traceback
    (left_out,) = re.findall(r"^  \[(\d+) frames left out\]$", text, re.MULTILINE)
    assert int(left_out) > 800
    assert text.count("  File ") == 12


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def f(): return (i for i in range(3))", "the result of f() cannot be sent: generator objects cannot be pickled"),
        ("def f(): return (i for i in range(3))", "return list(...) of it"),
        ("async def f(): return 1", "f() returned a coroutine, which is never awaited: calling an `async def` function"),
    ],
)
@pytest.mark.processes
def test_results_that_cannot_be_sent_are_named(ranks: lab.Group, cells: in_cells.Cells, source: str, words: str) -> None:
    cells(source)
    assert words in failure(ranks, cells.f).failures[0].headline
    assert ranks.run(int).output == "", "Python has not warned of a coroutine as well"


# In a terminal

PROGRAM = """import labkit as lab

def divide(a, b):
    return a / b

def train():
    return divide(1, 0)

group = lab.Group(1, runtime="bare")
"""
REPORT = [
    "rank 0 failed: ZeroDivisionError: division by zero",
    "",
    "Traceback (most recent call last):",
]


def shown(command: list[str], typed: str, folder: Path) -> list[str]:
    """What a terminal shows of a program that receives typed input."""
    mine, its = pty.openpty()
    environment = os.environ | {"IPYTHONDIR": str(folder), "TERM": "dumb", "COLUMNS": "120"}
    program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=its, stderr=its, env=environment, cwd=folder)
    os.close(its)
    assert program.stdin is not None
    program.stdin.write(typed.encode())
    program.stdin.close()
    data = b""
    try:
        while piece := os.read(mine, 1 << 16):
            data += piece
    except OSError:  # on Linux, this means that the other end is closed
        pass
    finally:
        os.close(mine)
        program.kill()
        program.wait()
    return data.decode().replace("\r\n", "\n").splitlines()


@pytest.mark.processes
def test_a_script_shows_its_own_frames_and_one_of_labkit(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(f"{PROGRAM}\ndef main():\n    group.run(train)\n\nmain()\n")
    lines = shown([sys.executable, "script.py"], "", tmp_path)
    frames = [line.strip().rsplit(", in ")[1] for line in lines if line.startswith("  File")]
    assert [*frames[:2], *frames[3:]] == ["<module>", "main", "train", "divide"], "and one of labkit between them"
    assert lines[lines.index(REPORT[0]) :][: len(REPORT)] == REPORT
    assert sum("ZeroDivisionError" in line for line in lines) == 2, "the headline, and the end of its traceback"


@pytest.mark.processes
def test_a_wrong_argument_shows_few_frames(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import labkit as lab\nlab.Group(0)\n")
    lines = shown([sys.executable, "script.py"], "", tmp_path)
    assert len([line for line in lines if line.startswith("  File")]) == 2
    assert lines[-1] == "ValueError: Group(0): expected between 1 and 1024 ranks"


@pytest.mark.parametrize("kind", [KeyError, ValueError])
@pytest.mark.processes
def test_errors_of_other_libraries_keep_their_frames(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise kind("a defect, or a library's")

    monkeypatch.setattr(lab.Group, "_run", broken)
    with lab.Group(2, runtime="bare") as group, pytest.raises(kind) as caught:
        group.run(int)
    assert caught.traceback[-1].name == "broken"


@pytest.mark.processes
def test_plain_ipython_names_the_cell_and_shows_no_labkit_frames(tmp_path: Path) -> None:
    pytest.importorskip("IPython")
    command = [sys.executable, "-m", "IPython", "--no-banner", "--colors=NoColor", "--simple-prompt", "--no-confirm-exit"]
    typed = "import labkit as lab\ngroup = lab.Group(2, runtime='bare')\ndef train(): return 1 / 0\n\ngroup.run(train)\nexit()\n"
    lines = shown(command, typed, tmp_path)
    assert '  File "cell 3", line 1, in train' in lines
    assert not [line for line in lines if "labkit/" in line]
    assert sum("ZeroDivisionError" in line for line in lines) == 2


# What the text of a library's error does not say


def encodes_after_fully_shard() -> None:
    import torch
    from torch.distributed.fsdp import fully_shard

    class Coder(torch.nn.Linear):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, self.weight)

    model = Coder(4, 4)
    fully_shard(model)
    model(torch.ones(1, 4)).sum().backward()
    model.encode(torch.ones(1, 4))


@pytest.mark.processes
def test_a_method_of_a_sharded_model() -> None:
    pytest.importorskip("torch")
    with lab.Group(2, timeout_s=200) as group:
        assert "register_fsdp_forward_method" in failure(group, encodes_after_fully_shard).hint


def calls_a_lambda() -> None:
    import torch.distributed.rpc as rpc

    rpc.rpc_sync("worker0", lambda: 1)


@pytest.mark.processes
def test_a_local_function_in_a_remote_call() -> None:
    pytest.importorskip("torch")
    with lab.Group(2, runtime="rpc", timeout_s=200) as group, pytest.raises(lab.RankError) as caught:
        group[1].run(calls_a_lambda)
    assert "with `def`" in caught.value.hint
