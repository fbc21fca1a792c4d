"""Groups of ranks with torch, one for each file that uses it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import labkit as lab


@pytest.fixture(scope="module")
def two() -> Iterator[lab.Group]:
    with lab.Group(2, timeout_s=200) as group:
        yield group


@pytest.fixture(scope="module")
def three() -> Iterator[lab.Group]:
    with lab.Group(3, timeout_s=200) as group:
        yield group
