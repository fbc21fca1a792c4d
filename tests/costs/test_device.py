"""The rates and the memory of devices."""

from __future__ import annotations

import math
from typing import Any

import pytest

import labkit as lab
from labkit.costs.device import Kernel


def test_a_kernel_takes_the_longer_of_its_two_times() -> None:
    device = lab.Device(tflop_per_s=2, gbyte_per_s=10)
    assert device.seconds(flops=4e12, nbytes=1e9) == 2.0
    assert device.seconds(flops=1e12, nbytes=3e10) == 3.0


def test_an_h100_has_half_of_its_peak_rate_and_80_gb() -> None:
    h100 = lab.Device.h100
    assert (h100.tflop_per_s, h100.peak_tflop_per_s, h100.gbyte_per_s, h100.memory_gb) == (494.5, 989, 2847.5, 80)
    assert h100.seconds(0, 0) == pytest.approx(5e-6)


def test_attention_and_numbers_of_32_bits_have_rates_of_their_own() -> None:
    device = lab.Device(tflop_per_s=2, gbyte_per_s=10, tflop_per_s_32=0.5)
    assert Kernel("mm", 4e12, 0, 0).seconds(device) == 2
    assert Kernel("mm", 4e12, 0, 0, wide=True).seconds(device) == 8
    assert Kernel("_scaled_dot_product_flash_attention", 6e11, 0, 0).seconds(device) == pytest.approx(0.5)
    assert Kernel("mm", 4e12, 0, 0, wide=True).seconds(lab.Device(tflop_per_s=2, gbyte_per_s=10)) == 2


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"tflop_per_s": 0}, ValueError),
        ({"gbyte_per_s": math.inf}, ValueError),
        ({"tflop_per_s_32": 0}, ValueError),
        ({"peak_tflop_per_s": "989"}, TypeError),
        ({"launch_us": -1}, ValueError),
        ({"memory_gb": None}, TypeError),
        ({"memory_gb": -1}, ValueError),
        ({"memory_gb": "80"}, TypeError),
        ({"runs_ahead": "no"}, TypeError),
        ({"runs_ahead": 1}, TypeError),
        ({"name": 5}, TypeError),
    ],
)
def test_wrong_arguments_are_refused(wrong: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(wrong))):
        lab.Device(**{"tflop_per_s": 1, "gbyte_per_s": 1, **wrong})


def test_this_machine_is_measured_and_keeps_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from labkit.costs import device

    before = torch.get_num_threads()
    ticks = iter(range(0, 10**12, 10**9))  # each reading of the clock is one second after the last
    monkeypatch.setattr(device, "clock", lambda: next(ticks))
    found = lab.Device.here()
    assert found.tflop_per_s == pytest.approx(2 * device.WIDTH**3 / 1e12)  # one product in one second
    assert found.gbyte_per_s == pytest.approx(2 * device.COPIED_BYTES / 1e9)
    assert found.launch_us == pytest.approx(1e6)
    assert torch.get_num_threads() == before
    with pytest.raises(ValueError, match="threads=0"):
        lab.Device.here(threads=0)
    with pytest.raises(ValueError, match=r"threads=1000000000\): expected a whole number from 1 to \d+, the cores"):
        lab.Device.here(10**9)
