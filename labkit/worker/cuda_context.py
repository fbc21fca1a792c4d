"""Whether CUDA still works in this process: a kernel that fails makes every later call of CUDA fail too.

Source: "CUDA Runtime API", NVIDIA, error handling: errors of kernels are reported by later calls, and most of them corrupt the
process's context, which only the end of the process repairs.
"""

from __future__ import annotations

import sys
import time

__all__ = ["context_error"]


def context_error(wait_s: float = 0.0) -> RuntimeError | None:
    """The error that every call of CUDA raises from now on in this process; None while CUDA works, or is not in use.

    Args:
        wait_s: how long to wait for kernels of the current stream that are still running: they have not failed yet.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    until = time.monotonic() + wait_s
    try:
        if not torch.cuda.is_current_stream_capturing():  # else the question itself would end the recording of a CUDA graph
            while not torch.cuda.current_stream().query() and time.monotonic() < until:
                time.sleep(0.0005)
    except RuntimeError as error:
        return error
    return None
