"""Lesson 18: fewer bytes or fewer messages, error feedback, an int8 all-reduce, DiLoCo, and stale gradients."""

from __future__ import annotations

from tools.diagrams.kit import COMMUNICATION, COMPUTE, INK, OPTIMIZER, SHARES, SUM, Diagram, diagram

HIGH = 34.0


@diagram("18_less", 660, 226, "two ways to communicate less")
def less(picture: Diagram) -> None:
    """Three time lines of a rank, each with four steps. Every step: each step ends with an all-reduce. Compressed: each
    step ends with a shorter all-reduce. Local steps: four steps follow one another, then one full all-reduce. The two
    lower lines end earlier."""
    rows = (
        ("every step", ((40, 90),) * 4),
        ("compressed", ((40, 45),) * 4),
        ("local steps", ((40, 0), (40, 0), (40, 0), (40, 90))),
    )
    for number, (name, steps) in enumerate(rows):
        x, y = 120.0, 16 + 58 * number
        picture.text(106, y + HIGH / 2, name, anchor="end", bold=True)
        for compute, message in steps:
            picture.box(x, y, compute - 2, HIGH, "step", fill=COMPUTE, radius=2, size=12)
            if message:
                picture.box(x + compute - 2, y, message - 2, HIGH, "all-reduce" if message > 60 else "small",
                            fill=COMMUNICATION, radius=2, size=12)  # fmt: skip
            x += compute + message
    picture.line((120, 196), (640, 196))
    picture.text(640, 212, "time", anchor="end", size=13)


@diagram("18_feedback", 700, 214, "top-k with error feedback")
def feedback(picture: Diagram) -> None:
    """Rows of six numbers. The gradient, 5 1 -2 1 0 -6, plus what was kept back, 0 3 -2 1 -1 0, is 5 4 -4 2 -1 -6. The
    two largest magnitudes, 5 and -6, are sent with their places 0 and 5. The others, 4 -4 2 -1, are kept back for the
    next step."""
    rows = (
        ("gradient", (5, 1, -2, 1, 0, -6)),
        ("+ kept back", (0, 3, -2, 1, -1, 0)),
        ("= total", (5, 4, -4, 2, -1, -6)),
        ("kept back now", (0, 4, -4, 2, -1, 0)),
    )
    for number, (name, values) in enumerate(rows):
        y = 12 + 50 * number
        picture.text(136, y + HIGH / 2, name, anchor="end", bold=True)
        for place, value in enumerate(values):
            sent = number == 2 and place in (0, 5)
            fill = COMMUNICATION if sent else SUM if value else "none"
            picture.box(150 + 52 * place, y, 48, HIGH, str(value).replace("-", "−"), fill=fill, radius=2)
    picture.arrow((464, 129), (510, 129), color=COMMUNICATION)
    picture.text(518, 119, "sent: 5 at place 0", anchor="start", size=13, color=COMMUNICATION)
    picture.text(518, 139, "−6 at place 5", anchor="start", size=13, color=COMMUNICATION)
    picture.text(476, 179, "added in the next step", anchor="start", size=13)


@diagram("18_int8", 660, 246, "an all-reduce of int8 numbers in two phases")
def int8(picture: Diagram) -> None:
    """Three ranks with three pieces each. An all-to-all brings the first pieces of all ranks to rank 0, the second to
    rank 1, the third to rank 2. Each rank multiplies by the scales, takes the mean of its three pieces and quantises it
    again. An all-gather brings the three means to all ranks."""
    for x, text in ((140, "int8 numbers"), (320, "all-to-all"), (440, "mean"), (566, "all-gather")):
        picture.text(x, 14, text, size=13, bold=True)
    for rank in range(3):
        y = 34 + 70 * rank
        picture.text(66, y + HIGH / 2, f"rank {rank}", anchor="end", bold=True)
        for piece in range(3):
            picture.box(80 + 42 * piece, y, 38, HIGH, f"{rank}{'abc'[piece]}", fill=SHARES[piece], radius=2, size=13)
            picture.box(260 + 42 * piece, y, 38, HIGH, f"{piece}{'abc'[rank]}", fill=SHARES[rank], radius=2, size=13)
            picture.box(506 + 42 * piece, y, 38, HIGH, "abc"[piece], fill=SHARES[piece], radius=2, size=13)
        picture.box(420, y, 38, HIGH, "abc"[rank], fill=SHARES[rank], radius=2, size=13)
        for start, end in ((208, 254), (388, 416), (462, 502)):
            picture.arrow((start, y + HIGH / 2), (end, y + HIGH / 2), color=INK if start == 388 else COMMUNICATION)


@diagram("18_diloco", 660, 276, "DiLoCo: inner steps and an outer step")
def diloco(picture: Diagram) -> None:
    """From the shared weights, two ranks take inner steps in different directions, without messages. An all-reduce
    gives the mean of their differences from the shared weights, the outer gradient. The outer optimizer, which has a
    momentum, moves the shared weights, and both ranks go on from there."""
    picture.box(20, 94, 96, 44, "shared\nweights", fill=SUM)
    for y, rank, fill in ((40, 0, SHARES[0]), (176, 1, SHARES[1])):
        picture.arrow((116, 116), (176, y + 10), color=COMPUTE)
        for step in range(3):
            picture.box(182 + 52 * step, y, 48, HIGH, "step", fill=COMPUTE, radius=2, size=12)
        picture.text(256, y - 14, f"rank {rank}: inner steps, AdamW", size=13, color=fill)
        picture.arrow((340, y + HIGH / 2), (396, 116 + (-8 if rank == 0 else 8)), color=COMMUNICATION)
    picture.box(400, 94, 88, 44, "mean\ndifference", fill=COMMUNICATION, size=13)
    picture.arrow((488, 116), (516, 116))
    picture.box(520, 94, 120, 44, "outer step\nwith momentum", fill=OPTIMIZER, size=13)
    picture.line((580, 138), (580, 244), (68, 244), dashed=True)
    picture.arrow((68, 244), (68, 142), dashed=True)
    picture.text(330, 262, "both ranks go on from the new shared weights", size=13)


@diagram("18_stale", 600, 192, "an asynchronous server and a stale gradient")
def stale(picture: Diagram) -> None:
    """Time lines of a server and two workers, which both got version 1 of the weights. The server takes a step with the
    gradient of worker 1. When the gradient of worker 2 arrives, the server's weights are version 2: the gradient is one
    update old."""
    y_server = 20.0
    picture.text(84, y_server + HIGH / 2, "server", anchor="end", bold=True)
    for x, version in ((100, 1), (270, 2), (450, 3)):
        picture.box(x, y_server, 90, HIGH, f"version {version}", fill=SUM, radius=2, size=13)
    for worker, (start, end) in {1: (110, 270), 2: (130, 450)}.items():
        y = 36 + 48 * worker
        picture.text(84, y + HIGH / 2, f"worker {worker}", anchor="end", bold=True)
        picture.box(start, y, end - start - 30, HIGH, "of version 1", fill=COMPUTE, radius=2, size=12)
        picture.arrow((end - 30, y + HIGH / 2), (end + 12, y_server + HIGH), color=COMMUNICATION)
    picture.text(470, 149, "one update old", anchor="start", size=13, color=COMMUNICATION)
    picture.line((100, 178), (580, 178))
    picture.text(580, 166, "time", anchor="end", size=13)
