"""TensorFlow's data parallelism: a strategy with two replicas, the scaling of the loss, and the sharding policies."""

from __future__ import annotations

from tools.diagrams.kit import COMMUNICATION, GOLD, OLIVE, OPTIMIZER, PINK, VIOLET, Diagram, diagram

SHARES = (VIOLET, GOLD)  # of replicas and ranks 0 and 1


@diagram("10_strategy", 760, 220, "a step of MirroredStrategy with two replicas")
def strategy(picture: Diagram) -> None:
    """The pipeline gives a global batch of 64 images. Replica 0 on CPU:0 and replica 1 on CPU:1 get 32 each and compute
    gradients with their copies of the weights. An all-reduce sums the gradients. Both replicas make the same update."""
    picture.text(69, 62, "global batch", size=13)
    picture.box(14, 80, 110, 30, "32 images", fill=VIOLET, size=13, radius=0)
    picture.box(14, 110, 110, 30, "32 images", fill=GOLD, size=13, radius=0)
    picture.text(69, 158, "from tf.data", size=13)
    for device, color in enumerate(SHARES):
        y = 30.0 + 110 * device
        picture.text(270, y - 14, f"replica {device}, CPU:{device}", size=13, bold=True)
        picture.box(180, y, 180, 50, "copy of the weights,\ngradients of 32 images", fill=color, size=13)
        picture.box(590, y, 150, 50, "the same update\nof the copy", fill=OPTIMIZER, size=13)
        picture.arrow((128, 95 + 30 * device), (176, y + 25))
        picture.arrow((364, y + 25), (426, 96 + 28 * device), color=COMMUNICATION)
        picture.arrow((524, 96 + 28 * device), (586, y + 25), color=COMMUNICATION)
    picture.box(430, 80, 90, 60, "all-reduce:\nsum", outline=COMMUNICATION, size=13)


@diagram("10_loss", 700, 190, "what to divide a replica's loss by")
def loss(picture: Diagram) -> None:
    """Replica 0 has the losses 1 and 2, replica 1 has 3 and 6; the mean of all four is 3. Divided by the global batch
    of 4, the replicas have 0.75 and 2.25, with the sum 3. Divided by their own 2 examples, they have 1.5 and 4.5, sum
    6."""
    picture.text(130, 16, "losses", size=13, bold=True)
    picture.text(320, 16, "sum ÷ global batch", size=13, bold=True)
    picture.text(560, 16, "mean of the replica's own", size=13, bold=True)
    rows = (("1", "2", "(1 + 2) ÷ 4 = 0.75", "(1 + 2) ÷ 2 = 1.5"), ("3", "6", "(3 + 6) ÷ 4 = 2.25", "(3 + 6) ÷ 2 = 4.5"))
    for replica, (first, second, scaled, own) in enumerate(rows):
        y, color = 36.0 + 54 * replica, SHARES[replica]
        picture.text(6, y + 20, f"replica {replica}", anchor="start", size=13)
        picture.box(78, y, 50, 40, first, fill=color, size=15)
        picture.box(132, y, 50, 40, second, fill=color, size=15)
        picture.box(230, y, 180, 40, scaled, fill=color, size=14)
        picture.box(470, y, 180, 40, own, fill=color, size=14)
    picture.text(130, 162, "mean of all: 3", size=14)
    picture.text(320, 162, "sum: 3, right", size=14, bold=True)
    picture.text(560, 162, "sum: 6, twice too large", size=14, bold=True)


@diagram("10_shards", 760, 230, "sharding policies")
def shards(picture: Diagram) -> None:
    """Two files with six blocks each. DATA: both ranks read both files, rank 0 keeps the first half of every batch,
    rank 1 the second half. FILE: rank 0 reads file 0 only, rank 1 reads file 1 only. OFF: both ranks keep
    everything."""
    kept = {
        "DATA": [[i % 4 < 2 for i in range(12)], [i % 4 >= 2 for i in range(12)]],
        "FILE": [[i < 6 for i in range(12)], [i >= 6 for i in range(12)]],
        "OFF": [[True] * 12, [True] * 12],
    }
    words = ("halves of every batch", "whole files", "everything, twice")
    for column, (name, ranks) in enumerate(kept.items()):
        left = 64.0 + 236 * column
        picture.text(left + 104, 14, name, size=16, bold=True)
        picture.text(left + 104, 36, words[column], size=13)
        for rank, keeps in enumerate(ranks):
            y = 76.0 + 72 * rank
            for number, keep in enumerate(keeps):
                x = left + 16 * number + (16 if number >= 6 else 0)
                fill = (OLIVE, PINK)[number // 6]
                if keep:
                    picture.box(x, y, 14, 40, fill=fill, radius=2)
                elif name == "DATA":
                    picture.box(x, y, 14, 40, dashed=True, radius=2)
        for file in (0, 1):
            picture.text(left + 47 + 112 * file, 60, f"file {file}", size=12)
    for rank in (0, 1):
        picture.text(6, 96 + 72 * rank, f"rank {rank}", anchor="start", size=13)
    picture.text(380, 212, "filled: trained on · dashed: read and dropped · empty: not read", size=13)
