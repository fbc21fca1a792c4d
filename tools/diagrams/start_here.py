"""Diagrams of lesson 00: a group of processes, their separate memories, the parts of a timeline, uneven shares."""

from __future__ import annotations

from typing import Final

from tools.diagrams.kit import COMMUNICATION, COMPUTE, SHARES, STRIPES, Diagram, diagram

RANKS: Final = 4


@diagram("00_group", 640, 246, "A group of four ranks")
def group(picture: Diagram) -> None:
    """The notebook sends a function to four processes, ranks 0 to 3 of world size 4. Each process calls it in its own
    memory. The notebook gets one result from each rank."""
    picture.box(12, 80, 120, 76, "")
    picture.text(72, 103, "notebook", bold=True)
    picture.text(72, 132, "hello", size=13)
    picture.box(504, 80, 124, 76, "")
    picture.text(566, 103, "notebook", bold=True)
    picture.text(566, 132, "results", size=13)
    for rank in range(RANKS):
        y = 8 + 60 * rank
        picture.arrow((136, 118), (252, y + 24))
        picture.box(256, y, 122, 48, f"rank {rank}\nown memory", fill=SHARES[rank], size=13)
        picture.arrow((382, y + 24), (500, 118))
    picture.text(128, 44, "the function and copies", size=12)
    picture.text(128, 60, "of what it uses", size=12)
    picture.text(520, 56, "one result per rank", size=12)


@diagram("00_timeline", 700, 216, "How to read a timeline")
def timeline(picture: Diagram) -> None:
    """Two rows, one for each rank, on one clock. The upper half of a row is what the rank computes, the lower half what
    it sends and receives. Rank 1 finishes computing first and waits, striped, until rank 0 arrives; then the data
    moves."""
    left, end = 78.0, 590.0
    for rank, busy in enumerate((430.0, 270.0)):
        y = 30 + 72 * rank
        picture.text(left - 12, y + 24, f"rank {rank}", anchor="end", bold=True)
        picture.box(left, y, busy - left, 24, "compute", fill=COMPUTE, size=13, radius=2)
        if rank == 1:
            picture.box(busy, y + 26, 430 - busy, 24, "waits for rank 0", fill=STRIPES, size=12, radius=2)
        picture.box(430, y + 26, 70, 24, "data", fill=COMMUNICATION, size=12, radius=2)
    picture.text(end - 80, 42, "upper half: compute", anchor="start", size=12)
    picture.text(end - 80, 68, "lower half: communication", anchor="start", size=12)
    picture.line((430, 18), (430, 160), dashed=True)
    picture.text(430, 10, "all ranks have arrived", size=12)
    picture.arrow((left, 180), (end - 80, 180), "")
    picture.text((left + end - 80) / 2, 198, "time, on one clock for all ranks", size=12)


@diagram("00_shares", 620, 150, "Dealing items to ranks")
def shares(picture: Diagram) -> None:
    """Items 0 to 10 are dealt to four ranks in turn: rank 0 gets items 0, 4 and 8, rank 1 items 1, 5 and 9, rank 2
    items 2, 6 and 10, rank 3 items 3 and 7."""
    picture.text(12, 26, "items", anchor="start", size=13)
    for item in range(11):
        picture.box(70 + 38 * item, 10, 34, 32, str(item), fill=SHARES[item % RANKS])
    for rank in range(RANKS):
        x = 20 + 150 * rank
        picture.text(x + 52, 76, f"rank {rank}", bold=True, size=13)
        own = range(rank, 11, RANKS)
        for place, item in enumerate(own):
            picture.box(x + 38 * place, 92, 34, 32, str(item), fill=SHARES[rank])


@diagram("00_memories", 620, 130, "Separate memories")
def memories(picture: Diagram) -> None:
    """The notebook has a list called seen, which is empty. Each of the four ranks has a list called seen in its own
    memory, with its own number."""
    picture.box(12, 30, 110, 76, "")
    picture.text(67, 50, "notebook", bold=True, size=13)
    picture.text(67, 82, "seen = []", size=13)
    for rank in range(RANKS):
        x = 146 + 118 * rank
        picture.box(x, 30, 106, 76, "", outline=SHARES[rank])
        picture.box(x + 8, 38, 90, 24, f"rank {rank}", fill=SHARES[rank], bold=True, size=13)
        picture.text(x + 53, 82, f"seen = [{rank}]", size=13)
