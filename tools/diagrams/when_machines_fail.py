"""Lesson 17: what a failure costs, the best interval, a file that is replaced, shards for another number of ranks."""

from __future__ import annotations

from math import sqrt

from tools.diagrams.kit import COMMUNICATION, COMPUTE, GOLD, INK, OLIVE, PINK, STRIPES, SUM, VIOLET, Diagram, diagram

HIGH = 40.0


@diagram("17_lost", 700, 200, "what a failure costs")
def lost(picture: Diagram) -> None:
    """A training over time: steps, a save, steps, a save, and steps that a failure ends. Then nothing runs until new
    ranks have started. They load the last checkpoint, and compute the steps after it again."""
    y, bars = 50.0, (
        (0, 90, "steps", COMPUTE), (90, 26, "", OLIVE), (116, 90, "steps", COMPUTE), (206, 26, "", OLIVE),
        (232, 70, "lost", STRIPES), (382, 70, "again", COMPUTE), (452, 70, "steps", COMPUTE), (522, 26, "", OLIVE),
    )  # fmt: skip
    for start, width, text, fill in bars:
        picture.box(60 + start, y, width, HIGH, text, fill=fill, radius=2)
    picture.line((362, 36), (362, 104), color=COMMUNICATION, width=3)
    picture.text(362, 22, "a rank dies", bold=True)
    picture.box(364, y, 76, HIGH, "restart", dashed=True, radius=2, size=13)
    picture.arrow((279, 94), (444, 94), color=INK, bend=-24)
    picture.text(362, 134, "new ranks load the last checkpoint", size=13)
    picture.box(60, 160, 22, 16, fill=OLIVE, radius=2)
    picture.text(90, 168, "save", anchor="start", size=13)
    picture.line((150, 168), (610, 168))
    picture.text(620, 168, "time", anchor="start", size=13)


@diagram("17_interval", 640, 270, "the best interval between checkpoints")
def interval(picture: Diagram) -> None:
    """Two curves over the interval between checkpoints. The time for saving falls, the time for computing again rises.
    Their sum is lowest where they cross."""
    left, bottom, wide, tall = 70.0, 220.0, 420.0, 180.0

    def curve(share: tuple[float, float]) -> list[tuple[float, float]]:
        """Points of a/x + b·x in the picture."""
        a, b = share
        points = []
        for number in range(12, 101):
            x = number / 100
            points.append((left + x * wide, bottom - min(a / x + b * x, 1.0) * tall))
        return points

    save, again = 0.1, 0.4
    best = sqrt(save / again)
    picture.line((left, 24), (left, bottom), (left + wide + 20, bottom))
    picture.line(*curve((save, 0)), color=OLIVE, width=3)
    picture.line(*curve((0, again)), color=PINK, width=3)
    picture.line(*curve((save, again)), color=INK, width=3)
    x = left + best * wide
    picture.line((x, bottom), (x, bottom - 2 * sqrt(save * again) * tall), dashed=True)
    picture.text(x, bottom + 16, "best interval: both are equal", size=13, bold=True)
    picture.text(left + wide + 8, bottom - save * tall, "saving", anchor="start", size=13, color=OLIVE)
    picture.text(left + wide + 8, bottom - again * tall, "computing again", anchor="start", size=13, color=PINK)
    picture.text(left + wide + 8, bottom - (save + again) * tall - 6, "lost in all", anchor="start", size=13, bold=True)
    picture.text(left + 4, 12, "share of the time that is lost", anchor="start", size=13)
    picture.text(left + wide + 30, bottom + 16, "interval", size=13)


@diagram("17_reshard", 660, 210, "the same files for another number of ranks")
def reshard(picture: Diagram) -> None:
    """Four ranks each write a quarter of a tensor into a file of its own; a file .metadata says what is where. Two
    ranks, of which each needs a half, read two files each."""
    colours = (VIOLET, GOLD, OLIVE, PINK)
    for rank, fill in enumerate(colours):
        y = 20 + 44 * rank
        picture.text(70, y + 16, f"rank {rank}", anchor="end", bold=True)
        picture.box(80, y, 60, 32, "¼", fill=fill)
        picture.arrow((144, y + 16), (232, y + 16))
        picture.box(236, y, 130, 32, f"__{rank}_0.distcp", fill=fill, size=13)
    for rank in range(2):
        y = 20 + 88 * rank
        for part in range(2):
            picture.box(470, y + 44 * part, 60, 38, "¼", fill=colours[2 * rank + part], radius=2)
            picture.arrow((370, y + 16 + 44 * part), (466, y + 19 + 44 * part))
        picture.text(545, y + 41, f"rank {rank} of 2", anchor="start", bold=True)
    picture.text(301, 200, ".metadata: which part is in which file", size=13)


@diagram("17_write", 680, 170, "replacing a file safely")
def write(picture: Diagram) -> None:
    """Three steps from left to right: write the new content into another file; flush and fsync, until it is on the
    disk; rename it. Below: until the rename the name stands for the old content, after it for the new one."""
    steps = ("write into\na new file", "flush, fsync:\non the disk", "os.replace")
    for number, text in enumerate(steps):
        picture.box(40 + 210 * number, 20, 150, 54, text)
        if number:
            picture.arrow((194 + 210 * (number - 1), 47), (246 + 210 * (number - 1), 47))
    picture.box(40, 104, 420, 30, "the name stands for the old content", fill=SUM, radius=2)
    picture.box(462, 104, 150, 30, "the new one", fill=GOLD, radius=2)
    picture.line((40, 152), (612, 152))
    picture.text(622, 152, "time", anchor="start", size=13)
