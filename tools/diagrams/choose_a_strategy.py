"""Lesson 14: the cluster of the lesson, and the way from its questions to a plan."""

from __future__ import annotations

from tools.diagrams.kit import COMMUNICATION, SHARES, Diagram

__all__ = ["diagrams"]


def cluster() -> Diagram:
    """Two nodes with two devices each, and their two kinds of link."""
    picture = Diagram(
        660, 222, "two nodes with two devices each",
        "Two nodes. Each has two devices with 50 megabytes of memory, joined by a link of 0.2 gigabits per second. "
        "One connection of 0.1 gigabits per second joins the nodes, and both devices of a node share it. Each link has a latency "
        "of 4 milliseconds.",
    )  # fmt: skip
    for node in range(2):
        left = 12.0 + 360 * node
        picture.box(left, 30, 276, 128, dashed=True)
        picture.text(left + 138, 14, f"node {node}", bold=True)
        for place in range(2):
            rank = 2 * node + place
            picture.box(left + 14 + 160 * place, 54, 88, 80, f"rank {rank}\n50 MB", fill=SHARES[rank])
        _both_ways(picture, (left + 106, 94), (left + 170, 94))
        picture.text(left + 138, 72, "inside", size=13)
        picture.text(left + 138, 178, "inside: 0.2 Gbit/s, 4 ms", size=13)
    _both_ways(picture, (290, 94), (370, 94), width=4)
    picture.text(330, 72, "between", size=13)
    picture.text(330, 208, "between: 0.1 Gbit/s, 4 ms, shared by the ranks of a node", size=13)
    return picture


def questions() -> Diagram:
    """The questions, what each decides, and the plan that follows."""
    picture = Diagram(
        760, 262, "from questions to a plan",
        "Four questions in a column. How large is the model, and how much memory has a device? This decides what fits. How much "
        "data belongs to a step? This decides the computing of a rank. How are the devices connected? This decides what "
        "communication costs. How is the model built? This decides where it can be cut. All four lead to a plan, which is then "
        "measured.",
    )  # fmt: skip
    rows = (
        ("model and memory", "what fits: bytes per rank, by kind"),
        ("data: samples per step", "how long a rank computes"),
        ("links: inside, between", "what each axis costs, and who waits"),
        ("layers and heads", "where the model can be cut"),
    )
    for number, (asked, decides) in enumerate(rows):
        y = 14.0 + 60 * number
        picture.box(12, y, 190, 44, asked, fill=SHARES[number])
        picture.arrow((206, y + 22), (246, y + 22))
        picture.box(250, y, 270, 44, decides, size=13)
        picture.arrow((524, y + 22), (572, 104 + 14 * number))
    picture.box(576, 88, 84, 74, "plan", bold=True)
    picture.arrow((664, 125), (690, 125))
    picture.box(694, 88, 62, 74, "run", bold=True)
    return picture


def _both_ways(picture: Diagram, start: tuple[float, float], end: tuple[float, float], *, width: float = 2) -> None:
    picture.arrow(start, end, color=COMMUNICATION, width=width)
    picture.arrow(end, start, color=COMMUNICATION, width=width)


def diagrams() -> dict[str, Diagram]:
    """The diagrams of this lesson by the names of their files."""
    return {"14_cluster": cluster(), "14_questions": questions()}
