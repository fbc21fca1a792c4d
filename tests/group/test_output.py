"""What ranks print: nothing is lost, lines are whole and labelled, bounded, shown while they work, grouped at the
end."""

from __future__ import annotations

import ctypes
import io
import os
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
from time_limits import some_limit_does

import labkit as lab
from labkit.group import output
from labkit.group.output import LIVE_AFTER_S, LIVE_EVERY_S, LIVE_LINES, Notice, Output
from labkit.group.printed_lines import HELD_LINES, KEPT_CHARACTERS, KEPT_LINES, LINE_CHARACTERS
from labkit.ipc.stdio import quiet_stderr

# What three bars of tqdm with `position=` 0, 1 and 2 write when each of them is drawn.
TQDM = b"\r%b\n\r%b\x1b[A\n\n\r%b\x1b[A\x1b[A"
GLOO = b" peer ranks. Expected number of connected peer ranks is : 1\n"  # torch 2.10 writes it in pieces


def finished(*pieces: bytes) -> str:
    """The lines made from one rank's bytes that arrive in these pieces."""
    prints = Output(["r"])
    for piece in pieces:
        prints.feed(0, piece)
    return prints.finish().replace("[r] ", "")


# Bytes become lines


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ([], ""),
        ([b"a\n"], "a"),
        ([b"a"], "a"),
        ([b"a\nb"], "a\nb"),
        (["eins\nzwei\r\ndrei: 10%\r20%\rµ\n\nohne Ende".encode()], "eins\nzwei\nµ\n\nohne Ende"),
        ([b"a\n\nb\n"], "a\n\nb"),
        ([b"a", b"b", b"\n", b"c"], "ab\nc"),
        ([b"\n"], ""),
        ([b"windows\r\nlines\r\n"], "windows\nlines"),
        ([b"10%\r50%\r100%\n"], "100%"),
        ([b"10%\r", b"50%\r", b"100%"], "100%"),
        ([b"10%\r", b"50%\r", b"\n"], "50%"),
        ([b"\r10%", b"\r50%", b"\r100%"], "100%"),
        (["grün → 1 µs".encode()[:3], "grün → 1 µs".encode()[3:]], "grün → 1 µs"),
        ([b"not utf-8: \xff\xfe!\n"], "not utf-8: \ufffd\ufffd!"),
        ([b"nul \0 and bell \7\n"], "nul \0 and bell \7"),
        ([b"10%\b\b\b20%\b\b\b100%\n"], "100%"),
        ([b"a\n[Gloo] Rank 0 is connected", b" to ", b"1", GLOO, b"[Gloo] Rank 1 is connected to 3", GLOO, b"b"], "a\nb"),
        ([b"\x1b[1mbold\x1b[0m\n[Gloo] Rank 0 is connected to 1", GLOO], "\x1b[1mbold\x1b[0m"),
        ([b"[Gloo] Rank 0 is lost\n"], "[Gloo] Rank 0 is lost"),
        ([b"\x1b[1mbold\x1b[0m \x1b[Kand \x1b[?25lhidden\n"], "\x1b[1mbold\x1b[0m and hidden"),
        ([b"a\nb\nc\x1b[2A\rA\nB"], "A\nB"),
        ([b"a\x1b[5A\rb\n"], "b"),
        ([b"a\nb\n\x1b[2J", b"c\n"], "c"),
        (
            [b"before\n", TQDM % (b"0%", b"0%", b"0%"), TQDM % (b"9%", b"50%", b"7%"), b"\n\n\nafter\n"],
            "before\n7%\n\n\nafter",
        ),
    ],
)
def test_lines(pieces: list[bytes], text: str) -> None:
    """The size of the pieces makes no difference."""
    assert finished(*pieces) == text
    data = b"".join(pieces)
    for cut in range(len(data)):
        assert finished(data[:cut], data[cut:]) == text
    assert finished(*(bytes([byte]) for byte in data)) == text


def test_many_lines_keep_the_first_and_the_last() -> None:
    lines = finished(b"".join(b"%d\n" % i for i in range(10_000))).splitlines()
    assert len(lines) == 2 * KEPT_LINES + 1
    assert lines[: KEPT_LINES + 2] == [*map(str, range(KEPT_LINES)), "... 8,000 lines left out ...", "9000"]
    assert lines[-1] == "9999"


def test_long_lines_are_cut_and_many_are_omitted() -> None:
    assert finished(b"x" * 10**6) == "x" * LINE_CHARACTERS + " ... (cut)"
    text = finished(*([b"y" * LINE_CHARACTERS + b"\n"] * 1000))
    assert len(text) < 2 * KEPT_CHARACTERS + 100
    assert "lines left out ..." in text


def test_an_endless_progress_bar_shows_its_last_state_in_bounded_memory() -> None:
    prints = Output(["r"])
    for i in range(100_000):
        prints.feed(0, b"\r%d of 100000 steps" % i)
    assert len(prints._ranks[0]._open) < 100
    assert prints.finish() == "[r] 99999 of 100000 steps"


def test_ranks_are_in_order_whoever_printed_first() -> None:
    prints = Output(["a", "b", "c"])
    prints.feed(2, b"c1\n")
    prints.feed(0, b"a1\na")
    prints.feed(2, b"c2\n")
    prints.feed(0, b"2\n")
    assert prints.finish() == "[a] a1\n[a] a2\n[c] c1\n[c] c2"


# A terminal shows lines as they arrive, a notebook a display that plain text replaces at the end


def test_in_a_terminal_lines_appear_when_they_are_complete(capsys: pytest.CaptureFixture[str]) -> None:
    prints = Output(["a", "b"])
    for rank, data, shown in (
        (1, b"first\nsec", "[b] first\n"), (0, b"other\n", "[a] other\n"), (1, b"ond\n", "[b] second\n"), (0, b"no end", ""),
    ):  # fmt: skip
        prints.feed(rank, data)
        assert capsys.readouterr().out == shown
    prints.finish()
    assert capsys.readouterr().out == "[a] no end\n"


def test_a_terminal_without_utf_8_shows_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    whole = Output(["rank 0"])
    whole.feed(0, "größe → 中文\n".encode())
    assert whole.finish() == "[rank 0] größe → 中文"
    assert terminal.buffer.getvalue() == rb"[rank 0] gr\xf6\xdfe \u2192 \u4e2d\u6587" + b"\n"


def test_bars_that_move_are_printed_once_in_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    prints = Output(["a"])
    for i in range(100):
        prints.feed(0, TQDM % (b"%d%%" % i, b"%d%%" % i, b"%d%%" % i))
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) <= 2, "what came before the cursor moved for the first time"
    prints.feed(0, b"\n\n\n" + b"".join(b"%d\n" % i for i in range(2 * HELD_LINES)))
    prints.finish()
    assert capsys.readouterr().out.splitlines() == ["[a] 99%", "[a] ", "[a] "] + [f"[a] {i}" for i in range(2 * HELD_LINES)]


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.processes
def test_a_program_without_standard_output_can_run(closed: bool, ranks: lab.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stdout", stream if closed else None)
    monkeypatch.setattr(sys, "stderr", stream if closed else None)
    ranks._announce("something")
    assert ranks.run(lambda: print("said", end="")).output == "[rank 0] said\n[rank 1] said"


@pytest.mark.processes
def test_a_stream_closed_by_a_run_works_again_in_the_next(ranks: lab.Group) -> None:
    def f() -> None:
        sys.stdout.close()
        sys.stderr.close()

    for _ in range(2):
        assert ranks.run(f).results == [None, None]
        assert ranks.run(lambda: print("said")).output == "[rank 0] said\n[rank 1] said"
        assert ranks.run(lambda: print("said", file=sys.stderr)).output == "[rank 0] said\n[rank 1] said"


@pytest.mark.processes
@pytest.mark.usefixtures("patient")
def test_a_rank_without_standard_output_answers(ranks: lab.Group) -> None:
    def f(closed: bool) -> None:
        import __main__

        __main__.streams = sys.stdout, sys.stderr  # type: ignore[attr-defined]
        stream = io.StringIO()
        stream.close()
        sys.stdout = sys.stderr = stream if closed else None  # type: ignore[assignment]
        with quiet_stderr():
            os.write(2, b"nobody reads this")

    def back() -> None:
        import __main__

        sys.stdout, sys.stderr = __main__.streams
        print("back")

    for closed in (True, False):
        try:
            assert ranks.run(f, closed).results == [None, None]
            assert ranks.run(int).results == [0, 0]
            with pytest.raises(lab.RankError, match="invalid literal"):
                ranks.run(int, "no")
        finally:
            assert ranks.run(back).output == "[rank 0] back\n[rank 1] back"


class Notebook:
    """Replaces IPython's display and the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        self.states: list[Any] = []
        self.displays = 0
        monkeypatch.setattr(output, "notebook_shell", lambda: types.SimpleNamespace(kernel=True))
        monkeypatch.setattr(output.time, "monotonic", lambda: self.now_s)
        fake = types.ModuleType("IPython.display")
        fake.display = self.display  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "IPython.display", fake)

    def display(self, data: Any, *, raw: bool, display_id: bool) -> Notebook:
        assert raw
        assert display_id
        self.displays += 1
        self.states.append(data)
        return self

    def update(self, data: Any, *, raw: bool) -> None:
        assert raw
        self.states.append(data)


def test_a_short_run_in_a_notebook_prints_once_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = Notebook(monkeypatch)
    prints = Output(["a", "b"])
    prints.feed(1, b"hello\n")
    notebook.now_s += LIVE_AFTER_S / 2
    prints.refresh()
    assert (notebook.states, capsys.readouterr().out) == ([], "")
    prints.finish()
    assert (notebook.states, capsys.readouterr().out) == ([], "[b] hello\n")


def test_a_long_run_in_a_notebook_shows_its_prints_while_it_lasts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = Notebook(monkeypatch)
    prints = Output(["a", "b"])
    notebook.now_s += 2 * LIVE_AFTER_S
    prints.refresh()
    assert notebook.states == [], "nothing printed, nothing shown"
    prints.feed(1, b"b waits")
    prints.refresh()
    assert notebook.states == [{}, {"text/plain": "[b] b waits"}], "also what has no end yet"
    prints.feed(0, b"a works\n")
    prints.refresh()
    assert len(notebook.states) == 2, "not at every print"
    notebook.now_s += 2 * LIVE_EVERY_S
    prints.refresh()
    prints.refresh()
    assert notebook.states[2:] == [{"text/plain": "[a] a works\n[b] b waits"}]
    prints.feed(0, b"".join(b"%d\n" % i for i in range(50)))
    notebook.now_s += 2 * LIVE_EVERY_S
    prints.refresh()
    shown = notebook.states[-1]["text/plain"].splitlines()
    assert shown == [f"[a] {i}" for i in range(50 - LIVE_LINES, 50)] + ["[b] b waits"]
    assert capsys.readouterr().out == ""
    prints.finish()
    assert notebook.states[-1] == {}, "the display gives way to text"
    assert notebook.displays == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed == ["[a] a works", *(f"[a] {i}" for i in range(50)), "[b] b waits"]


def test_a_run_that_prints_nothing_leaves_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    notebook = Notebook(monkeypatch)
    prints = Output(["a"])
    notebook.now_s += 10
    prints.refresh()
    assert prints.finish() == ""
    assert (notebook.states, capsys.readouterr().out) == ([], "")


def test_a_notice_in_a_notebook_is_no_part_of_the_cells_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """nbval compares the first state of a display, and what is printed."""
    notebook, notice = Notebook(monkeypatch), Notice()
    notice.clear()
    assert notebook.states == [], "nothing said, nothing shown"
    notice.show("takes long")
    assert notebook.states == [{}, {"text/plain": "takes long"}]
    notice.clear()
    assert notebook.states[2:] == [{}]
    assert capsys.readouterr() == ("", "")


def test_a_notice_in_a_terminal_does_not_mix_with_the_programs_output(capsys: pytest.CaptureFixture[str]) -> None:
    notice = Notice()
    notice.show("takes long")
    notice.clear()
    assert capsys.readouterr() == ("", "takes long\n")


# Names of cells


class Compiler:
    """That of IPython 7 with ipykernel 6: a cell's file is named by its text, and no table has the numbers."""

    def get_code_name(self, raw: str, _: str, __: int) -> str:
        return f"/tmp/ipykernel_7/{len(raw)}.py"


def test_a_cell_is_found_where_ipython_keeps_no_table_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    history = types.SimpleNamespace(input_hist_raw=["", "a", "ab", "x", "abc"])
    shell = types.SimpleNamespace(compile=Compiler(), history_manager=history)
    monkeypatch.setattr(output, "_shell", lambda: shell)
    labels = {length: output.cell_label(f"/tmp/ipykernel_7/{length}.py") for length in (1, 2, 4, 9)}
    assert labels == {1: "cell 3", 2: "cell 3", 4: "cell 4", 9: "9.py"}, "2: a cell of one letter that ends its line"
    assert output.cell_label("/elsewhere/2.py") == "2.py"


# Real ranks


@pytest.mark.processes
def test_everything_that_a_rank_prints_arrives(ranks: lab.Group, capsys: pytest.CaptureFixture[str]) -> None:
    def f() -> None:
        libc = ctypes.CDLL(None)
        print("from Python", 1, "µs", end=" ")
        print("to stderr", file=sys.stderr)
        os.write(1, b"from the system\n")
        libc.puts(b"from C, a line")
        libc.printf(b"from C, without end")
        libc.write(2, b"; C's stderr\n", 13)
        subprocess.run(["echo", "from a child"], check=True)
        sys.stdout.buffer.write(b"raw \xff bytes\n")
        sys.stdout.writelines(["several ", "writes\n"])
        print("a lone surrogate: \udcff")
        print("no end", end="")

    run = ranks[0].run(f)
    assert run.output.splitlines() == [
        "[rank 0] from Python 1 µs to stderr",
        "[rank 0] from the system",
        "[rank 0] from C, a line",
        "[rank 0] from C, without end; C's stderr",
        "[rank 0] from a child",
        "[rank 0] raw \ufffd bytes",
        "[rank 0] several writes",
        "[rank 0] a lone surrogate: \\udcff",
        "[rank 0] no end",
    ]
    assert capsys.readouterr().out == run.output + "\n"


@pytest.mark.processes
def test_an_unfinished_line_is_shown_while_the_rank_works(ranks: lab.Group, tmp_path: Path) -> None:
    """Also from C, which would buffer it."""

    def f(seen: Path) -> None:
        ctypes.CDLL(None).printf(b"C asks")
        print(", Python asks", end="")
        while not seen.exists():
            os.sched_yield()

    feed = Output.feed
    data = bytearray()

    def look(prints: Output, rank: int, piece: bytes) -> None:
        feed(prints, rank, piece)
        data.extend(piece)
        if b"C asks, Python asks" in data:
            (tmp_path / "seen").touch()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Output, "feed", look)
        assert ranks[1].run(f, tmp_path / "seen").output == "[rank 1] C asks, Python asks"


@pytest.mark.processes
def test_100_000_lines_of_each_rank(ranks: lab.Group, capsys: pytest.CaptureFixture[str]) -> None:
    def f() -> int:
        text = "".join(f"line {i}\n" for i in range(100_000))
        return sys.stdout.write(text)

    run = ranks.run(f)
    assert run.results[0] > 1 << 20, "more than any pipe holds"
    for name in ("rank 0", "rank 1"):
        mine = [line.removeprefix(f"[{name}] ") for line in run.output.splitlines() if line.startswith(f"[{name}]")]
        assert len(mine) == 2 * KEPT_LINES + 1
        assert (mine[0], mine[-1]) == ("line 0", "line 99999")
        assert mine[KEPT_LINES] == "... 98,000 lines left out ..."
    shown = capsys.readouterr().out
    assert shown.count("\n") == 200_000, "a terminal shows all of them"


@pytest.mark.processes
def test_a_rank_that_prints_and_never_stops_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Output, "_print", lambda *_: None)

    def f() -> None:
        while True:
            print("on and on")

    def goes_on(limit_s: float) -> bool:
        with lab.Group(2, runtime="bare", timeout_s=limit_s) as group:
            with pytest.raises(lab.LabError, match="f took longer than the group's timeout_s"):
                group.run(f)
            return group.run(int).results == [0, 0]

    assert some_limit_does(goes_on)


@pytest.mark.processes
def test_output_of_a_failed_run_is_shown(ranks: lab.Group, capsys: pytest.CaptureFixture[str]) -> None:
    def f() -> None:
        print("before the error", end="")
        raise ValueError("no")

    with pytest.raises(lab.RankError):
        ranks[1].run(f)
    assert capsys.readouterr().out == "[rank 1] before the error\n"


@pytest.mark.processes
def test_prints_of_a_thread_between_runs_are_not_lost(ranks: lab.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the pipe holds: the rest comes with the next runs, at whatever point it is read."""
    count, size = 1000, 5000

    def f() -> None:
        def work() -> None:
            for i in range(count):
                print(f"{i} ".ljust(size, "x"))

        import __main__

        __main__.worker = threading.Thread(target=work)  # type: ignore[attr-defined]
        __main__.worker.start()

    def g() -> None:
        import __main__

        __main__.worker.join()

    seen = bytearray()
    feed = Output.feed

    def look(prints: Output, rank: int, piece: bytes) -> None:
        feed(prints, rank, piece)
        seen.extend(piece)

    monkeypatch.setattr(Output, "feed", look)
    monkeypatch.setattr(Output, "_print", lambda *_: None)
    ranks[0].run(f)
    ranks[0].run(g)
    lines = bytes(seen).decode().splitlines()
    assert [int(line.split()[0]) for line in lines] == list(range(count))
    assert {len(line) for line in lines} == {size}
