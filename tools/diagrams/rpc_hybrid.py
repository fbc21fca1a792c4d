"""Lesson 08: who holds what in the RPC hybrid, two halves one by one and overlapped, gradients, a text classifier."""

from __future__ import annotations

from tools.diagrams.kit import COMMUNICATION, GOLD, INK, OLIVE, PINK, VIOLET, Diagram, diagram


@diagram("08_hybrid", 740, 230, "the RPC hybrid")
def hybrid(picture: Diagram) -> None:
    """Three processes. The master has the images, the labels and the training loop. Worker1 has NetShard1, the
    convolutions, on one device. Worker2 has NetShard2 on two devices: linear and ReLU on the first, linear on the
    second. Images go from the master to worker1, features from worker1 to worker2, scores from worker2 to the
    master."""
    for x, width, title in ((10, 160, "master"), (270, 150, "worker1: NetShard1"), (520, 210, "worker2: NetShard2")):
        picture.box(x, 40, width, 130)
        picture.text(x + width / 2, 24, title, bold=True)
    picture.box(25, 66, 130, 78, "images, labels,\nloss,\ntraining loop", fill=VIOLET, size=13)
    picture.box(290, 60, 110, 90, "device:\nconvolutions", fill=OLIVE, size=13)
    picture.box(532, 60, 88, 90, "device 1:\nlinear, ReLU", fill=GOLD, size=13)
    picture.box(630, 60, 88, 90, "device 2:\nlinear", fill=PINK, size=13)
    picture.arrow((174, 105), (266, 105), "images", color=COMMUNICATION)
    picture.arrow((424, 105), (516, 105), "features", color=COMMUNICATION)
    picture.line((625, 172), (625, 204), (90, 204), color=COMMUNICATION, width=2)
    picture.arrow((90, 204), (90, 174), color=COMMUNICATION)
    picture.text(345, 190, "scores", color=COMMUNICATION, size=13)


@diagram("08_overlap", 740, 340, "two halves of a batch, one by one and overlapped")
def overlap(picture: Diagram) -> None:
    """Two time diagrams with four rows each: the link to worker1, worker1, the link to worker2, worker2. One by one,
    the second half of the batch starts when the first has passed all four. Overlapped, each row takes the second half
    as soon as it has passed the first on, so the second half ends later by only the longest of the four times."""
    lanes = ("link to worker1", "worker1", "link to worker2", "worker2")
    lengths = (90, 60, 96, 22)
    for top, title, overlapped in ((14, "one by one", False), (178, "overlapped", True)):
        picture.text(140, top, title, anchor="start", bold=True)
        for row, lane in enumerate(lanes):
            picture.text(128, top + 34 + 32 * row, lane, anchor="end", size=13)
            picture.line((140, top + 49 + 32 * row), (730, top + 49 + 32 * row), width=1)
        free = [0.0] * 4
        last = 0.0
        for half, color in ((1, VIOLET), (2, GOLD)):
            now = 0.0 if overlapped else last
            for row, length in enumerate(lengths):
                now = max(now, free[row])
                picture.box(140 + now, top + 21 + 32 * row, length, 26, str(half), fill=color, size=13)
                now += length
                free[row] = now
            last = now
    picture.text(730, 14, "time →", anchor="end", size=12)


@diagram("08_backward", 740, 250, "gradients across processes")
def backward(picture: Diagram) -> None:
    """Master, worker1 and worker2 in a row. On top, the forward pass: images, features, and scores back to the master.
    In the middle, the backward pass: the gradient of the scores goes from the master to worker2, that of the features
    from worker2 to worker1. Each worker keeps the gradients of its parameters in the context. Below, the optimizer's
    step runs on each worker."""
    for x, title in ((10, "master"), (280, "worker1"), (550, "worker2")):
        picture.box(x, 36, 180, 160)
        picture.text(x + 90, 20, title, bold=True)
    for x in (280, 550):
        picture.box(x + 14, 46, 152, 32, "parameters", fill=OLIVE)
        picture.box(x + 14, 116, 152, 44, "context:\ntheir gradients", fill=GOLD, size=13)
        picture.arrow((x + 90, 114), (x + 90, 80), "step", color=INK)
    picture.box(24, 46, 152, 32, "loss", fill=VIOLET)
    picture.box(24, 116, 152, 44, "context:\nwhat went where", fill=GOLD, size=13)
    picture.arrow((192, 62), (278, 62), "images", color=COMMUNICATION)
    picture.arrow((462, 62), (548, 62), "features", color=COMMUNICATION)
    picture.arrow((548, 138), (462, 138), "gradients", color=PINK)
    picture.line((100, 198), (100, 228), (640, 228), color=PINK, width=2)
    picture.arrow((640, 228), (640, 200), color=PINK)
    picture.text(360, 215, "gradient of the scores", color=PINK, size=13)


@diagram("08_text", 740, 190, "a text classifier on three processes")
def text(picture: Diagram) -> None:
    """The master is in the middle. It sends word numbers to worker1, whose embedding returns a vector for each word.
    The GRU on the master reads the vectors. The master sends the state after the last word to worker2, whose linear
    layer returns four scores."""
    parts = (
        (10, "worker1", "embedding:\na vector for\neach word", OLIVE),
        (290, "master", "GRU: reads the\nvectors, word\nby word", VIOLET),
        (570, "worker2", "output: a linear\nlayer, 64 → 4", PINK),
    )
    for x, title, part, color in parts:
        picture.box(x, 40, 160, 130)
        picture.text(x + 80, 24, title, bold=True)
        picture.box(x + 15, 60, 130, 90, part, fill=color, size=13)
    picture.arrow((286, 80), (174, 80), "word numbers", color=COMMUNICATION)
    picture.arrow((174, 132), (286, 132), "vectors", color=COMMUNICATION)
    picture.arrow((454, 80), (566, 80), "last state", color=COMMUNICATION)
    picture.arrow((566, 132), (454, 132), "scores", color=COMMUNICATION)
