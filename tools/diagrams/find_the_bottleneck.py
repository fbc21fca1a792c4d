"""Lesson 13: the critical path of a step of two ranks, and slowing everything else down in place of a speed-up."""

from __future__ import annotations

from tools.diagrams.kit import BACKWARD, COMMUNICATION, COMPUTE, FORWARD, INK, OPTIMIZER, STRIPES, Diagram, diagram

HIGH = 40.0


@diagram("13_path", 640, 226, "the critical path of a step")
def path(picture: Diagram) -> None:
    """Two ranks. Rank 0 runs forward and backward quickly, and waits in an all-reduce. Rank 1 takes longer. When it
    arrives, the all-reduce is carried out, then each rank's optimizer runs. A line marks what the end of the step had
    to wait for: forward and backward of rank 1, the all-reduce, and the optimizer of rank 0. What rank 0 did before is
    not on it."""
    rows = (
        (40.0, "rank 0", ((0, 70, "forward", FORWARD), (70, 90, "backward", BACKWARD), (160, 120, "waits", STRIPES))),
        (120.0, "rank 1", ((0, 120, "forward", FORWARD), (120, 160, "backward", BACKWARD))),
    )
    for y, name, bars in rows:
        picture.text(70, y + HIGH / 2, name, anchor="end", bold=True)
        for start, length, text, fill in bars:
            picture.box(90 + start, y, length, HIGH, text, fill=fill, radius=2)
        picture.box(370, y, 130, HIGH, "all-reduce", fill=COMMUNICATION, radius=2)
    picture.box(500, 40, 70, HIGH, "optimizer", fill=OPTIMIZER, radius=2, size=12)
    picture.box(500, 120, 50, HIGH, "opt.", fill=OPTIMIZER, radius=2, size=12)
    picture.line((90, 170), (370, 170), (370, 30), (570, 30), color=INK, width=4)
    picture.text(230, 190, "the step's end had to wait for this line", size=13)
    picture.text(540, 16, "critical path", size=13, bold=True)
    picture.line((90, 206), (570, 206))
    picture.text(580, 206, "time", anchor="start", size=13)


@diagram("13_slowed", 640, 216, "a virtual speed-up")
def slowed(picture: Diagram) -> None:
    """Above, a step of a phase A and a phase B. In the middle, A is twice as fast and the step is shorter. Below, B is
    twice as slow instead. Its step is exactly twice as long as that in the middle."""
    rows = (("as it is", 120, 160), ("A twice as fast", 60, 160), ("B twice as slow", 120, 320))
    for number, (name, a, b) in enumerate(rows):
        y = 20 + 64 * number
        picture.text(130, y + HIGH / 2, name, anchor="end", bold=True)
        picture.box(146, y, a, HIGH, "A", fill=COMPUTE, radius=2)
        picture.box(146 + a, y, b, HIGH, "B", fill=COMMUNICATION, radius=2)
    picture.text(374, 104, "half of the step below", anchor="start", size=13)
    picture.line((146, 204), (586, 204))
    picture.text(594, 204, "time", anchor="start", size=13)
