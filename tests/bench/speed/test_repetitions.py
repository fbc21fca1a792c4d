"""What counts as the time of a repetition."""

import pytest


def test_a_repetition_is_timed_from_the_last_start_to_the_last_end() -> None:
    pytest.importorskip("torch")
    from bench.speed.repetitions import seconds

    first, second = [(0, 90), (100, 190), (200, 990)], [(10, 60), (110, 160), (210, 260)]
    assert seconds([first, second]) == 80e-9
