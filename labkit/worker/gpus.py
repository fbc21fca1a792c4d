"""How busy each GPU is and how full its memory, as NVIDIA's management library (NVML) says, without waking CUDA.

Source: "NVML API Reference Guide", NVIDIA: nvmlDeviceGetUtilizationRates, nvmlDeviceGetMemoryInfo.
"""

from __future__ import annotations

import os
from typing import Any

__all__ = ["Gpus"]


class Gpus:
    """The GPUs in the order in which CUDA numbers them, as far as that is the bus's.

    Args:
        nvml: the module `pynvml`, or what a test has in its place.

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

    def look(self, number: int) -> tuple[int, int] | None:
        """How much of the last moment (a sixth of a second to one) it computed, in per cent, and bytes in use; None: unknown."""
        try:
            handle = self._handle(number)
            busy, used = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu, self._nvml.nvmlDeviceGetMemoryInfo(handle).used
        except self._nvml.NVMLError:
            return None
        return int(busy), int(used)

    def _handle(self, number: int) -> Any:
        """NVML's own name for a GPU that CUDA numbers among those that CUDA_VISIBLE_DEVICES leaves."""
        if number not in self._handles:
            visible = [v.strip() for v in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if v.strip()]
            name = visible[number] if number < len(visible) else str(number)
            by_index, by_uuid = self._nvml.nvmlDeviceGetHandleByIndex, self._nvml.nvmlDeviceGetHandleByUUID
            self._handles[number] = by_index(int(name)) if name.isdecimal() else by_uuid(name)
        return self._handles[number]


def _pynvml() -> Any:
    try:
        import pynvml
    except ImportError as error:  # a machine where nothing may be installed
        raise OSError(str(error)) from None
    return pynvml
