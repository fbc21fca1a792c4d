"""The exercises of lesson 00: a rank's number, its share of the work, and the cost of waiting."""

from __future__ import annotations

import reprlib
from typing import Any

from labkit.errors.wrong_calls import one_number
from labkit.teaching.exercises.answer_ranks import call_answer
from labkit.teaching.exercises.comparisons import expect, listing, whole_numbers, wrong_if
from labkit.teaching.exercises.exercise import NUMBER_FOR_LIST, Results, exercise

LESSON = "00_start_here"


@exercise(
    LESSON, "Every rank knows who it is, in a group of any size.", [(3,), (2,)],
    on_ranks=call_answer, call="introduce() on {ranks} ranks",
)
def introduce(results: Results, ranks: int) -> None:
    """Return the text 'rank R of N', with this rank's number and the number of ranks."""
    expected = [f"rank {rank} of {ranks}" for rank in range(ranks)]
    shown = f"given {results}", f"expected {expected}"
    wrong_if(all(text is None for text in results),
             "the function returns nothing: print only shows the text; `return` gives it to the notebook",
             "", *shown)
    wrong_if(results == [f"rank {rank + 1} of {ranks}" for rank in range(ranks)],
             "ranks are counted from 0: the first is rank 0, the last is rank N-1", "", *shown)
    wrong_if(len(set(map(str, results))) == 1,
             "all ranks return the same text: which number is this rank's?",
             "dist.get_rank() gives the number of this rank", *shown)
    wrong_if(results != expected and [str(text).split(" of ")[0] for text in results]
             == [text.split(" of ")[0] for text in expected],
             "the number of ranks is wrong: it differs from group to group",
             "dist.get_world_size() gives it", *shown)
    wrong_if(not all(isinstance(text, str) for text in results), "not a string",
             "write f'rank {...} of {...}', with an f before the quotes, and return that", *shown)
    wrong_if(results != expected, "the text is not the one asked for", "", *shown)


@exercise(
    LESSON, "Every item belongs to exactly one rank, and no rank has more than one item more than another.",
    [(4, 10), (3, 7), (3, 2)], on_ranks=call_answer, call="my_share({items}) on {ranks} ranks",
    errors=lambda _, items: dict.fromkeys(
        NUMBER_FOR_LIST, f"`items` is a number, not a list: here it was {items}"
    ),
)
def my_share(results: Results, ranks: int, items: int) -> None:
    """Given a number of items, return the numbers of those that this rank shall do: every item on exactly one
    rank, and no rank with more than one item more than another."""
    shares = [
        whole_numbers(share, "its item numbers, as a list or a range", f"rank {rank} returned {share!r}")
        for rank, share in enumerate(results)
    ]
    shown = [f"rank {rank}: my_share({items}) returned {share}" for rank, share in enumerate(shares)]
    every = [item for share in shares for item in share]
    sizes = [len(share) for share in shares]
    unknown = sorted({item for item in every if item not in range(items)})
    twice = sorted({item for item in every if every.count(item) > 1})
    lost = [item for item in range(items) if item not in every]
    wrong_if(unknown, f"there is no item {listing(unknown[:1])}; they are numbered 0 to {items - 1}",
             "", *shown)
    wrong_if(len(twice) == items,
             f"every rank takes everything, so the work is done {ranks} times; each item belongs to one rank",
             "", *shown)
    wrong_if(twice, f"{_items(twice)} to more than one rank", "", *shown)
    rest = f"; {items} // {ranks} rounds down, and some rank must take the rest" if items % ranks else ""
    wrong_if(lost, f"{_items(lost)} to no rank{rest}", "", *shown)
    wrong_if(max(sizes) - min(sizes) > 1,
             f"rank {sizes.index(max(sizes))} has {max(sizes)}, another rank has {min(sizes)}, and all wait "
             "for the slowest", "", *shown)


def _items(numbers: list[int]) -> str:
    return f"item {listing(numbers)} belongs" if len(numbers) == 1 else f"items {listing(numbers)} belong"


@exercise(
    LESSON, "The three fast ranks wait 0.6 of the group's 1.2 seconds: half of what was paid for is idle.",
    number=True,
)
def waiting_share(answer: Any) -> None:
    """Four ranks meet at a barrier. Rank 0 comes after 0.3 s, the others after 0.1 s. Which share of the four
    ranks' time is waited?"""
    share = None if isinstance(answer, str) else one_number(answer)
    wrong_if(share is None, f"expected a number between 0 and 1, given {reprlib.repr(answer)}")
    expect(share, 0.5, [  # the three fast ranks wait 3 × 0.2 s of 4 × 0.3 s
        (50, "right as a percentage; as a share between 0 and 1 it is a hundredth of that"),
        (2 / 3, "that is the share of one fast rank; the slow one never waits, and counts too"),
        (0.6, "those are the seconds that all ranks wait, not a share",
         "divide by the seconds of four ranks"),
        (0.2, "those are the seconds that one rank waits, not a share of the time of all ranks",
         "add up the waiting of all ranks, and divide by the seconds of four ranks"),
        (0.25, "that would be one rank of four; three of them wait, though not all the time"),
        (0.75, "three of four ranks wait, but not all the time: each works for a third of it"),
    ],
    "that is not the share: how long does each of the four ranks wait, and how long are all of them there?",
       "add up what each rank waits until the slowest is done, and divide by 4 ranks × 0.3 s",
       f"given {answer}", same=lambda a, b: abs(a - b) < 0.0075 * max(1, b))
