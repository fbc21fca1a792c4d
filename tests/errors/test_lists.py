"""How messages join names and numbers."""

from __future__ import annotations

from typing import Any

import pytest

from labkit.errors.lists import counted, listed, numbers_in_words


@pytest.mark.parametrize(
    ("items", "options", "text"),
    [
        ([], {}, ""),
        (["a"], {}, "a"),
        (["a", "b"], {}, "a and b"),
        (["a", "b", "c"], {"word": "or"}, "a, b or c"),
        (range(9), {"most": 2}, "0, 1 and 7 more"),
        (range(4), {"most": 1, "rest": "others"}, "0 and 3 others"),
        (range(3), {"most": 2}, "0, 1 and 2"),
        (range(3), {"most": 5}, "0, 1 and 2"),
    ],
)
def test_items_are_joined(items: Any, options: Any, text: str) -> None:
    assert listed(items, **options) == text


@pytest.mark.parametrize(
    ("numbers", "text"), [([3], "3"), ([0, 1, 2, 3], "0-3"), ([0, 2, 3, 7], "0, 2-3, 7"), ([0, 1, 2, 3, 5], "0-3, 5")]
)
def test_numbers_are_joined(numbers: list[int], text: str) -> None:
    assert numbers_in_words(numbers) == text


def test_a_noun_is_counted() -> None:
    assert [counted(n, "rank") for n in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
