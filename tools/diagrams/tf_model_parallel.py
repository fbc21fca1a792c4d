"""TensorFlow's model parallelism: three ways to use two devices, placement with its messages, and DTensor's layouts."""

from __future__ import annotations

from tools.diagrams.kit import BACKWARD, COMMUNICATION, FORWARD, GOLD, INK, OLIVE, PINK, VIOLET, Diagram, diagram

MATRICES = ("784 × 256", "256 × 1024", "1024 × 256", "256 × 10")
COLORS = (OLIVE, VIOLET, GOLD, PINK)


@diagram("11_three_ways", 780, 250, "three ways to use two devices")
def three_ways(picture: Diagram) -> None:
    """MirroredStrategy: CPU:0 and CPU:1 each hold all four matrices. Placement with tf.device: CPU:0 holds the first
    two, CPU:1 the last two. DTensor: each device holds the whole first and last matrix, half of the columns of the
    second and half of the rows of the third."""
    for number, (title, words) in enumerate(
        (("MirroredStrategy", "copies"), ("tf.device", "whole layers"), ("DTensor", "parts of layers"))
    ):
        left = 70.0 + 240 * number
        picture.text(left + 105, 14, title, size=16, bold=True)
        picture.text(left + 105, 36, words, size=13)
        for device in range(2):
            x = left + 110 * device
            picture.text(x + 50, 238, f"CPU:{device}", size=13)
            for row, (name, color) in enumerate(zip(MATRICES, COLORS, strict=True)):
                y = 54.0 + 44 * row
                if number == 1 and row // 2 != device:
                    picture.box(x, y, 100, 36, dashed=True)
                elif number == 2 and row == 1:
                    picture.box(x, y, 100, 36, dashed=True)
                    picture.box(x + 50 * device, y, 50, 36, "half", fill=color, size=12)
                elif number == 2 and row == 2:
                    picture.box(x, y, 100, 36, dashed=True)
                    picture.box(x, y + 18 * device, 100, 18, "half", fill=color, size=12, radius=3)
                else:
                    picture.box(x, y, 100, 36, name, fill=color, size=13)
        if number:
            picture.line((left - 15, 10), (left - 15, 240), dashed=True)
    for row in range(4):
        picture.text(8, 72 + 44 * row, f"matrix {row + 1}", anchor="start", size=12)


@diagram("11_placed", 720, 190, "a placed model takes turns")
def placed(picture: Diagram) -> None:
    """Time runs to the right. CPU:0 computes the forward pass of matrices 1 and 2 and sends h to CPU:1. CPU:1 computes
    the rest of the forward pass and its own backward pass, and sends the gradient of h to CPU:0, which computes the
    backward pass of matrices 2 and 1. While one computes, the other waits."""
    for device in range(2):
        picture.text(8, 52 + 80 * device, f"CPU:{device}", anchor="start", size=14)
    picture.box(70, 28, 150, 48, "forward\nmatrices 1, 2", fill=FORWARD, size=13)
    picture.box(228, 28, 304, 48, "waits", dashed=True, size=13)
    picture.box(540, 28, 170, 48, "backward\nmatrices 2, 1", fill=BACKWARD, size=13)
    picture.box(70, 108, 170, 48, "waits", dashed=True, size=13)
    picture.box(248, 108, 120, 48, "forward\nmatrices 3, 4", fill=FORWARD, size=13)
    picture.box(374, 108, 150, 48, "backward\nmatrices 4, 3", fill=BACKWARD, size=13)
    picture.box(532, 108, 178, 48, "waits", dashed=True, size=13)
    picture.arrow((212, 78), (252, 106), color=COMMUNICATION)
    picture.text(190, 92, "h", size=15, color=COMMUNICATION, bold=True)
    picture.arrow((520, 106), (552, 78), color=COMMUNICATION)
    picture.text(610, 92, "gradient of h", size=13, color=COMMUNICATION, bold=True)
    picture.arrow((70, 174), (710, 174), color=INK)
    picture.text(390, 184, "time", size=12)


@diagram("11_layouts", 740, 190, "layouts of a matrix on a mesh of two devices")
def layouts(picture: Diagram) -> None:
    """Layout unsharded, model: CPU:0 holds the left half of the columns, CPU:1 the right half. Layout model, unsharded:
    CPU:0 holds the upper half of the rows, CPU:1 the lower half. Layout unsharded, unsharded: both hold the whole
    matrix."""
    cases = (
        ('["unsharded", "model"]', "columns are divided"),
        ('["model", "unsharded"]', "rows are divided"),
        ('["unsharded", "unsharded"]', "a copy on each device"),
    )
    for number, (name, words) in enumerate(cases):
        left = 16.0 + 246 * number
        picture.text(left + 106, 14, name, size=14, bold=True)
        for device in range(2):
            x, color = left + 112 * device, (VIOLET, GOLD)[device]
            picture.box(x, 36, 100, 90, dashed=True)
            if number == 0:
                picture.box(x + 50 * device, 36, 50, 90, fill=color, text="half", size=13)
            elif number == 1:
                picture.box(x, 36 + 45 * device, 100, 45, "half", fill=color, size=13)
            else:
                picture.box(x, 36, 100, 90, "whole", fill=OLIVE, size=13)
            picture.text(x + 50, 144, f"CPU:{device}", size=13)
        picture.text(left + 106, 172, words, size=13)
