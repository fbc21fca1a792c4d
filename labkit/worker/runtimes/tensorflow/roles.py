"""Raises an explanation if a rank other than the chief creates a ParameterServerStrategy.

TensorFlow does not check this. Several coordinators in one cluster reset each other's state on the servers: the program
hangs, or a server is killed by SIGSEGV in `GetOrCreateKernelAndDevice` (TensorFlow 2.21, also without labkit's
recording).
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

from labkit.errors.exceptions import LabError
from labkit.worker.runtimes.base import has_server

__all__ = ["apply"]


def apply(jobs: Collection[str], job: str) -> None:
    """Make the strategy's constructor raise in this process, if this rank serves the chief.

    Args:
        jobs: the jobs of the cluster.
        job: this rank's job.
    """
    from tensorflow.python.distribute.parameter_server_strategy_v2 import ParameterServerStrategyV2

    if "chief" not in jobs or not has_server(jobs, job):
        return
    make = ParameterServerStrategyV2.__init__

    @functools.wraps(make)
    def refuse(*_: Any, **__: Any) -> None:
        raise LabError(
            f"tf.distribute.ParameterServerStrategy belongs to the chief, and this rank's job is {job!r}: it runs what the chief "
            "sends. Use group['chief'].run(...), or call tf.distribute.Server(...).join() on workers and servers."
        )

    ParameterServerStrategyV2.__init__ = refuse
