"""The exercises of lesson 00: right answers pass, and wrong ones get an explanation."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from answers import Answers, judge

answers = Answers()
right, wrong = answers.right, answers.wrong


# 00: introduce


@right("introduce")
def introduce():
    return f"rank {dist.get_rank()} of {dist.get_world_size()}"


@wrong("introduce", "Ranks are counted from 0")
def introduce_from_one():
    return f"rank {dist.get_rank() + 1} of {dist.get_world_size()}"


@wrong("introduce", "`return` gives it to the notebook")
def introduce_by_print():
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}")


@wrong("introduce", "All ranks return the same text", cure="dist.get_rank() gives")
def introduce_the_first():
    return f"rank 0 of {dist.get_world_size()}"


@wrong("introduce", "The number of ranks is wrong", cure="dist.get_world_size() gives it")
def introduce_of_constant():
    return f"rank {dist.get_rank()} of 2"


@wrong("introduce", "not the one asked for")
def introduce_otherwise():
    return f"{dist.get_rank()}/{dist.get_world_size()}"


@wrong("introduce", "not a string", cure="with an f before the quotes")
def introduce_in_four_parts():
    return "rank", dist.get_rank(), "of", dist.get_world_size()


@wrong("introduce", "ZeroDivisionError")
def introduce_and_fail():
    return 1 / 0


# 00: my_share


@right("my_share")
def my_share(items):
    return range(items)[dist.get_rank() :: dist.get_world_size()]


@right("my_share")
def my_share_in_blocks(items):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return list(range(items * rank // ranks, items * (rank + 1) // ranks))


@wrong("my_share", "10 // 4 rounds down")
def my_share_rounded_down(items):
    each = items // dist.get_world_size()
    return range(dist.get_rank() * each, (dist.get_rank() + 1) * each)


@wrong("my_share", "every rank takes everything")
def my_share_of_all(items):
    return range(items)


@wrong("my_share", "there is no item 10")
def my_share_rounded_up(items):
    each = -(-items // dist.get_world_size())
    return range(dist.get_rank() * each, (dist.get_rank() + 1) * each)


@wrong("my_share", "all wait for the slowest")
def my_share_rest_to_the_last(items):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    each = items // ranks
    return range(rank * each, items if rank == ranks - 1 else (rank + 1) * each)


@wrong("my_share", "items 2, 5 and 8 belong to more than one rank")
def my_share_with_seams(items):
    each = -(-items // dist.get_world_size())
    start = dist.get_rank() * each
    return range(max(0, start - 1), min(items, start + each))


@wrong("my_share", "expected its item numbers")
def my_share_as_a_count(items):
    return items // dist.get_world_size()


@wrong("my_share", "`items` is a number, not a list: here it was 10")
def my_share_of_a_list(items):
    return items[dist.get_rank() :: dist.get_world_size()]


@wrong("my_share", "unsupported operand")
def my_share_and_fail(items):
    return range(items + "1")


@wrong("my_share", "0.5 is not a whole number")
def my_share_of_halves(items):
    return [item + 0.5 for item in my_share(items)]


@wrong("my_share", "expected its item numbers")
def my_share_as_a_mask(items):
    return [item in my_share(items) for item in range(items)]


# 00: waiting_share

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
