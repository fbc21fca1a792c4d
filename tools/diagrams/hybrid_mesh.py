"""Lesson 09: a mesh of two axes, data × pipeline, three axes on two nodes, and both placements of the tensor axis."""

from __future__ import annotations

from tools.diagrams.kit import COMMUNICATION, SHARES, Diagram, diagram

WIDE, HIGH = 120.0, 48.0


def _axis(picture: Diagram, start: tuple[float, float], end: tuple[float, float], text: str, width: float = 2) -> None:
    """Draw arrows in both directions, with the name of the axis beside them."""
    picture.both_ways(start, end, width=width)
    (x, y), (x2, y2) = start, end
    if x == x2:
        picture.text(x + 10, (y + y2) / 2, text, anchor="start", size=13, bold=True)
    else:
        picture.text((x + x2) / 2, y - 13, text, size=13, bold=True)


@diagram("09_mesh", 640, 236, "a mesh with the axes dp and tp")
def mesh(picture: Diagram) -> None:
    """Four ranks in two rows and two columns. Rank 0 has the coordinates 0, 0, rank 1 has 0, 1, rank 2 has 1, 0 and
    rank 3 has 1, 1. A row is a tensor-parallel group: its ranks share one model and the same data. A column is a
    data-parallel group: its ranks hold the same weights and different data."""
    for rank in range(4):
        row, column = divmod(rank, 2)
        picture.box(110 + 210 * column, 48 + 110 * row, WIDE, HIGH, f"rank {rank}\n({row}, {column})", fill=SHARES[column])
    for row in range(2):
        y = 72 + 110 * row
        _axis(picture, (234, y), (316, y), "tp")
        picture.text(100, y, f"data {'AB'[row]}", anchor="end", size=14, bold=True)
        picture.text(450, y, "one model in two parts", anchor="start", size=13)
    for column in range(2):
        x = 170 + 210 * column
        _axis(picture, (x, 100), (x, 154), "dp")
        picture.text(x, 30, f"weights {'01'[column]}", size=14, bold=True)
        picture.text(x, 222, "the same weights", size=13)


@diagram("09_pipeline", 640, 236, "a mesh with the axes dp and pp")
def pipeline(picture: Diagram) -> None:
    """Four ranks in two rows and two columns. Each row is a pipeline of two stages, with its own data; activations go
    to the right and gradients come back. Each column holds the same stage twice, and averages its gradients."""
    for rank in range(4):
        row, column = divmod(rank, 2)
        picture.box(110 + 210 * column, 48 + 110 * row, WIDE, HIGH, f"rank {rank}\nstage {column}", fill=SHARES[column])
    for row in range(2):
        y = 72 + 110 * row
        picture.arrow((234, y - 8), (316, y - 8), color=COMMUNICATION)
        picture.text(275, y - 20, "activations", size=12)
        picture.arrow((316, y + 8), (234, y + 8), color=COMMUNICATION)
        picture.text(275, y + 20, "gradients", size=12)
        picture.text(100, y, f"data {'AB'[row]}", anchor="end", size=14, bold=True)
        picture.text(450, y, "one model in two stages", anchor="start", size=13)
    for column in range(2):
        x = 170 + 210 * column
        _axis(picture, (x, 100), (x, 154), "dp")
        picture.text(x, 30, f"stage {column}", size=14, bold=True)
        picture.text(x, 222, "the same weights", size=13)


@diagram("09_cube", 700, 262, "a mesh with the axes pp, dp and tp on two nodes")
def cube(picture: Diagram) -> None:
    """Eight ranks. Ranks 0 to 3 hold stage 0 and are on node 0, ranks 4 to 7 hold stage 1 and are on node 1. In each
    node, ranks of a row share the layers of their stage by tensor parallelism, and the two rows are data-parallel
    replicas. Activations and their gradients alone travel between the nodes."""
    for stage in range(2):
        left = 12.0 + 380 * stage
        picture.box(left, 34, 296, 190, dashed=True)
        picture.text(left + 148, 16, f"node {stage}: stage {stage}", bold=True)
        for row in range(2):
            for column in range(2):
                rank = 4 * stage + 2 * row + column
                text = f"rank {rank}\n({stage}, {row}, {column})"
                picture.box(left + 16 + 166 * column, 52 + 106 * row, 98, HIGH, text, fill=SHARES[2 * stage + column], size=13)
            _axis(picture, (left + 118, 76 + 106 * row), (left + 178, 76 + 106 * row), "tp")
        for column in range(2):
            _axis(picture, (left + 65 + 166 * column, 104), (left + 65 + 166 * column, 154), "dp")
    _axis(picture, (312, 129), (388, 129), "pp", width=4)
    picture.text(350, 246, "each rank of stage 0 exchanges messages with the rank at its place in stage 1", size=13)


@diagram("09_placement", 760, 266, "the tensor axis inside the nodes and across them")
def placement(picture: Diagram) -> None:
    """Two nodes with two ranks each. On the left, the mesh has the order dp, tp: tensor-parallel groups are inside a
    node, and gradients cross between the nodes. On the right, the order is tp, dp: gradients stay inside a node, and
    the activations of tensor parallelism cross."""
    for side, (inner, outer) in enumerate((("tp", "dp"), ("dp", "tp"))):
        left = 14.0 + 386 * side
        picture.text(left + 173, 14, f"order {outer}, {inner}: tp {'inside' if side == 0 else 'across'}", size=15, bold=True)
        for node in range(2):
            y = 34.0 + 122 * node
            picture.box(left, y, 346, 84, dashed=True)
            picture.text(left + 10, y + 12, f"node {node}", anchor="start", size=12)
            for place in range(2):
                picture.box(
                    left + 66 + 156 * place, y + 22, 94, 44, f"rank {2 * node + place}",
                    fill=SHARES[place if side == 0 else node],
                )  # fmt: skip
            _axis(picture, (left + 164, y + 44), (left + 218, y + 44), inner)
        for place in range(2):
            x = left + 113 + 156 * place
            _axis(picture, (x, 104), (x, 174), outer, width=4)
    picture.line((380, 30), (380, 240), dashed=True)
    picture.text(380, 256, "the same colour: the same part of the weights", size=13)
