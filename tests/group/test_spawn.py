"""`group.spawn`: functions whose first argument is the rank, and the hint at it for those that were called without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import labkit as lab
from labkit.errors.exceptions import RankError

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def three() -> Iterator[lab.Group]:
    with lab.Group(3, runtime="bare", timeout_s=200) as group:
        yield group


def shown(rank: int, *rest: Any) -> tuple[Any, ...]:
    return rank, *rest


def test_spawn_gives_the_rank_first(three: lab.Group) -> None:
    assert three.spawn(shown).results == [(0,), (1,), (2,)]
    run = three.spawn(shown, args=(3, "x"), nprocs=3, join=True, daemon=False, start_method="fork")
    assert run.results == [(r, 3, "x") for r in range(3)]
    assert [s.name for s in run.trace.filter(rank=0, kind="call")] == ["shown"]


def test_spawn_refuses_what_it_cannot_do(three: lab.Group) -> None:
    with pytest.raises(ValueError, match=r"nprocs=4\): this group has 3 ranks; create one with lab.Group\(4\)"):
        three.spawn(shown, nprocs=4)
    with pytest.raises(ValueError, match="join=False"):
        three.spawn(shown, join=False)
    with pytest.raises(TypeError, match="Pass f, not f"):
        three.spawn(3)  # type: ignore[arg-type]  # what a student may do
    with pytest.raises(TypeError, match=r"a single one is written args=\(3,\)"):
        three.spawn(shown, args=3)  # type: ignore[arg-type]  # likewise
    with pytest.raises(TypeError, match="Did you mean 'args'") as caught:
        three.spawn(shown, arg=(3,))  # type: ignore[call-arg]  # likewise
    assert "\n" not in str(caught.value)


def demo(rank: int, world_size: int) -> None: ...


def train(epochs: int) -> None: ...


def fails_by_itself(rank: int) -> None:
    raise TypeError(f"rank {rank} and a mistake")


def test_a_missing_rank_leads_to_spawn(three: lab.Group) -> None:
    with pytest.raises(RankError, match=r"`group.spawn\(demo, args=\(...\)\)` calls demo\(rank, ...\)") as caught:
        three.run(demo, 3)
    assert caught.value.failures[0].headline.startswith("TypeError")
    with pytest.raises(RankError) as other:
        three.run(train)
    assert "group.spawn" not in str(other.value)
    with pytest.raises(RankError) as own:
        three.spawn(fails_by_itself)
    assert "group.spawn" not in str(own.value)
