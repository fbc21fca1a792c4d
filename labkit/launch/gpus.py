"""Reads utilization and memory use of GPUs from NVIDIA's management library (NVML), without initialising CUDA.

Source: "NVML API Reference Guide", NVIDIA: nvmlDeviceGetUtilizationRates, nvmlDeviceGetMemoryInfo.
"""

from __future__ import annotations

import os
from typing import Any


class Gpus:
    """The GPUs, in the order of their bus numbers, which is usually CUDA's.

    Args:
        nvml: the module `pynvml`; tests pass a substitute.

    Raises:
        OSError: `pynvml` is not installed, there is no driver, or NVML does not start.
    """

    def __init__(self, nvml: Any = None) -> None:
        self._nvml = nvml if nvml is not None else _pynvml()
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise OSError(str(error)) from None
        self._handles: dict[int, Any] = {}

    def read(self, number: int) -> tuple[int, int] | None:
        """Return a GPU's utilization in per cent, over the last 1/6 to 1 second, and its memory in use, in bytes.

        Args:
            number: the GPU's number in CUDA.

        Returns:
            both, or None if NVML does not report them.
        """
        try:
            handle = self._handle(number)
            busy, used = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu, self._nvml.nvmlDeviceGetMemoryInfo(handle).used
        except self._nvml.NVMLError:
            return None
        return int(busy), int(used)

    def _handle(self, number: int) -> Any:
        """Return NVML's handle of a GPU, given its number among those in CUDA_VISIBLE_DEVICES."""
        if number not in self._handles:
            visible = [v.strip() for v in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if v.strip()]
            name = visible[number] if number < len(visible) else str(number)
            by_index, by_uuid = self._nvml.nvmlDeviceGetHandleByIndex, self._nvml.nvmlDeviceGetHandleByUUID
            self._handles[number] = by_index(int(name)) if name.isdecimal() else by_uuid(name)
        return self._handles[number]


def _pynvml() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise OSError(str(error)) from None
    return pynvml
