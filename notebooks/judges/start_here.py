"""The exercises of lesson 00: a rank's number, its share of the work, and the cost of waiting."""

from __future__ import annotations

import reprlib
from typing import Any

from labkit.errors.wrong_calls import one_number
from labkit.teaching.exercises.comparisons import listing, whole_numbers
from labkit.teaching.exercises.judging import (
    NUMBER_FOR_LIST,
    AnswerError,
    OnRanks,
    call,
    exercise,
    explaining,
    judge_result,
    reject,
    showing,
)

LESSON = "00_start_here"


@exercise(
    LESSON,
    "Return the text 'rank R of N', with this rank's number and the number of ranks.",
    "Every rank knows who it is, in a group of any size.",
)
def _introduce(answer: Any, on: OnRanks) -> None:
    for ranks in (3, 2):
        got = on(ranks, call, answer)
        expected = [f"rank {rank} of {ranks}" for rank in range(ranks)]
        faults = {
            "the function returns nothing: print only shows the text; `return` gives it to the notebook": (
                all(g is None for g in got)
            ),
            "ranks are counted from 0: the first is rank 0, the last is rank N-1": (
                got == [f"rank {rank + 1} of {ranks}" for rank in range(ranks)]
            ),
            ("all ranks return the same text: which number is this rank's?", "dist.get_rank() gives the number of this rank"): (
                len(set(map(str, got))) == 1
            ),
            ("the number of ranks is wrong: it differs from group to group", "dist.get_world_size() gives it"): (
                got != expected and [str(g).split(" of ")[0] for g in got] == [e.split(" of ")[0] for e in expected]
            ),
            ("not a string", "write f'rank {...} of {...}', with an f before the quotes, and return that"): (
                not all(isinstance(g, str) for g in got)
            ),
            "the text is not the one asked for": got != expected,
        }
        reject(faults, f"introduce() on {ranks} ranks: given {got}", f"expected {expected}")


@exercise(
    LESSON,
    "Given a number of items, return the numbers of those that this rank shall do: every item on exactly one rank, and no "
    "rank with more than one item more than another.",
    "Every item belongs to exactly one rank, and no rank has more than one item more than another.",
)
def _my_share(answer: Any, on: OnRanks) -> None:
    for items, ranks in ((10, 4), (7, 3), (2, 3)):
        number = f"`items` is a number, not a list: here it was {items}"
        with showing(f"my_share({items}) on {ranks} ranks"), explaining(dict.fromkeys(NUMBER_FOR_LIST, number)):
            returned = on(ranks, call, answer, items)
        shares = []
        for rank, share in enumerate(returned):
            with showing(f"my_share({items}) on rank {rank} of {ranks} returned {share!r}"):
                shares.append(whole_numbers(share, "its item numbers, as a list or a range"))
        every = [item for share in shares for item in share]
        unknown = sorted({item for item in every if item not in range(items)})
        twice = sorted({item for item in every if every.count(item) > 1})
        lost = [item for item in range(items) if item not in every]
        rest = f"; {items} // {ranks} rounds down, and some rank must take the rest" if items % ranks else ""
        sizes = [len(share) for share in shares]
        faults = {
            f"there is no item {listing(unknown[:1])}; they are numbered 0 to {items - 1}": unknown,
            f"every rank takes everything, so the work is done {ranks} times; each item belongs to one rank": len(twice) == items,
            f"{_items(twice)} to more than one rank": twice,
            f"{_items(lost)} to no rank{rest}": lost,
            f"rank {sizes.index(max(sizes))} has {max(sizes)}, another rank has {min(sizes)}, and all wait for the slowest": (
                max(sizes) - min(sizes) > 1
            ),
        }
        returned_by = (f"rank {rank}: my_share({items}) returned {share}" for rank, share in enumerate(shares))
        reject(faults, f"{items} items on {ranks} ranks", *returned_by)


def _items(numbers: list[int]) -> str:
    return f"item {listing(numbers)} belongs" if len(numbers) == 1 else f"items {listing(numbers)} belong"


@exercise(
    LESSON,
    "Four ranks meet at a barrier. Rank 0 comes after 0.3 s, the others after 0.1 s. Which share of the four ranks' time is "
    "waited?",
    "The three fast ranks wait 0.6 of the group's 1.2 seconds: half of what was paid for is idle.",
    number=True,
)
def _waiting_share(answer: Any, _: OnRanks) -> None:
    """Rank 0 works for 0.3 s, the three others for 0.1 s: they wait 3 × 0.2 s of 4 × 0.3 s."""
    share = None if isinstance(answer, str) else one_number(answer)
    if share is None:
        raise AnswerError(f"expected a number between 0 and 1, given {reprlib.repr(answer)}")
    mistakes = {
        "right as a percentage; as a share between 0 and 1 it is a hundredth of that": 50,
        "that is the share of one fast rank; the slow one never waits, and counts too": 2 / 3,
        ("those are the seconds that all ranks wait, not a share", "divide by the seconds of four ranks"): 0.6,
        (
            "those are the seconds that one rank waits, not a share of the time of all ranks",
            "add up the waiting of all ranks, and divide by the seconds of four ranks",
        ): 0.2,
        "that would be one rank of four; three of them wait, though not all the time": 0.25,
        "three of four ranks wait, but not all the time: each works for a third of it": 0.75,
    }
    judge_result(
        share, 0.5, mistakes,
        (
            "that is not the share: how long does each of the four ranks wait, and how long are all of them there?",
            "add up what each rank waits until the slowest is done, and divide by 4 ranks × 0.3 s",
        ),
        f"given {answer}",
        same=lambda a, b: abs(a - b) < 0.0075 * max(1, b),
    )  # fmt: skip
