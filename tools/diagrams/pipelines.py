"""Pipelines: stages, schedules of micro-batches, a divided backward pass, and a deadlock of two sends."""

from __future__ import annotations

from typing import Final

from labkit.tracing.ideal_pipeline import schedule
from labkit.tracing.trace import Trace
from tools.diagrams.kit import BACKWARD, COMMUNICATION, FORWARD, GOLD, INK, VIOLET, Diagram, diagram

LATER: Final = GOLD  # around passes of a rank's second stage
ROW: Final = 36.0
BAR: Final = 26.0
LEFT: Final = 62.0


@diagram("05_stages", 790, 170, "four stages")
def stages(picture: Diagram) -> None:
    """Four ranks in a row, each with two of the eight blocks. An activation goes from each rank to the next; its
    gradient comes back. Images enter rank 0, and rank 3 computes the loss."""
    width, space, left, top = 116.0, 60.0, 78.0, 46.0
    for rank in range(4):
        x = left + rank * (width + space)
        picture.text(x + width / 2, top - 16, f"rank {rank}", size=13, bold=True)
        picture.box(x, top, width, 96)
        for number in range(2):
            picture.box(x + 10, top + 10 + number * 40, width - 20, 34, f"block {2 * rank + number}", fill=VIOLET, size=13)
        if rank < 3:
            picture.arrow((x + width + 4, top + 30), (x + width + space - 4, top + 30), color=COMMUNICATION)
            picture.arrow((x + width + space - 4, top + 66), (x + width + 4, top + 66), color=COMMUNICATION, dashed=True)
    picture.arrow((14, top + 30), (left - 4, top + 30), "images", color=INK, size=12)
    picture.text(left + 4 * width + 3 * space + 4, top + 48, "loss", anchor="start", size=13)
    picture.text(left, top + 112, "solid: activation, dashed: its gradient", anchor="start", size=12)


def _timetable(picture: Diagram, trace: Trace, unit: float) -> None:
    """Draw a row for each rank, a box for each pass; `unit` is the width of a second in pixels."""
    ranks = len(trace.ranks)
    for rank in range(ranks):
        y = 14 + rank * ROW
        picture.text(LEFT - 10, y + BAR / 2, f"rank {rank}", anchor="end", size=13)
        picture.line((LEFT, y + BAR + 5), (LEFT + unit * trace.duration_ns / 1e9, y + BAR + 5), width=0.6)
        for span in sorted(trace.filter(rank=rank, kind="compute"), key=lambda span: span.start_ns):
            x, long = LEFT + unit * span.start_ns / 1e9, unit * span.duration_ns / 1e9
            way, number, *of_stage = span.name.split()
            forward, second = way == "forward", bool(of_stage) and int(of_stage[-1]) >= ranks
            picture.box(
                x + 0.75, y, long - 1.5, BAR, number, fill=FORWARD if forward else BACKWARD,
                outline=LATER if second else "", bold=second, size=11, radius=2,
            )  # fmt: skip
    y = 24 + ranks * ROW
    several = any(" of stage" in span.name for span in trace.filter(kind="compute"))
    legend = [(FORWARD, "forward", False), (BACKWARD, "backward", False)]
    if several:
        legend = [
            (fill, f"{way}, stages {4 * second}-{4 * second + 3}", second) for fill, way, _ in legend for second in (False, True)
        ]
    x = LEFT
    for fill, words, second in legend:
        picture.box(x, y, 14, 14, fill=fill, outline=LATER if second else "", radius=2)
        picture.text(x + 20, y + 7, words, anchor="start", size=12)
        x += 20 + 8.2 * len(words) + 14


@diagram("05_one_batch", 698, 206, "one batch in one piece")
def one_batch(picture: Diagram) -> None:
    """One batch passes through four ranks forward and back. At any time one rank works and three are idle."""
    _timetable(picture, schedule("gpipe", stages=4, micro_batches=1), 52)


@diagram("05_gpipe", 767, 206, "GPipe")
def gpipe(picture: Diagram) -> None:
    """GPipe with four ranks and four micro-batches: a staircase of forward passes, then a staircase of backward passes.
    The corners are idle."""
    _timetable(picture, schedule("gpipe", stages=4, micro_batches=4), 33)


@diagram("05_1f1b", 767, 206, "1F1B")
def alternating(picture: Diagram) -> None:
    """1F1B with four ranks and eight micro-batches: rank 0 runs four forward passes, then backward and forward passes
    in turn; rank 3 alternates from the start."""
    _timetable(picture, schedule("1f1b", stages=4, micro_batches=8), 21)


@diagram("05_interleaved", 820, 206, "interleaved 1F1B")
def interleaved(picture: Diagram) -> None:
    """Interleaved 1F1B with four ranks, two stages on each and four micro-batches: rank 0 has the stages 0 and 4, rank
    3 the stages 3 and 7."""
    _timetable(picture, schedule("interleaved 1f1b", stages=8, ranks=4, micro_batches=4), 22)


@diagram("05_zero_bubble", 640, 150, "a backward pass in two parts")
def zero_bubble(picture: Diagram) -> None:
    """A backward pass is divided. The gradient of the input comes first, because the previous rank waits for it. The
    gradient of the weights comes later, in a slot that would be idle."""
    picture.text(14, 20, "usual", anchor="start", size=13, bold=True)
    picture.box(110, 8, 220, 28, "backward 3", fill=BACKWARD)
    picture.arrow((332, 22), (420, 22), color=COMMUNICATION)
    picture.text(428, 22, "to the previous rank", anchor="start", size=13)
    picture.text(14, 82, "divided", anchor="start", size=13, bold=True)
    picture.box(110, 68, 108, 28, "input", fill=BACKWARD)
    picture.arrow((164, 98), (164, 134), color=COMMUNICATION)
    picture.text(176, 122, "to the previous rank, sooner", anchor="start", size=13)
    picture.box(226, 68, 130, 28, "other passes", dashed=True, size=13)
    picture.box(364, 68, 108, 28, "weights", fill=BACKWARD)
    picture.text(482, 82, "when there is time", anchor="start", size=13)


@diagram("05_deadlock", 640, 120, "two sends, no receive")
def deadlock(picture: Diagram) -> None:
    """Rank 0 sends an activation to rank 1, and rank 1 sends a gradient to rank 0. Both wait in send; the recv that
    each of them needs comes only afterwards."""
    for rank, y, tensor in ((0, 10, "activation"), (1, 72, "gradient")):
        picture.text(14, y + 18, f"rank {rank}", anchor="start", size=13, bold=True)
        picture.box(80, y, 190, 36, f"send the {tensor}", fill=COMMUNICATION, size=13)
        picture.box(330, y, 190, 36, f"recv the {'gradient' if rank == 0 else 'activation'}", dashed=True, size=13)
        picture.text(532, y + 18, "never reached", anchor="start", size=13)
    picture.arrow((140, 48), (140, 70), color=COMMUNICATION)
    picture.arrow((210, 70), (210, 48), color=COMMUNICATION)
