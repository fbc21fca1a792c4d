"""Lesson 16: causal attention in blocks, ring and Ulysses, the zig-zag cut, and tokens on their way to experts."""

from __future__ import annotations

from tools.diagrams.kit import COMMUNICATION, COMPUTE, EMPTY, OLIVE, SHARES, Diagram, diagram

RANKS = 4


def _pairs(picture: Diagram, left: float, top: float, owners: list[int], side: float) -> None:
    """Draw the pairs of blocks that causal attention needs; a row of queries has colour and number of its rank."""
    for row, owner in enumerate(owners):
        for column in range(len(owners)):
            needed = column <= row
            text, fill = (str(owner), SHARES[owner]) if needed else ("", EMPTY)
            picture.box(left + column * side, top + row * side, side - 2, side - 2, text, fill=fill, dashed=not needed,
                        size=12, radius=2)  # fmt: skip
        picture.text(left - 8, top + row * side + side / 2, f"rank {owner}", anchor="end", size=12)


@diagram("16_attention", 700, 250, "causal attention in blocks")
def attention(picture: Diagram) -> None:
    """A square of four by four blocks: rows are the queries of ranks 0 to 3, columns are keys. Only the blocks on the
    diagonal and below it are needed, since a token looks at no later one. Row 3 needs the keys of all four ranks, so
    keys and values must reach other ranks."""
    picture.text(190, 16, "keys and values of", size=13, bold=True)
    for rank in range(RANKS):
        picture.text(116 + 50 * rank, 36, f"rank {rank}", size=12)
    picture.text(20, 148, "queries", size=13, bold=True, anchor="start")
    _pairs(picture, 92, 50, [0, 1, 2, 3], 48)
    for line, text in enumerate((
        "filled: scores that are needed",
        "dashed: later tokens, hidden",
        "the diagonal: half of it hidden",
    )):  # fmt: skip
        picture.text(340, 70 + 26 * line, text, anchor="start", size=13)
    picture.text(340, 170, "Rank 3 holds the last quarter of the tokens.", anchor="start", size=13)
    picture.text(340, 192, "Its queries need the keys of all ranks.", anchor="start", size=13,
                 color=COMMUNICATION)  # fmt: skip


@diagram("16_ring_ulysses", 760, 300, "ring attention and Ulysses")
def ring_ulysses(picture: Diagram) -> None:
    """On the left, the ring: each of four ranks keeps its queries, and its block of keys and values goes on to the next
    rank, three times. On the right, Ulysses: before, each rank has all heads of its quarter of the tokens; an
    all-to-all gives each rank all tokens of a quarter of the heads; after attention, a second all-to-all gives the
    tokens back."""
    picture.text(150, 16, "ring: blocks travel", size=16, bold=True)
    places = ((40, 50), (180, 50), (180, 170), (40, 170))
    for rank, (x, y) in enumerate(places):
        picture.box(x, y, 84, 30, f"q of rank {rank}", fill=SHARES[rank], size=12)
        picture.box(x, y + 34, 84, 30, f"k, v of {(rank - 1) % RANKS}", fill=SHARES[(rank - 1) % RANKS], size=12)
    arrows = (((126, 99), (178, 99)), ((222, 118), (222, 168)), ((178, 219), (126, 219)), ((82, 168), (82, 118)))
    for start, end in arrows:
        picture.arrow(start, end, color=COMMUNICATION)
    picture.text(150, 264, "after one of three turns", size=13)
    picture.line((318, 30), (318, 280), dashed=True)
    picture.text(545, 16, "Ulysses: heads for tokens", size=16, bold=True)
    side = 30
    for number, (left, words) in enumerate(((352, "tokens ↓  heads →"), (560, "tokens ↓  heads →"))):
        picture.text(left + 2 * side, 46, words, size=12)
        for row in range(RANKS):
            for column in range(RANKS):
                owner = column if number else row
                picture.box(left + column * side, 60 + row * side, side - 2, side - 2, fill=SHARES[owner], radius=2)
    picture.arrow((482, 106), (550, 106), color=COMMUNICATION)
    picture.arrow((550, 140), (482, 140), color=COMMUNICATION)
    picture.text(516, 88, "all-to-all", size=12, color=COMMUNICATION)
    picture.text(516, 158, "and back", size=12, color=COMMUNICATION)
    picture.text(412, 200, "a rank has some", size=13)
    picture.text(412, 218, "tokens, all heads", size=13)
    picture.text(620, 200, "a rank has some", size=13)
    picture.text(620, 218, "heads, all tokens:", size=13)
    picture.text(620, 236, "ordinary attention", size=13)
    for rank in range(RANKS):
        picture.box(380 + 90 * rank, 270, 14, 14, fill=SHARES[rank], radius=2)
        picture.text(400 + 90 * rank, 277, f"rank {rank}", anchor="start", size=12)


@diagram("16_zigzag", 740, 290, "the plain cut and the zig-zag cut")
def zigzag(picture: Diagram) -> None:
    """On the left, the plain cut into four blocks, one for each rank; the pairs on the diagonal and below it are
    needed. On the right, eight smaller blocks, given to ranks 0, 1, 2, 3, 3, 2, 1, 0."""
    picture.text(170, 16, "the plain cut", size=15, bold=True)
    _pairs(picture, 70, 40, [0, 1, 2, 3], 56)
    picture.text(540, 16, "the zig-zag cut", size=15, bold=True)
    _pairs(picture, 440, 40, [0, 1, 2, 3, 3, 2, 1, 0], 28)
    picture.text(182, 282, "number and colour: the rank that computes", size=12)


@diagram("16_experts", 760, 260, "tokens go to their experts and back")
def experts(picture: Diagram) -> None:
    """Two ranks with five tokens each. The router has chosen an expert for each token. Sorted by expert, three tokens
    of rank 0 stay for expert 0 and two go to rank 1; of rank 1, four go to rank 0 and one stays. So expert 0 computes
    seven tokens and expert 1 three. A second all-to-all brings the results back to the tokens' places."""
    chosen = ((0, 1, 0, 0, 1), (0, 0, 1, 0, 0))
    for x, words in ((94, "tokens, with"), (250, "sorted"), (474, "at the experts"), (684, "back in place")):
        picture.text(x, 16, words, size=13, bold=True)
    picture.text(94, 34, "their experts", size=12)
    for rank, of_rank in enumerate(chosen):
        y = 62 + 96 * rank
        picture.text(8, y + 15, f"rank {rank}", anchor="start", size=12)
        for column, places in ((52, of_rank), (208, tuple(sorted(of_rank)))):
            for i, expert in enumerate(places):
                picture.box(column + 18 * i, y, 16, 30, str(expert), fill=SHARES[rank], size=11, radius=2)
        picture.arrow((146, y + 15), (202, y + 15))
        for i, expert in enumerate(of_rank):
            picture.box(640 + 18 * i, y, 16, 30, str(expert), fill=SHARES[rank], size=11, radius=2)
        come = [of_rank.count(rank) if source == rank else chosen[source].count(rank) for source in range(2)]
        rows = [0] * come[0] + [1] * come[1]
        for i, source in enumerate(rows):
            picture.box(412 + 18 * i, y, 16, 30, fill=SHARES[source], radius=2)
        picture.text(412, y + 44, f"expert {rank}: {len(rows)} tokens", anchor="start", size=12, color=COMPUTE)
    for start in (0, 1):
        for end in (0, 1):
            picture.arrow((302, 77 + 96 * start), (404, 77 + 96 * end), color=COMMUNICATION, width=1.5)
            picture.arrow((544, 77 + 96 * start), (632, 77 + 96 * end), color=COMMUNICATION, width=1.5)
    picture.text(353, 226, "all-to-all", size=12, color=COMMUNICATION)
    picture.text(588, 226, "all-to-all", size=12, color=COMMUNICATION)
    picture.text(120, 226, "the router chooses", size=12, color=OLIVE)
