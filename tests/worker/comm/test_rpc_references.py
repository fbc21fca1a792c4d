"""References to values of other ranks are dropped on one thread of their rank, and no two block each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import rpc_reference_cases as cases

from labkit.group.group import Group

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    with Group(["master", cases.WORKER], runtime="rpc") as group:
        yield group


def test_references_die_on_one_thread(group: Group) -> None:
    threads = ["labkit-references"] * cases.CALLS
    assert group["master"].run(cases.dropped).results[0] == (threads, threads)


def test_an_object_is_freed_with_its_last_reference(group: Group) -> None:
    assert group["master"].run(cases.freed).results[0]


def test_calls_with_references_may_end_at_the_same_time(group: Group) -> None:
    """Without that thread, one of some hundred meetings hangs."""
    count = 300
    assert group["master"].run(cases.meetings, count).results[0] == count * cases.CALLS
