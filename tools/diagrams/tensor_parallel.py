"""Tensor parallelism: the two splits of a linear layer, the pair of them, heads, the sequence, and the loss."""

from __future__ import annotations

from tools.diagrams.kit import COMMUNICATION, INK, OLIVE, SHARES, Diagram, diagram

WHOLE = OLIVE  # what every rank has in full


@diagram("06_splits", 760, 250, "column split and row split")
def splits(picture: Diagram) -> None:
    """On the left, the matrix A is split by columns: each rank multiplies the whole input by its columns and has some
    columns of the output. On the right, A is split by rows: each rank multiplies its columns of the input by its rows
    of A, and the output is the sum of the ranks' products."""
    picture.text(185, 16, "split by columns", size=16, bold=True)
    picture.box(20, 80, 90, 54, "X", fill=WHOLE)
    picture.text(126, 107, "×", size=20)
    for rank, x in enumerate((142, 190)):
        picture.box(x, 60, 46, 94, f"A{'₀₁'[rank]}", fill=SHARES[rank])
    picture.text(253, 107, "=", size=20)
    for rank, x in enumerate((270, 318)):
        picture.box(x, 80, 46, 54, f"Y{'₀₁'[rank]}", fill=SHARES[rank])
    picture.text(185, 190, "Y = [X A₀ , X A₁]", size=15)
    picture.text(185, 214, "parts of Y, side by side", size=13)
    picture.line((384, 30), (384, 230), dashed=True)
    picture.text(575, 16, "split by rows", size=16, bold=True)
    for rank, x in enumerate((400, 442)):
        picture.box(x, 80, 40, 54, f"X{'₀₁'[rank]}", fill=SHARES[rank])
    picture.text(494, 107, "×", size=20)
    for rank, y in enumerate((60, 108)):
        picture.box(506, y, 68, 46, f"A{'₀₁'[rank]}", fill=SHARES[rank])
    picture.text(586, 107, "=", size=20)
    picture.box(598, 80, 68, 54, "X₀A₀", fill=SHARES[0], size=15)  # as wide as A: each has all columns of Y
    picture.text(678, 107, "+", size=20, color=COMMUNICATION, bold=True)
    picture.box(690, 80, 68, 54, "X₁A₁", fill=SHARES[1], size=15)
    picture.text(575, 190, "Y = X₀ A₀ + X₁ A₁", size=15)
    picture.text(575, 214, "a sum over the ranks: one all_reduce", size=13, color=COMMUNICATION)
    for rank, x in enumerate((270, 350)):
        picture.box(x, 234, 14, 14, fill=SHARES[rank], radius=2)
        picture.text(x + 20, 241, f"rank {rank}", anchor="start", size=12)
    picture.box(430, 234, 14, 14, fill=WHOLE, radius=2)
    picture.text(450, 241, "both", anchor="start", size=12)


def _lanes(picture: Diagram, *stages: tuple[str, str]) -> None:
    """Draw two ranks between f and g: a row for each rank, a column for each stage, with its text on both ranks."""
    wide, gap, left = 118, 22, 120.0
    after = left + 88 + (len(stages) - 1) * (wide + gap) + wide - 4
    for rank in range(2):
        y = 34.0 + 84 * rank
        picture.text(8, y + 28, f"rank {rank}", anchor="start", size=13)
        picture.box(62, y + 4, 62, 48, "x", fill=WHOLE)
        picture.arrow((126, y + 28), (left + 38, y + 28))
        picture.arrow((left + 62, y + 28), (left + 86, y + 28))
        for number, texts in enumerate(stages):
            x = left + 88 + number * (wide + gap)
            picture.box(x, y, wide - 4, 56, texts[rank], fill=SHARES[rank], size=13)
            if number:
                picture.arrow((x - gap - 2, y + 28), (x, y + 28))
        picture.arrow((after, y + 28), (after + 18, y + 28))
        picture.arrow((after + 42, y + 28), (after + 58, y + 28))
        picture.box(after + 60, y + 4, 46, 48, "y", fill=WHOLE)
    for name, x in (("f", left + 50), ("g", after + 30)):
        picture.box(x - 11, 30, 22, 150, name, outline=COMMUNICATION, size=16, bold=True)
    picture.text(left - 10, 194, "forward: nothing", anchor="start", size=13, color=COMMUNICATION)
    picture.text(after + 102, 194, "forward: all_reduce", anchor="end", size=13, color=COMMUNICATION)


@diagram("06_pair", 778, 206, "the MLP on two ranks")
def pair(picture: Diagram) -> None:
    """Both ranks have the whole input x. f passes it on unchanged. Each rank multiplies x by its columns of A, applies
    GELU to its part, and multiplies that by its rows of B. g adds the products with an all_reduce. Then both ranks have
    the whole output y."""
    _lanes(picture, ("columns A₀", "columns A₁"), ("GELU", "GELU"), ("rows B₀", "rows B₁"))


@diagram("06_heads", 778, 206, "attention on two ranks")
def heads(picture: Diagram) -> None:
    """Both ranks have the whole input x, which f passes on. Rank 0 computes queries, keys and values of heads 0 and 1,
    rank 1 of heads 2 and 3: columns of the three matrices. Each rank computes the attention of its heads alone and
    multiplies the result by its rows of the output matrix. g adds the products with an all_reduce."""
    queries = "q, k, v of\nheads 0 and 1", "q, k, v of\nheads 2 and 3"
    attention = "attention of\nheads 0 and 1", "attention of\nheads 2 and 3"
    _lanes(picture, queries, attention, ("rows O₀", "rows O₁"))


@diagram("06_sequence", 770, 214, "sequence parallel")
def sequence(picture: Diagram) -> None:
    """Between the split layers, rank 0 has the first half of the tokens and rank 1 the second half, so that LayerNorm
    and the residual sum are computed once. An all_gather gives both ranks all tokens before the split layers; a
    reduce_scatter adds their products and leaves each rank its half of the tokens."""
    picture.text(143, 14, "split by tokens", size=13, bold=True)
    picture.text(393, 14, "split by columns and rows", size=13, bold=True)
    picture.text(668, 14, "split by tokens", size=13, bold=True)
    for rank, half in enumerate(("tokens 0–13", "tokens 14–27")):
        y = 34.0 + 72 * rank
        picture.text(8, y + 24, f"rank {rank}", anchor="start", size=13)
        picture.box(62, y, 162, 48, f"LayerNorm\n{half}", fill=SHARES[rank], size=13)
        picture.arrow((226, y + 24), (246, y + 24))
        picture.arrow((272, y + 24), (292, y + 24))
        picture.box(294, y, 198, 48, f"all tokens,\npart {rank} of the layers", fill=SHARES[rank], size=13)
        picture.arrow((494, y + 24), (514, y + 24))
        picture.arrow((540, y + 24), (560, y + 24))
        picture.box(562, y, 200, 48, f"residual sum\n{half}", fill=SHARES[rank], size=13)
    for x, down, back in ((259, "all_gather", "reduce_scatter"), (527, "reduce_scatter", "all_gather")):
        picture.box(x - 11, 28, 22, 132, outline=COMMUNICATION)
        picture.text(x, 176, f"forward: {down}", size=13, color=COMMUNICATION)
        picture.text(x, 196, f"backward: {back}", size=13, color=COMMUNICATION)


@diagram("06_loss", 700, 176, "loss parallel")
def loss(picture: Diagram) -> None:
    """The head is split by columns, so each rank has the scores of half of the words. The ranks exchange only the
    largest score, the sum of the exponentials and the score of the right word: three numbers per token instead of all
    scores."""
    for rank, words in enumerate(("scores of words\n0–4095", "scores of words\n4096–8191")):
        y = 26.0 + 76 * rank
        picture.text(8, y + 26, f"rank {rank}", anchor="start", size=13)
        picture.box(62, y, 130, 52, words, fill=SHARES[rank], size=13)
        picture.arrow((194, y + 26), (222, y + 26))
        picture.arrow((470, y + 26), (498, y + 26))
        picture.box(500, y, 190, 52, "loss of all tokens", fill=WHOLE, size=13)
    picture.box(224, 18, 244, 144, outline=COMMUNICATION)
    picture.text(346, 38, "all_reduce, per token:", size=13, color=COMMUNICATION, bold=True)
    for line, text in enumerate(("largest score", "sum of exp(score − largest)", "score of the right word")):
        picture.text(346, 70 + 30 * line, text, size=13, color=INK)
