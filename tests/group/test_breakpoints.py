"""`breakpoint()` in a rank: its prompt, its turn, its end. A function in place of `input` types the lines."""

from __future__ import annotations

import os
import pdb  # noqa: T100
import select
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import SELDOM_SPAWNED

import labkit as lab
from labkit.group import breakpoints
from labkit.group.breakpoints import NOBODY, TURN_S, Breakpoints
from labkit.group.message_loop import MessageLoop
from labkit.plots.live.drawing import LiveFrame
from labkit.plots.live.live import Live
from labkit.worker.debugger import Debugger

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module", params=SELDOM_SPAWNED)
def group(request: pytest.FixtureRequest) -> Iterator[lab.Group]:
    with lab.Group(["a", "b"], runtime="bare", start=request.param, timeout_s=100) as group:
        yield group


Typed = Callable[..., list[str]]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    """Types lines at the prompts; returns the prompts, which grow during the run."""

    def types_them(*lines: str | Callable[[], str]) -> list[str]:
        rest, prompts = list(lines), list[str]()

        def answer(prompt: str) -> str:
            prompts.append(prompt)
            line = rest.pop(0)
            return line() if callable(line) else line

        monkeypatch.setattr(breakpoints, "input", answer, raising=False)
        return prompts

    return types_them


def stop() -> str:
    raise KeyboardInterrupt


def until_it_says(group: lab.Group, rank: int, words: bytes) -> None:
    assert group._pool is not None
    while words not in group._pool.members[rank].process.sock.recv(1 << 16, socket.MSG_PEEK):
        time.sleep(0.01)


def name() -> str:
    return "ab"[int(os.environ["RANK"])]


def counted(names: str = "a", times: int = 1) -> int:
    total = 0
    for i in range(times):
        if name() in names:
            breakpoint()  # noqa: T100
        total += i + 1
    return total


def test_commands_show_and_change_the_program(group: lab.Group, typed: Typed, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = typed("p i", "l", "n", "nonsense here", "w", "!total = 100", "c")
    added = 1 if sys.version_info >= (3, 13) else 0  # then pdb stops at `breakpoint()` itself, not at the next line
    assert group.run(counted).results == [100 + added, 1]
    assert prompts == ["[a] (Pdb) "] * 7
    said = capsys.readouterr().out
    assert "[a] -> total += i + 1\n" in said
    assert "[a] 0\n" in said
    assert "def counted(" in said, "`l` shows the lines"
    assert "[a] *** SyntaxError: invalid syntax" in said
    assert "main_loop" not in said, "`w` shows the student's frames"


def test_ranks_take_turns(group: lab.Group, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Breakpoints()
    monkeypatch.setattr(breakpoints, "Breakpoints", lambda: turns)

    def until_both_wait() -> str:
        assert group._pool is not None
        (other,) = (m.process.sock for m in group._pool.members if f"[{m.name}]" not in prompts[-1])
        while len(turns.texts) < 2 and not select.select([other], [], [], 0.01)[0]:
            pass
        return "p 1"

    prompts = typed(*[until_both_wait, "c"] * 3, "p 1", "c")
    assert group.run(counted, "ab", 2).results == [3, 3]
    asked = [prompt[1] for prompt in prompts]
    assert asked[::2] == asked[1::2], "a rank keeps its turn until it continues"
    assert asked[::2] in (list("abab"), list("baba")), "then it is the other's"


def test_turns() -> None:
    turns = Breakpoints()
    assert turns.next(0.0) is None
    turns.arrived(1, "one")
    turns.arrived(0, "zero")
    assert turns.next(0.0) == 1
    turns.asked(1)
    given_s = turns._since_s
    assert turns.next(given_s) is None, "it may come back soon"
    assert turns.next(given_s + 2 * TURN_S) == 0, "it may wait for the other one"
    turns.arrived(1, "one")
    assert turns.next(given_s) == 1
    turns.left(1)
    assert turns.next(given_s) == 0
    assert turns.stopped == {0}, "meanwhile, no time counts"
    turns.left(0)
    assert turns.next(given_s) is None
    assert not turns.stopped


def test_turns_after_an_error() -> None:
    turns = Breakpoints()
    turns.arrived(0, "zero")
    turns.asked(0)
    given_s = turns._since_s
    turns.last_call()
    assert turns.busy(given_s), "it may come back soon"
    assert not turns.busy(given_s + 2 * TURN_S)
    turns.arrived(0, "zero")
    assert turns.next(given_s) == 0
    assert turns.busy(given_s + 2 * TURN_S)
    turns.asked(0)
    turns.left(0)
    assert not turns.busy(given_s)
    turns.arrived(0, "again")
    assert turns.next(given_s) is None, "it has continued"
    turns.arrived(1, "one")
    assert turns.next(given_s) == 1
    turns.close()
    assert turns.next(given_s) is None
    assert not turns.busy(given_s)


def test_a_rank_that_waits_for_another_one_gives_its_turn_away(typed: Typed) -> None:
    def meet() -> None:
        import torch.distributed as dist

        breakpoint()  # noqa: T100
        dist.barrier()
        breakpoint()  # noqa: T100

    with lab.Group(2, timeout_s=100) as group:
        prompts = typed("n", "c", "c", "c", "c", "c")
        group.run(meet)
    assert prompts[0] != prompts[1], "the first one is in `barrier`, for which it needs the other one"


def test_every_function_of_pdb(group: lab.Group, typed: Typed, capsys: pytest.CaptureFixture[str]) -> None:
    def f() -> str:
        if name() == "a":
            pdb.set_trace()  # noqa: T100
            value = "unused"
            try:
                value = {}["missing"]
            except KeyError as error:
                pdb.post_mortem(error.__traceback__)
            return value
        return ""

    prompts = typed("c", "p value", "q")
    assert group.run(f).results == ["unused", ""]
    assert len(prompts) == 3
    assert "[a] 'unused'" in capsys.readouterr().out


def test_breakpoints_of_pdb_and_steps_end_with_the_run(
    group: lab.Group, typed: Typed, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = typed("b counted", *["s"] * 30)
    group.run(counted)
    stepped = len(prompts)
    assert stepped < 31, "no step stops in labkit's own code"
    assert group.run(counted, "").results == [1, 1]
    assert len(prompts) == stepped
    assert "skipped" not in capsys.readouterr().out


@pytest.mark.parametrize("command", ["interact", "run", "restart"])
def test_commands_that_no_rank_has(group: lab.Group, typed: Typed, capsys: pytest.CaptureFixture[str], command: str) -> None:
    typed(command, "help", "c")
    assert group.run(counted).results == [1, 1]
    said = capsys.readouterr().out
    assert f"[a] *** {command} does not work in a rank\n" in said
    assert "condition" in said
    assert command not in said.partition("Documented commands")[2]


@pytest.mark.parametrize("line", ["q", EOFError])
def test_quit(group: lab.Group, typed: Typed, line: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def end() -> str:
        raise EOFError

    monkeypatch.setattr("sys.stdin", types.SimpleNamespace(isatty=lambda: True))
    typed(line if isinstance(line, str) else end)
    with pytest.raises(lab.RankError) as caught:
        group.run(counted)
    first = caught.value.failures[0]
    assert (first.rank, str(first), first.traceback) == (0, "a was ended at a breakpoint, with q", "")
    assert group.run(counted, "").results == [1, 1]


def skips_bad_batches(names: str, caught: type[BaseException], end: str) -> str:
    while name() in names:
        try:
            breakpoint()  # noqa: T100
            os.getpid()  # here, `q` takes effect
        except caught:
            if end == "return":
                return "caught"
    return ""


@pytest.mark.parametrize(
    ("names", "catches", "end"),
    [("a", Exception, "go on"), ("ab", Exception, "go on"), ("a", BaseException, "go on"), ("a", BaseException, "return")],
)
def test_quit_ends_a_program_that_catches_errors(
    group: lab.Group, typed: Typed, names: str, catches: type[BaseException], end: str
) -> None:
    prompts = typed("q")
    with pytest.raises(lab.RankError, match="was ended at a breakpoint, with q") as caught:
        group.run(skips_bad_batches, names, catches, end)
    assert [failure.rank for failure in caught.value.failures] == [*range(len(names))]
    assert caught.value.stopped is (catches is BaseException and end == "go on"), "`q` ends also the one that waits at its prompt"
    assert len(prompts) == 1, "no other rank is asked then"
    assert group.run(counted, "").results == [1, 1]


def test_quit_in_a_statement_that_is_debugged_comes_back(group: lab.Group, typed: Typed) -> None:
    prompts = typed("debug os.getpid()", "q", "p 1", "c")
    assert group.run(counted).results == [1, 1]
    assert prompts == ["[a] (Pdb) ", "[a] ((Pdb)) ", "[a] (Pdb) ", "[a] (Pdb) "]


@pytest.fixture
def waited_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time by which the clock of a run is fast."""
    waited_s = [0.0]
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + waited_s[0], perf_counter_ns=time.perf_counter_ns)
    monkeypatch.setattr("labkit.group.run.time", clock)
    return waited_s


def test_no_time_counts_at_the_prompt(group: lab.Group, typed: Typed, waited_s: list[float]) -> None:
    def think() -> str:
        waited_s[0] += 1000.0
        return "p 1"

    typed(think, think, "c")
    assert group.run(counted).results == [1, 1]
    assert waited_s == [2000.0], "20 times the limit of the group"


AfterACommand = Callable[[Callable[[], object]], None]


@pytest.fixture
def after_a_command(monkeypatch: pytest.MonkeyPatch) -> AfterACommand:
    """Calls a function whenever a rank has got its command."""

    def install(function: Callable[[], object]) -> None:
        def asked(turns: Breakpoints, rank: int, original: Callable[[Breakpoints, int], None] = Breakpoints.asked) -> None:
            original(turns, rank)
            function()

        monkeypatch.setattr(Breakpoints, "asked", asked)

    return install


def test_no_time_counts_while_a_command_runs(
    group: lab.Group, typed: Typed, waited_s: list[float], monkeypatch: pytest.MonkeyPatch, after_a_command: AfterACommand
) -> None:
    given = list[bool]()

    def poll(*args: Any, original: Callable[..., bool] = MessageLoop.poll) -> bool:
        while given:
            waited_s[0] += 1000.0 if given.pop() else 0.0
        return original(*args)

    monkeypatch.setattr(MessageLoop, "poll", poll)
    prompts = typed("p 1", "n", "c")
    after_a_command(lambda: given.append(len(prompts) < 3))
    assert group.run(counted).results == [1, 1]
    assert waited_s == [2000.0], "20 times the limit of the group"


@pytest.mark.parametrize("when", ["at the prompt", "while a command is executed"])
def test_stop_at_a_breakpoint(group: lab.Group, typed: Typed, after_a_command: AfterACommand, when: str) -> None:
    if when == "at the prompt":
        typed(stop)
    else:
        after_a_command(stop)
        typed("!os.getpid() and __import__('time').sleep(1000)")
    with pytest.raises(KeyboardInterrupt) as caught:
        group.run(counted)
    assert "a was at a breakpoint" in str(caught.value)
    assert group.run(counted, "").results == [1, 1]


@pytest.mark.parametrize(("answer", "deleted"), [("y", True), ("n", False), ("", False)])
def test_a_question_of_pdb_is_asked_at_the_prompt(
    group: lab.Group, typed: Typed, capsys: pytest.CaptureFixture[str], answer: str, deleted: bool
) -> None:
    prompts = typed("b name", "cl", answer, "b", "c")
    assert group.run(counted).results == [1, 1]
    assert prompts == ["[a] (Pdb) "] * 2 + ["[a] Clear all breaks? "] + ["[a] (Pdb) "] * 2
    said = capsys.readouterr().out
    assert ("Deleted breakpoint" in said) == deleted


def until_it_ends(group: lab.Group, rank: int) -> None:
    assert group._pool is not None
    while not group._pool.members[rank].process.status().exiting:
        time.sleep(0.01)


def test_a_rank_that_dies_at_the_prompt(group: lab.Group, typed: Typed) -> None:
    def kill() -> str:
        assert group._pool is not None
        os.kill(group._pool.members[0].process.pid, signal.SIGKILL)
        until_it_ends(group, 0)
        return "c"

    typed(kill)
    with pytest.raises(lab.RankError, match="SIGKILL") as caught:
        group.run(counted)
    assert caught.value.failures[0].last == "It was at a breakpoint."
    assert group.run(counted, "").results == [1, 1]


def fails_when_told(how: str, told: Path) -> None:
    """Rank a stops, and rank b fails while the student thinks."""
    if name() == "a":
        breakpoint()  # noqa: T100
    while not told.exists():
        time.sleep(0.01)
    if how == "exit":
        os._exit(5)
    raise ValueError("too late")


def test_another_rank_dies_while_the_student_thinks(group: lab.Group, typed: Typed, tmp_path: Path) -> None:
    def think() -> str:
        (tmp_path / "told").touch()
        until_it_ends(group, 1)
        return "c"

    typed(think)
    with pytest.raises(lab.RankError, match="exit code 5") as caught:
        group.run(fails_when_told, "exit", tmp_path / "told")
    assert caught.value.failures[0].rank == 1
    assert caught.value.others == ["a was at a breakpoint"]


def test_stop_does_not_hide_another_ranks_error(group: lab.Group, typed: Typed, tmp_path: Path) -> None:
    def think_and_stop() -> str:
        (tmp_path / "told").touch()
        until_it_says(group, 1, b"too late")
        return stop()

    prompts = typed(think_and_stop)
    with pytest.raises(lab.RankError) as caught:
        group.run(fails_when_told, "error", tmp_path / "told")
    (failure,) = caught.value.failures
    assert (failure.rank, failure.headline) == (1, "ValueError: too late")
    assert "too late" in failure.traceback
    assert caught.value.others == ["a was at a breakpoint"]
    assert len(prompts) == 1


@pytest.mark.parametrize("place", ["a thread", "no input", "pytest"])
def test_without_input_breakpoints_are_skipped(
    group: lab.Group, place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if place == "no input":
        monkeypatch.setattr("sys.stdin", None)
    group._announced.clear()
    results: list[Any] = []

    def run() -> None:
        results.extend(group.run(counted, "ab", 1000).results)

    if place == "a thread":
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    else:
        run()
    assert results == [500_500, 500_500]
    assert capsys.readouterr().out.count(NOBODY) == 1


def test_threads_may_stop_and_processes_may_not(group: lab.Group, typed: Typed, capsys: pytest.CaptureFixture[str]) -> None:
    def f() -> int:
        if name() == "b":
            return 0
        thread = threading.Thread(target=counted)
        thread.start()
        child = os.fork()
        if child == 0:
            counted(times=3)
            os._exit(0)
        ended = os.waitpid(child, 0)[1]
        thread.join()
        return os.waitstatus_to_exitcode(ended)

    prompts = typed("p total", "c")
    assert group.run(f).results == [0, 0]
    assert len(prompts) == 2
    assert capsys.readouterr().out.count("labkit: breakpoint() is skipped in a process that the rank has started") == 1


def test_code_that_is_run_for_another_rank_does_not_stop(typed: Typed, capsys: pytest.CaptureFixture[str]) -> None:
    def ask() -> int:
        from torch.distributed import rpc

        return rpc.rpc_sync("worker1", counted, args=("b",)) if name() == "a" else 0

    prompts = typed()
    with lab.Group(["master", "worker1"], runtime="rpc", timeout_s=100) as group:
        assert group[0].run(ask).results == [1]
    assert not prompts
    assert "labkit: breakpoint() is skipped in code that the rank runs for other ranks" in capsys.readouterr().out


def test_a_thread_that_comes_to_the_prompt_as_the_function_ends_does_not_ask() -> None:
    """It would take the notebook's next message."""
    debugger, given = Debugger(pytest.fail, pytest.fail), list[bool]()

    def come() -> None:
        assert debugger.may_stop()
        arrived.set()
        with debugger.at_prompt() as running:
            given.append(running)

    arrived, thread = threading.Event(), threading.Thread(target=come)
    debugger.begin()
    with debugger._prompt:
        thread.start()
        arrived.wait()
        debugger.end()
    thread.join()
    assert given == [False]


def careful(told: Path | None = None, times: int = 1) -> None:
    """Rank b fails once it is told to, and stops as often as asked."""
    while name() == "b" and told is not None and not told.exists():
        time.sleep(0.01)
    try:
        {}["missing"]
    except KeyError:
        for _ in range(times if name() == "b" else 1):
            pdb.post_mortem()
        raise


@pytest.mark.parametrize("times", [1, 5])
def test_ranks_at_prompts_are_asked_before_an_error_ends_the_run(
    group: lab.Group, typed: Typed, tmp_path: Path, capsys: pytest.CaptureFixture[str], times: int
) -> None:
    assert group.run(counted, "").results == [1, 1]
    assert group._pool is not None
    pool, told = group._pool, tmp_path / "told"

    def think() -> str:
        told.touch()
        until_it_says(group, 1, b"Pdb")
        return "q"

    def until_the_other_has_failed() -> str:
        while not select.select([pool.members[0].process.sock], [], [], 0.01)[0]:
            said.append(capsys.readouterr().out)
            if "a failed" in said[-1]:
                break
        return "p 1"

    said = list[str]()
    prompts = typed(think, until_the_other_has_failed, "c")
    with pytest.raises(lab.RankError) as caught:
        group.run(careful, told, times)
    said.append(capsys.readouterr().out)
    assert prompts == ["[a] (Pdb) ", "[b] (Pdb) ", "[b] (Pdb) "], "once it has continued, it is not asked again"
    assert "".join(said).count("labkit: a failed: KeyError: 'missing'. The run ends") == 1
    assert caught.value.failures[0].headline == "KeyError: 'missing'"
    if times == 1:
        assert [failure.rank for failure in caught.value.failures] == [0, 1]
        assert not caught.value.stopped
        assert group.run(counted, "").results == [1, 1]
        assert group._pool is pool


def test_stop_at_a_prompt_after_an_error(group: lab.Group, typed: Typed, tmp_path: Path) -> None:
    def think() -> str:
        (tmp_path / "told").touch()
        until_it_says(group, 1, b"too late")
        return "p 1"

    prompts = typed(think, stop)
    with pytest.raises(lab.RankError, match="too late"):
        group.run(fails_when_told, "error", tmp_path / "told")
    assert len(prompts) == 2


def test_what_no_prompt_has_shown_is_not_shown_in_the_next_run() -> None:
    debugger = Debugger(pytest.fail, pytest.fail)
    debugger.begin()
    debugger.stream.write("--Return--")
    debugger.end()
    debugger.begin()
    assert debugger.stream.taken() == ""


def test_torchs_own_breakpoint(typed: Typed) -> None:
    def f() -> int:
        import torch.distributed as dist

        x = 1
        dist.breakpoint(1)
        return x

    with lab.Group(2, timeout_s=100) as group:
        prompts = typed("up", "!x = 5", "c")
        group.run(f)
    assert set(prompts) == {"[rank 1] (Pdb) "}


def test_the_live_picture_stays_while_the_student_thinks(group: lab.Group, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen:
        def __init__(self) -> None:
            self.frames = list[LiveFrame]()

        def begin(self, _: str) -> None: ...

        def show(self, frame: LiveFrame) -> None:
            self.frames.append(frame)

        def end(self, *_: Any) -> None: ...

    screen, seen = Screen(), list[tuple[bool, str]]()

    def look() -> str:
        frame = screen.frames[-1]
        seen.append((frame.held, frame.rows[0].status))
        return "c"

    monkeypatch.setattr(lab.Group, "picture", lambda: Live(screen))
    typed(look)
    group.watch(counted)
    assert seen == [(True, "breakpoint")]
