"""Raises an explanation if a MirroredStrategy names a device that this rank does not have.

TensorFlow does not check this. The replica of the missing device never runs, so the first all-reduce waits for it
without end (TensorFlow 2.21).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from labkit.errors.exceptions import LabError
from labkit.errors.lists import counted

__all__ = ["apply"]


def apply() -> None:
    """Make the strategy's constructor check its devices, in this process."""
    from tensorflow.python.distribute.mirrored_strategy import MirroredStrategy

    make = MirroredStrategy.__init__

    @functools.wraps(make)
    def check_and_make(strategy: Any, devices: Any = None, *args: Any, **kwargs: Any) -> None:
        if isinstance(devices, Sequence) and not isinstance(devices, str):
            _check(devices)
        make(strategy, devices, *args, **kwargs)

    MirroredStrategy.__init__ = check_and_make


def _check(devices: Sequence[Any]) -> None:
    """Check the devices without initialising TensorFlow, which the program may still want to configure.

    Raises:
        LabError: this rank lacks one of them.
    """
    import tensorflow as tf
    from tensorflow.python.distribute import device_util

    for device in devices:
        named = tf.DeviceSpec.from_string(device_util.canonicalize(str(device)))
        physical = tf.config.get_visible_devices(named.device_type)
        has = sum(len(tf.config.get_logical_device_configuration(one) or [one]) for one in physical)
        if (named.device_index or 0) >= has:
            raise LabError(
                f"MirroredStrategy names {device!r}, but this rank has {counted(has, f'{named.device_type} device')}. "
                "lab.Group(..., devices_per_rank=2) gives each rank two; between processes, use MultiWorkerMirroredStrategy."
            )
