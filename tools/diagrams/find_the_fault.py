"""Lesson 15: the four ways in which a fault shows, and the three places where two runs are compared."""

from __future__ import annotations

from tools.diagrams.kit import EMPTY, GOLD, SUM, VIOLET, Diagram, diagram


@diagram("15_four_ways", 700, 250, "four ways in which a fault shows")
def four_ways(picture: Diagram) -> None:
    """A program with a fault ends in one of four ways. With an error: its traceback shows the line. It waits for ever:
    a report of the deadlock shows where each rank waits. With a wrong number: comparing the ranks, or comparing with
    one process, shows it. With the right number, but slowly: the timeline shows it. The third way raises no error."""
    picture.box(20, 100, 120, 50, "a program\nwith a fault")
    rows = (
        ("it ends with an error", "the traceback"),
        ("it waits for ever", "who waits for whom"),
        ("it returns a wrong number", "ranks compared; one process"),
        ("it is right, and slow", "the timeline"),
    )
    picture.text(310, 18, "what happens", bold=True, size=13)
    picture.text(582, 18, "what shows the cause", bold=True, size=13)
    for number, (end, shown) in enumerate(rows):
        y = 36 + 54 * number
        wrong = number == 2
        picture.arrow((140, 125), (200, y + 20))
        picture.box(205, y, 215, 40, end, fill=SUM if wrong else EMPTY, bold=wrong, size=13)
        picture.arrow((420, y + 20), (475, y + 20))
        picture.box(480, y, 205, 40, shown, dashed=True, size=13)


@diagram("15_oracle", 700, 230, "a serial oracle")
def oracle(picture: Diagram) -> None:
    """The same program runs on one rank with the whole batch, and on two ranks with half of the batch each. Three
    things are compared, in this order: the samples of the first step, the gradients of the first step, and the
    weights at the end. The first one that differs tells where to look."""
    picture.text(80, 62, "one rank", bold=True, anchor="end")
    picture.text(80, 152, "two ranks", bold=True, anchor="end")
    columns = ((100, "samples of\nthe first step"), (310, "gradients of\nthe first step"), (520, "weights\nat the end"))
    for number, (x, text) in enumerate(columns):
        picture.box(x, 36, 140, 50, text, fill=VIOLET)
        for left in (x, x + 74):
            picture.box(left, 126, 66, 50, "half" if number == 0 else "", fill=GOLD)
        picture.both_ways((x + 70, 88), (x + 70, 124))
        picture.text(x + 70, 200, f"{number + 1}. equal?", size=13)
        if number < 2:
            picture.arrow((x + 146, 61), (x + 204, 61))
            picture.arrow((x + 146, 151), (x + 204, 151))
