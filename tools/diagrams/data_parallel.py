"""Replicas, averaged gradients, buckets under the backward pass, nn.DataParallel, and the cost of a link."""

from __future__ import annotations

from tools.diagrams.kit import BACKWARD, COMMUNICATION, COMPUTE, FORWARD, OLIVE, OPTIMIZER, PINK, SHARES, SUM, Diagram, diagram


@diagram("02_replicas", 640, 240, "replicas")
def replicas(picture: Diagram) -> None:
    """A batch of 64 digits is divided: rank 0 gets 32 of them, rank 1 the other 32. Each rank has a whole copy of the
    model."""
    picture.text(80, 20, "batch: 64 digits", size=14, bold=True)
    for row in range(2):
        picture.box(30, 40 + row * 92, 100, 88, "32 digits", fill=SHARES[row], radius=3)
    for row in range(2):
        y = 34 + row * 104
        picture.box(250, y, 370, 92, radius=8)
        picture.text(266, y + 16, f"rank {row}", anchor="start", size=14, bold=True)
        for place, layer in enumerate(("conv1", "conv2", "fc1", "fc2")):
            picture.box(270 + place * 86, y + 34, 76, 40, layer, fill=PINK, size=13)
        picture.arrow((138, 84 + row * 92), (242, y + 54), color=COMMUNICATION)
    picture.text(435, 14, "the same weights on both", size=13)


@diagram("02_average", 700, 190, "averaging gradients")
def average(picture: Diagram) -> None:
    """Rank 0 has gradient g0 of its 32 digits, rank 1 has g1. After an all-reduce both have the sum g0 + g1. Divided by
    2 it is the gradient of all 64 digits."""
    for x, title in ((155, "after backward"), (375, "after all_reduce"), (595, "divided by p = 2")):
        picture.text(x, 16, title, size=14, bold=True)
    for row, (letter, colour) in enumerate((("g₀", SHARES[0]), ("g₁", SHARES[1]))):
        y = 42 + row * 76
        picture.text(52, y + 26, f"rank {row}", anchor="end", size=14)
        picture.box(90, y, 130, 52, f"{letter}\nof 32 digits", fill=colour)
        picture.box(310, y, 130, 52, "g₀ + g₁\nthe sum", fill=SUM)
        picture.box(530, y, 130, 52, "(g₀ + g₁) / 2\nof all 64 digits", fill=SUM, size=13)
        picture.arrow((448, y + 26), (522, y + 26))
    for start in (0, 1):
        for end in (0, 1):
            picture.arrow((228, 68 + start * 76), (302, 68 + end * 76), color=COMMUNICATION)


@diagram("02_buckets", 760, 236, "buckets and overlap")
def buckets(picture: Diagram) -> None:
    """A step of one rank, from left to right. Backward computes fc2, fc1, conv2 and conv1. The gradients of fc2 and fc1
    fill bucket 1; its all-reduce runs while backward computes conv2 and conv1. Bucket 2, with the gradients of conv2
    and conv1, is complete at the end of backward; nothing is left to compute beside its all-reduce. The optimizer
    follows."""
    top, height = 56.0, 46.0
    picture.text(14, 20, "compute", anchor="start", size=14, bold=True)
    bars = (("forward", 14, 130, FORWARD), ("fc2", 148, 60, BACKWARD), ("fc1", 212, 90, BACKWARD), ("conv2", 306, 160, BACKWARD))
    for text, x, width, fill in (*bars, ("conv1", 470, 90, BACKWARD), ("optimizer", 654, 92, OPTIMIZER)):
        picture.box(x, top, width, height, text, fill=fill, size=13, radius=3)
    picture.line((148, 44), (148, 38), (560, 38), (560, 44))
    picture.text(354, 24, "backward, from the last layer to the first", size=13)
    picture.text(14, 140, "communication", anchor="start", size=14, bold=True)
    picture.arrow((257, top + height + 4), (320, 162), "", color=COMMUNICATION)
    picture.arrow((515, top + height + 4), (570, 162), "", color=COMMUNICATION)
    picture.box(306, 166, 150, 40, "bucket 1: fc2, fc1", fill=COMMUNICATION, size=13, radius=3)
    picture.box(564, 166, 86, 40, "bucket 2", fill=COMMUNICATION, size=13, radius=3)
    picture.text(381, 222, "hidden behind backward", size=13)
    picture.text(607, 222, "exposed", size=13)


@diagram("02_nn_dataparallel", 700, 270, "nn.DataParallel")
def nn_dataparallel(picture: Diagram) -> None:
    """One process with four GPUs. In every forward pass GPU 0 sends the whole model and a part of the batch to GPUs 1
    to 3. Their outputs and gradients come back to GPU 0."""
    picture.box(8, 8, 684, 254, radius=10, dashed=True)
    picture.text(24, 28, "one process, one interpreter lock", anchor="start", size=13)
    picture.box(40, 98, 150, 84, "GPU 0\nmodel, all outputs,\nsum of gradients", fill=SHARES[0], size=13)
    for number in (1, 2, 3):
        y = 40 + (number - 1) * 74
        picture.box(530, y, 140, 60, f"GPU {number}\ncopy of the model", fill=SHARES[1], size=13)
        picture.arrow((198, 98 + number * 11), (522, y + 20), color=COMMUNICATION, bend=6)
        picture.arrow((522, y + 42), (198, 138 + number * 11), color=OLIVE, bend=6)
    picture.text(360, 54, "whole model, part of the batch", size=13, color=COMMUNICATION)
    picture.text(360, 234, "outputs, gradients", size=13, color=OLIVE)


@diagram("02b_link_cost", 620, 270, "what a message costs")
def link_cost(picture: Diagram) -> None:
    """Time of a message by its size n: a straight line that begins at the latency alpha for an empty message and rises
    by one second for every B bytes. Small messages cost the latency, large ones the bandwidth."""
    left, bottom = 90.0, 220.0
    picture.arrow((left, bottom), (left, 24))
    picture.arrow((left, bottom), (590, bottom))
    picture.text(left - 8, 14, "time", size=14, bold=True)
    picture.text(590, bottom + 20, "size n", anchor="end", size=14, bold=True)
    start, end = (left, 176.0), (560.0, 52.0)
    picture.line((left, 176), (560, 176), dashed=True)
    picture.line(start, end, color=COMMUNICATION, width=3)
    picture.arrow((left - 20, bottom), (left - 20, 176), color=OLIVE)
    picture.text(left - 32, 198, "α", anchor="end", size=18, bold=True, color=OLIVE)
    picture.arrow((560, 176), (560, 58), color=COMMUNICATION)
    picture.text(550, 120, "n / B", anchor="end", size=16, bold=True, color=COMMUNICATION)
    picture.text(200, 198, "small: mostly latency", size=13)
    picture.text(452, 198, "large: mostly bandwidth", size=13)
    picture.box(200, 44, 150, 36, "T = α + n / B", fill=COMMUNICATION, size=16, bold=True)


@diagram("02b_break_even", 700, 220, "when sharing pays")
def break_even(picture: Diagram) -> None:
    """Three bars. One process computes the whole batch. Two ranks compute half each, then an all-reduce follows: over a
    fast link the step is shorter than that of one process, over a slow link longer."""
    left, whole = 170.0, 330.0
    rows = (
        ("one process", whole, 0),
        ("two ranks, fast link", whole / 2 + 20, 70),
        ("two ranks, slow link", whole / 2 + 20, 300),
    )
    for number, (name, compute, communication) in enumerate(rows):
        y = 34 + number * 56
        picture.text(left - 8, y + 20, name, anchor="end", size=12)
        picture.box(left, y, compute, 40, "compute", fill=COMPUTE, radius=3)
        if communication:
            words = "all_reduce" if communication > 100 else "all-red."
            picture.box(left + compute + 2, y, communication, 40, words, fill=COMMUNICATION, size=13, radius=3)
    picture.line((left + whole, 20), (left + whole, 200), dashed=True)
    picture.text(left + whole, 10, "must end before this", size=13)
    picture.arrow((left, 208), (left + 300, 208))
    picture.text(left + 316, 208, "time", anchor="start", size=13)
