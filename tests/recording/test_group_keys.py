"""Keys of groups and signatures of operations: what was put into one is read from it, and what fits is equal."""

from __future__ import annotations

import pytest

from labkit.recording.group_keys import (
    DIST_BACKWARD,
    TENSORFLOW,
    Exchange,
    GroupKind,
    axis_of,
    call_key,
    creation_key,
    ends_of,
    exchange_of,
    kind_of,
    of_exchange,
    of_parts,
    of_ranks,
    of_tensor,
    pair_key,
    ranks_of,
    rendezvous_key,
    size_of,
    where_of,
    with_elements,
    without_ones,
)


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("", GroupKind.ALONE),
        ("world", GroupKind.COLLECTIVE),
        (of_ranks("group 1 rpc p2p", [0, 2]), GroupKind.COLLECTIVE),
        (pair_key(10, 2, 7), GroupKind.PAIR),
        (pair_key(0, 1, 0, of_ranks("group 1", [0, 1])), GroupKind.PAIR),
        (call_key(0, 11), GroupKind.CALL),
        (rendezvous_key("localhost:29500", 4), GroupKind.RENDEZVOUS),
        (creation_key("5", [1, 2]), GroupKind.CREATION),
        (TENSORFLOW, GroupKind.TENSORFLOW),
        (DIST_BACKWARD, GroupKind.BACKWARD),
    ],
)
def test_the_kinds_are_distinguished(key: str, kind: GroupKind) -> None:
    assert kind_of(key) is kind


def test_what_was_put_into_a_key_is_read_from_it() -> None:
    assert ends_of(pair_key(10, 2, 7)) == ends_of(pair_key(10, 2, 7, "group 1 of ranks 2,10")) == (10, 2, 7)
    assert size_of(rendezvous_key("host of 3:29500", 12)) == 12
    assert ranks_of(of_ranks("group 1", [0, 12])) == [0, 12]
    assert ranks_of(creation_key("5", [3])) == [3]
    assert ranks_of("world") is None
    assert where_of(rendezvous_key("localhost:29500", 2)) == "at localhost:29500 of 2 ranks"
    assert where_of(pair_key(0, 1, 7)) == "with tag 7"
    assert where_of(call_key(0, 1)) == where_of(pair_key(0, 1, 0)) == ""


def test_groups_and_pairs_of_a_mesh_name_their_axis() -> None:
    group = of_ranks("group 7 mesh_tp", [0, 1])
    assert axis_of(group) == axis_of(pair_key(0, 1, 0, group)) == "tp"
    assert axis_of("group 3 mesh_dp_cp of world 2 of ranks 0,1") == "dp_cp"
    assert [axis_of(key) for key in ("world", "", "group 1 mesh_default of ranks 0,1", "group 1 my_mesh")] == [""] * 4
    keys = {pair_key(0, 1, 0), pair_key(1, 0, 0), pair_key(0, 1, 1), pair_key(0, 1, 0, "group 1")}
    assert len(keys) == 4, "directions, tags and groups differ"


# Signatures.


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


@pytest.mark.parametrize(
    ("one", "other", "same"), [((4, 1), (1, 4), True), ((1, 1), (), True), ((4, 2), (2, 4), False), ((11,), (1, 1, 1), False)]
)
def test_dimensions_of_size_1_do_not_change_the_layout(one: tuple[int, ...], other: tuple[int, ...], same: bool) -> None:
    assert (without_ones(of_tensor("int8", one)) == without_ones(of_tensor("int8", other))) is same


def test_an_exchange_is_read_again() -> None:
    assert exchange_of(of_exchange("float32", [2, 6], [4, 4]), 2) == Exchange("float32", [2, 6], [4, 4])
    assert exchange_of(of_exchange("float32", [], []), 2) == Exchange("float32", [], [])
    assert exchange_of(with_elements(of_tensor("int8", (3, 2))), 3) == Exchange("int8", [2] * 3, [2] * 3)
    assert exchange_of(with_elements(of_parts("int8", [3, 2])), 2) is None
    assert exchange_of("", 2) is None
