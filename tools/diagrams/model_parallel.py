"""Model parallel: the cut, what crosses it, one training step on two ranks, and evaluation in which both work."""

from __future__ import annotations

from typing import Final

from tools.diagrams.kit import BACKWARD, COMMUNICATION, FORWARD, INK, OLIVE, PINK, VIOLET, Diagram, diagram

LAYERS: Final = ("conv1", "pool1", "relu1", "conv2", "pool2", "relu2", "flatten", "fc1", "relu3", "fc2")


@diagram("04_cut", 908, 168, "a chain of ten layers, cut")
def cut(picture: Diagram) -> None:
    """The ten layers in a chain. Rank 0 has conv1 to flatten, rank 1 has fc1, relu3 and fc2. The activation goes from
    rank 0 to rank 1, its gradient comes back. Images enter rank 0; rank 1 computes the loss."""
    width, space, gap, top = 58.0, 10.0, 112.0, 44.0
    x = 78.0
    for rank, layers in enumerate((LAYERS[:7], LAYERS[7:])):
        whole = len(layers) * width + (len(layers) - 1) * space + 20
        picture.box(x, top, whole, 74)
        picture.text(x + whole / 2, top - 16, f"rank {rank}", size=13, bold=True)
        for number, name in enumerate(layers):
            left = x + 10 + number * (width + space)
            picture.box(left, top + 20, width, 34, name, fill=VIOLET if rank == 0 else OLIVE, size=13)
            if number:
                picture.line((left - space + 1, top + 37), (left - 1, top + 37))
        if rank == 0:
            picture.arrow((14, top + 37), (x - 4, top + 37), "images", size=12)
            end = x + whole
            picture.arrow((end + 4, top + 22), (end + gap - 4, top + 22), "activation", color=COMMUNICATION)
            picture.arrow((end + gap - 4, top + 58), (end + 4, top + 58), "gradient", color=COMMUNICATION, dashed=True)
            picture.line((end + gap / 2, top - 30), (end + gap / 2, top - 6), dashed=True)
            picture.line((end + gap / 2, top + 72), (end + gap / 2, top + 92), dashed=True)
            picture.text(end + gap / 2, top + 106, "the cut", size=13)
            x = end + gap


@diagram("04_autograd", 760, 170, "two graphs, two messages")
def autograd(picture: Diagram) -> None:
    """Rank 0's graph ends at the activation, which is detached and sent. Rank 1's graph begins at what it receives,
    which requires a gradient, and ends at the loss. That gradient is sent back; rank 0's backward pass starts from
    it."""
    for x, words, fill in ((14.0, "rank 0", VIOLET), (456.0, "rank 1", OLIVE)):
        picture.box(x, 34, 290, 120)
        picture.text(x + 145, 18, words, size=13, bold=True)
        own = ["stage(x)", "activation"] if fill == VIOLET else ["activation", "stage, loss"]
        for number, text in enumerate(own):
            picture.box(x + 14 + number * 146, 48, 116, 34, text, fill=fill if text != "activation" else PINK, size=13)
        picture.line((x + 131, 65), (x + 159, 65))
        mine = ["backward(gradient)", "gradient"] if fill == VIOLET else ["activation.grad", "backward()"]
        for number, text in enumerate(mine):
            picture.box(x + 8 + number * 142, 106, 132, 34, text, size=12)
        picture.arrow((x + 149, 123), (x + 142, 123))
    picture.arrow((292, 65), (468, 65), color=COMMUNICATION)
    picture.text(380, 54, "detach, send", size=13, color=COMMUNICATION)
    picture.text(380, 77, "recv, requires_grad_", size=11, color=COMMUNICATION)
    picture.arrow((462, 123), (298, 123), color=COMMUNICATION, dashed=True)
    picture.text(380, 112, "its gradient", size=13, color=COMMUNICATION)


@diagram("04_step", 700, 156, "one training step")
def step(picture: Diagram) -> None:
    """One training step. Rank 0 computes its forward pass, then rank 1 its forward and backward pass, then rank 0 its
    backward pass. Each is idle while the other computes."""
    left, top, row, bar, unit = 74.0, 10.0, 50.0, 30.0, 42.0
    for rank in range(2):
        picture.text(left - 12, top + rank * row + bar / 2, f"rank {rank}", anchor="end", size=13)
    for rank, start, length, words, fill in (
        (0, 0.0, 3.0, "forward", FORWARD),
        (1, 3.5, 1.5, "forward", FORWARD),
        (1, 5.0, 3.0, "backward", BACKWARD),
        (0, 8.5, 5.5, "backward", BACKWARD),
    ):
        picture.box(left + unit * start, top + rank * row, unit * length - 2, bar, words, fill=fill, size=13, radius=2)
    for rank, start, length in ((0, 3.5, 4.5), (1, 0.0, 3.0), (1, 8.5, 5.5)):
        picture.box(left + unit * start, top + rank * row, unit * length - 2, bar, "idle", dashed=True, size=13, radius=2)
    for x, way in ((3.0, 1), (8.0, -1)):
        ends = [(left + unit * x, top + bar / 2), (left + unit * (x + 0.5) - 4, top + row + bar / 2)]
        if way < 0:
            ends = [(left + unit * x, top + row + bar / 2), (left + unit * (x + 0.5) - 4, top + bar / 2)]
        picture.arrow(ends[0], ends[1], color=COMMUNICATION)
    y = top + 2 * row + 14
    for x, length, words in ((0.0, 3.0, "T₀, first part"), (3.5, 4.5, "T₁"), (8.5, 5.5, "T₀, second part")):
        picture.line((left + unit * x, y - 14), (left + unit * (x + length) - 2, y - 14))
        picture.text(left + unit * (x + length / 2), y, words, size=13)
    picture.text(left + unit * 7, y + 24, "a step takes T₀ + T₁, plus two messages", size=13, color=INK)


@diagram("04_overlap", 640, 112, "evaluation on two ranks")
def overlap(picture: Diagram) -> None:
    """Rank 0 computes batches 0 to 4 one after another. Rank 1 begins batch 0 when rank 0 begins batch 1, and so on:
    from then on both ranks compute at the same time."""
    left, top, row, bar, unit = 74.0, 10.0, 46.0, 30.0, 88.0
    for rank in range(2):
        picture.text(left - 12, top + rank * row + bar / 2, f"rank {rank}", anchor="end", size=13)
        for batch in range(5):
            x = left + unit * (batch + rank * 1.08)
            picture.box(x, top + rank * row, unit - 8, bar, f"batch {batch}", fill=FORWARD, size=13, radius=2)
            if rank == 0:
                picture.arrow((x + unit - 6, top + bar - 4), (x + unit + 8, top + row - 2), color=COMMUNICATION)
