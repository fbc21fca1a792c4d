"""What each rank of a verdict would import from the tests' files, and the end of the ranks that several verdicts
share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from answers import kept_groups
from preloaded import preloaded


@pytest.fixture(autouse=True, scope="module")
def answers_are_preloaded() -> Iterator[None]:
    with preloaded("answers"):
        yield


@pytest.fixture(autouse=True, scope="module")
def kept_groups_end() -> Iterator[None]:
    yield
    kept_groups.end()
