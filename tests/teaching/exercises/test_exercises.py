"""The exercises of lesson 00: right answers pass, and wrong ones get an explanation."""

from __future__ import annotations

import torch.distributed as dist
from answers import Answers

answers = Answers()

right, wrong, mutant = answers.of("introduce")


@right
def introduce_in_parts():
    return " ".join(["rank", str(dist.get_rank()), "of", str(dist.get_world_size())])


RANK = "{dist.get_rank()}"
RANKS = "{dist.get_world_size()}"
TEXT = 'f"rank {dist.get_rank()} of {dist.get_world_size()}"'
mutant(RANK, "{dist.get_rank() + 1}", "Ranks are counted from 0")
mutant("return ", "text = ", "`return` gives it to the notebook")
mutant(RANK, "0", "All ranks return the same text", cure="dist.get_rank() gives")
mutant(RANKS, "2", "The number of ranks is wrong", cure="dist.get_world_size() gives it")
mutant(TEXT, 'f"{dist.get_rank()}/{dist.get_world_size()}"', "not the one asked for")
mutant(TEXT, '"rank", dist.get_rank(), "of", 2', "not a string", cure="with an f before the quotes")
mutant(TEXT, "1 / 0", "ZeroDivisionError")


right, wrong, mutant = answers.of("my_share")


@right
def my_share_in_blocks(items):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return list(range(items * rank // ranks, items * (rank + 1) // ranks))


SHARE = "range(items)[dist.get_rank() :: dist.get_world_size()]"
RETURN, EACH = f"return {SHARE}", "each = items // dist.get_world_size()"
BEGIN, END = "dist.get_rank() * each", "(dist.get_rank() + 1) * each"
REST = f"items if dist.get_rank() == dist.get_world_size() - 1 else {END}"
ROUNDED_UP = "each = -(-items // dist.get_world_size())"
mutant(RETURN, f"{EACH}\n    return range({BEGIN}, {END})", "10 // 4 rounds down")
mutant(RETURN, f"{ROUNDED_UP}\n    return range({BEGIN}, {END})", "there is no item 10")
mutant(RETURN, f"{EACH}\n    return range({BEGIN}, {REST})", "all wait for the slowest")
mutant(
    RETURN,
    f"{ROUNDED_UP}\n    return range(max(0, {BEGIN} - 1), min(items, {END}))",
    "items 2, 5 and 8 belong to more than one rank",
)
mutant(SHARE, "range(items)", "every rank takes everything")
mutant(SHARE, "items // dist.get_world_size()", "expected its item numbers")
mutant("range(items)", "items", "`items` is a number, not a list: here it was 10")
mutant(SHARE, "range(items + '1')", "unsupported operand")
mutant(SHARE, f"[item + 0.5 for item in {SHARE}]", "0.5 is not a whole number")
mutant(SHARE, f"[item in {SHARE} for item in range(items)]", "expected its item numbers")


right, wrong, mutant = answers.of("waiting_share")

right(0.5)
wrong("the share of one fast rank", 2 / 3)
wrong("right as a percentage", 50)
wrong("the seconds that all ranks wait", 0.6, cure="divide by the seconds of four ranks")
wrong("the seconds that one rank waits", 0.2, cure="add up the waiting of all ranks")
wrong("how long does each of the four ranks wait", 0.11, cure="divide by 4 ranks × 0.3 s")
wrong("expected a number between 0 and 1", "half")


test_the_verdict_fits_the_answer = answers.test_of_verdicts()
test_every_exercise_has_right_and_wrong_answers_here = answers.test_of_completeness("start_here")
