"""Diagrams of lesson 01: a message in time, an exchange round a ring, a binomial tree, a network of two levels."""

from __future__ import annotations

from typing import Final

from tools.diagrams.kit import COMMUNICATION, INK, SHARES, SUM, Diagram, diagram

RANKS: Final = 4


@diagram("01_message", 600, 170, "The time of a message")
def message(picture: Diagram) -> None:
    """Time runs from left to right. Rank 0 sends; the first byte reaches rank 1 after the latency alpha, the last one
    after another n divided by B. Rank 1 waits in recv until then."""
    for rank in range(2):
        y = 40 + 70 * rank
        picture.text(66, y + 13, f"rank {rank}", anchor="end", bold=True)
        picture.line((78, y + 13), (585, y + 13))
    picture.box(110, 38, 220, 30, "send: n bytes leave", fill=COMMUNICATION, size=13)
    picture.box(250, 108, 220, 30, "n bytes arrive", fill=COMMUNICATION, size=13)
    picture.arrow((110, 70), (250, 106))
    picture.arrow((330, 70), (470, 106))
    picture.line((110, 120), (110, 160), dashed=True)
    picture.text(180, 152, "latency α", size=13)
    picture.line((250, 142), (250, 160), dashed=True)
    picture.text(360, 152, "n / B", size=13)
    picture.line((470, 142), (470, 160), dashed=True)
    picture.text(530, 152, "recv ends", size=13)


@diagram("01_shift", 620, 122, "An exchange round a ring")
def shift(picture: Diagram) -> None:
    """Four ranks in a ring. Each sends its number to the next rank and receives one from the rank before; rank 3 sends
    to rank 0."""
    for rank in range(RANKS):
        picture.box(20 + 155 * rank, 62, 110, 42, f"rank {rank}", fill=SHARES[rank], bold=True)
        if rank + 1 < RANKS:
            picture.arrow((132 + 155 * rank, 83), (173 + 155 * rank, 83), color=COMMUNICATION)
    picture.line((540, 60), (540, 26), (75, 26), color=COMMUNICATION, width=2)
    picture.arrow((75, 26), (75, 60), color=COMMUNICATION)


@diagram("01_tree", 640, 236, "A tree all-reduce over two nodes")
def tree(picture: Diagram) -> None:
    """Ranks 0 and 1 are on node 0, ranks 2 and 3 on node 1. Round 1: ranks 1 and 3 send their tensors to ranks 0 and 2,
    which add them. Round 2: rank 2 sends its sum to rank 0, between the nodes. Rounds 3 and 4 send the result back the
    same way."""
    for node in range(2):
        y = 26 + 104 * node
        picture.box(70, y, 540, 92, "", outline=INK, dashed=True)
        picture.text(60, y + 46, f"node {node}", anchor="end", size=13)
    heights = [38, 82, 142, 186]
    for rank in range(RANKS):
        for column in range(5):
            picture.box(
                84 + 116 * column, heights[rank], 54, 30, f"rank {rank}" if column == 0 else "", fill=SHARES[rank], size=12
            )
    rounds = [[(1, 0), (3, 2)], [(2, 0)], [(0, 2)], [(0, 1), (2, 3)]]
    for number, pairs in enumerate(rounds):
        x = 138 + 116 * number
        picture.text(x + 31, 12, f"{'add' if number < 2 else 'copy'}: round {number + 1}", size=12)
        for start, end in pairs:
            picture.arrow((x + 2, heights[start] + 15), (x + 60, heights[end] + 15), color=COMMUNICATION)


@diagram("01_hierarchy", 700, 210, "A hierarchical all-reduce over two nodes")
def hierarchy(picture: Diagram) -> None:
    """First, a reduce-scatter inside each node leaves each rank one half of its node's sum. Second, ranks 0 and 2
    all-reduce the first half between the nodes, ranks 1 and 3 the second half. Third, an all-gather inside each node
    completes it."""
    titles = ["start", "reduce-scatter inside", "all-reduce between", "all-gather inside"]
    states = [
        [["A", "A"], ["B", "B"], ["C", "C"], ["D", "D"]],
        [["AB", ""], ["", "AB"], ["CD", ""], ["", "CD"]],
        [["Σ", ""], ["", "Σ"], ["Σ", ""], ["", "Σ"]],
        [["Σ", "Σ"]] * RANKS,
    ]
    for number, (title, state) in enumerate(zip(titles, states, strict=True)):
        x = 76 + 160 * number
        picture.text(x + 36, 14, title, size=12)
        for rank, halves in enumerate(state):
            y = 32 + 42 * rank + 8 * (rank > 1)
            if number == 0:
                picture.text(x - 12, y + 15, f"rank {rank}", anchor="end", size=12)
            picture.box(x - 4, y - 3, 80, 36)
            for half, text in enumerate(halves):
                if text:
                    picture.box(x + 37 * half, y, 34, 30, text, fill=SUM if text == "Σ" else SHARES[rank], size=12)
        if number:
            picture.arrow((x - 78, 112), (x - 12, 112), color=COMMUNICATION)
    picture.line((10, 114), (690, 114), dashed=True, width=0.8)
