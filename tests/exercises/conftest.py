"""What each rank of a verdict would import from the tests' files."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from preloaded import preloaded


@pytest.fixture(autouse=True, scope="module")
def answers_are_preloaded() -> Iterator[None]:
    with preloaded("answers"):
        yield
