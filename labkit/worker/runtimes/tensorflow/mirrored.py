"""Checks each MirroredStrategy that a rank makes: the rank must have its devices, and other ranks do not take part."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from labkit.errors.exceptions import LabError
from labkit.errors.lists import counted
from labkit.worker.runtimes.tensorflow.tensorflow_internals import MIRRORED

__all__ = ["apply"]


def apply(apart: Callable[[], int]) -> None:
    """Make the strategy's constructor check its devices, in this process, and warn if several ranks train apart.

    Args:
        apart: returns how many ranks run the same program and may each make such a strategy.
    """

    def check_and_make(make: Callable[..., None], strategy: Any, devices: Any = None, *args: Any, **kwargs: Any) -> None:
        if isinstance(devices, Sequence) and not isinstance(devices, str):
            _check(devices)
        if (ranks := apart()) > 1:
            warnings.warn(
                f"MirroredStrategy connects only the devices of one rank, so {ranks} ranks train {ranks} models, each on all "
                "data. To train one model, use tf.distribute.MultiWorkerMirroredStrategy(), or one rank with several devices: "
                f'lab.Group(1, runtime="tensorflow", devices_per_rank={ranks}).',
                stacklevel=3,
            )
        make(strategy, devices, *args, **kwargs)

    MIRRORED.apply(__init__=check_and_make)


def _check(devices: Sequence[Any]) -> None:
    """Check the devices without initialising TensorFlow, which the program may still want to configure.

    Raises:
        LabError: this rank lacks one of them.
    """
    import tensorflow as tf

    for device in devices:
        named = tf.DeviceSpec.from_string(str(device))
        kind = named.device_type or "CPU"
        physical = tf.config.get_visible_devices(kind)
        has = sum(len(tf.config.get_logical_device_configuration(one) or [one]) for one in physical)
        if (named.device_index or 0) >= has:
            advice = "lab.Group(..., devices_per_rank=2) gives each rank two; between processes, use MultiWorkerMirroredStrategy."
            if kind != "CPU":
                advice = (
                    "MirroredStrategy() without a list takes all devices that the rank has, GPUs or CPUs; "
                    "lab.Group(..., devices_per_rank=2) gives it two."
                )
            raise LabError(f"MirroredStrategy names {device!r}, but this rank has {_number(has, kind)}. {advice}")


def _number(count: int, kind: str) -> str:
    return counted(count, f"{kind} device") if count else f"no {kind}"
