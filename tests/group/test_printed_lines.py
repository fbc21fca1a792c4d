r"""Bars of tqdm that move the cursor share one line; other movements of the cursor are dropped.

The bytes of tqdm are those that tqdm 4.70 wrote with `bar_format="{desc}{percentage:.0f}%"`, for two steps.
"""

from __future__ import annotations

import pytest

from labkit.group.printed_lines import HELD_LINES, Lines

UP = b"\x1b[A"
RANK_2 = (b"\n\n\r0%" + 2 * UP, b"\n\n\r50%" + 2 * UP, b"\n\n\r100%" + 2 * UP)  # position=2
CLEARED = b"\n\n\r    " + 2 * UP  # its close() with leave=False
NESTED = b"\rout0%%\n%b\rout50%%\n%b\rout100%%\rout100%%\n"
INNER = b"\rin0%\x1b[A\n\rin50%\x1b[A\n\rin100%\x1b[A"
SEVERAL = (  # position=0, 1 and 2 in one process
    b"\rb00%\n\rb10%\x1b[A\n\n\rb20%\x1b[A\x1b[A\rb050%\n\rb150%\x1b[A\n\n\rb250%\x1b[A\x1b[A\rb0100%\n\rb1100%\x1b[A"
    b"\n\n\rb2100%\x1b[A\x1b[A"
)
WRITE = (  # tqdm.write with a bar of position=2
    b"\n\n\r0%\x1b[A\x1b[A\n\n\r  \r\x1b[A\x1b[Aw0\n\n\n\r0%\x1b[A\x1b[A\n\n\r50%\x1b[A\x1b[A\n\n\r   \r\x1b[A\x1b[Aw1\n\n\n"
    b"\r50%\x1b[A\x1b[A\n\n\r100%\x1b[A\x1b[A\r100%\n"
)
PRINT = b"\n\n\r0%\x1b[A\x1b[Ap0\n\n\n\r50%\x1b[A\x1b[Ap1\n\n\n\r100%\x1b[A\x1b[A\r100%\n"


def final(*pieces: bytes) -> list[str]:
    """What stays of these bytes of a rank."""
    lines = Lines()
    for piece in pieces:
        lines.feed(piece)
    lines.finish()
    return lines.shown()


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"\r0%\r50%\r100%\r100%\n", ["100%"]),
        (b"\r0%\r50%\r100%\r    \r", []),
        (b"\n\r0%\x1b[A\n\r50%\x1b[A\n\r100%\x1b[A\r100%\n", ["100%"]),
        (b"\n\r0%\x1b[A\r100%\n", ["100%"]),
        (b"".join(RANK_2) + b"\r100%\n", ["100%"]),
        (b"".join(RANK_2) + b"\r100%\nafter\n\nend", ["100%", "after", "", "end"]),
        ((b"".join(RANK_2) + b"\r100%\n") * 3, ["100%"] * 3),
        (b"before\n\n" + b"".join(RANK_2) + CLEARED, ["before", ""]),
        (b"before\n" + RANK_2[0] + RANK_2[1], ["before", "50%"]),
        (NESTED % (INNER + b"\rin100%\n", INNER + b"\rin100%\n"), ["in100%", "in100%", "out100%"]),
        (NESTED % (INNER + b"\n\r      \x1b[A", INNER + b"\n\r      \x1b[A"), ["out100%"]),
        (SEVERAL, ["b2100%"]),
        (SEVERAL + b"\rb0100%\n\rb1100%\n\rb2100%\nafter\n", ["b0100%", "b1100%", "b2100%", "after"]),
        (WRITE, ["w0", "w1", "100%"]),
        (PRINT, ["p0", "p1", "100%"]),
    ],
)
def test_a_bar_is_one_line(data: bytes, lines: list[str]) -> None:
    assert final(data) == lines
    for cut in range(len(data)):
        assert final(data[:cut], data[cut:]) == lines
    assert final(*(bytes([byte]) for byte in data)) == lines


def test_a_bar_that_works_has_no_empty_and_no_old_lines_around_it() -> None:
    lines = Lines()
    for _ in range(3):  # epochs
        for bar, text in zip(RANK_2, ("0%", "50%", "100%"), strict=True):
            lines.feed(bar)
            assert lines.shown(1 + HELD_LINES)[-1] == text
        lines.feed(b"\r100%\n")
    lines.feed(RANK_2[0])
    assert lines.shown(HELD_LINES) == ["100%", "100%", "100%", "0%"]


def test_the_way_down_to_a_bar_is_not_given_to_a_terminal() -> None:
    lines = Lines()
    given = [line for piece in (b"first\n", b"\n\n", b"\r0%", 2 * UP, b"\r0%\n") for line in lines.feed(piece)]
    assert given + lines.finish() == ["first", "0%"]


def test_lines_after_bars_are_given_once_and_held_lines_are_few() -> None:
    lines = Lines()
    given = [line for piece in (*RANK_2, b"\r100%\n") for line in lines.feed(piece)]
    given += lines.feed(b"".join(b"%d\n" % i for i in range(100)))
    assert given == ["100%", *map(str, range(99 - HELD_LINES + 1))]
    assert given + lines.finish() == ["100%", *map(str, range(100))]


def test_two_ends_of_a_bar_keep_it() -> None:
    assert final(b"100%\r", b"\r", b"\n") == ["100%"]


def test_the_progress_bar_of_pytorch_cifar_keeps_loss_and_accuracy() -> None:
    """It goes back by 90 `\b` to write the number of the step over the bar."""
    bars = [f" [{'=' * 65}]  Step: 1ms | Tot: 2s | Loss: {loss}".encode() + b"\b" * 90 for loss in (2.303, 0.5)]
    assert final(bars[0] + b" 1/2 \r", bars[1] + b" 2/2 \n") == [f" [{'=' * 65}]  Step: 1ms | Tot: 2s | Loss: 0.5 2/2 "]


RED, OFF = "\x1b[31m", "\x1b[0m"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("|\b/\b-\b", "-"),
        ("abcdef\x1b[2DX\x1b[3CY\x1b[1G", "abcdefXY"),
        (f"{RED}abc{OFF}", f"{RED}abc{OFF}"),
        ("a\x1b[?3Cb\x1b[1;5Dc", "abc"),
        (f"a\x1b[{'9' * 5000}Ab\x1b[{'9' * 5000}Jc", "abc"),
        ("loss\tacc", "loss    acc"),
        ("0.12345\t0.5", "0.12345 0.5"),
        ("10%\r1\t2", "1       2"),
        ("first\nsecond\n\x1b[A\x1b[Anew", "new"),
    ],
)
def test_colours_stay_tabs_are_columns_and_other_escapes_are_dropped(text: str, line: str) -> None:
    assert final(text.encode()) == [line]
