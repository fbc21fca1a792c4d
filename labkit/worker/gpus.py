"""How busy each GPU is and how full its memory, as NVIDIA's management library (NVML) says, without waking CUDA.

Source: "NVML API Reference Guide", NVIDIA: nvmlDeviceGetUtilizationRates, nvmlDeviceGetMemoryInfo.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, Final

__all__ = ["Gpus"]

LIBRARY: Final = "libnvidia-ml.so.1"  # comes with the driver


class _Rates(ctypes.Structure):
    """nvmlUtilization_t, in per cent."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Gpus:
    """The GPUs in the order in which CUDA numbers them, as far as that is the bus's.

    Args:
        library: NVML; default: the driver's.

    Raises:
        OSError: there is none, or it does not start.
    """

    def __init__(self, library: Any = None) -> None:
        self._nvml: Any = library or ctypes.CDLL(LIBRARY)
        if self._nvml.nvmlInit_v2():
            raise OSError("NVML does not start")
        self._handles: dict[int, Any] = {}

    def look(self, number: int) -> tuple[int, int] | None:
        """How much of the last moment (a sixth of a second to one) it computed, in per cent, and bytes in use; None: unknown."""
        rates, memory = _Rates(), _Memory()
        handle = self._handle(number)
        if handle is None or self._nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates)):
            return None
        if self._nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
            return None
        return int(rates.gpu), int(memory.used)

    def _handle(self, number: int) -> Any:
        """NVML's own name for a GPU that CUDA numbers among those that CUDA_VISIBLE_DEVICES leaves."""
        if number not in self._handles:
            visible = [v.strip() for v in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if v.strip()]
            name = visible[number] if number < len(visible) else str(number)
            handle = ctypes.c_void_p()
            failed = (
                self._nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
                if name.isdecimal()
                else self._nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
            )
            self._handles[number] = None if failed else handle
        return self._handles[number]
