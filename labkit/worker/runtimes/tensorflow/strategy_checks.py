"""Checks the strategies that a rank makes: MirroredStrategy (has it the devices), ParameterServerStrategy (the job)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

from labkit.errors.exceptions import LabError
from labkit.errors.lists import counted
from labkit.worker.runtimes.base import has_server
from labkit.worker.runtimes.tensorflow.tensorflow_internals import MIRRORED, PARAMETER_SERVERS


def apply(jobs: Collection[str], job: str, apart: Callable[[], int]) -> None:
    """Make the strategies' constructors raise errors in this process, and warn if several ranks train apart.

    Args:
        jobs: the jobs of the cluster.
        job: this rank's job.
        apart: returns how many ranks run the same program and may each make a MirroredStrategy.
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

    def refuse(*_: Any, **__: Any) -> None:
        raise LabError(
            f"tf.distribute.ParameterServerStrategy belongs to the chief, and this rank's job is {job!r}: it runs what the chief "
            "sends. Use group['chief'].run(...), or call tf.distribute.Server(...).join() on workers and servers."
        )

    MIRRORED.apply(__init__=check_and_make)
    if "chief" in jobs and has_server(jobs, job):
        PARAMETER_SERVERS.apply(__init__=refuse)


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
