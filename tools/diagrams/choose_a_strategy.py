"""Lesson 14: the cluster of the lesson, and the way from its questions to a plan."""

from __future__ import annotations

from tools.diagrams.kit import SHARES, Diagram, diagram


@diagram("14_cluster", 660, 222, "two nodes with two devices each")
def cluster(picture: Diagram) -> None:
    """Two nodes. Each has two devices with 50 megabytes of memory, joined by a link of 0.2 gigabits per second. One
    connection of 0.1 gigabits per second joins the nodes, and both devices of a node share it. Each link has a latency
    of 4 milliseconds."""
    for node in range(2):
        left = 12.0 + 360 * node
        picture.box(left, 30, 276, 128, dashed=True)
        picture.text(left + 138, 14, f"node {node}", bold=True)
        for place in range(2):
            rank = 2 * node + place
            picture.box(left + 14 + 160 * place, 54, 88, 80, f"rank {rank}\n50 MB", fill=SHARES[rank])
        picture.both_ways((left + 106, 94), (left + 170, 94))
        picture.text(left + 138, 72, "inside", size=13)
        picture.text(left + 138, 178, "inside: 0.2 Gbit/s, 4 ms", size=13)
    picture.both_ways((290, 94), (370, 94), width=4)
    picture.text(330, 72, "between", size=13)
    picture.text(330, 208, "between: 0.1 Gbit/s, 4 ms, shared by the ranks of a node", size=13)


@diagram("14_questions", 760, 262, "from questions to a plan")
def questions(picture: Diagram) -> None:
    """Four questions in a column. How large is the model, and how much memory has a device? This decides what fits. How
    much data belongs to a step? This decides the computing of a rank. How are the devices connected? This decides what
    communication costs. How is the model built? This decides where it can be cut. All four lead to a plan, which is
    then measured."""
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
