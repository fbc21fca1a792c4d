"""The time of a kernel on a device: its operations or its memory, whichever takes longer."""

from __future__ import annotations

from typing import Any

import pytest

from labkit.simulation.device import Device
from labkit.simulation.program import Kernel


@pytest.mark.parametrize(("kernel", "seconds"), [
    (Kernel("mm", 4 * 10**12, 10**9, 10**9, 0), 2.0),
    (Kernel("copy_", 0, 10**10, 2 * 10**10, 0), 3.0),
    (Kernel("view", 0, 0, 0, 0), 0.0),
])  # fmt: skip
def test_the_slower_of_operations_and_memory_counts(kernel: Kernel, seconds: float) -> None:
    assert Device(tflop_per_s=2, gbyte_per_s=10).seconds(kernel) == pytest.approx(seconds)


@pytest.mark.parametrize(("rates", "error"), [
    ({"tflop_per_s": "1", "gbyte_per_s": 1}, TypeError), ({"tflop_per_s": 1, "gbyte_per_s": 0}, ValueError),
])  # fmt: skip
def test_rates_are_numbers_above_zero(rates: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        Device(**rates)


def test_a_preset_names_its_source() -> None:
    assert Device.h100.source
    assert 500 < Device.h100.tflop_per_s < 989
    assert 2000 < Device.h100.gbyte_per_s < 3350


@pytest.mark.processes
def test_this_machine_is_measured() -> None:
    """Within six orders of magnitude: what a wrong unit would exceed."""
    here = Device.here()
    assert 1e-4 < here.tflop_per_s < 1e2
    assert 1e-2 < here.gbyte_per_s < 1e4
    assert here.source
