"""Whether a round of `make chaos` went as it should, and the table of many. Starts nothing."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.chaos.faults import FAULTS, Round
from bench.page import duration, table


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one round."""

    turn: Round
    problem: str  # why the next run did not succeed; "" if it did
    named: bool  # whether the report was right: it named the right rank or, for faults without a rank, the right thing
    report_s: float | None  # from the fault to the report; None if there is none, or if the time of the fault is unknown
    left: Sequence[str]  # what was left behind
    reported: str = ""  # what the student saw

    @property
    def good(self) -> bool:
        """Whether the round succeeded."""
        return self.named and not self.problem and not self.left


def named(turn: Round, reported: dict[str, Any]) -> bool:
    """Whether the report of how the run ended was right and named the right rank.

    It has the exception's `kind`, `text`, `sentence` (the one that says why) and `rank`, and the run's `results`.
    """
    kind, expect = reported["kind"], FAULTS[turn.fault].expect
    if expect == "rank":
        return bool(kind == "RankError" and reported["rank"] == turn.victim)
    if expect == "machine":
        return bool(kind == "RankError" and reported["rank"] in turn.beside() and "is lost: " in reported["text"])
    if expect == "pair":
        concerned = set(re.findall(r"\b(?:rank |worker)\d+", reported["sentence"]))
        if turn.fault.startswith("another"):  # the victim, and any of those that did it right
            return turn.name_of(turn.victim) in concerned and len(concerned) == 2
        return concerned == {turn.name_of(rank) for rank in turn.facing()}
    if expect == "words":
        return kind == "LabError" and all(name in reported["text"] for name in ("'odd'", "work()"))
    if expect == "nothing":
        return kind == "NoneType" and all(result == 1 for result in reported["results"])
    lines = [line for line in reported["text"].splitlines() if line.strip().startswith(f"{turn.name_of(turn.victim)} ")]
    return kind in ("Stopped", "KeyboardInterrupt") and (expect == "stop" or any("SIGSTOP" in line for line in lines))


def rows(outcomes: Sequence[Outcome]) -> str:
    """A row for each fault that was drawn."""
    head = ["fault", "rounds", "recovered", "reported correctly", "time to the report: median", "worst", "left behind"]
    lines = []
    for name in FAULTS:
        mine = [outcome for outcome in outcomes if outcome.turn.fault == name]
        if mine:
            times = [outcome.report_s for outcome in mine if outcome.report_s is not None]
            lines.append(
                [
                    name, str(len(mine)), str(sum(not o.problem for o in mine)), str(sum(o.named for o in mine)),
                    duration(statistics.median(times) if times else None), duration(max(times, default=None)),
                    str(sum(len(o.left) for o in mine)),
                ]
            )  # fmt: skip
    return table(head, lines)


def closing_line(outcomes: Sequence[Outcome]) -> str:
    """All outcomes in one line."""
    whole = len(outcomes)
    return (
        f"{sum(not o.problem for o in outcomes)} of {whole} recovered, {sum(o.named for o in outcomes)} of {whole} reported "
        f"correctly, {sum(len(o.left) for o in outcomes)} left behind"
    )
