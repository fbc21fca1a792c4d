"""Keys of communication groups: what was put into one is read from it, and the kinds are distinguished."""

from __future__ import annotations

import pytest

from labkit.recording.group_keys import (
    DIST_BACKWARD,
    TENSORFLOW,
    GroupKind,
    axis_of,
    call_key,
    creation_key,
    ends_of,
    kind_of,
    of_ranks,
    pair_key,
    ranks_of,
    rendezvous_key,
    size_of,
    where_of,
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


def test_both_ends_of_a_pair_have_one_key_and_tags_and_groups_differ() -> None:
    assert len({pair_key(0, 1, 0), pair_key(1, 0, 0), pair_key(0, 1, 1), pair_key(0, 1, 0, "group 1")}) == 4
