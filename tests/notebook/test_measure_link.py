"""When `measure_link` leaves larger sizes out. Its fits are tested in `costs/test_fit.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from labkit.notebook.measure_link import LONGEST_S, TRIES, _shortest_s


@pytest.mark.parametrize(
    ("times_s", "expected_s", "left"),
    [
        ([0.1, 9.0, 9.0], 0.1, 2),  # no operation is repeated without need
        ([9.0, 0.1, 9.0], 0.1, 1),  # a stall
        ([9.0, 9.0, 0.1], 0.1, 0),
        ([0.4, 0.2, 0.3], 0.2, 0),  # really longer
    ],
)
def test_one_stall_does_not_leave_out_all_larger_sizes(times_s: list[float], expected_s: float, left: int) -> None:
    assert len(times_s) == TRIES
    measured: Iterator[float] = iter(times_s)
    assert _shortest_s(lambda: next(measured)) == expected_s
    assert len(list(measured)) == left
    assert (expected_s > LONGEST_S) == (left == 0 and times_s[-1] > LONGEST_S)
