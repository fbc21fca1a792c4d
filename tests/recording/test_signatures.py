"""Signatures: what is built can be read again, and what fits is equal."""

from __future__ import annotations

import pytest

from labkit.recording.group_keys import (
    Exchange,
    exchange_of,
    of_exchange,
    of_parts,
    of_tensor,
    with_elements,
    without_ones,
)


def test_a_signature_says_what_must_match() -> None:
    assert of_tensor("float32", (4, 3)) == "float32 [4, 3]"
    assert of_tensor("float32", (4, 3), "product", 0) == "float32 [4, 3], product, root 0"
    assert of_tensor("int64", (), root=2) == "int64 [], root 2"
    assert of_parts("float32", [4, 2], "max") == "float32 parts of 4, 2, max"
    assert of_exchange("float32", [2, 6], [4, 4]) == "float32 2,6 sent, 4,4 received"


@pytest.mark.parametrize(
    ("one", "other", "fit"),
    [((4,), (2, 2), True), ((), (1,), True), ((4,), (5,), False), ((0, 3), (0,), True), ((12,), (1, 2), False)],
)
def test_tensors_with_as_many_elements_fit(one: tuple[int, ...], other: tuple[int, ...], fit: bool) -> None:
    assert (with_elements(of_tensor("int8", one, "max", 1)) == with_elements(of_tensor("int8", other, "max", 1))) == fit


@pytest.mark.parametrize("other", [of_tensor("int16", (4,)), of_tensor("int8", (4,), "max"), of_tensor("int8", (4,), root=1)])
def test_another_type_reduction_or_root_never_fits(other: str) -> None:
    assert with_elements(of_tensor("int8", (4,))) != with_elements(other)


def test_dimensions_of_size_1_do_not_change_the_layout() -> None:
    def same(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
        return without_ones(of_tensor("int8", one)) == without_ones(of_tensor("int8", other))

    assert same((4, 1), (1, 4))
    assert same((1, 1), ())
    assert not same((4, 2), (2, 4))
    assert not same((11,), (1, 1, 1))


def test_an_exchange_is_read_again() -> None:
    assert exchange_of(of_exchange("float32", [2, 6], [4, 4]), 2) == Exchange("float32", [2, 6], [4, 4])
    assert exchange_of(of_exchange("float32", [], []), 2) == Exchange("float32", [], [])
    assert exchange_of(with_elements(of_tensor("int8", (3, 2))), 3) == Exchange("int8", [2] * 3, [2] * 3)
    assert exchange_of(with_elements(of_parts("int8", [3, 2])), 2) is None
    assert exchange_of("", 2) is None
