"""The devices of a rank: its share of the GPUs, or the CPU."""

from __future__ import annotations

import glob
import numbers
import os
from typing import Any

from labkit.errors.exceptions import missing
from labkit.errors.wrong_calls import public_api


@public_api
def device() -> Any:
    """Return the first torch device of this rank: a GPU of its own if there are enough, else a shared one or the CPU.

    Raises:
        LabError: torch is not installed.
    """
    return devices(1)[0]


@public_api
def devices(n: int = 1) -> list[Any]:
    """Return the torch devices of this rank: its share of the GPUs, or the CPU if there are none.

    Args:
        n: the number of devices to return. If the rank has fewer, they repeat, so that a model split over two devices
            also runs on one.

    Raises:
        TypeError: `n` is not a whole number.
        ValueError: `n` is less than 1.
        LabError: torch is not installed.
    """
    if not isinstance(n, numbers.Integral) or isinstance(n, bool):
        raise TypeError(f"devices({n!r}): expected a whole number, at least 1")
    if n < 1:
        raise ValueError(f"devices({n}): expected at least 1")
    try:
        import torch
    except ImportError:
        raise missing("torch", "torch") from None
    own = os.environ.get("LABKIT_DEVICES", "").split(",")
    if own == [""]:  # under torchrun, or in the notebook itself
        rank, size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        own = share_of_devices(rank, size, torch.cuda.device_count())
    return [torch.device(own[i % len(own)]) for i in range(n)]


def share_of_devices(rank: int, size: int, gpus: int) -> list[str]:
    """Return the names of a rank's devices: an equal share of the GPUs, a GPU shared with other ranks, or the CPU."""
    if gpus == 0:
        return ["cpu"]
    if gpus < size:
        return [f"cuda:{rank % gpus}"]
    each = gpus // size
    return [f"cuda:{i}" for i in range(rank * each, (rank + 1) * each)]


def gpu_count() -> int:
    """Count GPUs without initialising CUDA: the driver's device files, except those that CUDA_VISIBLE_DEVICES hides."""
    files = len(glob.glob("/dev/nvidia[0-9]*")) or len(glob.glob("/dev/dri/renderD*")) * os.path.exists("/dev/kfd")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return files if visible is None else min(files, len([v for v in visible.split(",") if v.strip() not in ("", "-1")]))
