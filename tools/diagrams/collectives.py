"""What each collective does: who has what before it, and after it; and how a ring does an all-reduce."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from tools.diagrams.kit import COMMUNICATION, DIAGRAMS, PART_OF_SUM, SHARES, SUM, Diagram, diagram

RANKS: Final = 4
CELL: Final = 30
GAP: Final = 4
PANEL: Final = RANKS * (CELL + GAP)
ROW: Final = 40
TOP: Final = 58

# A cell is a text and a colour; a rank has a row of four, None where it has nothing.
Cell = tuple[str, str] | None
State = Sequence[Sequence[Cell]]


def own(rank: int, part: int | None = None) -> Cell:
    """What rank `rank` has, or one part of it."""
    letter = "ABCD"[rank]
    return (letter if part is None else f"{letter}{'₀₁₂₃'[part]}", SHARES[rank])


def added(part: int) -> Cell:
    """The sum over the ranks of one part."""
    return f"Σ{'₀₁₂₃'[part]}", SUM


def only(rank: int, cells: Sequence[Cell]) -> State:
    """These cells on one rank, nothing on the others."""
    return [list(cells) if r == rank else [None] * RANKS for r in range(RANKS)]


def each(cells: Callable[[int], Sequence[Cell]]) -> State:
    """On each rank the cells that the function gives for it."""
    return [list(cells(rank)) for rank in range(RANKS)]


def at(place: int, cell: Cell) -> list[Cell]:
    """One cell in its place."""
    return [cell if i == place else None for i in range(RANKS)]


def whole(rank: int) -> list[Cell]:
    """All that a rank has."""
    return [own(rank, part) for part in range(RANKS)]


SUMS: Final = [added(part) for part in range(RANKS)]
# Before, after, and what happens in a sentence.
COLLECTIVES: Final[dict[str, tuple[State, State, str]]] = {
    "broadcast": (only(0, whole(0)), each(lambda _: whole(0)), "Every rank receives what rank 0 has."),
    "scatter": (only(0, whole(0)), each(lambda r: at(0, own(0, r))), "Rank 0 gives every rank one part of what it has."),
    "gather": (
        each(lambda r: at(0, own(r))), only(0, [own(r) for r in range(RANKS)]), "Rank 0 receives what every rank has.",
    ),
    "all_gather": (
        each(lambda r: at(0, own(r))), each(lambda _: [own(r) for r in range(RANKS)]),
        "Every rank receives what every rank has.",
    ),
    "reduce": (each(whole), only(0, SUMS), "Rank 0 receives the sum of what the ranks have."),
    "all_reduce": (each(whole), each(lambda _: SUMS), "Every rank receives the sum of what the ranks have."),
    "reduce_scatter": (
        each(whole), each(lambda r: at(0, added(r))), "Every rank receives one part of the sum of what the ranks have.",
    ),
    "all_to_all": (
        each(whole), each(lambda r: [own(other, r) for other in range(RANKS)]),
        "Every rank gives each rank one part of what it has.",
    ),
}  # fmt: skip


def collective(name: str) -> Diagram:
    """Return two panels, before and after, with a row for each rank."""
    before, after, sentence = COLLECTIVES[name]
    left, right = 70.0, 180.0 + PANEL
    picture = Diagram(right + PANEL + 12, TOP + RANKS * ROW + 4, name, f"{name} on four ranks, before and after. {sentence}")
    picture.text(left, 14, name, anchor="start", size=16, bold=True)
    for x, title, state in ((left, "before", before), (right, "after", after)):
        picture.text(x + PANEL / 2 - GAP / 2, TOP - 16, title, size=13)
        for rank, cells in enumerate(state):
            y = TOP + rank * ROW
            picture.box(x - 5, y - 5, PANEL + 6, CELL + 10, radius=6)
            for place, cell in enumerate(cells):
                if cell is not None:
                    picture.box(x + place * (CELL + GAP), y, CELL, CELL, cell[0], fill=cell[1], size=13, radius=3)
    for rank in range(RANKS):
        picture.text(left - 14, TOP + rank * ROW + CELL / 2, f"rank {rank}", anchor="end", size=13)
    middle = TOP + (RANKS * ROW - 10) / 2
    picture.arrow((left + PANEL + 14, middle), (right - 18, middle), color=COMMUNICATION)
    return picture


DIAGRAMS.update({f"01_{name}": collective(name) for name in COLLECTIVES})


@diagram("01_ring_all_reduce", 864, 236, "ring all-reduce")
def ring(picture: Diagram) -> None:
    """Ring all-reduce on three ranks in four rounds. In the first two rounds each rank sends one part to the next rank,
    which adds it; then each rank has one complete sum. In the last two rounds the complete sums travel round the
    ring."""
    names, parts = ["rank 0", "rank 1", "rank 2"], 3
    # What each rank holds of each part after each round, as the ranks whose values are in it.
    holds = [[{rank} for _ in range(parts)] for rank in range(3)]
    states = [[[set(p) for p in rank] for rank in holds]]
    for step in range(4):
        moved = []
        for rank in range(3):
            part = (rank - step) % 3 if step < 2 else (rank + 1 - (step - 2)) % 3
            moved.append((rank, (rank + 1) % 3, part, set(holds[rank][part])))
        for _, receiver, part, values in moved:
            holds[receiver][part] = holds[receiver][part] | values if step < 2 else values
        states.append([[set(p) for p in rank] for rank in holds])
    cell, panel, space = 34.0, 3 * 38.0, 56.0
    left = 62.0
    titles = ["start", "round 1", "round 2", "round 3", "round 4"]
    for number, state in enumerate(states):
        x = left + number * (panel + space)
        picture.text(x + panel / 2 - 2, 40, titles[number], size=13)
        for rank, held in enumerate(state):
            y = 60 + rank * 58
            picture.box(x - 5, y - 5, panel + 6, cell + 10, radius=6)
            for part, who in enumerate(held):
                text = "".join("ABC"[r] for r in sorted(who))
                fill = SUM if len(who) == 3 else PART_OF_SUM if len(who) == 2 else SHARES[min(who)]
                changed = number > 0 and states[number - 1][rank][part] != who
                picture.box(
                    x + part * 38, y, cell, cell, text if len(who) < 3 else "Σ", fill=fill,
                    outline=COMMUNICATION if changed else "", size=12, radius=3,
                )  # fmt: skip
    for rank, name in enumerate(names):
        picture.text(left - 14, 60 + rank * 58 + cell / 2, name, anchor="end", size=13)
    for number in range(4):
        x = left + number * (panel + space) + panel + 6
        for rank in range(3):
            start, end = ((at_x, 60 + r * 58 + cell / 2) for at_x, r in ((x, rank), (x + space - 16, (rank + 1) % 3)))
            picture.arrow(start, end, color=COMMUNICATION, width=1.6)
    width = 2 * panel + 2 * space
    for middle, words in ((left + panel / 2, "add: reduce-scatter"), (left + panel / 2 + width, "copy: all-gather")):
        picture.text(middle + width / 2 + 20, 14, words, size=14, bold=True, color=COMMUNICATION)
