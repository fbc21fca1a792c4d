"""Sub-groups with other members on each rank: what torch would mix up or wait for is refused at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import labkit as lab
from labkit.group.group import Group

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def four() -> Iterator[Group]:
    with Group(4) as group:
        yield group


def both_halves() -> float:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return total(halves[dist.get_rank() // 2])


def total(group: dist.ProcessGroup) -> float:
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x, group=group)
    return x.item()


def own_half() -> float:
    first = dist.get_rank() // 2 * 2
    return total(dist.new_group([first, first + 1]))


@pytest.mark.parametrize("times", range(3))  # by chance, torch connects the right ones
def test_ranks_that_create_only_their_own_group_are_told_so(four: Group, times: int) -> None:
    with pytest.raises(lab.RankError, match=r"new_group of the ranks \d and \d: for another rank, this group has the ranks"):
        four.run(own_half)
    assert four.run(both_halves).results == [1.0, 1.0, 5.0, 5.0]


def test_groups_of_one_rank_may_differ(four: Group) -> None:
    def alone() -> float:
        return total(dist.new_group([dist.get_rank()]))

    assert four.run(alone).results == [0.0, 1.0, 2.0, 3.0]
    assert four.run(both_halves).results == [1.0, 1.0, 5.0, 5.0]


@pytest.mark.parametrize("times", range(3))  # by chance, torch connects the right ones
def test_a_group_of_one_rank_beside_a_larger_one_is_refused(four: Group, times: int) -> None:
    def uneven() -> float:
        return total(dist.new_group([0] if dist.get_rank() == 0 else [1, 2, 3]))

    with pytest.raises(lab.RankError, match=r"new_group of .*rank.*: for another rank, this group has .*rank"):
        four.run(uneven)


def test_groups_that_only_their_members_create_may_differ(four: Group) -> None:
    def by_members() -> float:
        first = dist.get_rank() // 2 * 2
        return total(dist.new_group([first, first + 1], use_local_synchronization=True))

    assert four.run(by_members).results == [1.0, 1.0, 5.0, 5.0]


def test_a_program_with_a_default_group_of_its_own_begins_anew(four: Group) -> None:
    def twice() -> list[float]:
        found = []
        for pairs in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]):
            dist.init_process_group("gloo")
            made = [dist.new_group(pair) for pair in pairs]
            found.append(total(next(g for g, pair in zip(made, pairs, strict=True) if dist.get_rank() in pair)))
            dist.destroy_process_group()
        return found

    assert four.run(twice).results == [[1.0, 2.0], [1.0, 4.0], [5.0, 2.0], [5.0, 4.0]]
