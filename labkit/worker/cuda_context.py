"""Checks whether CUDA still works in this process: after a kernel has failed, every later CUDA call fails too.

Source: "CUDA Runtime API", NVIDIA, error handling: later calls report errors of kernels; most of these errors corrupt
the context, and only a new process has a valid one.
"""

from __future__ import annotations

import sys
import time


def context_error(wait_s: float = 0.0) -> RuntimeError | None:
    """Return the error that every CUDA call in this process raises from now on; None if CUDA works or is not in use.

    Args:
        wait_s: how many seconds to wait for running kernels of the current stream, which may still fail.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    until = time.monotonic() + wait_s
    try:
        if not torch.cuda.is_current_stream_capturing():  # a query would abort the capture of a CUDA graph
            while not torch.cuda.current_stream().query() and time.monotonic() < until:
                time.sleep(0.0005)
    except RuntimeError as error:
        return error
    return None
