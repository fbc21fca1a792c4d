"""Lesson 03: memory in data parallel, the ZeRO stages, a layer's parameters in time, a mesh, and recomputation."""

from __future__ import annotations

from typing import Final

from labkit.plots.memory import COLOURS
from tools.diagrams.kit import BACKWARD, COMMUNICATION, FORWARD, GOLD, PINK, VIOLET, Diagram, diagram

RANKS: Final = 4
# The colours of `lab.memory` and of the timelines, which the lesson shows below the drawings.
PARAMETERS: Final = COLOURS["parameters"]
KINDS: Final = (
    ("parameters", PARAMETERS), ("gradients", COLOURS["gradients"]), ("1st moment", COLOURS["optimizer state"]),
    ("2nd moment", COLOURS["optimizer state"]),
)  # fmt: skip


@diagram("03_memory", 652, 254, "memory in data parallel")
def memory(picture: Diagram) -> None:
    """Four ranks in data parallel. Each of them holds the same parameters, gradients, first moment and second
    moment."""
    wide, high, left, top = 132.0, 34.0, 76.0, 34.0
    for rank in range(RANKS):
        y = top + rank * (high + 14)
        picture.text(left - 14, y + high / 2, f"rank {rank}", anchor="end", size=13)
        for place, (name, fill) in enumerate(KINDS):
            picture.box(left + place * (wide + 10), y, wide, high, name, fill=fill, size=13)
    picture.text(left, 14, "the same four numbers for each parameter, on every rank", anchor="start", bold=True)
    picture.text(left, top + RANKS * (high + 14) + 10, "each box: 4 bytes per parameter in float32", anchor="start", size=13)


@diagram("03_zero", 798, 284, "ZeRO stages")
def stages(picture: Diagram) -> None:
    """Three stages of ZeRO on four ranks. Stage 1 divides both moments over the ranks, stage 2 also the gradients,
    stage 3 also the parameters; each rank keeps another quarter."""
    cell, gap, between, left, top = 48.0, 6.0, 34.0, 76.0, 62.0
    panel = 4 * (cell + gap)
    for stage in (1, 2, 3):
        x = left + (stage - 1) * (panel + between)
        picture.text(x, 14, f"stage {stage}", anchor="start", size=15, bold=True)
        for place, letter in enumerate(("P", "G", "M₁", "M₂")):
            picture.text(x + place * (cell + gap) + cell / 2, 44, letter, size=13)
        for rank in range(RANKS):
            y = top + rank * 48
            if stage == 1:
                picture.text(left - 14, y + 20, f"rank {rank}", anchor="end", size=13)
            for place, (_, fill) in enumerate(KINDS):
                at = x + place * (cell + gap)
                sharded = place >= 2 or (place == 1 and stage >= 2) or stage == 3
                whole = "" if sharded else "all"
                picture.box(at, y, cell, 40, whole, fill="none" if sharded else fill, dashed=sharded, size=13, radius=3)
                if sharded:
                    picture.box(at, y + rank * 10, cell, 10, fill=fill, radius=1)
    words = "P: parameters · G: gradients · M₁, M₂: moments · filled: kept on this rank"
    picture.text(left, top + RANKS * 48 + 14, words, anchor="start", size=13)


@diagram("03_gather", 726, 176, "a layer's parameters in stage 3")
def gather(picture: Diagram) -> None:
    """One layer of one rank in time. Its parameters are gathered, used in the forward pass and freed; after the other
    layers, they are gathered again, used in the backward pass, the gradient is reduce-scattered, and they are freed."""
    steps = (
        ("gather", COMMUNICATION), ("forward", FORWARD), ("free", ""), ("", ""), ("gather", COMMUNICATION),
        ("backward", BACKWARD), ("reduce-scatter", COMMUNICATION), ("free", ""),
    )  # fmt: skip
    widths = (74, 84, 54, 96, 74, 92, 116, 54)
    left, y, high = 20.0, 74.0, 36.0
    picture.text(left, 14, "one layer on one rank, in time", anchor="start", bold=True)
    x, edges = left, []
    for (name, fill), wide in zip(steps, widths, strict=True):
        edges.append(x)
        if name:
            picture.box(x, y, wide, high, name, fill=fill or "none", size=13)
        else:
            picture.text(x + wide / 2, y + high / 2, "other layers", size=13)
        x += wide + 6
    base = 156.0
    picture.text(left, 128, "parameters of this layer in memory:", anchor="start", size=13)
    whole, shard = 22.0, 5.5
    spans = ((edges[0], edges[3] - 6, whole), (edges[3], edges[4] - 6, shard), (edges[4], x - 6, whole))
    for start, end, tall in spans:
        picture.box(start, base + 12 - tall, end - start, tall, fill=PARAMETERS, radius=1)
    picture.text((edges[3] + edges[4]) / 2 - 3, base - 6, "shard", size=13)
    picture.text((edges[0] + edges[3]) / 2 - 3, 54, "forward pass", size=13)
    picture.text((edges[4] + x) / 2 - 3, 54, "backward pass", size=13)


@diagram("03_mesh", 678, 246, "a mesh of two rows and two columns")
def mesh(picture: Diagram) -> None:
    """Ranks 0 and 1 form the first row and share one copy of the model, half each; ranks 2 and 3 form the second. Ranks
    0 and 2 hold the first half, ranks 1 and 3 the second half, and average its gradient."""
    wide, high, left, top = 150.0, 52.0, 128.0, 50.0
    across, down = 250.0, 118.0
    for rank in range(RANKS):
        row, column = divmod(rank, 2)
        x, y = left + column * across, top + row * down
        picture.box(x, y, wide, high, f"rank {rank}\n{('first', 'second')[column]} half", fill=(VIOLET, GOLD)[column], size=13)
    for row in range(2):
        y = top + row * down + high / 2
        picture.text(left - 14, y, f"node {row}", anchor="end", size=14, bold=True)
        picture.arrow((left + wide + 8, y), (left + across - 8, y), "gather", color=COMMUNICATION)
        picture.arrow((left + across - 8, y), (left + wide + 8, y), color=COMMUNICATION)
    for column in range(2):
        x = left + column * across + wide / 2
        picture.arrow((x, top + high + 6), (x, top + down - 6), "all-reduce", color=COMMUNICATION)
        picture.arrow((x, top + down - 6), (x, top + high + 6), color=COMMUNICATION)
    picture.text(left + (across + wide) / 2, 18, "shard →", bold=True)
    picture.text(left + across + wide + 24, top + (down + high) / 2, "replicate ↓", anchor="start", bold=True)


@diagram("03_recompute", 724, 248, "recomputation")
def recompute(picture: Diagram) -> None:
    """Two timelines of four blocks. Above: four forward passes, then four backward passes; all activations of all
    blocks are kept. Below: only the inputs of the blocks are kept, and each block's forward pass is computed again
    before its backward pass."""
    cell, gap, left = 42.0, 5.0, 150.0
    rows = {
        "keep everything": (["F1", "F2", "F3", "F4", "B4", "B3", "B2", "B1"], 78.0),
        "recompute": (["F1", "F2", "F3", "F4", "F4", "B4", "F3", "B3", "F2", "B2", "F1", "B1"], 192.0),
    }
    picture.text(left, 14, "F forward, B backward of each block; bars: activations in memory", anchor="start", size=13)
    for name, (order, y) in rows.items():
        picture.text(left - 16, y + 16, name, anchor="end", size=14, bold=True)
        kept, again = 0.0, name == "recompute"
        for place, step in enumerate(order):
            x = left + place * (cell + gap)
            second = again and place >= 4 and step[0] == "F"
            picture.box(x, y, cell, 32, step, fill=FORWARD if step[0] == "F" else BACKWARD, size=13,
                        outline=COMMUNICATION if second else "")  # fmt: skip
            if step[0] == "F" and not second:
                kept += 2.0 if again else 10.0
            shown = kept + (8.0 if second else 8.0 if again and step[0] == "B" else 0.0)
            picture.box(x, y - 8 - shown, cell, shown, fill=PINK, radius=1)
            if step[0] == "B":
                kept -= 2.0 if again else 10.0
