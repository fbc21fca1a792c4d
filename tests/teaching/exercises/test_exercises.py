"""The exercises of lesson 00: right answers pass, and wrong ones get an explanation."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from answers import Answers, judge

answers = Answers()
right, wrong, mutant = answers.right, answers.wrong, answers.mutant


# introduce


@right("introduce")
def introduce_in_parts():
    return " ".join(["rank", str(dist.get_rank()), "of", str(dist.get_world_size())])


RANK, RANKS, TEXT = "{dist.get_rank()}", "{dist.get_world_size()}", 'f"rank {dist.get_rank()} of {dist.get_world_size()}"'
mutant("introduce", RANK, "{dist.get_rank() + 1}", "Ranks are counted from 0")
mutant("introduce", "return ", "text = ", "`return` gives it to the notebook")
mutant("introduce", RANK, "0", "All ranks return the same text", cure="dist.get_rank() gives")
mutant("introduce", RANKS, "2", "The number of ranks is wrong", cure="dist.get_world_size() gives it")
mutant("introduce", TEXT, 'f"{dist.get_rank()}/{dist.get_world_size()}"', "not the one asked for")
mutant("introduce", TEXT, '"rank", dist.get_rank(), "of", 2', "not a string", cure="with an f before the quotes")
mutant("introduce", TEXT, "1 / 0", "ZeroDivisionError")


# my_share


@right("my_share")
def my_share_in_blocks(items):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return list(range(items * rank // ranks, items * (rank + 1) // ranks))


SHARE = "range(items)[dist.get_rank() :: dist.get_world_size()]"
RETURN, EACH = f"return {SHARE}", "each = items // dist.get_world_size()"
BEGIN, END = "dist.get_rank() * each", "(dist.get_rank() + 1) * each"
REST = f"items if dist.get_rank() == dist.get_world_size() - 1 else {END}"
ROUNDED_UP = "each = -(-items // dist.get_world_size())"
mutant("my_share", RETURN, f"{EACH}\n    return range({BEGIN}, {END})", "10 // 4 rounds down")
mutant("my_share", RETURN, f"{ROUNDED_UP}\n    return range({BEGIN}, {END})", "there is no item 10")
mutant("my_share", RETURN, f"{EACH}\n    return range({BEGIN}, {REST})", "all wait for the slowest")
mutant(
    "my_share",
    RETURN,
    f"{ROUNDED_UP}\n    return range(max(0, {BEGIN} - 1), min(items, {END}))",
    "items 2, 5 and 8 belong to more than one rank",
)
mutant("my_share", SHARE, "range(items)", "every rank takes everything")
mutant("my_share", SHARE, "items // dist.get_world_size()", "expected its item numbers")
mutant("my_share", "range(items)", "items", "`items` is a number, not a list: here it was 10")
mutant("my_share", SHARE, "range(items + '1')", "unsupported operand")
mutant("my_share", SHARE, f"[item + 0.5 for item in {SHARE}]", "0.5 is not a whole number")
mutant("my_share", SHARE, f"[item in {SHARE} for item in range(items)]", "expected its item numbers")


# waiting_share

right("waiting_share", 0.5)
wrong("waiting_share", "the share of one fast rank", 2 / 3)
wrong("waiting_share", "right as a percentage", 50)
wrong("waiting_share", "the seconds that all ranks wait", 0.6, cure="divide by the seconds of four ranks")
wrong("waiting_share", "the seconds that one rank waits", 0.2, cure="add up the waiting of all ranks")
wrong("waiting_share", "how long does each of the four ranks wait", 0.11, cure="divide by 4 ranks × 0.3 s")
wrong("waiting_share", "expected a number between 0 and 1", "half")


@pytest.mark.parametrize("answer", answers.parameters())
@pytest.mark.processes
def test_the_verdict_fits_the_answer(answer) -> None:
    judge(answer)


def test_every_exercise_has_right_and_wrong_answers_here() -> None:
    answers.complete("start_here")
