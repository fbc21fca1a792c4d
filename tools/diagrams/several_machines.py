"""Lesson 09b: what runs on which machine, a ring that crosses the cables, and an all-reduce of two levels."""

from __future__ import annotations

from typing import Final

from tools.diagrams.kit import COMMUNICATION, PART_OF_SUM, SHARES, SUM, Diagram, diagram

FAST, SLOW = 2.0, 5.0  # widths of the arrows
WIDE: Final = 84.0
HIGH: Final = 42.0


def _two_machines(picture: Diagram) -> None:
    for number in range(2):
        left = 14.0 + 320 * number
        picture.box(left, 46, 284, 90, dashed=True)
        picture.text(left + 8, 30, f"pc{number + 1}", anchor="start", bold=True)
        for local in range(2):
            rank = 2 * number + local
            picture.box(left + 20 + 160 * local, 70, WIDE, HIGH, f"rank {rank}", fill=SHARES[rank])


@diagram("09b_machines", 720, 262, "a group on two machines")
def machines(picture: Diagram) -> None:
    """The notebook's machine is joined by a network with the machines pc1 and pc2. Ranks 0 and 1 are on pc1, ranks 2
    and 3 on pc2. On each machine, an agent has started the ranks. Messages between ranks of a machine are fast; those
    between pc1 and pc2 take the cables."""
    picture.box(14, 66, 150, 112, dashed=True)
    picture.text(89, 50, "your machine", bold=True)
    picture.box(32, 100, 114, HIGH, "notebook")
    for number, name in enumerate(("pc1", "pc2")):
        top = 34.0 + 122 * number
        picture.box(330, top, 376, 92, dashed=True)
        picture.text(340, top - 14, name, anchor="start", bold=True)
        picture.box(346, top + 25, 72, HIGH, "agent")
        for local in range(2):
            rank = 2 * number + local
            picture.box(456 + 150 * local, top + 25, WIDE, HIGH, f"rank {rank}", fill=SHARES[rank])
        y = top + 25 + HIGH / 2
        picture.both_ways((544, y), (602, y))
        picture.text(573, y - 15, "fast", size=13)
        picture.line((330, y), (247, 122), color=COMMUNICATION, width=SLOW)
    picture.line((164, 122), (247, 122), color=COMMUNICATION, width=SLOW)
    picture.box(215, 102, 64, 40, "switch", fill=SUM)
    picture.text(204, 156, "slow cables", size=13)


@diagram("09b_ring", 640, 210, "a ring over two machines")
def ring(picture: Diagram) -> None:
    """Ranks 0 and 1 are on pc1, ranks 2 and 3 on pc2. Each rank sends to the next one: 0 to 1 and 2 to 3 inside a
    machine, 1 to 2 and 3 to 0 between the machines."""
    _two_machines(picture)
    for left in (34, 354):
        picture.arrow((left + WIDE + 4, 91), (left + 160 - 4, 91), color=COMMUNICATION, width=FAST)
    picture.arrow((282, 91), (350, 91), color=COMMUNICATION, width=SLOW)
    picture.line((556, 114), (556, 182), (76, 182), color=COMMUNICATION, width=SLOW)
    picture.arrow((76, 182), (76, 118), color=COMMUNICATION, width=SLOW)
    picture.text(316, 196, "thick arrows: over the cables", size=13)


@diagram("09b_two_levels", 760, 300, "an all-reduce of two levels")
def two_levels(picture: Diagram) -> None:
    """Three phases. First, a reduce-scatter inside each machine: each rank has one half of its machine's sum. Second,
    an all-reduce between the machines, of ranks with the same half: each rank has one half of the whole sum. Third, an
    all-gather inside each machine: every rank has the whole sum."""
    phases = ("1 reduce-scatter inside", "2 all-reduce between", "3 all-gather inside")
    halves = (("A", "B"), ("A", "B"), ("A B", "A B"))
    for number, (phase, texts) in enumerate(zip(phases, halves, strict=True)):
        left = 10.0 + 252 * number
        picture.text(left + 118, 14, phase, bold=True)
        for machine in range(2):
            top = 52.0 + 120 * machine
            picture.box(left, top, 236, 78, dashed=True)
            picture.text(left + 6, top - 11, f"pc{machine + 1}", anchor="start", size=13)
            for local in range(2):
                holds = f"sum on pc{machine + 1}" if number == 0 else "sum"
                fill = PART_OF_SUM if number == 0 else SUM
                x = left + 12 + 116 * local
                picture.box(x, top + 18, 96, HIGH, f"{texts[local]}\n{holds}", fill=fill, size=13)
            if number != 1:
                y = top + 18 + HIGH / 2
                picture.both_ways((left + 108, y), (left + 128, y), width=FAST)
        if number == 1:
            for local in range(2):
                x = left + 60 + 116 * local
                picture.both_ways((x, 116), (x, 186), width=SLOW)
    picture.text(380, 278, "A and B: the halves of the tensor; in each box, what a rank has after the phase", size=13)
