"""Grading makes the process that runs it adopt orphans; other tests are not to be affected."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from processes import adopt_no_orphans


@pytest.fixture(autouse=True)
def orphans() -> Iterator[None]:
    yield
    adopt_no_orphans()
